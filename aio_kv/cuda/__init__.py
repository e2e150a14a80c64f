"""The GPU: devices, callers' streams, events that can be awaited, memory, and what the engine needs for copies.

Only this package touches cuda-python, and only when something is opened: importing it needs neither a GPU nor a
driver. Nothing here creates a stream for callers or waits for one; they bring their own.
"""

from aio_kv.cuda.device import Device
from aio_kv.cuda.event import AwaitableEvent
from aio_kv.cuda.memory import DeviceBuffer, DevicePointer, PinnedBuffer
from aio_kv.cuda.path import CopyOptions, DevicePath
from aio_kv.cuda.stream import Stream

__all__ = [
    "AwaitableEvent",
    "CopyOptions",
    "Device",
    "DeviceBuffer",
    "DevicePath",
    "DevicePointer",
    "PinnedBuffer",
    "Stream",
]
