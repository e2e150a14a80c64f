"""How much of a file lies in the page cache, asked with mincore through a mapping of it."""

from __future__ import annotations

import ctypes
import mmap
import os

__all__ = ["drop_files", "resident_nbytes"]


def resident_nbytes(path: str | os.PathLike[str]) -> int:
    """Bytes of a file that the page cache holds. Raises `OSError`."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path, "rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        # Private and writable, for its address; nothing is ever written.
        with mmap.mmap(file.fileno(), nbytes, flags=mmap.MAP_PRIVATE) as mapping:
            states = (ctypes.c_ubyte * -(-nbytes // mmap.PAGESIZE))()
            first = ctypes.c_char.from_buffer(mapping)
            code = libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(nbytes), states)
            del first
    if code:
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(map((1).__and__, bytes(states))) * mmap.PAGESIZE


def drop_files(paths: list[str]) -> None:
    """Write files back and have the page cache forget them."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
