"""Streams that callers bring along: told apart, checked, and never created here.

A handle is never taken for "no stream": 0 and 1 are the legacy default stream, 2 is the calling thread's default
stream, and all three are streams like any other.
"""

from __future__ import annotations

import ctypes
from typing import Any

from aio_kv.cuda.device import Device
from aio_kv.cuda.event import AwaitableEvent, Event
from aio_kv.errors import DeviceError, LayoutError

__all__ = ["Stream", "as_stream", "handle_of"]

_SPECIAL_HANDLES = frozenset({0, 1, 2})
_CAPTURE_IMPLICIT = 906
# What streams of other libraries call their handle: torch, then CuPy, then older cuda.core.
_HANDLE_NAMES = ("cuda_stream", "ptr", "handle")
_ACCEPTED = "give a torch, CuPy or cuda.core stream, an object with __cuda_stream__, or an integer handle"


class Stream:
    """A caller's stream on one device.

    Args:
        obj: an object with `__cuda_stream__`, a cuda.core, torch or CuPy stream, or an integer handle. It stays the
            caller's and is kept alive by this object.
        device: the GPU that it must belong to.

    Any thread may use it. Raises `LayoutError` for what is not a stream, `DeviceError` for a stream of another device.
    """

    __slots__ = ("device", "handle", "owner")

    def __init__(self, obj: Any, device: Device) -> None:
        device.check_usable()
        self.device = device
        self.owner = obj
        self.handle = handle_of(obj)
        if self.handle not in _SPECIAL_HANDLES:  # those mean the stream of whichever context is current
            _check_context(self.handle, device)

    @property
    def is_capturing(self) -> bool:
        """Whether work given to the stream now would go into a graph instead of being done."""
        with self.device.activated():
            return self._asks_capturing()

    def record(self) -> Event:
        """Return the point that the stream has reached in what it was given.

        Raises `DeviceError` for a capturing stream, `BusyError` when too many events are in use.
        """
        self.device.check_usable()
        with self.device.activated():
            self._refuse_capture("an event cannot be recorded on it")
            return self.device.events.record(self.handle)

    def wait(self, event: Event | AwaitableEvent) -> None:
        """Hold back what the stream is given from now on until `event` is done; the calling thread does not wait.

        The event may be of another stream or device. Raises `DeviceError` for a capturing stream.
        """
        self.wait_handle(event.handle)

    def wait_handle(self, event: int) -> None:
        """As `wait`, for the handle of an event that has been recorded."""
        self.device.check_usable()
        with self.device.activated():
            self._refuse_capture("it cannot be made to wait")
            self.device.call("cuStreamWaitEvent", self.handle, event, 0)

    def synchronize(self) -> None:
        """Block until the stream has done all it was given. For the synchronous oracle only."""
        with self.device.activated():
            self.device.call("cuStreamSynchronize", self.handle)

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle

    def __repr__(self) -> str:
        return f"<aio_kv.cuda.Stream {self.handle:#x} on device {self.device.index}>"

    def _asks_capturing(self) -> bool:
        status = ctypes.c_int()
        code = self.device.table.function("cuStreamIsCapturing")(self.handle, ctypes.byref(status))
        if code == _CAPTURE_IMPLICIT:
            return True  # asked of the legacy stream while a stream that it would wait for is capturing
        if code:
            raise self.device.failure("cuStreamIsCapturing", code)
        return status.value != 0

    def _refuse_capture(self, consequence: str) -> None:
        if self._asks_capturing():
            raise DeviceError(
                f"stream {self.handle:#x} is being captured into a graph: {consequence}",
                hint="hand over a stream that is not capturing, or load before the capture begins",
            )


def as_stream(obj: Any, device: Device) -> Stream:
    """Return `obj` as a `Stream` on `device`; raises as `Stream` does."""
    if isinstance(obj, Stream):
        if obj.device is device:
            return obj
        if obj.handle in _SPECIAL_HANDLES and obj.device.index != device.index:
            raise _wrong_device(obj.handle, device, f"device {obj.device.index}")
        obj = obj.owner
    return Stream(obj, device)


def handle_of(obj: Any) -> int:
    """The handle of anything that `Stream` takes; checks nothing else. Raises `LayoutError`."""
    if obj.__class__ is int:
        return _checked(obj, obj)
    protocol = getattr(obj, "__cuda_stream__", None)
    if protocol is not None:
        # Early cuda.core had an attribute here where the protocol now has a method.
        answer = protocol() if callable(protocol) else protocol
        try:
            version, handle = answer
        except (TypeError, ValueError):
            raise LayoutError(
                f"__cuda_stream__ of {obj!r:.80} gives {answer!r:.80}: must be two integers"
            ) from None
        if version != 0:
            raise LayoutError(f"__cuda_stream__ of {obj!r:.80} has version {version!r}: only 0 is known")
        return _checked(handle, obj)
    for name in _HANDLE_NAMES:
        handle = getattr(obj, name, None)
        if handle is not None:
            return _checked(handle, obj)
    raise LayoutError(f"stream is {obj!r:.80} ({type(obj).__name__}): {_ACCEPTED}")


def _checked(handle: Any, obj: Any) -> int:
    if isinstance(handle, bool) or not hasattr(handle, "__int__") or isinstance(handle, float | str):
        raise LayoutError(f"stream is {obj!r:.80} with handle {handle!r:.80}: {_ACCEPTED}")
    number = int(handle)
    if not 0 <= number < 1 << 64:
        raise LayoutError(f"stream handle is {number}: must be a pointer, 0 or more")
    return number


def _check_context(handle: int, device: Device) -> None:
    found = ctypes.c_void_p()
    with device.activated():
        device.call("cuStreamGetCtx", handle, ctypes.byref(found))
    if found.value != device.context:
        raise _wrong_device(handle, device, _describe_context(found.value or 0, device))


def _describe_context(context: int, device: Device) -> str:
    index = ctypes.c_int(-1)
    with device.activated():  # brings the thread's own context back, whatever happens in between
        if not device.table.function("cuCtxSetCurrent")(context):
            device.table.function("cuCtxGetDevice")(ctypes.byref(index))
        device.table.function("cuCtxSetCurrent")(device.context)
    if index.value < 0:
        return f"context {context:#x}"
    return f"device {index.value} (context {context:#x})"


def _wrong_device(handle: int, device: Device, found: str) -> DeviceError:
    return DeviceError(
        f"stream {handle:#x} belongs to {found}, not to device {device.index} (context {device.context:#x})",
        hint="give a stream that was created with this device current, in its primary context",
    )
