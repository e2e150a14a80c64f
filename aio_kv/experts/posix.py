"""The oracle of expert reads: one segment after the other, synchronous, simple for ever."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from aio_kv.backends.device_side import DeviceSide
from aio_kv.cuda import CopyOptions, Device
from aio_kv.errors import ClosedError, LayoutError, ShortReadError, UnavailableError
from aio_kv.experts.expert_map import ExpertMap
from aio_kv.experts.segments import DirectSegment
from aio_kv.experts.shards import ShardFiles, drop_range
from aio_kv.experts.windows import window_of
from aio_kv.memory import host_view, is_device_memory
from aio_kv.positional import aligned_buffer, read_exactly

__all__ = ["PosixExpertReader"]

_BOUNCE_NBYTES = 1 << 20


class PosixExpertReader:
    """Reads experts synchronously; what `ExpertReader` does is right when it is what this does.

    Args:
        experts: where each expert lies.
        direct: "on" reads past the page cache, "off" through it, "auto" past it where that works.
        keep_page_cache: leave what was read through the page cache there.
        device: the GPU that destinations are on, or None.

    Raises as `ShardFiles`. A context manager; to be used from one thread at a time.
    """

    def __init__(
        self,
        experts: ExpertMap,
        *,
        direct: str = "auto",
        keep_page_cache: bool = False,
        device: int | Device | None = None,
    ) -> None:
        self.experts = experts
        self._keeps = keep_page_cache
        self._files = ShardFiles(experts.paths, direct=direct)
        self._side: DeviceSide | None = None
        try:
            if device is not None:
                self._side = DeviceSide(device, CopyOptions(kernel_nbytes_max=0))
        except BaseException:
            self._files.close()
            raise
        self._is_direct = self._files.direct_alignment is not None
        self._alignment = self._files.direct_alignment.offset if self._files.direct_alignment else 1
        self._bounce = aligned_buffer(_BOUNCE_NBYTES)
        self._is_closed = False
        if not self._keeps and not self._is_direct:
            self._files.advise_random()

    def read(self, layer: int, expert: int, into: Any, *, stream: Any = None) -> None:
        """Read one expert into memory of at least `slot_nbytes(layer)`, and return when its bytes are there.

        `into` is a writable buffer or, with a device, device memory, which copies reach on `stream`. Raises
        `ShortReadError` where a file ends too early, `StorageError` for what the system refuses, `LayoutError`.
        """
        self.read_segments(self.experts.segments(layer, expert), into, stream=stream)

    def read_segments(self, segments: tuple[DirectSegment, ...], into: Any, *, stream: Any = None) -> None:
        """Read segments to their slot offsets in `into`; see `read`."""
        if self._is_closed:
            raise ClosedError("the reader is closed: open a new one")
        if is_device_memory(into):
            if self._side is None:
                raise UnavailableError(
                    "into is device memory and the reader has no device", hint="give device="
                )
            memory = self._side.memory(into, what="into")
            check_room(segments, memory.nbytes)
            for segment in segments:
                image = memoryview(bytearray(segment.nbytes))
                self._read(segment, image)
                part = memory.part(segment.slot_offset, segment.nbytes)
                self._side.path.copy_and_wait(part, image, stream)
            return
        view = host_view(into, writable=True, what="into")
        check_room(segments, view.nbytes)
        for segment in segments:
            self._read(segment, view[segment.slot_offset : segment.slot_offset + segment.nbytes])

    def _read(self, segment: DirectSegment, target: memoryview) -> None:
        fd = self._files.fds(self._is_direct)[segment.shard]
        if self._is_direct:
            self._read_windows(fd, segment, target)
        else:
            read_exactly(fd, target, segment.file_offset, file=self._files.path_of(segment.shard))
            if not self._keeps:
                drop_range(fd, segment.file_offset, segment.nbytes)

    def _read_windows(self, fd: int, segment: DirectSegment, target: memoryview) -> None:
        first, last = window_of(segment, self._alignment)
        done = 0
        for start in range(first, last, _BOUNCE_NBYTES):
            window = self._bounce[: min(_BOUNCE_NBYTES, last - start)]
            skip = max(0, segment.file_offset - start)
            owed = min(window.nbytes, segment.file_offset + segment.nbytes - start)
            self._read_owed(fd, window, start, owed, segment.shard)
            target[done : done + owed - skip] = window[skip:owed]
            done += owed - skip

    def _read_owed(self, fd: int, window: memoryview, start: int, owed: int, shard: int) -> None:
        file = self._files.path_of(shard)
        try:
            read_exactly(fd, window, start, file=file, alignment=self._alignment)
        except ShortReadError as error:
            if error.arrived < owed:
                raise ShortReadError(
                    arrived=error.arrived,
                    file=file,
                    file_offset=start,
                    nbytes=owed,
                    hint="the file is shorter than its index says: it was cut off, or truncated while open",
                ) from error

    def close(self) -> None:
        """Give everything back; again does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._files.close()
            if self._side is not None:
                self._side.close()

    def __enter__(self) -> PosixExpertReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_room(segments: tuple[DirectSegment, ...], nbytes: int) -> None:
    """Raise `LayoutError` unless every segment ends inside memory of `nbytes`."""
    end = max((segment.slot_offset + segment.nbytes for segment in segments), default=0)
    if end > nbytes:
        raise LayoutError(f"into holds {nbytes} bytes: an expert of {end} bytes does not fit")
