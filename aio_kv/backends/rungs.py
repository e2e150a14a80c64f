"""Opening an engine on the best rung that works, and saying why it is not a better one.

A rung is a mechanism (uring-fixed, uring, threads, threads-python) and a file mode (direct, buffered). Each is proven
by doing: the ring is set up, a NOP goes through it, and one read through a staging slot must bring the bytes that
were just written. Neither kernel versions nor sysctls are believed: both lie in containers.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from aio_kv.blockdevice import block_device_of
from aio_kv.direct import DirectAlignment
from aio_kv.engine import Batch, Engine, IoEngine, Kind, PythonEngine, extension_error, has_extension
from aio_kv.engine.options import EngineOptions
from aio_kv.errors import LayoutError, UnavailableError
from aio_kv.memory import host_address
from aio_kv.plan import COPY_DTYPE, OP_DTYPE, RESULT_DTYPE, IoLimits, Placement

__all__ = [
    "CHOICES",
    "MEMLOCK_HINT",
    "EngineFiles",
    "OpenedEngine",
    "Refusal",
    "has_seccomp_filter",
    "open_engine",
]

# What each choice of backend may end on, best first.
CHOICES = {
    "auto": ("uring", "threads", "threads-python"),
    "uring": ("uring",),
    "threads": ("threads", "threads-python"),
}
_PROBE_NBYTES = 4096
_PROBE_SECONDS = 10.0
_EXTENSION_HINT = "install aio_kv on Linux with liburing-dev present, without AIO_KV_NO_EXTENSION"
MEMLOCK_HINT = (
    "raise the locked-memory limit: ulimit -l unlimited, docker --ulimit memlock=-1, LimitMEMLOCK=infinity"
)


class EngineFiles(Protocol):
    """Open files that an engine works on, by number: `LayerFiles`, and the shards of a model."""

    @property
    def directories(self) -> tuple[str, ...]:
        """The directories that the files are in."""

    @property
    def read_only(self) -> bool:
        """Whether nothing may be written, not even beside the files."""

    @property
    def direct_alignment(self) -> DirectAlignment | None:
        """What direct I/O on the files asks for; None where it is not to be used."""

    @property
    def direct_refusal(self) -> str | None:
        """Why direct I/O does not work; None where it does, or was not asked for."""

    def fds(self, direct: bool = False) -> list[int]:
        """The descriptors of all files in order."""

    def path_of(self, index: int, /) -> str:
        """The path of a file."""

    def nbytes_of(self, index: int, /) -> int:
        """The length of a file."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a rung is not in force, and what would bring it about."""

    rung: str
    reason: str
    hint: str


@dataclass(frozen=True, slots=True)
class OpenedEngine:
    """An engine that has proven itself, and the rungs above it that did not."""

    engine: IoEngine
    mechanism: str
    mode: str
    limits: IoLimits
    refusals: tuple[Refusal, ...]

    @property
    def rung(self) -> str:
        """Mechanism and file mode in one word."""
        return f"{self.mechanism}-{self.mode}"


def open_engine(
    files: EngineFiles,
    options: EngineOptions,
    choice: str = "auto",
    *,
    device: Mapping[str, int] | None = None,
) -> OpenedEngine:
    """Open the best engine of `choice` that works on `files`. Blocking: it takes and touches all of its memory.

    `device` is what the engine is told of a GPU (`Engine`); only the native engine can use one.
    Raises `UnavailableError` naming the reason and its cure when none works.
    """
    if choice not in CHOICES:
        raise LayoutError(f"backend is {choice!r}: must be one of {', '.join(CHOICES)}")
    limits, options = _limits(files, options)
    mode = "buffered" if limits.offset_alignment == 1 else "direct"
    refusals = [] if mode == "direct" else [_buffered_refusal(files)]
    for mechanism in CHOICES[choice]:
        try:
            engine = _open_proven(mechanism, files, limits, options, device)
        except UnavailableError as error:
            refusals.append(Refusal(mechanism, error.reason, error.hint or ""))
            continue
        name = mechanism
        if mechanism == "uring":
            name, lesser = _fixed_or_not(engine, options)
            refusals.extend(lesser)
        return OpenedEngine(engine, name, mode, limits, tuple(refusals))
    raise UnavailableError(
        f"backend {choice!r} does not work here: {refusals[-1].reason}", hint=refusals[-1].hint
    )


def _limits(files: EngineFiles, options: EngineOptions) -> tuple[IoLimits, EngineOptions]:
    devices = [block_device_of(directory) for directory in files.directories]
    sizes = [device.request_nbytes_max for device in devices if device.request_nbytes_max]
    op_nbytes_max = max(4096, min([options.op_nbytes_max, *sizes]) // 4096 * 4096)
    depths = [device.requests_max for device in devices if device.requests_max]
    fitted = replace(
        options,
        queue_depth=min([options.queue_depth, *depths]),
        op_nbytes_max=op_nbytes_max,
        small_nbytes=min(options.small_nbytes, op_nbytes_max),
    )
    alignment = files.direct_alignment
    if alignment is None:
        return IoLimits(1, 1, op_nbytes_max), fitted
    return IoLimits(alignment.memory, alignment.offset, op_nbytes_max), fitted


def _buffered_refusal(files: EngineFiles) -> Refusal:
    if files.direct_refusal is None:
        return Refusal("direct", "direct I/O was not asked for", "ask for it: direct='auto'")
    hint = "keep the files on ext4, XFS or another filesystem with O_DIRECT, not on tmpfs or overlayfs"
    return Refusal("direct", files.direct_refusal, hint)


def _open_proven(
    mechanism: str,
    files: EngineFiles,
    limits: IoLimits,
    options: EngineOptions,
    device: Mapping[str, int] | None,
) -> IoEngine:
    is_direct = limits.offset_alignment > 1
    with _probe_file(files, is_direct=is_direct) as probe:
        fds = [*files.fds(is_direct), probe.fd]
        engine = _open(mechanism, fds, limits, options, device)
        try:
            _prove(engine, len(fds) - 1, probe, mechanism)
        except BaseException:
            engine.close()
            raise
        return engine


def _open(
    mechanism: str,
    fds: list[int],
    limits: IoLimits,
    options: EngineOptions,
    device: Mapping[str, int] | None,
) -> IoEngine:
    if mechanism == "threads-python" and device is not None:
        raise UnavailableError("threads-python: Python threads serve host memory only", hint=_EXTENSION_HINT)
    if mechanism == "threads-python":
        return PythonEngine(fds, limits, options)
    if not has_extension():
        raise UnavailableError(
            f"the compiled extension is not installed ({extension_error()})",
            hint=_EXTENSION_HINT,
        )
    try:
        return Engine(fds, limits, options, uring=mechanism == "uring", device=device)
    except UnavailableError as error:
        hint = _uring_hint(error.error_number or 0) if mechanism == "uring" else None
        raise UnavailableError(
            error.reason, hint=hint, error_number=error.error_number, step=error.step
        ) from error


@dataclass(frozen=True, slots=True)
class _Probe:
    """A descriptor to read `nbytes` from, and what must come back where that is known.

    `nbytes_owed` is less than that where the file is shorter.
    """

    fd: int
    nbytes: int
    content: bytes | None
    nbytes_owed: int = 0


@contextmanager
def _probe_file(files: EngineFiles, *, is_direct: bool) -> Iterator[_Probe]:
    """A nameless file of random bytes; where there can be none, the first file, whose bytes nobody knows."""
    with ExitStack() as stack:
        try:
            if files.read_only:
                raise OSError(errno.EROFS, "the files are open for reading only")
            probe = stack.enter_context(_random_file(files.directories[0], is_direct))
        except OSError:
            # A full disk is no reason not to open files that have their space.
            probe = _Probe(
                files.fds(is_direct)[0], _PROBE_NBYTES, None, min(_PROBE_NBYTES, files.nbytes_of(0))
            )
        yield probe


@contextmanager
def _random_file(directory: str, is_direct: bool) -> Iterator[_Probe]:
    content = os.urandom(_PROBE_NBYTES)
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        file.write(content)
        os.fsync(file.fileno())
        if not is_direct:
            yield _Probe(file.fileno(), _PROBE_NBYTES, content)
            return
        fd = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        try:
            yield _Probe(fd, _PROBE_NBYTES, content)
        finally:
            os.close(fd)


def _prove(engine: IoEngine, file: int, probe: _Probe, mechanism: str) -> None:
    target = bytearray(b"\xa5" * probe.nbytes)
    memory = host_address(target, writable=True, what="probe")
    ops, copies = np.zeros(1, OP_DTYPE), np.zeros(1, COPY_DTYPE)
    ops["file"], ops["nbytes"], ops["placement"], ops["copy_count"] = file, probe.nbytes, Placement.STAGED, 1
    ops["nbytes_owed"] = probe.nbytes_owed
    copies["address"], copies["nbytes"] = memory.address, probe.nbytes_owed or probe.nbytes
    results = np.zeros(1, RESULT_DTYPE)
    ticket = engine.submit(Batch(Kind.READ, ops, 1, results, copies, 1, owner=(memory, target)))
    if not engine.wait(ticket, _PROBE_SECONDS):
        raise UnavailableError(f"{mechanism}: the first read did not end within {_PROBE_SECONDS:.0f} s")
    if ticket.status:
        name = errno.errorcode.get(-ticket.status, str(ticket.status))
        raise UnavailableError(
            f"{mechanism}: the first read failed with {name} ({os.strerror(-ticket.status)})"
        )
    if probe.content is not None and bytes(target) != probe.content:
        raise UnavailableError(f"{mechanism}: the first read brought wrong bytes", hint="update the kernel")


def _fixed_or_not(engine: IoEngine, options: EngineOptions) -> tuple[str, list[Refusal]]:
    info = engine.ring_info()
    if info.registered_nbytes:
        return "uring-fixed", []
    if not options.register_buffers:
        return "uring", [
            Refusal("uring-fixed", "register_buffers is False", "open with register_buffers=True")
        ]
    name = errno.errorcode.get(info.register_errno, str(info.register_errno))
    hint = (
        MEMLOCK_HINT if info.register_errno == errno.ENOMEM else "a kernel of 5.19 or later registers buffers"
    )
    return "uring", [Refusal("uring-fixed", f"registering buffers failed with {name}", hint)]


def _uring_hint(error_number: int) -> str:
    if error_number == errno.EPERM:
        if has_seccomp_filter():
            return (
                "a seccomp filter blocks io_uring: run the container with a profile that allows io_uring_setup, "
                "io_uring_enter and io_uring_register (docker run --security-opt seccomp=PROFILE.json)"
            )
        return "the sysctl forbids io_uring: sysctl -w kernel.io_uring_disabled=0"
    if error_number == errno.ENOSYS:
        return "this kernel (before 5.11) or sandbox (gVisor) has no io_uring: run on a newer or real kernel"
    if error_number == errno.ENOMEM:
        return MEMLOCK_HINT
    return "aio-kv doctor says more"


def has_seccomp_filter() -> bool:
    """Whether this process runs under a seccomp filter, by /proc/self/status."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return False
    return any(line.split()[1:] == ["2"] for line in lines if line.startswith("Seccomp:"))
