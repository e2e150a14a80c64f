"""What `aio-kv doctor` finds out, each by doing it: versions and settings are told only beside the result of a try."""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from aio_kv.backends.rungs import MEMLOCK_HINT, OpenedEngine, open_engine
from aio_kv.blockdevice import BlockDevice, block_device_of
from aio_kv.cli.workspace import workspace
from aio_kv.engine import RingInfo, extension_error, has_extension
from aio_kv.engine.extension import allocate_host
from aio_kv.engine.options import EngineOptions
from aio_kv.errors import StorageError
from aio_kv.files import LayerFiles
from aio_kv.layout import GroupLayout
from aio_kv.memory import host_address

__all__ = ["Check", "Diagnosis", "diagnose"]

_MIB = 1 << 20
_HUGE_NBYTES = 16 * _MIB
_LAYOUT = GroupLayout(1, 2, 1, 16, 64, 2)
_CAP_IPC_LOCK = 14
# IORING_SETUP_* of io_uring_setup(2).
_RING_FLAGS = {
    3: "CQSIZE",
    7: "SUBMIT_ALL",
    8: "COOP_TASKRUN",
    9: "TASKRUN_FLAG",
    12: "SINGLE_ISSUER",
    13: "DEFER_TASKRUN",
}
_BEST_FLAGS = {"SINGLE_ISSUER", "DEFER_TASKRUN"}
_FILE_SYSTEM_HINT = "use a local ext4 or XFS file system, in a container a volume mounted from one"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was tried. `hint` says what to do about it, empty where nothing can or need be done."""

    name: str
    ok: bool
    detail: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The findings; the names of the fields are the keys of the JSON."""

    rung: str
    checks: tuple[Check, ...]


def diagnose(directory: Path) -> Diagnosis:
    """Try everything. Raises `StorageError` where no small layer files can be made in `directory`."""
    if not directory.is_dir():
        number = errno.ENOTDIR if directory.exists() else errno.ENOENT
        hint = "--dir takes a directory that is there and may be written to"
        raise StorageError("open", errno=number, file=str(directory), hint=hint)
    options = EngineOptions()
    with workspace(directory) as path, LayerFiles(path / "kv", _LAYOUT, create=True) as files:
        opened = open_engine(files, options)
        try:
            info = opened.engine.ring_info()
        finally:
            opened.engine.close()
        checks = (
            _kernel(),
            _extension(),
            *_ring(opened, info),
            _locked_memory(options),
            _registered(opened, info, options),
            _huge_pages(),
            _file_system(path),
            _direct(files),
            _device(block_device_of(path)),
            _cuda(),
            *_missed(opened),
        )
    return Diagnosis(opened.rung, checks)


def _kernel() -> Check:
    system = platform.system()
    hint = "" if system == "Linux" else "io_uring and huge pages are Linux's"
    return Check("kernel", system == "Linux", f"{system} {platform.release()} {platform.machine()}", hint)


def _extension() -> Check:
    if has_extension():
        return Check("compiled extension", True, "installed")
    hint = "install aio_kv on Linux with liburing-dev present, without AIO_KV_NO_EXTENSION"
    return Check("compiled extension", False, extension_error() or "not installed", hint)


def _ring(opened: OpenedEngine, info: RingInfo) -> Iterator[Check]:
    if not opened.mechanism.startswith("uring"):
        refusal = next(refusal for refusal in opened.refusals if refusal.rung == "uring")
        yield Check("io_uring", False, refusal.reason, refusal.hint)
        return
    yield Check("io_uring", True, "a ring was set up, and a read through it brought the right bytes")
    flags = [name for bit, name in _RING_FLAGS.items() if info.setup_flags >> bit & 1]
    is_best = set(flags) >= _BEST_FLAGS
    hint = "" if is_best else "a kernel of 6.1 or later accepts SINGLE_ISSUER and DEFER_TASKRUN"
    yield Check("ring flags", is_best, ", ".join(flags) or "none", hint)


def _locked_memory(options: EngineOptions) -> Check:
    try:
        import resource
    except ImportError:
        return Check("locked memory", True, "this system has no limit")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "no limit" if soft == resource.RLIM_INFINITY else f"limit {soft // 1024} KiB"
    is_free = soft == resource.RLIM_INFINITY or _may_lock()
    detail = f"{limit}; CAP_IPC_LOCK, which lifts it, is {'there' if _may_lock() else 'not there'}"
    is_enough = is_free or soft >= options.staging_nbytes * options.rings
    return Check("locked memory", is_enough, detail, "" if is_enough else MEMLOCK_HINT)


def _may_lock() -> bool:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return False
    masks = [int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")]
    return any(mask >> _CAP_IPC_LOCK & 1 for mask in masks)


def _registered(opened: OpenedEngine, info: RingInfo, options: EngineOptions) -> Check:
    name, wanted = "registered memory", options.staging_nbytes
    if not opened.mechanism.startswith("uring"):
        return Check(name, False, f"0 of {wanted // _MIB} MiB: there is no ring", "see io_uring above")
    detail = f"{info.registered_nbytes // _MIB} of {wanted // _MIB} MiB"
    if info.register_errno:
        detail += f" ({errno.errorcode.get(info.register_errno, info.register_errno)})"
    is_whole = info.registered_nbytes >= wanted
    hint = MEMLOCK_HINT if info.register_errno == errno.ENOMEM else "a kernel of 5.19 or later registers it"
    return Check(name, is_whole, detail, "" if is_whole else hint)


def _huge_pages() -> Check:
    name = "huge pages"
    hint = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    if not has_extension():
        return Check(
            name, False, "the compiled extension is what asks for them", "see compiled extension above"
        )
    view = allocate_host(_HUGE_NBYTES)
    first = host_address(view, writable=True, what="memory").address
    nbytes = _huge_nbytes(first, first + _HUGE_NBYTES)
    detail = f"{nbytes // _MIB} of {_HUGE_NBYTES // _MIB} MiB just allocated"
    return Check(name, nbytes >= _HUGE_NBYTES, detail, "" if nbytes >= _HUGE_NBYTES else hint)


def _huge_nbytes(first: int, end: int) -> int:
    """Bytes on huge pages in the mappings that touch [first, end), no more than its length."""
    try:
        lines = Path("/proc/self/smaps").read_text().splitlines()
    except OSError:
        return 0
    total, is_inside = 0, False
    for line in lines:
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            start, stop = (int(number, 16) for number in name.split("-"))
            is_inside = start < end and first < stop
        elif is_inside and name == "AnonHugePages:":
            total += int(rest.split()[0]) * 1024
    return min(total, end - first)


def _file_system(path: Path) -> Check:
    kind, place = _mount_of(path)
    is_slow = kind in ("tmpfs", "ramfs", "overlay", "9p", "virtiofs") or kind.startswith(
        ("nfs", "fuse", "cifs")
    )
    detail = f"{kind}, mounted on {place}" if place else "not known"
    return Check("file system", not is_slow, detail, _FILE_SYSTEM_HINT if is_slow else "")


def _mount_of(path: Path) -> tuple[str, str]:
    """Type and mount point of the file system that holds `path`; empty where the system does not tell."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return "", ""
    found, wanted = ("", ""), path.resolve()
    for line in lines:
        # proc(5): ... mount point, the fifth field, with octal escapes ... " - " type source options
        place = line.split()[4].encode().decode("unicode_escape")
        if wanted.is_relative_to(place) and len(place) >= len(found[1]):
            found = line.partition(" - ")[2].split()[0], place
    return found


def _direct(files: LayerFiles) -> Check:
    alignment = files.direct_alignment
    if alignment is None:
        return Check("direct I/O", False, files.direct_refusal or "refused", _FILE_SYSTEM_HINT)
    detail = f"a first read worked: memory aligned to {alignment.memory}, offsets to {alignment.offset} bytes"
    return Check("direct I/O", True, detail)


def _device(device: BlockDevice) -> Check:
    name = "block device"
    if not device.name:
        return Check(name, False, "none: memory, network or overlay", _FILE_SYSTEM_HINT)
    size, depth = device.request_nbytes_max, device.requests_max
    detail = (
        f"{device.name}: {size // 1024 if size else '?'} KiB a request, {depth or '?'} requests at a time"
    )
    if device.is_raid:
        hint = "md RAID splits large I/Os: give one directory per disk instead (path=[...])"
        return Check(name, False, f"{detail}; it is an md RAID", hint)
    if device.is_rotational:
        hint = f"if it does not: echo 0 > /sys/block/{device.name}/queue/rotational"
        return Check(name, False, f"{detail}; the kernel says that it rotates", hint)
    return Check(name, True, detail)


def _cuda() -> Check:
    has_driver = _has_driver()
    has_bindings = _has_bindings()
    detail = (
        f"driver (libcuda.so.1) {'found' if has_driver else 'not found'}, "
        f"cuda-python {'found' if has_bindings else 'not found'}"
    )
    is_there = has_driver and has_bindings
    hint = "" if is_there else "only for memory on a GPU: its driver, and pip install 'aio-kv[cuda]'"
    return Check("CUDA", is_there, detail, hint)


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _has_bindings() -> bool:
    try:
        return importlib.util.find_spec("cuda.bindings") is not None
    except ImportError:
        return False


def _missed(opened: OpenedEngine) -> Iterator[Check]:
    """A line for each rung above the one in force."""
    for refusal in opened.refusals:
        yield Check(f"rung {refusal.rung}", False, refusal.reason, refusal.hint)
