"""How much of a file lies in the page cache, asked with mincore through a mapping of it."""

from __future__ import annotations

import ctypes
import mmap
import os

import pytest

_libc = ctypes.CDLL(None, use_errno=True)
PAGE = mmap.PAGESIZE


def resident_nbytes(path: str | os.PathLike[str]) -> int:
    """Bytes of a file that the page cache holds."""
    if not hasattr(_libc, "mincore"):
        pytest.skip("this system has no mincore")
    with open(path, "rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        with mmap.mmap(file.fileno(), nbytes, flags=mmap.MAP_PRIVATE) as mapping:  # writable, for its address
            pages = -(-nbytes // PAGE)
            states = (ctypes.c_ubyte * pages)()
            first = ctypes.c_char.from_buffer(mapping)
            failed = _libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(nbytes), states)
            del first
            if failed:
                raise OSError(ctypes.get_errno(), "mincore")
    return sum(state & 1 for state in states) * PAGE


def make_cold(path: str | os.PathLike[str]) -> None:
    """Write a file's pages back and have the page cache forget them; skip where that does not work (tmpfs)."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    if resident_nbytes(path):
        pytest.skip("the files are on a filesystem that is a page cache itself")
