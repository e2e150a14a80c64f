"""Positional reads and writes on a file descriptor, on any system that Python runs on.

One call moves bytes at an explicit offset and leaves the descriptor's own position alone. Where the system
has no such call, a lock per descriptor makes seek-and-read atomic instead. Which one is used is decided at
import.

Python itself repeats calls that a signal interrupted (EINTR); EAGAIN is repeated here, a bounded number of
times.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from aio_kv.errors import LayoutError, ShortReadError, storage_error
from aio_kv.memory import host_address

__all__ = ["SUPPORTS_DIRECT", "aligned_buffer", "read_at", "read_exactly", "write_all", "write_at"]

# Direct I/O needs the caller's own aligned memory in the system call: `os.pread` reads into a fresh bytes
# object.
SUPPORTS_DIRECT = hasattr(os, "O_DIRECT") and hasattr(os, "preadv") and hasattr(os, "pwritev")

_AGAIN_RETRIES = 8
_AGAIN_PAUSE_SECONDS = 0.001

# One lock per descriptor number, so bounded by the number of files that a process may open. Duplicates of one
# descriptor share a position without sharing a lock: do not use them on systems that need this.
_seek_locks: dict[int, threading.Lock] = {}


def _seek_lock(fd: int) -> threading.Lock:
    return _seek_locks.setdefault(fd, threading.Lock())


def _preadv(fd: int, view: memoryview, file_offset: int) -> int:
    return os.preadv(fd, [view], file_offset)


def _pread(fd: int, view: memoryview, file_offset: int) -> int:
    data = os.pread(fd, view.nbytes, file_offset)
    view[: len(data)] = data
    return len(data)


def _seek_and_read(fd: int, view: memoryview, file_offset: int) -> int:
    with _seek_lock(fd):
        os.lseek(fd, file_offset, os.SEEK_SET)
        data = os.read(fd, view.nbytes)
    view[: len(data)] = data
    return len(data)


def _pwritev(fd: int, view: memoryview, file_offset: int) -> int:
    return os.pwritev(fd, [view], file_offset)


def _pwrite(fd: int, view: memoryview, file_offset: int) -> int:
    return os.pwrite(fd, view, file_offset)


def _seek_and_write(fd: int, view: memoryview, file_offset: int) -> int:
    with _seek_lock(fd):
        os.lseek(fd, file_offset, os.SEEK_SET)
        return os.write(fd, view)


def _first_supported(*choices: tuple[str, Callable[[int, memoryview, int], int]]) -> Any:
    return next(function for name, function in choices if hasattr(os, name))


_read_once = _first_supported(("preadv", _preadv), ("pread", _pread), ("read", _seek_and_read))
_write_once = _first_supported(("pwritev", _pwritev), ("pwrite", _pwrite), ("write", _seek_and_write))


def read_at(fd: int, view: memoryview, file_offset: int) -> int:
    """Read up to `len(view)` bytes at `file_offset` with one call; return how many came, 0 at the end of the
    file.

    `view` is writable bytes, borrowed for the call. Raises `OSError` as the system gives it. Blocks;
    thread-safe.
    """
    return _with_retries(_read_once, fd, view, file_offset)


def write_at(fd: int, view: memoryview, file_offset: int) -> int:
    """Write up to `len(view)` bytes at `file_offset` with one call; return how many were taken.

    `view` is bytes, borrowed for the call. Raises `OSError` as the system gives it. Blocks; thread-safe.
    """
    return _with_retries(_write_once, fd, view, file_offset)


def read_exactly(fd: int, view: memoryview, file_offset: int, *, file: str, alignment: int = 1) -> None:
    """Fill `view` from `file_offset`, going on after short reads; `file` is the name for error messages.

    With `alignment` (bytes, for direct I/O) a short read is resumed at the last multiple of it. `view` is
    borrowed for the call. Raises `ShortReadError` at the end of the file and `StorageError` for what the
    system refuses.
    """
    done = 0
    while done < view.nbytes:
        start = done - done % alignment
        count = _translated(read_at, "read", fd, view, start, file_offset, file)
        # Resuming at a boundary repeats a few bytes, so "no progress" is the test, not "zero bytes".
        if start + count <= done:
            raise ShortReadError(arrived=done, file=file, file_offset=file_offset, nbytes=view.nbytes)
        done = start + count


def write_all(fd: int, view: memoryview, file_offset: int, *, file: str, alignment: int = 1) -> None:
    """Write all of `view` at `file_offset`, going on after short writes; `file` is the name for error
    messages.

    With `alignment` (bytes, for direct I/O) a short write is resumed at the last multiple of it. `view` is
    borrowed for the call. Raises `StorageError` for what the system refuses, and for a write that makes no
    progress.
    """
    done = 0
    while done < view.nbytes:
        start = done - done % alignment
        count = _translated(write_at, "write", fd, view, start, file_offset, file)
        if start + count <= done:
            raise storage_error(
                errno.EIO,
                action="write",
                file=file,
                file_offset=file_offset + done,
                nbytes=view.nbytes - done,
            )
        done = start + count


def aligned_buffer(nbytes: int, alignment: int = 4096) -> memoryview:
    """Return `nbytes` zeroed, writable bytes whose address is a multiple of `alignment` (a power of two).

    The memory is a private anonymous mapping: unlike the shared one that `mmap.mmap(-1, n)` makes, the kernel
    may give it huge pages. The caller owns it; it is unmapped when the last view of it goes away.
    """
    if nbytes <= 0 or alignment <= 0 or alignment & (alignment - 1):
        raise LayoutError(
            f"cannot make a buffer of {nbytes} bytes aligned to {alignment}: sizes must be positive"
        )
    # Mappings start on a page; anything coarser is cut out of a larger one.
    extra = alignment if alignment > mmap.PAGESIZE else 0
    view = memoryview(_private_mapping(nbytes + extra))
    start = -host_address(view, writable=True, what="mapping").address % alignment
    return view[start : start + nbytes]


def _private_mapping(nbytes: int) -> mmap.mmap:
    flags = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
    return mmap.mmap(-1, nbytes, flags=flags) if flags else mmap.mmap(-1, nbytes)


def _with_retries(
    call: Callable[[int, memoryview, int], int], fd: int, view: memoryview, file_offset: int
) -> int:
    for _ in range(_AGAIN_RETRIES):
        try:
            return call(fd, view, file_offset)
        except BlockingIOError:
            time.sleep(_AGAIN_PAUSE_SECONDS)
    return call(fd, view, file_offset)


def _translated(
    call: Callable[[int, memoryview, int], int],
    action: str,
    fd: int,
    view: memoryview,
    start: int,
    file_offset: int,
    file: str,
) -> int:
    try:
        return call(fd, view[start:], file_offset + start)
    except OSError as error:
        raise storage_error(
            error.errno or errno.EIO,
            action=action,
            file=file,
            file_offset=file_offset + start,
            nbytes=view.nbytes - start,
        ) from error
