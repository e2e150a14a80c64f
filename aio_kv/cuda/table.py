"""The one table of CUDA driver functions: every CUDA call of this project, in Python or in C, goes through it.

Each entry states the version of the function that is meant, because the driver keeps several under one name: the
arguments of cuMemcpyBatchAsync changed between 12.8 and 13.0. A table is filled by the real driver or, in tests, by
a fake one, and nothing above it can tell the difference.

A call from Python is a ctypes call on the entry's address. Entries that answer at once keep the GIL: dropping it and
winning it back can cost more than the call, up to milliseconds when another thread is busy. Entries that may wait for
the device or the operating system release it, so that they hold up only their own thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

from aio_kv.errors import DeviceError, UnavailableError

__all__ = ["ENTRIES", "STICKY_CODES", "DriverTable", "Entry"]

_LIBRARY = "libcuda.so.1"
# CU_GET_PROC_ADDRESS_LEGACY_STREAM: handle 0 means the legacy stream, whatever cuda.bindings was built for.
_LEGACY_STREAM = 1
_NO_DRIVER = "install the NVIDIA driver, and in a container ask for the GPU (docker run --gpus all)"
_NO_DRIVER_HINT = f"{_NO_DRIVER}; the Python side is pip install 'aio_kv[cuda13]'"


class Entry(NamedTuple):
    """One driver function.

    `version` is the CUDA version (1000 * major + 10 * minor) that brought the form meant here, `symbol` what a library
    exports it as, where that is not its name. `arguments` holds one letter each: p pointer or handle, d device address,
    n size_t, i int, u unsigned int.
    """

    version: int
    arguments: str
    symbol: str = ""
    keeps_gil: bool = False
    is_optional: bool = False


_TYPES: dict[str, Any] = {
    "p": ctypes.c_void_p,
    "d": ctypes.c_uint64,
    "n": ctypes.c_size_t,
    "i": ctypes.c_int,
    "u": ctypes.c_uint,
}

ENTRIES: dict[str, Entry] = {
    "cuInit": Entry(2000, "u"),
    "cuDriverGetVersion": Entry(2020, "p", keeps_gil=False),
    "cuGetErrorName": Entry(6000, "ip", keeps_gil=False),
    "cuGetErrorString": Entry(6000, "ip", keeps_gil=False),
    "cuDeviceGetCount": Entry(2000, "p", keeps_gil=False),
    "cuDeviceGet": Entry(2000, "pi", keeps_gil=False),
    "cuDeviceGetName": Entry(2000, "pii", keeps_gil=False),
    "cuDeviceTotalMem": Entry(3020, "pi", "cuDeviceTotalMem_v2", keeps_gil=False),
    "cuDeviceGetAttribute": Entry(2000, "pii", keeps_gil=False),
    "cuDevicePrimaryCtxRetain": Entry(7000, "pi"),
    "cuDevicePrimaryCtxRelease": Entry(11000, "i", "cuDevicePrimaryCtxRelease_v2"),
    "cuCtxGetCurrent": Entry(4000, "p", keeps_gil=False),
    "cuCtxSetCurrent": Entry(4000, "p", keeps_gil=False),
    "cuCtxGetDevice": Entry(2000, "p", keeps_gil=False),
    "cuThreadExchangeStreamCaptureMode": Entry(10010, "p", keeps_gil=False),
    "cuStreamCreate": Entry(2000, "pu"),
    "cuStreamCreateWithPriority": Entry(5050, "pui"),
    "cuCtxGetStreamPriorityRange": Entry(5050, "pp", keeps_gil=False),
    "cuStreamDestroy": Entry(4000, "p", "cuStreamDestroy_v2"),
    "cuStreamGetCtx": Entry(9020, "pp", keeps_gil=False),
    "cuStreamIsCapturing": Entry(10000, "pp", keeps_gil=False),
    "cuStreamWaitEvent": Entry(3020, "ppu", keeps_gil=False),
    "cuStreamSynchronize": Entry(2000, "p"),
    "cuEventCreate": Entry(2000, "pu"),
    "cuEventDestroy": Entry(4000, "p", "cuEventDestroy_v2"),
    "cuEventRecord": Entry(2000, "pp", keeps_gil=False),
    "cuEventQuery": Entry(2000, "p", keeps_gil=False),
    "cuMemAlloc": Entry(3020, "pn", "cuMemAlloc_v2"),
    "cuMemFree": Entry(3020, "d", "cuMemFree_v2"),
    "cuPointerGetAttributes": Entry(7000, "uppd", keeps_gil=False),
    "cuPointerGetAttribute": Entry(4000, "pid", keeps_gil=False),
    "cuMemHostRegister": Entry(6050, "pnu", "cuMemHostRegister_v2"),
    "cuMemHostUnregister": Entry(4000, "p"),
    "cuMemHostGetDevicePointer": Entry(3020, "ppu", "cuMemHostGetDevicePointer_v2", keeps_gil=False),
    "cuMemcpyHtoDAsync": Entry(3020, "dpnp", "cuMemcpyHtoDAsync_v2"),
    "cuMemcpyDtoHAsync": Entry(3020, "pdnp", "cuMemcpyDtoHAsync_v2"),
    "cuMemcpyBatchAsync": Entry(13000, "pppnppnp", "cuMemcpyBatchAsync_v2", is_optional=True),
    "cuLaunchHostFunc": Entry(10000, "ppp", is_optional=True),
    "cuModuleLoadData": Entry(2000, "pp"),
    "cuModuleUnload": Entry(2000, "p"),
    "cuModuleGetFunction": Entry(2000, "ppp"),
    "cuLaunchKernel": Entry(4000, "puuuuuuuppp"),
}

# After one of these the context answers every call with the same error until the process ends (cuda.h), and the
# hardware may still be at work on memory: nothing is freed any more.
STICKY_CODES = frozenset({214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911})

_RESTART = "the GPU context is lost: restart the process; the first such error in the log is the cause"
_CAPTURING = (
    "a stream is being captured into a graph: hand over a stream that is not, or do this before the capture"
)
_HINTS = {
    2: "GPU or pinned memory is used up: free some, or ask for a smaller pool or staging area",
    3: "CUDA was not initialised in this process, or it was forked: start workers with the spawn method",
    4: "the driver is shutting down: close backends before the interpreter exits",
    100: "no GPU is visible: check nvidia-smi and CUDA_VISIBLE_DEVICES",
    101: "check the device index against nvidia-smi -L and CUDA_VISIBLE_DEVICES",
    201: "the context of the device was destroyed (cudaDeviceReset?): keep it alive while a backend uses it",
    209: "the kernels were compiled for another GPU: delete the cache folder aio_kv and open again",
    400: "a stream or event handle was destroyed, or belongs to another device",
    801: "this GPU or driver cannot do this: update the driver",
    900: _CAPTURING,
    901: _CAPTURING,
    905: _CAPTURING,
    906: _CAPTURING,
    **dict.fromkeys(STICKY_CODES, _RESTART),
}

_Lookup = Callable[[str, Entry], int]


class DriverTable:
    """The driver functions of `ENTRIES`, by name.

    Args:
        lookup: returns the address of an entry, 0 where the driver has none.
        is_fake: whether this is a test's driver, which takes kernels by name instead of compiled ones.

    Any thread may use a table. Raises `UnavailableError` naming the functions that the driver lacks.
    """

    def __init__(self, lookup: Callable[[str, Entry], int], *, is_fake: bool = False) -> None:
        self.is_fake = is_fake
        self._addresses = {name: lookup(name, entry) for name, entry in ENTRIES.items()}
        missing = [n for n, entry in ENTRIES.items() if not self._addresses[n] and not entry.is_optional]
        if missing:
            raise UnavailableError(
                f"the CUDA driver lacks {', '.join(missing)}", hint="install a driver for CUDA 12 or later"
            )
        self._functions: dict[str, Callable[..., int]] = {
            name: _prototype(ENTRIES[name])(address) for name, address in self._addresses.items() if address
        }

    @classmethod
    def load(cls) -> DriverTable:
        """Take the functions from the installed driver, through cuda.bindings where it is there.

        Raises `UnavailableError` where there is no driver or it is too old.
        """
        return cls(_bindings_lookup() or _loader_lookup())

    @classmethod
    def from_library(cls, path: str) -> DriverTable:
        """Take the functions from a shared library that exports them: the test's fake driver."""
        library = _open_library(path, hint=f"build the fake driver {path} first")

        def lookup(name: str, entry: Entry) -> int:
            function = getattr(library, entry.symbol or name, None)
            return 0 if function is None else ctypes.cast(function, ctypes.c_void_p).value or 0

        return cls(lookup, is_fake=True)

    def has(self, name: str) -> bool:
        """Whether the driver has an entry; only optional ones can be missing."""
        return self._addresses[name] != 0

    def address(self, name: str) -> int:
        """The address of an entry for C code; 0 where an optional one is missing."""
        return self._addresses[name]

    def function(self, name: str) -> Callable[..., int]:
        """The entry as a callable that returns the bare CUresult. Raises KeyError for a missing optional one."""
        return self._functions[name]

    def call(self, name: str, *arguments: Any) -> None:
        """Call an entry. Raises `DeviceError` for anything but success."""
        code = self._functions[name](*arguments)
        if code:
            raise self.error(name, code)

    def error(self, call: str, code: int) -> DeviceError:
        """Build the error of a driver function `call` that answered with the CUresult `code`."""
        name, meaning = self._text("cuGetErrorName", code), self._text("cuGetErrorString", code)
        told = f"{call} failed: {name or 'CUDA error'} ({code})" + (f", {meaning}" if meaning else "")
        return DeviceError(told, call=call, code=code, name=name, hint=_HINTS.get(code))

    def _text(self, function: str, code: int) -> str | None:
        text = ctypes.c_char_p()
        unknown = self._functions[function](code, ctypes.byref(text))
        return None if unknown or text.value is None else text.value.decode(errors="replace")


def _prototype(entry: Entry) -> Any:
    kind = ctypes.PYFUNCTYPE if entry.keeps_gil else ctypes.CFUNCTYPE
    return kind(ctypes.c_int, *(_TYPES[letter] for letter in entry.arguments))


def _bindings_lookup() -> _Lookup | None:
    """Look functions up through cuda.bindings; None where it is not installed."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return None
    try:
        driver.cuDriverGetVersion()
    except Exception as error:
        # It loads the driver in its first call and raises, rather than returning a code, where there is none;
        # the type of the exception differs from version to version.
        raise UnavailableError(f"no CUDA driver was found ({error})", hint=_NO_DRIVER_HINT) from error

    def lookup(name: str, entry: Entry) -> int:
        code, address, _ = driver.cuGetProcAddress(name.encode(), entry.version, _LEGACY_STREAM)
        return 0 if int(code) or not address else int(address)

    return lookup


def _loader_lookup() -> _Lookup:
    """Look functions up in the driver's own library: only the kernels need cuda-python."""
    library = _open_library(_LIBRARY, hint=_NO_DRIVER_HINT)
    find = getattr(library, "cuGetProcAddress_v2", None)
    if find is None:
        raise UnavailableError(
            "the CUDA driver is older than 12.0", hint="install a driver for CUDA 12 or later"
        )
    find.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p]

    def lookup(name: str, entry: Entry) -> int:
        address, status = ctypes.c_void_p(), ctypes.c_int()
        code = find(name.encode(), ctypes.byref(address), entry.version, _LEGACY_STREAM, ctypes.byref(status))
        return 0 if code else address.value or 0

    return lookup


def _open_library(path: str, *, hint: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(path)
    except OSError as error:
        raise UnavailableError(f"no CUDA driver was found ({error})", hint=hint) from error
