"""The kernels of `kernels.cu`: compiled once for each kind of GPU, kept on disk, loaded at open.

They are an acceleration: where there is no compiler, or the driver refuses its result, copies go another way and the
reason is kept for whoever asks.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import tempfile
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from aio_kv.cuda.device import Device
from aio_kv.errors import DeviceError, UnavailableError

__all__ = ["Kernels", "cache_folder", "compile_kernels", "compile_source", "load_kernels", "prepare_kernels"]

_log = logging.getLogger("aio_kv")
_HINT = "pip install 'aio_kv[cuda13]', or 'aio_kv[cuda12]' for a driver of CUDA 12; copies work without it, slower"
_NON_BLOCKING = 1
_MAGIC = b"aio_kv cubin 1\n"
# A fake driver takes any image and finds its own kernels by name.
_FAKE_IMAGE = b"akv_gather akv_scatter\0"


@dataclass(frozen=True, slots=True)
class Kernels:
    """Handles (CUfunction) of the loaded kernels and of the module (CUmodule) that holds them."""

    gather: int
    scatter: int
    module: int


def prepare_kernels(device: Device) -> tuple[Kernels | None, str]:
    """Return the kernels, or None and why not. Slow the first time; raises `DeviceError` after a fault only."""
    try:
        image = _FAKE_IMAGE if device.table.is_fake else compile_kernels(device)
        return load_kernels(device, image), ""
    except (UnavailableError, DeviceError) as error:
        device.check_usable()  # a lost context is not a matter of kernels
        _log.info("copies to GPU %d work without kernels: %s", device.index, error)
        return None, str(error)


def compile_kernels(device: Device) -> bytes:
    """Return the cubin for a GPU, from the cache on disk where it is there. Raises `UnavailableError`."""
    source = _source()
    version = _compiler_version()
    path = cache_folder() / _cache_name(source, device.architecture, version)
    cubin = _read_cache(path)
    if cubin is None:
        cubin = compile_source(source, device.architecture)
        _write_cache(path, cubin)
    return cubin


def compile_source(source: str, architecture: str) -> bytes:
    """Compile CUDA C++ to a cubin for an architecture such as "sm_90"; needs no GPU and no driver.

    Raises `UnavailableError` where the compiler is missing or refuses, which it does for a GPU newer than itself.
    """
    try:
        from cuda.core import Program, ProgramOptions
    except ImportError as error:
        raise UnavailableError(f"cuda.core is not installed ({error})", hint=_HINT) from error
    try:
        options = ProgramOptions(name="aio_kv", arch=architecture, std="c++17")
        program = Program(source, code_type="c++", options=options)
        try:
            return bytes(program.compile("cubin").code)
        finally:
            program.close()
    except Exception as error:  # a missing library and a compiler error have no common base
        raise UnavailableError(f"NVRTC cannot compile for {architecture} ({error})", hint=_HINT) from error


def load_kernels(device: Device, image: bytes) -> Kernels:
    """Load a cubin into the device's context and launch each kernel once on an empty list.

    The first launch of a kernel uploads it, which takes its time and is not allowed while anyone captures a graph: both
    belong to opening. Raises `DeviceError`. The module stays loaded until the context goes.
    """
    device.check_usable()
    module = ctypes.c_void_p()
    with device.activated(), device.relaxed():
        device.call("cuModuleLoadData", ctypes.byref(module), image)
        found = []
        for name in (b"akv_gather", b"akv_scatter"):
            function = ctypes.c_void_p()
            device.call("cuModuleGetFunction", ctypes.byref(function), module, name)
            found.append(function.value or 0)
        if not device.table.is_fake:  # whose kernels look at the list's address even when it is empty
            _launch_once(device, found)
    return Kernels(gather=found[0], scatter=found[1], module=module.value or 0)


def cache_folder() -> Path:
    """Where compiled kernels are kept: `aio_kv` in XDG_CACHE_HOME, or in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification has relative paths ignored.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "aio_kv"


def _source() -> str:
    return resources.files("aio_kv.cuda").joinpath("kernels.cu").read_text(encoding="utf-8")


def _compiler_version() -> str:
    try:
        from cuda.bindings import nvrtc

        code, major, minor = nvrtc.nvrtcVersion()
    except (
        Exception
    ) as error:  # ImportError, and whatever a version of cuda.bindings raises without the library
        raise UnavailableError(f"NVRTC is not installed ({error})", hint=_HINT) from error
    if int(code):
        raise UnavailableError(f"NVRTC does not work: nvrtcVersion answers {int(code)}", hint=_HINT)
    return f"{major}.{minor}"


def _launch_once(device: Device, functions: list[int]) -> None:
    stream = ctypes.c_void_p()
    device.call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
    try:
        entries, count = ctypes.c_uint64(0), ctypes.c_uint(0)
        parameters = (ctypes.c_void_p * 2)(ctypes.addressof(entries), ctypes.addressof(count))
        for function in functions:
            device.call("cuLaunchKernel", function, 1, 1, 1, 32, 1, 1, 0, stream, parameters, None)
        device.call("cuStreamSynchronize", stream)
    finally:
        device.table.function("cuStreamDestroy")(stream)


def _cache_name(source: str, architecture: str, version: str) -> str:
    digest = hashlib.sha256(source.encode()).hexdigest()[:32]
    return f"kernels-{digest}-{architecture}-nvrtc{version}.bin"


def _read_cache(path: Path) -> bytes | None:
    """The payload of a whole and undamaged cache file, else None."""
    try:
        stored = path.read_bytes()
    except OSError:
        return None
    head = len(_MAGIC) + hashlib.sha256().digest_size
    payload = stored[head:]
    if not payload or stored[:head] != _MAGIC + hashlib.sha256(payload).digest():
        _log.warning("the cache file %s is damaged: compiling again", path)
        return None
    return payload


def _write_cache(path: Path, payload: bytes) -> None:
    # Written beside its place and then renamed: a reader sees the whole file or none.
    temporary: Path | None = None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        temporary = Path(name)
        with os.fdopen(handle, "wb") as file:
            file.write(_MAGIC + hashlib.sha256(payload).digest() + payload)
        temporary.replace(path)
    except OSError as error:
        _log.info("the compiled kernels cannot be kept in %s: %s", path.parent, error)
        if temporary is not None:
            temporary.unlink(missing_ok=True)
