"""The synchronous oracle: one group at a time, one bounce buffer, no overlap, nothing clever.

Every other backend is compared with this one byte for byte, so it stays slow, deterministic and simple for
ever. For each request in order: a positional read of exactly one group into the bounce buffer, a copy to the
destination (and, for device memory, a wait for that copy), then the next request. Requests are all checked
before the first byte moves.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np

from aio_kv.backends.device_side import DeviceSide
from aio_kv.cuda import CopyOptions, Device, PinnedBuffer
from aio_kv.errors import ClosedError, LayoutError, StorageError, UnavailableError
from aio_kv.files import LayerFiles, PathLike
from aio_kv.integers import Int64Array
from aio_kv.layout import GroupKey, GroupLayout
from aio_kv.memory import DeviceMemory, device_memory, host_view, is_device_memory
from aio_kv.positional import aligned_buffer, read_exactly, write_all
from aio_kv.protocols import Read, Scatter, check_count, limited

__all__ = ["CopyToDevice", "PosixBackend"]

CopyToDevice: TypeAlias = "Callable[[DeviceMemory, memoryview, Any], None]"
_Target: TypeAlias = "memoryview | DeviceMemory"


class PosixBackend:
    """Synchronous reads and writes of groups with plain positional I/O.

    Args:
        path_or_files: directories, opened and owned by this backend; or `LayerFiles`, which stay the
            caller's.
        layout: the geometry; may be left out where `LayerFiles` are given.
        device: the GPU that destinations are on, by index or as an open `aio_kv.cuda.Device`; None for host memory.
        create: make the files where there are none (only with a path).
        copy: `copy(destination, source, stream)` copies a view of host bytes to a `DeviceMemory` of the same
            length on `stream` and returns when the copy has ended. With a `device` there is one: an
            asynchronous copy from the pinned bounce buffer, then a stream synchronisation.
        direct: True asks for direct I/O, False for the page cache, None takes direct I/O where it works.

    Memory handed to a call is borrowed until the call returns. Calls block and are serialised by a lock, so
    any thread may make them. Without a GPU, destinations are host memory.
    """

    def __init__(
        self,
        path_or_files: PathLike | Sequence[PathLike] | LayerFiles,
        layout: GroupLayout | None = None,
        *,
        device: int | Device | None = None,
        create: bool = False,
        copy: CopyToDevice | None = None,
        direct: bool | None = None,
    ) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._device = device
        self._copy = copy
        self._side: DeviceSide | None = None
        self._pin: PinnedBuffer | None = None
        self._owns_files = not isinstance(path_or_files, LayerFiles)
        self._files = _as_files(path_or_files, layout, create)
        self._layout = self._files.layout
        try:
            self._direct = self._files.direct_alignment is not None if direct is None else direct
            self._fds = self._files.fds(self._direct)
            alignment = self._files.direct_alignment if self._direct else None
            self._resume_alignment = alignment.offset if alignment else 1
            self._bounce = aligned_buffer(
                self._layout.stride, max(4096, alignment.memory if alignment else 1)
            )
            if device is not None and copy is None:
                self._open_device(device)
        except BaseException:
            self._close_device()
            self._close_files()
            raise

    def _open_device(self, device: int | Device) -> None:
        # No kernels: the oracle copies one group at a time, the plainest way there is.
        self._side = DeviceSide(device, CopyOptions(kernel_nbytes_max=0))
        self._pin = PinnedBuffer(self._bounce, self._side.device)
        self._copy = self._side.path.copy_and_wait

    def _close_device(self) -> None:
        if self._pin is not None:
            self._pin.close()
        if self._side is not None:
            self._side.close()

    @property
    def layout(self) -> GroupLayout:
        """The geometry of the files."""
        return self._layout

    @property
    def files(self) -> LayerFiles:
        """The files underneath."""
        return self._files

    @property
    def device(self) -> Any:
        """The device that was given, or None."""
        return self._device

    @property
    def is_direct(self) -> bool:
        """Whether reads and writes go past the page cache."""
        return self._direct

    def read(self, requests: Iterable[Read], stream: Any = None) -> None:
        """Read groups in the given order; each `into` is exactly one payload of writable memory.

        `stream` is handed to `copy`. Raises `LayoutError` before anything is read, `StorageError` where a
        read fails (earlier requests have then been delivered), `UnavailableError` for device memory without
        `copy`.
        """
        checked = [self._check_read(request) for request in limited(requests)]
        with self._lock:
            self._require_open()
            for group_id, target in checked:
                self._read_group(group_id, target, 0, stream)

    def read_groups(self, group_ids: Any, into: Any, stream: Any = None) -> None:
        """Read groups by number, in order, into a `Scatter` or into memory of exactly their payloads, packed.

        Raises as `read` does.
        """
        check_count(group_ids, what="group_ids")
        ids = self._layout.check_ids(group_ids)
        memory = into.memory if isinstance(into, Scatter) else into
        target = self._check_target(memory, "Scatter.memory" if isinstance(into, Scatter) else "into")
        starts = self._starts(ids, into, target.nbytes, "into")
        with self._lock:
            self._require_open()
            for group_id, start in zip(ids.tolist(), starts, strict=True):
                self._read_group(group_id, target, start, stream)

    def read_block(self, layer: int, block: int, into: Any, stream: Any = None) -> None:
        """Read all groups of a block into `into`, packed in (kind, head) order without padding.

        `into` is exactly `groups_per_block * payload_nbytes` bytes. Raises as `read` does.
        """
        self.read_groups(self._block_ids(layer, block), into, stream)

    def write_from_host(self, key: GroupKey, source: Any) -> None:
        """Write one group from host memory of exactly `payload_nbytes` bytes; the padding on disk becomes
        zeros.

        Durable only after `sync`. Raises `LayoutError` for a wrong key or source, `StorageError` for a failed
        write.
        """
        view = host_view(source, writable=False, what="source")
        group_id = self._layout.group_id(key)
        self._check_length(view.nbytes, 1, "source")
        with self._lock:
            self._require_writable()
            self._write_group(group_id, view)

    def write_groups(self, group_ids: Any, source: Any) -> None:
        """Write groups by number, in order, from a `Scatter` or from host memory of their payloads, packed.

        A group given twice is a `LayoutError`; otherwise raises as `write_from_host` does.
        """
        check_count(group_ids, what="group_ids")
        ids = self._layout.check_ids(group_ids)
        _check_unique(ids)
        view = host_view(
            source.memory if isinstance(source, Scatter) else source, writable=False, what="source memory"
        )
        starts = self._starts(ids, source, view.nbytes, "source")
        with self._lock:
            self._require_writable()
            for group_id, start in zip(ids.tolist(), starts, strict=True):
                self._write_group(group_id, view[start : start + self._layout.payload_nbytes])

    def write_block(self, layer: int, block: int, source: Any) -> None:
        """Write all groups of a block from `source`, packed in (kind, head) order without padding.

        `source` is exactly `groups_per_block * payload_nbytes` bytes. Raises as `write_from_host` does.
        """
        self.write_groups(self._block_ids(layer, block), source)

    def sync(self) -> None:
        """Make everything written so far durable. Raises `StorageError`."""
        with self._lock:
            self._require_writable()
            self._files.sync()

    def drop_page_cache(self) -> None:
        """Push the files out of the page cache, after writing what is dirty; nothing where the system has no way."""
        with self._lock:
            self._require_open()
            self._files.drop_page_cache()

    def close(self) -> None:
        """Wait for the call in progress, then close; files given as `LayerFiles` stay open. Again does nothing."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._close_device()
                self._close_files()

    def __enter__(self) -> PosixBackend:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _close_files(self) -> None:
        if self._owns_files:
            self._files.close()

    def _require_open(self) -> None:
        if self._closed or self._files.closed:
            raise ClosedError("this PosixBackend is closed, or its files are")

    def _require_writable(self) -> None:
        self._require_open()
        if self._files.read_only:
            hint = "open the files without read_only"
            raise StorageError("write", errno=errno.EROFS, file=self._files.directories[0], hint=hint)

    def _check_read(self, request: object) -> tuple[int, _Target]:
        if not isinstance(request, Read):
            raise LayoutError(f"request is {request!r:.80} ({type(request).__name__}): must be a Read")
        group_id = self._layout.group_id(request.key)
        target = self._check_target(request.into, "into")
        self._check_length(target.nbytes, 1, "into")
        return group_id, target

    def _check_target(self, memory: object, what: str) -> _Target:
        if not is_device_memory(memory):
            return host_view(memory, writable=True, what=what)
        if self._copy is None:
            hint = "open the backend with `copy`, or read into host memory"
            raise UnavailableError(f"{what} is device memory and this backend cannot copy to it", hint=hint)
        return device_memory(memory, what=what)

    def _check_length(self, nbytes: int, groups: int, what: str) -> None:
        wanted = groups * self._layout.payload_nbytes
        if nbytes != wanted:
            raise LayoutError(
                f"{what} has {nbytes} bytes: must be exactly {wanted}, {groups} groups of "
                f"{self._layout.payload_nbytes} (payload_nbytes)"
            )

    def _starts(self, ids: Int64Array, place: object, nbytes: int, what: str) -> list[int]:
        """Return where each group begins in memory of `nbytes` bytes, having checked that all of them fit."""
        payload = self._layout.payload_nbytes
        if not isinstance(place, Scatter):
            self._check_length(nbytes, len(ids), what)
            return list(range(0, nbytes, payload))
        if len(place.offsets) != len(ids):
            raise LayoutError(
                f"Scatter has {len(place.offsets)} offsets for {len(ids)} groups: give one for each"
            )
        bad = np.flatnonzero(place.offsets > nbytes - payload)
        if bad.size:
            raise LayoutError(
                f"Scatter.offsets[{bad[0]}] is {place.offsets[bad[0]]}: with a payload of {payload} bytes it passes "
                f"the end of memory of {nbytes}"
            )
        starts: list[int] = place.offsets.tolist()
        return starts

    def _block_ids(self, layer: int, block: int) -> Int64Array:
        first = self._layout.block_group_id(layer, block)
        return np.arange(first, first + self._layout.groups_per_block, dtype=np.int64)

    def _read_group(self, group_id: int, target: _Target, start: int, stream: Any) -> None:
        layer, index = divmod(group_id, self._layout.groups_per_layer)
        read_exactly(
            self._fds[layer],
            self._bounce,
            index * self._layout.stride,
            file=self._files.path_of(layer),
            alignment=self._resume_alignment,
        )
        payload = self._layout.payload_nbytes
        if isinstance(target, memoryview):
            target[start : start + payload] = self._bounce[:payload]
        else:
            assert self._copy is not None
            self._copy(target.part(start, payload), self._bounce[:payload], stream)

    def _write_group(self, group_id: int, source: memoryview) -> None:
        layer, index = divmod(group_id, self._layout.groups_per_layer)
        payload = self._layout.payload_nbytes
        self._bounce[:payload] = source
        self._bounce[payload:] = bytes(self._layout.stride - payload)
        write_all(
            self._fds[layer],
            self._bounce,
            index * self._layout.stride,
            file=self._files.path_of(layer),
            alignment=self._resume_alignment,
        )


def _as_files(
    path_or_files: PathLike | Sequence[PathLike] | LayerFiles, layout: GroupLayout | None, create: bool
) -> LayerFiles:
    if not isinstance(path_or_files, LayerFiles):
        if layout is None:
            raise LayoutError("layout is missing: it is needed with a path")
        return LayerFiles(path_or_files, layout, create=create)
    if layout is not None and layout != path_or_files.layout:
        raise LayoutError(
            f"layout is {layout}, the files have {path_or_files.layout}: leave it out or make them agree"
        )
    if path_or_files.closed:
        raise ClosedError("the LayerFiles given are closed")
    return path_or_files


def _check_unique(ids: Int64Array) -> None:
    values, counts = np.unique(ids, return_counts=True)
    if len(values) != len(ids):
        raise LayoutError(f"group {values[np.argmax(counts > 1)]} is given twice in one write: write it once")
