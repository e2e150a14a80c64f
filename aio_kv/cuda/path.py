"""What a backend with a device holds: the context, the kernels, the thresholds, and order with callers' streams."""

from __future__ import annotations

import ctypes
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from aio_kv.cuda.destination import device_destination
from aio_kv.cuda.device import Device
from aio_kv.cuda.event import AwaitableEvent, Event
from aio_kv.cuda.kernels import Kernels, prepare_kernels
from aio_kv.cuda.stream import as_stream
from aio_kv.errors import LayoutError
from aio_kv.memory import DeviceMemory, host_address

__all__ = ["CopyOptions", "DevicePath"]

_KIB = 1 << 10
_MIB = 1 << 20
_EVENTS_AT_OPEN = 64
_PER_THREAD_STREAM = 2

# The entries that the native engine calls, by the name of their field in akv_device (native/akv.cdef.h).
_ENGINE_ENTRIES = {
    "ctx_get_current": "cuCtxGetCurrent",
    "ctx_set_current": "cuCtxSetCurrent",
    "thread_exchange_capture_mode": "cuThreadExchangeStreamCaptureMode",
    "event_create": "cuEventCreate",
    "event_destroy": "cuEventDestroy",
    "event_record": "cuEventRecord",
    "event_query": "cuEventQuery",
    "stream_create": "cuStreamCreateWithPriority",
    "stream_destroy": "cuStreamDestroy",
    "stream_is_capturing": "cuStreamIsCapturing",
    "stream_wait_event": "cuStreamWaitEvent",
    "memcpy_htod_async": "cuMemcpyHtoDAsync",
    "memcpy_dtoh_async": "cuMemcpyDtoHAsync",
    "memcpy_batch_async": "cuMemcpyBatchAsync",
    "launch_kernel": "cuLaunchKernel",
    "mem_host_register": "cuMemHostRegister",
    "mem_host_unregister": "cuMemHostUnregister",
    "mem_host_get_device_pointer": "cuMemHostGetDevicePointer",
    "pointer_get_attribute": "cuPointerGetAttribute",
    "pointer_get_attributes": "cuPointerGetAttributes",
}


@dataclass(frozen=True, slots=True)
class CopyOptions:
    """How copies between staging memory and the GPU are made.

    Args:
        kernel_nbytes_max: copies up to this size go by kernel, many in one launch; 0 uses no kernels.
        batch_nbytes_max: from there up to this size several go in one cuMemcpyBatchAsync; 0 makes single calls.
        kernel_blocks: blocks of a launch, and so multiprocessors that it can keep busy.
        kernel_threads: threads of a block, a multiple of 32.
        copy_streams: streams for copies; a caller's stream always gets the same one.

    Raises `LayoutError`.
    """

    kernel_nbytes_max: int = 32 * _KIB
    batch_nbytes_max: int = 4 * _MIB
    kernel_blocks: int = 32
    kernel_threads: int = 256
    copy_streams: int = 4

    def __post_init__(self) -> None:
        _within("kernel_nbytes_max", self.kernel_nbytes_max, 0, (1 << 32) - 1)
        _within("batch_nbytes_max", self.batch_nbytes_max, 0, (1 << 32) - 1)
        _within("kernel_blocks", self.kernel_blocks, 1, 65535)
        _within("kernel_threads", self.kernel_threads, 32, 512)
        _within("copy_streams", self.copy_streams, 1, 16)
        if self.kernel_threads % 32:
            raise LayoutError(f"kernel_threads is {self.kernel_threads}: must be a multiple of 32")


class DevicePath:
    """The GPU side of one backend. A context manager.

    Args:
        device: the GPU. It stays the caller's, who closes it after this.
        options: sizes and thresholds.

    Loads the kernels, which takes seconds on the first run on a machine: open it on a worker thread. `kernels` is None
    where there are none and `kernels_refusal` then says why. Any thread may use it. Raises `DeviceError`.
    """

    def __init__(self, device: Device, options: CopyOptions | None = None) -> None:
        self.device = device
        self.options = options or CopyOptions()
        self.kernels: Kernels | None = None
        self.kernels_refusal = "kernel_nbytes_max is 0"
        device.check_usable()
        self._stream_priority = _highest_priority(device)
        if self.options.kernel_nbytes_max:
            self.kernels, self.kernels_refusal = prepare_kernels(device)
        with device.relaxed():
            device.events.reserve(_EVENTS_AT_OPEN)

    @property
    def has_batch_copies(self) -> bool:
        """Whether the driver has cuMemcpyBatchAsync in the form meant here (CUDA 13)."""
        return self.device.table.has("cuMemcpyBatchAsync")

    def fields(self) -> dict[str, int]:
        """The fields of `akv_device` by name, pointers as integers; valid until this and its device are closed."""
        table, options, kernels = self.device.table, self.options, self.kernels
        return {
            "context": self.device.context,
            **{field: table.address(name) for field, name in _ENGINE_ENTRIES.items()},
            "gather": kernels.gather if kernels else 0,
            "scatter": kernels.scatter if kernels else 0,
            "kernel_blocks": options.kernel_blocks,
            "kernel_threads": options.kernel_threads,
            "kernel_nbytes_max": options.kernel_nbytes_max,
            "batch_nbytes_max": options.batch_nbytes_max,
            "copy_streams": options.copy_streams,
            "stream_priority": self._stream_priority,
        }

    def destination(self, obj: Any, *, what: str) -> DeviceMemory:
        """Check GPU memory that a caller hands over; see `device_destination`."""
        return device_destination(obj, self.device, what=what)

    def record_fence(self, stream: Any) -> Event:
        """Return the point that a caller's stream has reached, behind which copies have to wait.

        Keep the event until the engine is done with its handle, then `release` it. Raises `DeviceError` for a capturing
        stream or one of another device, `LayoutError` for what is not a stream.
        """
        return as_stream(stream, self.device).record()

    def order_after(self, stream: Any, event_handle: int) -> None:
        """Make a caller's stream wait for an event of the engine; the calling thread does not. Raises as above."""
        as_stream(stream, self.device).wait_handle(event_handle)

    def record_event(self, stream: Any, wait: Callable[[AwaitableEvent], Awaitable[None]]) -> AwaitableEvent:
        """Return an event recorded on a caller's stream that is awaited through `wait(event)`.

        `wait` keeps the event until nothing looks at its handle any more, cancelled or not. Raises as `record_fence`.
        """
        return AwaitableEvent._recorded(self.record_fence(stream), wait)

    def copy_and_wait(self, destination: DeviceMemory, source: memoryview, stream: Any = None) -> None:
        """Copy host bytes to GPU memory on `stream` and block until they are there: the copy of the oracle.

        Both are borrowed until it returns. Without a stream it is ordered after nothing but itself.
        """
        assert destination.nbytes == source.nbytes
        own = as_stream(_PER_THREAD_STREAM if stream is None else stream, self.device)
        host = host_address(source, writable=False, what="source")
        with self.device.activated():
            arguments = (destination.address, host.address, host.nbytes, own.handle)
            self.device.call("cuMemcpyHtoDAsync", *arguments)
            self.device.call("cuStreamSynchronize", own.handle)

    def close(self) -> None:
        """Unload the kernels; again does nothing. Only when no launch can be under way. After a fault they stay."""
        kernels, self.kernels = self.kernels, None
        if kernels is not None and self.device.fault is None and not self.device.is_closed:
            with self.device.activated(), self.device.relaxed():
                self.device.call("cuModuleUnload", kernels.module)

    def __enter__(self) -> DevicePath:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _highest_priority(device: Device) -> int:
    lowest, highest = ctypes.c_int(), ctypes.c_int()
    with device.activated():
        device.call("cuCtxGetStreamPriorityRange", ctypes.byref(lowest), ctypes.byref(highest))
    return highest.value


def _within(name: str, value: int, least: int, most: int) -> None:
    if value.__class__ is not int or not least <= value <= most:
        raise LayoutError(f"{name} is {value!r}: must be an integer from {least} to {most}")
