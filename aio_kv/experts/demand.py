"""A demand: the experts of one layer that somebody needs at once, from the place in line to the end of the lease."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, overload

from aio_kv.cuda import DevicePointer, Stream
from aio_kv.errors import ClosedError
from aio_kv.experts.slot_table import Grant

if TYPE_CHECKING:
    from aio_kv.experts.arena import ExpertArena

__all__ = ["Demand", "ExpertSlots"]

View = memoryview | DevicePointer


class ExpertSlots(Sequence[View]):
    """The slots of a demand, in the order of its ids: read-only memoryviews, or `DevicePointer` for GPU memory.

    `slot_numbers` says which slots of the arena they are. The bytes are the arena's, and good until the block ends.
    """

    def __init__(self, views: Sequence[View], slot_numbers: tuple[int, ...]) -> None:
        self._views = tuple(views)
        self.slot_numbers = slot_numbers

    @overload
    def __getitem__(self, index: int) -> View: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[View]: ...
    def __getitem__(self, index: int | slice) -> View | Sequence[View]:
        return self._views[index]

    def __len__(self) -> int:
        return len(self._views)

    def __iter__(self) -> Iterator[View]:
        return iter(self._views)

    def invalidate(self) -> None:
        """The lease has ended: reading a view raises from here on, unless an array was made over it."""
        for view in self._views:
            if isinstance(view, memoryview):
                with contextlib.suppress(BufferError):
                    view.release()


class Demand:
    """What `ExpertArena.experts` returns: an asynchronous context manager, to be entered once."""

    def __init__(self, arena: ExpertArena, layer: int, keys: tuple[int, ...], stream: Stream | None) -> None:
        self.layer = layer
        self.keys = tuple(dict.fromkeys(keys))
        self.stream = stream
        self.grant: Grant | None = None
        self.error: BaseException | None = None
        self._arena = arena
        self._order = keys
        self._slots: ExpertSlots | None = None
        self._has_begun = False
        self._wakes: list[Callable[[], None]] = []

    async def __aenter__(self) -> ExpertSlots:
        """Wait for a place, then for the bytes. Cancelled, give everything back at once and raise.

        Raises `TransferError` if an expert cannot be read, `ClosedError`, `DeviceError` for a capturing stream.
        """
        if self._has_begun:
            raise ClosedError("a demand is entered once: call experts() again")
        self._has_begun = True
        arena = self._arena
        arena.join_line(self)
        try:
            await arena.binding.wait_cancellably(self._is_settled, self._subscribe, self._unsubscribe)
            if self.error is not None:
                raise self.error
            assert self.grant is not None
            self._order_stream(self.grant)
        except BaseException:
            arena.leave(self)
            raise
        slots = tuple(self.grant.slots[key] for key in self._order)
        self._slots = ExpertSlots([arena.view(slot, self.layer) for slot in slots], slots)
        return self._slots

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the lease; with a stream, when the stream has reached this point. Never waits."""
        assert self._slots is not None
        self._slots.invalidate()
        self._arena.finish(self)

    def wake(self) -> None:
        """Something has changed: look again."""
        wakes, self._wakes = self._wakes, []
        for wake in wakes:
            wake()

    def _subscribe(self, wake: Callable[[], None]) -> None:
        self._wakes.append(wake)  # a method of its own: the list is another one after each wake

    def _unsubscribe(self, wake: Callable[[], None]) -> None:
        with contextlib.suppress(ValueError):
            self._wakes.remove(wake)

    def _is_settled(self) -> bool:
        if self.error is not None:
            return True
        if self.grant is None:
            return False
        fills = [fill for key in self.keys if (fill := self._arena.fill_of(key)) is not None]
        if self.stream is None or not self._arena.is_on_device:
            return not fills
        return all(fill.is_enqueued for fill in fills)

    def _order_stream(self, grant: Grant) -> None:
        # No await since the fills were looked at: their events are good until the next drain, in this very thread.
        if self.stream is None:
            return
        for key in grant.slots:
            fill = self._arena.fill_of(key)
            for event in fill.events() if fill is not None else ():
                self.stream.wait_handle(event)
