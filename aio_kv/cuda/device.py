"""A GPU: its primary context, which torch and the CUDA runtime share, and what is known about it."""

from __future__ import annotations

import ctypes
import logging
from types import TracebackType
from typing import Any

from aio_kv.cuda.event import EventPool
from aio_kv.cuda.table import STICKY_CODES, DriverTable
from aio_kv.errors import ClosedError, DeviceError, LayoutError, UnavailableError

__all__ = ["Device"]

_log = logging.getLogger("aio_kv")
_NO_DEVICE = 100
_CAPTURE_RELAXED = 2
_MULTIPROCESSORS, _MAJOR, _MINOR = 16, 75, 76  # CUdevice_attribute


class Device:
    """One GPU by index, with its primary context retained until `close`. A context manager.

    Args:
        index: which of the visible GPUs, from 0.
        table: the driver functions; the installed driver's by default.

    Any thread may use it. Raises `UnavailableError` where there is no driver or no such GPU, `LayoutError`.
    """

    def __init__(self, index: int = 0, *, table: DriverTable | None = None) -> None:
        if index.__class__ is not int or index < 0:
            raise LayoutError(f"device is {index!r}: must be the index of a GPU, 0 or more")
        self.index = index
        self.table = table or DriverTable.load()
        self._fault: DeviceError | None = None
        self._is_closed = False
        self._device = self._find()
        self.name = self._read_name()
        self.memory_nbytes = self._read_memory()
        self.multiprocessor_count = self._attribute(_MULTIPROCESSORS)
        self.compute_capability = (self._attribute(_MAJOR), self._attribute(_MINOR))
        context = ctypes.c_void_p()
        self.table.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        self.context = context.value or 0
        self.get_current = self.table.function("cuCtxGetCurrent")
        self.events = EventPool(self)

    @property
    def architecture(self) -> str:
        """What the compiler calls this GPU, such as "sm_90"."""
        major, minor = self.compute_capability
        return f"sm_{major}{minor}"

    @property
    def fault(self) -> DeviceError | None:
        """The error that ended the use of this GPU for good, or None."""
        return self._fault

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    def make_current(self) -> None:
        """Make the device's context the calling thread's, until the thread chooses another."""
        self.check_usable()
        self.call("cuCtxSetCurrent", self.context)

    def activated(self) -> Activation:
        """A `with` block in which the device's context is current; the thread's own comes back afterwards."""
        return Activation(self)

    def relaxed(self) -> RelaxedCaptures:
        """A `with` block in which this thread's calls do not break graph captures that other threads have begun."""
        return RelaxedCaptures(self.table)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a driver function. Raises `DeviceError`, and remembers an error that the context does not survive."""
        code = self.table.function(name)(*arguments)
        if code:
            raise self.failure(name, code)

    def failure(self, call: str, code: int) -> DeviceError:
        """Build the error of the driver function `call`; one that the context does not survive is remembered."""
        error = self.table.error(call, code)
        if code in STICKY_CODES and self._fault is None:
            self._fault = error
            _log.error("GPU %d is lost to this process: %s", self.index, error)
        return error

    def check_usable(self) -> None:
        """Raise `ClosedError` after `close`, `DeviceError` after a fault that the context does not survive."""
        if self._is_closed:
            raise ClosedError(f"device {self.index} is closed: open a new one")
        fault = self._fault
        if fault is not None:
            raise DeviceError(
                f"GPU {self.index} was lost to an earlier error: {fault.reason}",
                call=fault.call,
                code=fault.code,
                name=fault.name,
                hint=fault.hint,
            )

    def close(self) -> None:
        """Give the context back; again does nothing. Close what uses the device first.

        After a fault nothing is given back: the hardware may still be at work.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if self._fault is None:
            with self.activated():
                self.events.close()
            self.call("cuDevicePrimaryCtxRelease", self._device)

    def __enter__(self) -> Device:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _find(self) -> int:
        code = self.table.function("cuInit")(0)
        count = ctypes.c_int()
        if code not in (0, _NO_DEVICE):
            error = self.table.error("cuInit", code)
            raise UnavailableError(
                f"CUDA cannot start: {error.reason}", hint=error.hint, step="cuInit"
            ) from error
        if not code:
            self.table.call("cuDeviceGetCount", ctypes.byref(count))
        if self.index >= count.value:
            raise UnavailableError(
                f"there is no GPU {self.index}: this process sees {count.value}",
                hint="check nvidia-smi -L and CUDA_VISIBLE_DEVICES, or open with device=None",
            )
        device = ctypes.c_int()
        self.table.call("cuDeviceGet", ctypes.byref(device), self.index)
        return device.value

    def _read_name(self) -> str:
        text = ctypes.create_string_buffer(256)
        self.table.call("cuDeviceGetName", ctypes.cast(text, ctypes.c_void_p), len(text), self._device)
        return text.value.decode(errors="replace")

    def _read_memory(self) -> int:
        nbytes = ctypes.c_size_t()
        self.table.call("cuDeviceTotalMem", ctypes.byref(nbytes), self._device)
        return nbytes.value

    def _attribute(self, number: int) -> int:
        value = ctypes.c_int()
        self.table.call("cuDeviceGetAttribute", ctypes.byref(value), number, self._device)
        return value.value


class Activation:
    """Makes a device's context current and the previous one again; changes nothing where it already is."""

    __slots__ = ("_device", "_previous")

    def __init__(self, device: Device) -> None:
        self._device = device
        self._previous: int | None = None

    def __enter__(self) -> None:
        device, current = self._device, ctypes.c_void_p()
        # On the path of every transfer: one call where the context is current already, as it mostly is.
        code = device.get_current(ctypes.byref(current))
        if code:
            raise device.failure("cuCtxGetCurrent", code)
        if current.value != device.context:
            device.call("cuCtxSetCurrent", device.context)
            self._previous = current.value or 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._previous is not None:
            # Nothing useful can be done about a failure, and it must not hide the error that led here.
            self._device.table.function("cuCtxSetCurrent")(self._previous)


class RelaxedCaptures:
    """Exchanges the calling thread's capture mode for the relaxed one, and back.

    torch captures graphs in the global mode, in which certain calls from any thread, such as an event query, break the
    capture. A thread in the relaxed mode takes no part in that.
    """

    __slots__ = ("_mode", "_table")

    def __init__(self, table: DriverTable) -> None:
        self._table = table
        self._mode = ctypes.c_int(_CAPTURE_RELAXED)

    def __enter__(self) -> None:
        self._table.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(self._mode))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._table.function("cuThreadExchangeStreamCaptureMode")(ctypes.byref(self._mode))
