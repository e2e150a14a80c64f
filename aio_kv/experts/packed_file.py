"""Packing experts into one file, and reading that file's header and records.

A file is made under another name (`.packing` at the end), whole, synced, and then renamed: what has the real name is
complete. Sources and target pass through the page cache and are dropped from it on the way, so that packing a model
that is larger than memory does not push out everything else.
"""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aio_kv.creation import open_regular
from aio_kv.errors import BusyError, CorruptionError, LayoutError, StorageError, storage_error
from aio_kv.experts.packed_directory import PackedDirectory, PackedLayer, PackedSource
from aio_kv.experts.packed_format import (
    HEAD_NBYTES,
    TRAILER_NBYTES,
    PackedHead,
    RecordTrailer,
    check_record,
)
from aio_kv.experts.segments import DirectSegment
from aio_kv.experts.shards import drop_range
from aio_kv.experts.slot_image import LayerExperts
from aio_kv.positional import read_exactly, write_all

fcntl: Any
try:
    import fcntl
except ImportError:  # a system without file locks: two packers of one target must be kept apart by hand
    fcntl = None

__all__ = ["PackedFile", "write_packed"]

# So much is written between two syncs, after which it can be dropped from the page cache.
_SYNC_NBYTES = 64 << 20
_NO_PREALLOCATION = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENODEV)


@dataclass(frozen=True, slots=True)
class PackedFile:
    """The head and directory of a packed file. Holds no file open."""

    path: Path
    head: PackedHead
    directory: PackedDirectory

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> PackedFile:
        """Read head and directory. Raises `StorageError`, `CorruptionError`, or `LayoutError` for another version."""
        file = str(path)
        fd = open_regular(os.path.realpath(path), os.O_RDONLY)
        try:
            nbytes = os.fstat(fd).st_size
            first = _read(fd, 0, min(HEAD_NBYTES, nbytes), file)
            head = PackedHead.decode(first, file=file, file_nbytes=nbytes)
            directory = _read(fd, HEAD_NBYTES, head.directory_nbytes, file)
        finally:
            os.close(fd)
        return cls(Path(path), head, PackedDirectory.decode(directory, head, file=file))

    def experts(self) -> dict[int, LayerExperts]:
        """Return the experts of each layer, every one in one segment."""
        return {layer.layer: layer.experts(self.head.data_start) for layer in self.directory.layers}

    def check_records(self, *, on_checked: Callable[[int], None] = lambda nbytes: None) -> None:
        """Read every record and compare it with its checksum; `on_checked` is told of the bytes.

        Raises `CorruptionError` for the first that is damaged, naming layer, expert and offset. Blocks.
        """
        file = str(self.path)
        fd = open_regular(os.path.realpath(self.path), os.O_RDONLY)
        try:
            buffer = memoryview(bytearray(max(layer.record_nbytes for layer in self.directory.layers)))
            for layer in self.directory.layers:
                for expert in range(layer.num_experts):
                    self._check_record(fd, layer, expert, buffer, file)
                    on_checked(layer.record_nbytes)
        finally:
            os.close(fd)

    def _check_record(self, fd: int, layer: PackedLayer, expert: int, buffer: memoryview, file: str) -> None:
        start = self.head.data_start + layer.record_offset + expert * layer.record_nbytes
        nbytes = layer.payload_nbytes(expert)
        record = buffer[: nbytes + TRAILER_NBYTES]
        read_exactly(fd, record, start, file=file)
        drop_range(fd, start, layer.record_nbytes)
        check_record(record, RecordTrailer(layer.layer, expert, 0, nbytes), file=file, file_offset=start)


def write_packed(
    target: Path,
    paths: tuple[Path, ...],
    experts: Mapping[int, LayerExperts],
    *,
    model: str | None,
    alignment: int,
    overwrite: bool,
    on_written: Callable[[int], None],
) -> PackedFile:
    """Pack `experts`, whose segments lie in `paths`, into `target`; see `ExpertMap.pack`."""
    with ExitStack() as undo:
        fds = [_open_source(path, undo) for path in paths]
        states = [os.fstat(fd) for fd in fds]
        sources = tuple(
            PackedSource(path.name, state.st_size) for path, state in zip(paths, states, strict=True)
        )
        directory = PackedDirectory.plan(experts, alignment=alignment, model=model, sources=sources)
        head, preamble = directory.encode(alignment)
        _check_target(target, states, overwrite=overwrite)
        with _replacing(target, head.file_nbytes) as (fd, file):
            write_all(fd, memoryview(preamble), 0, file=file)
            packer = _Packer(fds, paths, fd, file)
            for layer in directory.layers:
                packer.write_layer(layer, experts[layer.layer], head.data_start, on_written)
            _check_unchanged(paths, fds, states)
    return PackedFile(target, head, directory)


class _Packer:
    """Copies experts from open files into records of an open file."""

    def __init__(self, fds: list[int], paths: tuple[Path, ...], fd: int, file: str) -> None:
        self._fds = fds
        self._paths = paths
        self._fd = fd
        self._file = file
        self._unsynced_from = 0

    def write_layer(
        self, layer: PackedLayer, experts: LayerExperts, data_start: int, on_written: Callable[[int], None]
    ) -> None:
        """Write every record of `layer`."""
        buffer = memoryview(bytearray(layer.record_nbytes))
        for expert in range(layer.num_experts):
            nbytes = layer.payload_nbytes(expert)
            for segment in experts.segments(expert):
                self._read(segment, buffer)
            trailer = RecordTrailer(layer.layer, expert, zlib.crc32(buffer[:nbytes]), nbytes).encode()
            buffer[nbytes:] = trailer.ljust(layer.record_nbytes - nbytes, b"\0")
            start = data_start + layer.record_offset + expert * layer.record_nbytes
            write_all(self._fd, buffer, start, file=self._file)
            self._drop_written(start + layer.record_nbytes)
            on_written(layer.record_nbytes)

    def _read(self, segment: DirectSegment, buffer: memoryview) -> None:
        view = buffer[segment.slot_offset : segment.slot_offset + segment.nbytes]
        fd = self._fds[segment.shard]
        read_exactly(fd, view, segment.file_offset, file=str(self._paths[segment.shard]))
        drop_range(fd, segment.file_offset, segment.nbytes)

    def _drop_written(self, end: int) -> None:
        nbytes = end - self._unsynced_from
        if nbytes >= _SYNC_NBYTES:
            # Only what is on the disk can be dropped.
            os.fsync(self._fd)
            drop_range(self._fd, self._unsynced_from, nbytes)
            self._unsynced_from = end


@contextmanager
def _replacing(target: Path, nbytes: int) -> Iterator[tuple[int, str]]:
    """Give a new file of `nbytes` that takes the place of `target` if the body ends well, and vanishes if not."""
    path = f"{target}.packing"
    fd = _open_target(path)
    try:
        try:
            _reserve(fd, nbytes)
            yield fd, path
            os.fsync(fd)
            drop_range(fd, 0, nbytes)
            os.replace(path, target)
            _sync_folder(target)
        except BaseException:
            with suppress(OSError):
                os.unlink(path)
            raise
    except StorageError:
        raise
    except OSError as error:
        raise _translated(error, path, nbytes) from error
    finally:
        os.close(fd)


def _open_target(path: str) -> int:
    """Open the file for writing, locked; one that an interrupted packing has left is taken over."""
    try:
        fd = os.open(
            path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0), 0o666
        )
    except OSError as error:
        raise _translated(error, path, None) from error
    try:
        if fcntl is not None:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between opening and locking the other packer may have given the file its real name.
        if os.fstat(fd).st_ino != os.lstat(path).st_ino:
            raise BlockingIOError
        os.ftruncate(fd, 0)
    except (BlockingIOError, FileNotFoundError) as error:
        os.close(fd)
        raise BusyError(
            f"{path} is being written elsewhere: wait for that, or give another target"
        ) from error
    except OSError as error:
        os.close(fd)
        raise _translated(error, path, None) from error
    return fd


def _reserve(fd: int, nbytes: int) -> None:
    """Ask for all the space at once, so that a full disk is known before hours of copying."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in _NO_PREALLOCATION:
            raise


def _open_source(path: Path, undo: ExitStack) -> int:
    fd = open_regular(os.path.realpath(path), os.O_RDONLY)
    undo.callback(os.close, fd)
    return fd


def _check_target(target: Path, sources: list[os.stat_result], *, overwrite: bool) -> None:
    try:
        found = os.stat(target)
    except FileNotFoundError:
        return
    except OSError as error:
        raise _translated(error, str(target), None) from error
    if any(os.path.samestat(found, source) for source in sources):
        raise LayoutError(f"{target} is a file of the model itself: give another target")
    if not overwrite:
        raise StorageError(
            "create", errno=errno.EEXIST, file=str(target), hint="choose another name, or allow overwriting"
        )


def _check_unchanged(paths: tuple[Path, ...], fds: list[int], before: list[os.stat_result]) -> None:
    for path, fd, earlier in zip(paths, fds, before, strict=True):
        now = os.fstat(fd)
        if (now.st_size, now.st_mtime_ns) != (earlier.st_size, earlier.st_mtime_ns):
            raise CorruptionError(
                "the model changed while it was packed",
                file=str(path),
                expected=f"{earlier.st_size} bytes, unchanged",
                found=f"{now.st_size} bytes, written to",
                hint="pack it again when nothing writes to it",
            )


def _read(fd: int, file_offset: int, nbytes: int, file: str) -> bytes:
    data = bytearray(nbytes)
    read_exactly(fd, memoryview(data), file_offset, file=file)
    return bytes(data)


def _sync_folder(path: Path) -> None:
    if hasattr(os, "O_DIRECTORY"):
        fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _translated(error: OSError, file: str, nbytes: int | None) -> StorageError:
    return storage_error(error.errno or errno.EIO, action="pack", file=file, file_offset=None, nbytes=nbytes)
