"""The test's side of the fake CUDA driver: its `fake_*` functions with types, and a few calls that most tests need."""

import ctypes
import mmap
from ctypes import c_char_p, c_int, c_int32, c_int64, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NOT_READY = 600
NON_BLOCKING = 1
DISABLE_TIMING = 2
LEGACY, PER_THREAD = 1, 2
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2

_CONTROL: dict[str, tuple[Any, list[Any]]] = {
    "fake_reset": (None, [c_uint64]),
    "fake_set_devices": (c_int, [c_int]),
    "fake_set_driver_version": (None, [c_int]),
    "fake_hide": (c_int, [c_char_p]),
    "fake_set_plain_addresses": (None, [c_int]),
    "fake_set_policy": (None, [c_uint32, c_uint32]),
    "fake_hold_stream": (c_int, [c_void_p]),
    "fake_release_stream": (c_int, [c_void_p]),
    "fake_set_wait_limit": (None, [c_uint32]),
    "fake_run_everything": (c_uint64, []),
    "fake_fail": (c_int, [c_char_p, c_uint64, c_int, c_uint64]),
    "fake_fail_execution": (None, [c_uint64, c_int]),
    "fake_clear_faults": (None, []),
    "fake_set_memory_limit": (None, [c_uint64, c_uint64]),
    "fake_calls": (c_int64, [c_char_p]),
    "fake_log_count": (c_uint64, []),
    "fake_log_at": (c_int, [c_uint64, c_void_p]),
    "fake_log_clear": (None, []),
    "fake_live": (c_int64, [c_char_p]),
    "fake_pending": (c_uint64, []),
    "fake_executed": (c_uint64, []),
    "fake_sticky": (c_int, []),
    "fake_captures_invalidated": (c_uint64, []),
    "fake_violations": (c_uint64, [c_char_p, c_uint64]),
    "fake_peek": (c_int, [c_uint64, c_void_p, c_uint64]),
    "fake_poke": (c_int, [c_uint64, c_char_p, c_uint64]),
    "fake_bytes_at": (c_void_p, [c_uint64, c_uint64]),
}

_KINDS = {
    "p": c_void_p,
    "q": c_uint64,
    "z": c_size_t,
    "i": c_int,
    "u": c_uint,
    "b": ctypes.c_ubyte,
    "s": c_char_p,
}
# Arguments of the driver's entry points, one letter each.
_DRIVER = {
    "cuInit": "u", "cuDriverGetVersion": "p", "cuDeviceGetCount": "p", "cuDeviceGet": "pi",
    "cuDeviceGetName": "pii", "cuDeviceGetAttribute": "pii", "cuDeviceTotalMem": "pi",
    "cuDevicePrimaryCtxRetain": "pi", "cuDevicePrimaryCtxRelease": "i", "cuDevicePrimaryCtxGetState": "ipp",
    "cuCtxSetCurrent": "p", "cuCtxGetCurrent": "p", "cuCtxPushCurrent": "p", "cuCtxPopCurrent": "p",
    "cuCtxGetDevice": "p", "cuCtxGetStreamPriorityRange": "pp", "cuCtxSynchronize": "",
    "cuGetErrorName": "ip", "cuGetErrorString": "ip", "cuGetProcAddress": "spiqp",
    "cuMemGetInfo": "pp", "cuMemAlloc": "pz", "cuMemFree": "q", "cuMemHostAlloc": "pzu", "cuMemFreeHost": "p",
    "cuMemHostRegister": "pzu", "cuMemHostUnregister": "p", "cuMemHostGetDevicePointer": "ppu",
    "cuPointerGetAttribute": "piq", "cuPointerGetAttributes": "uppq", "cuMemGetAddressRange": "ppq",
    "cuMemcpyHtoDAsync": "qpzp", "cuMemcpyDtoHAsync": "pqzp", "cuMemcpyDtoDAsync": "qqzp", "cuMemcpyAsync": "qqzp",
    "cuMemcpyHtoD": "qpz", "cuMemcpyDtoH": "pqz", "cuMemcpyBatchAsync": "pppzppzp", "cuMemsetD8Async": "qbzp",
    "cuStreamCreate": "pu", "cuStreamCreateWithPriority": "pui", "cuStreamDestroy": "p", "cuStreamQuery": "p",
    "cuStreamSynchronize": "p", "cuStreamWaitEvent": "ppu", "cuStreamGetCtx": "pp", "cuStreamGetFlags": "pp",
    "cuStreamIsCapturing": "pp", "cuStreamBeginCapture": "pi", "cuStreamEndCapture": "pp",
    "cuThreadExchangeStreamCaptureMode": "p", "cuGraphDestroy": "p",
    "cuEventCreate": "pu", "cuEventDestroy": "p", "cuEventRecord": "pp", "cuEventQuery": "p",
    "cuEventSynchronize": "p", "cuLaunchHostFunc": "ppp",
    "cuModuleLoadData": "ps", "cuModuleLoadDataEx": "psupp", "cuModuleGetFunction": "pps", "cuModuleUnload": "p",
    "cuLaunchKernel": "puuuuuuuppp",
}  # fmt: skip


class FakeCudaError(Exception):
    """An entry point answered with an error."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name} answered {code}")
        self.code = code


@dataclass(frozen=True, slots=True)
class Call:
    """One call in the log. `waited`: it made, or may make, the host wait for the device. `stream`: 0 for none."""

    name: str
    thread: int
    stream: int
    result: int
    waited: bool


class _CallRecord(ctypes.Structure):
    _fields_ = [
        ("name", c_char_p),
        ("thread", c_uint64),
        ("stream", c_uint64),
        ("result", c_int32),
        ("waited", c_int32),
    ]


class CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes. `source_access_order`: 1 stream, 2 during the call, 3 any."""

    _fields_ = [
        ("source_access_order", c_uint32),
        ("source_location_type", c_uint32),
        ("source_location_id", c_int32),
        ("target_location_type", c_uint32),
        ("target_location_id", c_int32),
        ("flags", c_uint32),
    ]


class KernelCopy(ctypes.Structure):
    """One entry of the list that akv_gather and akv_scatter read."""

    _fields_ = [("target", c_uint64), ("source", c_uint64), ("nbytes", c_uint64)]


class HostPages:
    """Page-aligned host memory of a test's own, that CUDA does not know until it is registered."""

    def __init__(self, nbytes: int) -> None:
        self.map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))


class FakeCuda:
    """The fake driver at `path` (from `fake_cuda_build.build`). One machine per process: every object shows the same.

    `call` reaches any entry point of the driver and answers its code; the named methods raise `FakeCudaError`.
    Streams, events and addresses are plain integers.
    """

    def __init__(self, path: Path, *, seed: int | None = 0) -> None:
        self.path = path
        self.library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _CONTROL.items():
            function = getattr(self.library, name)
            function.restype, function.argtypes = result, arguments
        for name, letters in _DRIVER.items():
            function = getattr(self.library, name)
            function.restype, function.argtypes = c_int, [_KINDS[letter] for letter in letters]
        if seed is not None:
            self.reset(seed)

    # The machine

    def reset(self, seed: int = 0) -> None:
        """A new machine: nothing of the old one is valid, its counts are zero, the policy is 0 to 3 queries."""
        self.library.fake_reset(seed)
        self._functions: dict[str, int] = {}

    def set_devices(self, count: int) -> None:
        self._known(self.library.fake_set_devices(count), f"{count} devices")

    def set_driver_version(self, version: int) -> None:
        self.library.fake_set_driver_version(version)

    def hide(self, name: str) -> None:
        """Let cuGetProcAddress not find `name`, as on an older driver."""
        self._known(self.library.fake_hide(name.encode()), name)

    def set_plain_addresses(self, plain: bool) -> None:
        """Device addresses, of memory obtained from now on, that the host may use directly (a test's shortcut)."""
        self.library.fake_set_plain_addresses(int(plain))

    # The schedule

    def set_policy(self, queries_min: int, queries_max: int) -> None:
        """How many queries of a record answer "not yet" before one answers "done": drawn between the two."""
        self.library.fake_set_policy(queries_min, queries_max)

    def hold(self, stream: int) -> None:
        """Nothing on `stream`, nor what waits for it, happens until `release`."""
        self._known(self.library.fake_hold_stream(stream), f"stream {stream:#x}")

    def release(self, stream: int) -> None:
        self._known(self.library.fake_release_stream(stream), f"stream {stream:#x}")

    def set_wait_limit(self, milliseconds: int) -> None:
        """A host wait on a held stream answers CUDA_ERROR_TIMEOUT (909) after so long."""
        self.library.fake_set_wait_limit(milliseconds)

    def run_everything(self) -> int:
        """Carry out all that is not held, even after a sticky error; how many operations that was."""
        return int(self.library.fake_run_everything())

    # Faults

    def fail(self, name: str, *, nth: int = 1, result: int, times: int = 1) -> None:
        """The nth call from now of `name` does nothing and answers `result`, `times` times on end (0: for ever).

        Results that are sticky in CUDA (700, 702, 710, 714 to 719, 214, 220) are so here: later calls get them too.
        """
        self._known(self.library.fake_fail(name.encode(), nth, result, times), name)

    def fail_execution(self, *, nth: int = 1, result: int = 719) -> None:
        """The nth copy or kernel to be carried out from now does nothing, and leaves the sticky error `result`."""
        self.library.fake_fail_execution(nth, result)

    def clear_faults(self) -> None:
        """Forget faults that have not happened yet; a sticky error stays."""
        self.library.fake_clear_faults()

    def set_memory_limit(self, *, device_nbytes: int = 1 << 30, pinned_nbytes: int = 0) -> None:
        """Above these allocation and registration answer CUDA_ERROR_OUT_OF_MEMORY; 0 is no limit."""
        self.library.fake_set_memory_limit(device_nbytes, pinned_nbytes)

    # What has happened

    def calls(self, name: str) -> int:
        count = int(self.library.fake_calls(name.encode()))
        self._known(count, name)
        return count

    def log(self) -> list[Call]:
        """Calls in order, at most 65,536 since the last `clear_log`, without queries that answered "not yet"."""
        record = _CallRecord()
        calls = []
        for index in range(self.library.fake_log_count()):
            if self.library.fake_log_at(index, ctypes.byref(record)) == 0:
                name = record.name.decode()
                calls.append(Call(name, record.thread, record.stream, record.result, bool(record.waited)))
        return calls

    def clear_log(self) -> None:
        self.library.fake_log_clear()

    def waits(self) -> list[Call]:
        """The calls of the log that made the host wait: synchronisation, frees, copies to pageable memory."""
        return [call for call in self.log() if call.waited]

    def live(self, kind: str) -> int:
        """How many there are: streams, events, modules, graphs, contexts, captures, device, pinned, registered."""
        count = int(self.library.fake_live(kind.encode()))
        self._known(count, kind)
        return count

    @property
    def pending(self) -> int:
        """Operations queued and not carried out."""
        return int(self.library.fake_pending())

    @property
    def executed(self) -> int:
        return int(self.library.fake_executed())

    @property
    def sticky(self) -> int:
        """The sticky error, or 0."""
        return int(self.library.fake_sticky())

    @property
    def captures_invalidated(self) -> int:
        return int(self.library.fake_captures_invalidated())

    def violations(self) -> tuple[int, str]:
        """How often work met memory that was gone or unknown to the device, and the last such case in words."""
        text = ctypes.create_string_buffer(256)
        return int(self.library.fake_violations(text, len(text))), text.value.decode()

    # Memory, as it is at this moment: nothing is carried out

    def download(self, address: int, nbytes: int) -> bytes:
        out = ctypes.create_string_buffer(nbytes)
        self._known(self.library.fake_peek(address, out, nbytes), f"{nbytes} bytes at {address:#x}")
        return out.raw

    def upload(self, address: int, data: bytes) -> None:
        self._known(self.library.fake_poke(address, data, len(data)), f"{len(data)} bytes at {address:#x}")

    def bytes_at(self, address: int, nbytes: int) -> Any:
        """A writable ctypes array over the memory behind `address`; valid until that is freed."""
        host = self.library.fake_bytes_at(address, nbytes)
        self._known(0 if host else -1, f"{nbytes} bytes at {address:#x}")
        return (ctypes.c_ubyte * nbytes).from_address(host)

    # The driver

    def call(self, name: str, *arguments: Any) -> int:
        """Any entry point, by its plain name; answers its code."""
        return int(getattr(self.library, name)(*arguments))

    def check(self, name: str, *arguments: Any) -> None:
        if code := self.call(name, *arguments):
            raise FakeCudaError(name, code)

    def address(self, name: str) -> int:
        """Where an entry point is, for a table of function pointers."""
        return int(ctypes.cast(getattr(self.library, name), c_void_p).value or 0)

    def open(self, device: int = 0) -> int:
        """Initialise, retain the device's primary context, make it current in this thread; the context."""
        context = c_void_p()
        self.check("cuInit", 0)
        self.check("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.check("cuCtxSetCurrent", context)
        return int(context.value or 0)

    def alloc(self, nbytes: int) -> int:
        """Device memory, filled with 0xcb."""
        return self._made("cuMemAlloc", nbytes, kind=c_uint64)

    def free(self, address: int) -> None:
        self.check("cuMemFree", address)

    def alloc_pinned(self, nbytes: int) -> int:
        """Pinned host memory, filled with 0xcb; the device knows it by the same address."""
        return self._made("cuMemHostAlloc", nbytes, 3)

    def pinned(self, data: bytes) -> int:
        """Pinned host memory that holds `data`."""
        address = self.alloc_pinned(len(data))
        self.upload(address, data)
        return address

    def stream(self, *, blocking: bool = False) -> int:
        return self._made("cuStreamCreate", 0 if blocking else NON_BLOCKING)

    def event(self) -> int:
        return self._made("cuEventCreate", DISABLE_TIMING)

    def record(self, stream: int, event: int | None = None) -> int:
        """Records `event`, or a new one; the event."""
        event = self.event() if event is None else event
        self.check("cuEventRecord", event, stream)
        return event

    def wait(self, stream: int, event: int) -> None:
        """Lets `stream` wait for `event`; the host does not."""
        self.check("cuStreamWaitEvent", stream, event, 0)

    def is_done(self, event: int) -> bool:
        code = self.call("cuEventQuery", event)
        if code not in (0, NOT_READY):
            raise FakeCudaError("cuEventQuery", code)
        return code == 0

    def function(self, name: str) -> int:
        """A kernel: akv_gather, akv_scatter, fake_fill or fake_slow."""
        if name not in self._functions:
            module = self._made("cuModuleLoadData", b"fake")
            self._functions[name] = self._made("cuModuleGetFunction", module, name.encode())
        return self._functions[name]

    def launch(self, name: str, stream: int, *parameters: Any) -> None:
        """Launches a kernel with ctypes values as parameters."""
        pointers = (c_void_p * len(parameters))(*(ctypes.addressof(value) for value in parameters))
        self.check("cuLaunchKernel", self.function(name), 1, 1, 1, 32, 1, 1, 0, stream, pointers, None)

    def fill(self, address: int, nbytes: int, value: int, stream: int) -> None:
        """A kernel that fills device memory with a byte: a producer."""
        self.launch("fake_fill", stream, c_uint64(address), c_uint64(nbytes), c_uint32(value))

    def slow(self, stream: int, queries: int = 0xFFFFFFFF) -> None:
        """A long kernel: so many queries of what is behind it answer "not yet"; by default all, until a host wait."""
        self.launch("fake_slow", stream, c_uint32(queries))

    def _made(self, name: str, *arguments: Any, kind: Any = c_void_p) -> int:
        out = kind()
        self.check(name, ctypes.byref(out), *arguments)
        return int(out.value or 0)

    @staticmethod
    def _known(answer: int, what: str) -> None:
        if answer < 0:
            raise KeyError(f"the fake does not know {what}")
