"""The GPU side of a session: the device, what the engine needs of it, and the callers' streams."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from aio_kv.cuda import AwaitableEvent, CopyOptions, Device, DevicePath, PinnedBuffer, Stream
from aio_kv.cuda.event import Event
from aio_kv.cuda.stream import as_stream, handle_of
from aio_kv.engine import CUDA_ERROR, Engine, IoEngine, Order
from aio_kv.errors import ClosedError, DeviceError
from aio_kv.memory import DeviceMemory, HostMemory, device_memory, raw_view
from aio_kv.transfer import LoopBinding

__all__ = ["DeviceSide", "OrderedStream"]

_log = logging.getLogger("aio_kv")
_KNOWN_STREAMS_MAX = 64  # checked once each: the check costs as much as the fence


class OrderedStream:
    """A caller's stream for one transfer: the fence recorded on it at the call, and what `enqueued` asks of it."""

    def __init__(self, stream: Stream, owner: object, fence: Event) -> None:
        self._stream = stream
        self._owner = owner  # it keeps the handle from being destroyed before `wait_for`
        # Recorded inside the submitting call: it stands for what the caller has launched so far, and for nothing later.
        self._fence = fence

    @property
    def fence(self) -> tuple[int, int]:
        """The handles of the stream and of the event."""
        return self._stream.handle, self._fence.handle

    @property
    def order(self) -> Order:
        """What the engine is told."""
        # 0 and 1 are both the legacy stream; key 0 belongs to transfers without a stream.
        return Order(self._fence.handle, self._stream.handle or 1)

    def wait_for(self, event: int) -> None:
        """Make the stream wait for an event of the engine. Raises `DeviceError` for a stream under graph capture."""
        self._stream.wait_handle(event)

    def release(self) -> None:
        """The engine is done with the fence."""
        self._fence.release()


class DeviceSide:
    """Opened in a thread, because finding a device and loading kernels block; closed after the engine."""

    def __init__(self, device: int | Device, copies: CopyOptions | None) -> None:
        self._known_streams: dict[int, Stream] = {}
        self._engine: Engine | None = None
        self._owns_device = not isinstance(device, Device)
        self.device = device if isinstance(device, Device) else Device(device)
        try:
            self.path = DevicePath(self.device, copies)
        except BaseException:
            self._close_device()
            raise

    def attach(self, engine: IoEngine) -> None:
        """Have the engine, which was opened with `fields`, make the calls to the driver that every transfer makes."""
        self._engine = engine if isinstance(engine, Engine) else None

    def fields(self) -> Mapping[str, int]:
        """What the engine is told of the device."""
        return self.path.fields()

    def memory(self, place: Any, *, what: str) -> DeviceMemory:
        """The device memory behind what a caller hands over, checked. Raises `DeviceError`, `LayoutError`."""
        if self._engine is not None and hasattr(place, "data_ptr"):
            memory = device_memory(place, what=what)
            if self._engine.is_device_memory(memory.address, memory.nbytes, self.device.index):
                return memory
        return self.path.destination(place, what=what)

    def pin(self, memory: HostMemory) -> PinnedBuffer:
        """Register host memory with CUDA; blocking."""
        return PinnedBuffer(raw_view(memory.address, memory.nbytes), self.device)

    def begin_fence(self, stream: Any) -> OrderedStream | None:
        """The stream and an event that the engine is to record on it; None for None, and for one not checked yet."""
        if stream is None:
            return None
        # A Stream was checked when it was made, against a device that may be another.
        if stream.__class__ is Stream:
            known = stream if stream.device is self.device else None
        else:
            known = self._known_streams.get(handle_of(stream))
        return None if known is None else OrderedStream(known, stream, self.device.events.lend())

    def ordered(self, stream: Any) -> OrderedStream | None:
        """The caller's stream for one transfer; None for None: no fence, the caller vouches for the order."""
        if stream is None:
            return None
        known = None if stream.__class__ is Stream else self._known_streams.get(handle_of(stream))
        if known is not None:
            return OrderedStream(known, stream, self._fence_on(known))
        checked = as_stream(stream, self.device)
        if len(self._known_streams) >= _KNOWN_STREAMS_MAX:
            self._known_streams.clear()
        # By handle, without its owner. Should another stream get this handle, recording on it refuses a wrong one.
        self._known_streams[checked.handle] = Stream(checked.handle, self.device)
        return OrderedStream(checked, stream, self._fence_on(checked))

    def _fence_on(self, stream: Stream) -> Event:
        """Record on a stream in one step where all is well, and in those that say what is wrong where it is not."""
        if self._engine is None:
            return stream.record()
        event = self.device.events.lend()
        if self._engine.fence(stream.handle, event.handle):
            return event
        event.release()
        return stream.record()

    def record_event(self, stream: Any, engine: Engine, binding: LoopBinding) -> AwaitableEvent:
        """An event on a caller's stream that the engine watches for whoever awaits it."""

        async def wait(event: AwaitableEvent) -> None:
            await _wait_event(event, engine, binding)

        return self.path.record_event(stream, wait)

    def close(self) -> None:
        """Give back kernels and device; again does nothing. What a lost device refuses to take back is left to it."""
        try:
            self.path.close()
            self._close_device()
        except DeviceError as error:
            _log.error("GPU %d was not given back: %s", self.device.index, error)

    def _close_device(self) -> None:
        if self._owns_device:
            self.device.close()


async def _wait_event(event: AwaitableEvent, engine: Engine, binding: LoopBinding) -> None:
    if event.is_done:
        return
    if engine.is_closed:
        raise ClosedError("the backend that recorded the event is closed: synchronise the stream instead")
    wakes: list[Callable[[], None]] = []

    def on_news() -> None:
        while wakes:
            wakes.pop()()

    ticket = engine.submit_watch(event.handle, owner=event, tag=on_news)
    # Cancelled, nothing has to be waited for: the ticket keeps the event until the engine has stopped looking at it.
    await binding.wait_cancellably(lambda: ticket.is_done, wakes.append, lambda wake: engine.cancel(ticket))
    if ticket.status <= -CUDA_ERROR:
        raise DeviceError(
            f"the event failed with CUDA error {-ticket.status - CUDA_ERROR}: the device is lost",
            code=-ticket.status - CUDA_ERROR,
        )
    if ticket.status:
        raise ClosedError("the backend was closed before the event was done")
