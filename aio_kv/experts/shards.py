"""The files of a model, open for reading: through the page cache, and past it where that works."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from types import TracebackType

from aio_kv.creation import open_regular
from aio_kv.direct import DirectAlignment, probe_direct
from aio_kv.errors import ClosedError, LayoutError, StorageError, UnavailableError

__all__ = ["DIRECT_CHOICES", "ShardFiles", "drop_range"]

DIRECT_CHOICES = ("auto", "on", "off")
_PAGE = 4096
_ALIGNMENT_MAX = 4096  # what windows are rounded to at most


class ShardFiles:
    """The shards of one model, by number. A context manager; whoever opens it closes it.

    Args:
        paths: one file per shard, in order. Symbolic links are followed: model caches are made of them.
        direct: "auto" opens them past the page cache as well, where aligned reads of all of them work; "on" insists;
            "off" does not try.

    Raises `StorageError` for a shard that is missing or cannot be opened, `CorruptionError` for what is no regular
    file, `UnavailableError` where `direct="on"` and direct I/O does not work, `LayoutError`. Whatever is raised, no
    descriptor stays open. Nobody may use a descriptor while or after `close` runs.
    """

    read_only = True

    def __init__(self, paths: Sequence[str | os.PathLike[str]], *, direct: str = "auto") -> None:
        check_direct(direct)
        if not paths:
            raise LayoutError("paths is empty: a model has one shard at least")
        self._paths = tuple(os.path.realpath(path) for path in paths)
        self._names = tuple(os.fspath(path) for path in paths)
        self._buffered_fds: list[int] = []
        self._direct_fds: list[int] = []
        self._nbytes: list[int] = []
        self._alignment: DirectAlignment | None = None
        self._refusal: str | None = None
        self._is_closed = False
        try:
            self._open(direct)
        except BaseException:
            self.close()
            raise

    def _open(self, direct: str) -> None:
        for path, name in zip(self._paths, self._names, strict=True):
            self._buffered_fds.append(_open_shard(path, name, len(self._paths)))
            self._nbytes.append(os.fstat(self._buffered_fds[-1]).st_size)
        if direct == "off":
            return
        probe = probe_direct(list(self._paths), alignment=_ALIGNMENT_MAX)
        self._alignment, self._refusal = probe.alignment, probe.refusal
        if self._alignment is not None:
            for path in self._paths:
                self._direct_fds.append(open_regular(path, os.O_RDONLY | os.O_DIRECT))
        elif direct == "on":
            raise UnavailableError(
                f"direct='on' and direct I/O does not work on {self._names[0]}: {self._refusal}",
                hint="keep the files on ext4, XFS or another filesystem with O_DIRECT, or open with direct='auto'",
            )

    @property
    def directories(self) -> tuple[str, ...]:
        """The directories that the files are in."""
        return tuple(dict.fromkeys(os.path.dirname(path) for path in self._paths))

    @property
    def direct_alignment(self) -> DirectAlignment | None:
        """What direct I/O on these files asks for, found by trying; None where it is not used."""
        return self._alignment

    @property
    def direct_refusal(self) -> str | None:
        """Why direct I/O does not work here; None where it does, or was not asked for."""
        return self._refusal

    def fds(self, direct: bool = False) -> list[int]:
        """Return the descriptors of all shards, as a new list; they stay owned by this object."""
        if self._is_closed:
            raise ClosedError(f"the shards of {self._names[0]} are closed")
        return list(self._direct_fds if direct else self._buffered_fds)

    def path_of(self, shard: int) -> str:
        """Return the path of a shard as it was given."""
        return self._names[shard]

    def nbytes_of(self, shard: int) -> int:
        """Return the length that a shard had when it was opened."""
        return self._nbytes[shard]

    def advise_random(self) -> None:
        """Have buffered reads bring what is asked for and nothing ahead of it, which nobody would drop again."""
        for fd in self._buffered_fds:
            _advise(fd, 0, 0, "POSIX_FADV_RANDOM")

    def drop_page_cache(self) -> None:
        """Push the files out of the page cache, whoever read them in. Blocks."""
        for fd in self.fds():
            _advise(fd, 0, 0, "POSIX_FADV_DONTNEED")

    def close(self) -> None:
        """Close every descriptor; again does nothing."""
        self._is_closed = True
        for table in (self._direct_fds, self._buffered_fds):
            while table:
                os.close(table.pop())

    def __enter__(self) -> ShardFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_direct(direct: object) -> None:
    """Raise `LayoutError` for what is not a choice of `direct`."""
    if direct not in DIRECT_CHOICES:
        raise LayoutError(f"direct is {direct!r}: must be one of {', '.join(DIRECT_CHOICES)}")


def drop_range(fd: int, file_offset: int, nbytes: int) -> None:
    """Push a range, rounded outward to pages, out of the page cache. Blocks; does nothing on systems without it.

    Rounded, because the kernel keeps a page of which only a part is given up.
    """
    first = file_offset // _PAGE * _PAGE
    _advise(fd, first, -(-(file_offset + nbytes) // _PAGE) * _PAGE - first, "POSIX_FADV_DONTNEED")


def _advise(fd: int, file_offset: int, nbytes: int, advice: str) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, file_offset, nbytes, getattr(os, advice))


def _open_shard(path: str, name: str, count: int) -> int:
    try:
        return open_regular(path, os.O_RDONLY)
    except StorageError as error:
        if error.errno != errno.ENOENT:
            raise
        raise StorageError(
            "open",
            errno=errno.ENOENT,
            file=name,
            hint=f"a shard is missing: all {count} files of the model must be there" if count > 1 else None,
        ) from error
