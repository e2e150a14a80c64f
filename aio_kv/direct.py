"""Finding out whether direct I/O (past the page cache) works on a file, and how it must be aligned, by doing
it.

Filesystems accept O_DIRECT when a file is opened and refuse the reads, or report an alignment that is not the
truth for the device below; a read that worked is the only proof. Without proof the page cache is used.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

from aio_kv.creation import open_regular
from aio_kv.errors import StorageError
from aio_kv.positional import SUPPORTS_DIRECT, aligned_buffer, read_at

__all__ = ["DirectAlignment", "DirectProbe", "probe_direct"]

_FINE, _COARSE = 512, 4096  # The two logical block sizes that disks have.


@dataclass(frozen=True, slots=True)
class DirectAlignment:
    """What direct I/O asks for, in bytes: of the memory address, and of file offset and length."""

    memory: int
    offset: int


@dataclass(frozen=True, slots=True)
class DirectProbe:
    """The alignment that works, or None and the reason why there is none."""

    alignment: DirectAlignment | None
    refusal: str | None


def probe_direct(paths: list[str], *, alignment: int) -> DirectProbe:
    """Try direct reads on every path and return what suits all of them.

    `alignment` (bytes) is that of the groups: where the device asks for more, groups cannot be read directly.
    Raises `StorageError` only where the process is out of files.
    """
    if not SUPPORTS_DIRECT:
        return DirectProbe(None, "this system has no direct I/O with positional vectored calls")
    found = []
    for path in paths:
        probe = _probe_file(path)
        if probe.alignment is None:
            return probe
        found.append(probe.alignment)
    best = DirectAlignment(max(a.memory for a in found), max(a.offset for a in found))
    if alignment % best.offset:
        reason = f"groups are aligned to {alignment} bytes and direct I/O needs {best.offset}"
        return DirectProbe(None, reason)
    return DirectProbe(best, None)


def _probe_file(path: str) -> DirectProbe:
    try:
        fd = open_regular(path, os.O_RDONLY | os.O_DIRECT)
    except StorageError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return DirectProbe(None, f"O_DIRECT was refused: {error}")
    try:
        return _probe_reads(fd, path)
    finally:
        os.close(fd)


def _probe_reads(fd: int, path: str) -> DirectProbe:
    # One coarse step more than is read, so that an address aligned to the fine step only can be cut out.
    memory = aligned_buffer(2 * _COARSE, _COARSE)
    offset = _FINE if _reads(fd, memory[:_FINE]) else _COARSE
    if offset == _COARSE and not _reads(fd, memory[:_COARSE]):
        return DirectProbe(None, f"direct reads of {_FINE} and {_COARSE} bytes both failed: {path}")
    works_fine = _reads(fd, memory[_FINE : _FINE + offset])
    return DirectProbe(DirectAlignment(_FINE if works_fine else _COARSE, offset), None)


def _reads(fd: int, view: memoryview) -> bool:
    # A file may be shorter than the coarse step; it is never empty.
    try:
        return read_at(fd, view, 0) == min(view.nbytes, os.fstat(fd).st_size)
    except OSError:
        return False
