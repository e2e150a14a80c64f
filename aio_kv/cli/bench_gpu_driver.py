"""Plain driver calls on one stream: what the benchmark compares with, and how it looks at GPU memory.

Everything here blocks, and some of it waits for the device: that is what the library exists to avoid.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aio_kv.cuda import CopyOptions, Device, DeviceBuffer
from aio_kv.cuda.kernels import Kernels
from aio_kv.engine.extension import host_function
from aio_kv.integers import Int64Array
from aio_kv.protocols import Scatter

__all__ = ["LIST_ENTRY_NBYTES", "CopyJob", "Driver", "flat_out", "list_entries"]

_NON_BLOCKING = 1
_DISABLE_TIMING = 2
_NOT_READY = 600
_BATCH = 1024  # copies in one cuMemcpyBatchAsync: more gained nothing
_JOBS_PER_WAIT = 4
LIST_ENTRY_NBYTES = 24  # of the kernel's list: target, source, length


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes: the copies are ordered as the stream is, and places are not hinted at."""

    _fields_ = (
        ("source_access_order", ctypes.c_uint32),
        ("source_location_type", ctypes.c_uint32),
        ("source_location_id", ctypes.c_int32),
        ("target_location_type", ctypes.c_uint32),
        ("target_location_id", ctypes.c_int32),
        ("flags", ctypes.c_uint32),
    )


@dataclass(frozen=True, slots=True)
class CopyJob:
    """Copies of `nbytes` each from pinned memory to the GPU, in the forms that the contenders take them in.

    `offsets` (in the pinned memory) and `scatter` are ours; the arrays hold addresses for cuMemcpyBatchAsync, `calls`
    pairs of (target, source) for single copies. `list_address` is where the device finds the list of the kernel.
    """

    nbytes: int
    offsets: Int64Array
    scatter: Scatter
    targets: NDArray[np.uint64]
    sources: NDArray[np.uint64]
    sizes: NDArray[np.uint64]
    calls: list[tuple[int, int]]
    list_address: int

    @property
    def total_nbytes(self) -> int:
        """Bytes of all copies."""
        return self.nbytes * len(self.calls)


class Driver:
    """One device's driver functions and a stream of its own; `close` waits for it.

    The device's context must be current in the calling thread. `kernels` are lent, None where there are none.
    """

    def __init__(self, device: Device, kernels: Kernels | None) -> None:
        self.device = device
        self.kernels = kernels
        self._streams: list[int] = []
        self.stream = self.new_stream()
        event = ctypes.c_void_p()
        device.call("cuEventCreate", ctypes.byref(event), _DISABLE_TIMING)
        self._event = event.value or 0
        self._attributes, self._first = _Attributes(source_access_order=1), ctypes.c_size_t(0)
        self._copy = device.table.function("cuMemcpyHtoDAsync")
        self._launch = device.table.function("cuLaunchKernel")
        self._query = device.table.function("cuEventQuery")

    @property
    def has_batches(self) -> bool:
        """Whether the driver has cuMemcpyBatchAsync."""
        return self.device.table.has("cuMemcpyBatchAsync")

    @property
    def has_host_functions(self) -> bool:
        """Whether host functions run by themselves; those of the test's driver wait until somebody asks for events."""
        return self.device.table.has("cuLaunchHostFunc") and not self.device.table.is_fake

    def new_stream(self) -> int:
        """A non-blocking stream, destroyed by `close`."""
        made = ctypes.c_void_p()
        self.device.call("cuStreamCreate", ctypes.byref(made), _NON_BLOCKING)
        self._streams.append(made.value or 0)
        return self._streams[-1]

    def close(self) -> None:
        """Wait for all streams and give everything back; after a fault nothing is."""
        if self.device.fault is None:
            self.device.call("cuEventDestroy", self._event)
            for stream in self._streams:
                self.device.call("cuStreamSynchronize", stream)
                self.device.call("cuStreamDestroy", stream)
        self._streams.clear()

    def tell_after(self, notify: int, eventfd: int) -> None:
        """Have a host function on the stream `notify` write an eventfd once the driver's stream has got here."""
        call = self.device.call
        call("cuEventRecord", self._event, self.stream)
        call("cuStreamWaitEvent", notify, self._event, 0)
        call("cuLaunchHostFunc", notify, host_function(), eventfd)

    def copy_one_by_one(self, job: CopyJob) -> None:
        """One cuMemcpyHtoDAsync per copy."""
        copy, nbytes, stream, code = self._copy, job.nbytes, self.stream, 0
        for target, source in job.calls:
            code |= copy(target, source, nbytes, stream)
        self._check("cuMemcpyHtoDAsync", code)

    def copy_in_batches(self, job: CopyJob) -> None:
        """cuMemcpyBatchAsync, with arrays that lie ready."""
        count, call = len(job.calls), self.device.table.function("cuMemcpyBatchAsync")
        for start in range(0, count, _BATCH):
            code = call(
                job.targets.ctypes.data + 8 * start,
                job.sources.ctypes.data + 8 * start,
                job.sizes.ctypes.data + 8 * start,
                min(_BATCH, count - start),
                ctypes.addressof(self._attributes),
                ctypes.addressof(self._first),
                1,
                self.stream,
            )
            self._check("cuMemcpyBatchAsync", code)

    def gather(self, job: CopyJob) -> None:
        """One launch of our kernel, on a list that lies ready."""
        assert self.kernels is not None
        options = CopyOptions()
        entries, count = ctypes.c_uint64(job.list_address), ctypes.c_uint(len(job.calls))
        parameters = (ctypes.c_void_p * 2)(ctypes.addressof(entries), ctypes.addressof(count))
        blocks = min(options.kernel_blocks, len(job.calls))
        code = self._launch(
            self.kernels.gather,
            *(blocks, 1, 1, options.kernel_threads, 1, 1, 0),
            self.stream,
            ctypes.addressof(parameters),
            None,
        )
        self._check("cuLaunchKernel", code)

    def copy_once(self, target: int, source: int, nbytes: int) -> None:
        """One copy of a single run: what the copy engine does at best."""
        self._check("cuMemcpyHtoDAsync", self._copy(target, source, nbytes, self.stream))

    def wait(self) -> None:
        """Block until the stream is done."""
        self.device.call("cuStreamSynchronize", self.stream)

    def record_and_spin(self) -> None:
        """Record an event and ask for it without pause until it is done."""
        self.device.call("cuEventRecord", self._event, self.stream)
        self.spin(self._event)

    def spin(self, event: int) -> None:
        """Ask for an event without pause until it is done."""
        while (code := self._query(event)) == _NOT_READY:
            pass
        self._check("cuEventQuery", code)

    def is_done(self, event: int) -> bool:
        """Whether a recorded event is done."""
        code = self._query(event)
        if code != _NOT_READY:
            self._check("cuEventQuery", code)
        return code == 0

    def upload(self, buffer: DeviceBuffer, data: NDArray[np.uint8]) -> None:
        """Put bytes at the start of GPU memory and wait for that."""
        self.copy_once(buffer.data_ptr(), data.ctypes.data, data.nbytes)
        self.wait()

    def download(self, buffer: DeviceBuffer) -> NDArray[np.uint8]:
        """The bytes of GPU memory, once the stream is done."""
        found = np.empty(buffer.nbytes, np.uint8)
        self.device.call("cuMemcpyDtoHAsync", found.ctypes.data, buffer.data_ptr(), found.nbytes, self.stream)
        self.wait()
        return found

    def check_bytes(self, job: CopyJob, buffer: DeviceBuffer, source: NDArray[np.uint8]) -> None:
        """Raise AssertionError unless the GPU memory has what a job was to copy: wrong bytes have no speed."""
        rows = source.reshape(-1, job.nbytes)[job.offsets // job.nbytes]
        self.check_rows(rows, buffer, job.scatter.offsets)

    def check_rows(self, rows: NDArray[np.uint8], buffer: DeviceBuffer, offsets: Int64Array) -> None:
        """As `check_bytes`, for one row per offset in the GPU memory, all multiples of the row's length."""
        nbytes = rows.shape[1]
        whole = buffer.nbytes // nbytes * nbytes
        found = self.download(buffer)[:whole].reshape(-1, nbytes)[offsets // nbytes]
        wrong = int((found != rows).any(axis=1).sum())
        if wrong:
            raise AssertionError(f"{wrong} of {len(rows)} groups of {nbytes} bytes arrived wrong on the GPU")

    def _check(self, name: str, code: int) -> None:
        if code:
            raise self.device.failure(name, code)


def flat_out(driver: Driver, issue: Callable[[CopyJob], None], jobs: list[CopyJob], seconds: float) -> float:
    """GB/s of jobs issued one behind the other for about `seconds`, waiting for the device once in a few."""
    clock = time.perf_counter
    begin, moved, count = clock(), 0, 0
    while not count or clock() - begin < seconds:
        for _ in range(_JOBS_PER_WAIT):
            job = jobs[count % len(jobs)]
            issue(job)
            moved, count = moved + job.total_nbytes, count + 1
        driver.wait()
    return moved / (clock() - begin) / 1e9


def list_entries(targets: NDArray[np.uint64], sources: NDArray[np.uint64], nbytes: int) -> bytes:
    """The list of the kernel for copies of `nbytes` each; sources are addresses as the device sees them."""
    entries = np.empty((len(targets), 3), np.uint64)
    entries[:, 0], entries[:, 1], entries[:, 2] = targets, sources, nbytes
    return entries.tobytes()
