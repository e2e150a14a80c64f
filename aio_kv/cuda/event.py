"""Recorded points on streams. An event comes from recording only: CUDA takes one never recorded for done.

Events are pooled, because creating one takes the context's lock, which has held up callers for milliseconds, and made
without timing, which makes recording and querying them cheap.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Generator
from typing import TYPE_CHECKING, Any

from aio_kv.errors import BusyError, ClosedError, LayoutError

if TYPE_CHECKING:
    from aio_kv.cuda.device import Device

__all__ = ["AwaitableEvent", "Event", "EventPool"]

_DISABLE_TIMING = 2
_NOT_READY = 600
EVENTS_MAX = 8192


class Event:
    """A point on a stream, made by `Stream.record()`.

    The handle belongs to the device's pool and is lent until `release`, or until the last reference is gone: whoever
    gives the handle to C code keeps this object for as long as that code may use it.
    """

    __slots__ = ("__weakref__", "_handle", "_is_done", "_pool")
    _handle: int
    _is_done: bool
    _pool: EventPool

    def __init__(self) -> None:
        raise LayoutError("an event comes from recording only: use Stream.record()")

    @property
    def handle(self) -> int:
        """The CUevent. Raises `ClosedError` after `release`."""
        if not self._handle:
            raise ClosedError("the event was released: record a new one")
        return self._handle

    @property
    def is_done(self) -> bool:
        """Whether everything before it on its stream has ended; never waits. Raises `DeviceError` after a fault."""
        if not self._is_done:
            self._is_done = self._pool.query(self.handle)
        return self._is_done

    def release(self) -> None:
        """Give the handle back to the pool; again does nothing.

        Waits that streams were told of keep the point that was recorded; the handle must no longer be queried.
        """
        handle, self._handle = self._handle, 0
        if handle:
            self._pool.give(handle)

    def __del__(self) -> None:
        # A handle goes back to a list and nothing is freed, so it does not matter when or on which thread this runs.
        if getattr(self, "_handle", 0):
            self.release()


class AwaitableEvent:
    """A point on a stream that tasks can await, made by `record_event(stream)` of a backend.

    Awaiting returns when everything before it on its stream has ended; it raises `DeviceError` after a fault. Any
    number of tasks may await it, any number of times. A cancelled await leaves the GPU's work as it is.
    """

    __slots__ = ("__weakref__", "_event", "_wait")
    _event: Event
    _wait: Callable[[AwaitableEvent], Awaitable[None]]

    def __init__(self) -> None:
        raise LayoutError(
            "an event comes from recording only: use Stream.record() or backend.record_event(stream)"
        )

    @classmethod
    def _recorded(cls, event: Event, wait: Callable[[AwaitableEvent], Awaitable[None]]) -> AwaitableEvent:
        made = cls.__new__(cls)
        made._event, made._wait = event, wait
        return made

    @property
    def handle(self) -> int:
        """The CUevent, lent for as long as this object is kept."""
        return self._event.handle

    @property
    def is_done(self) -> bool:
        """Whether everything before it on its stream has ended; never waits. Raises `DeviceError` after a fault."""
        return self._event.is_done

    def __await__(self) -> Generator[Any, Any, None]:
        return self._wait(self).__await__()


class EventPool:
    """The event handles of one device: at most `capacity` of them, made when first needed and then reused.

    Any thread may use it. Destroyed with the device; handles that are lent then go with the context.
    """

    def __init__(self, device: Device, *, capacity: int = EVENTS_MAX) -> None:
        self.capacity = capacity
        self._device = device
        self._lock = threading.Lock()
        self._made = 0
        # Handing a handle back must not take a lock: the collector may run it while this thread holds that very lock.
        self._idle: deque[int] = deque()

    @property
    def lent(self) -> int:
        """How many handles are lent."""
        return self._made - len(self._idle)

    def lend(self) -> Event:
        """An event that somebody else records at once. Raises `BusyError` when `capacity` events are lent."""
        event = Event.__new__(Event)
        event._pool, event._is_done = self, False
        event._handle = self._take()
        return event

    def record(self, stream: int) -> Event:
        """Record on the stream with this handle, in the device's context, which must be current.

        Raises `BusyError` when `capacity` events are lent, `DeviceError`.
        """
        event = self.lend()
        code = self._device.table.function("cuEventRecord")(event._handle, stream)
        if code:
            raise self._device.failure("cuEventRecord", code)
        return event

    def query(self, handle: int) -> bool:
        """Whether the recorded work has ended. Raises `DeviceError` after a fault."""
        # A global capture by anyone, on any thread, would be broken by a query that is not relaxed.
        with self._device.activated(), self._device.relaxed():
            code = self._device.table.function("cuEventQuery")(handle)
        if code and code != _NOT_READY:
            raise self._device.failure("cuEventQuery", code)
        return code == 0

    def give(self, handle: int) -> None:
        """Take a lent handle back."""
        self._idle.append(handle)

    def reserve(self, count: int) -> None:
        """Have `count` idle handles, so that recording does not have to create them. At open, not in a request."""
        while len(self._idle) < count:
            self.give(self._create())

    def close(self) -> None:
        """Destroy the idle handles."""
        while self._idle:
            self._device.call("cuEventDestroy", self._idle.pop())
            self._made -= 1

    def _take(self) -> int:
        try:
            return self._idle.popleft()
        except IndexError:
            return self._create()

    def _create(self) -> int:
        with self._lock:
            if self._made >= self.capacity:
                raise BusyError(f"{self.capacity} events of the device are in use: drop those that are done")
            self._made += 1
        handle = ctypes.c_void_p()
        try:
            with self._device.activated():
                self._device.call("cuEventCreate", ctypes.byref(handle), _DISABLE_TIMING)
        except BaseException:
            with self._lock:
                self._made -= 1
            raise
        return handle.value or 0
