"""The engine without the compiled extension: a pool of Python threads doing positional reads and writes.

The same interface and the same rules of ownership as the native engine, for host memory only, and slower: each I/O
takes the GIL twice. One bounce buffer per thread serves what does not land directly; short I/O, EINTR and EAGAIN are
dealt with by `aio_kv.positional`.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import logging
import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aio_kv.engine.batch import Batch, Kind, Ticket
from aio_kv.engine.options import EngineOptions
from aio_kv.engine.statistics import EngineStatistics, RingInfo
from aio_kv.engine.waiting import TicketWaiter
from aio_kv.errors import BusyError, ClosedError, LayoutError, ShortReadError, StorageError
from aio_kv.memory import raw_view
from aio_kv.plan import COPY_DTYPE, OP_DTYPE, RESULT_DTYPE, IoLimits, Placement
from aio_kv.positional import aligned_buffer, read_exactly, write_all

__all__ = ["PythonEngine"]

_log = logging.getLogger("aio_kv")


class _Work:
    """A batch being worked off; everything mutable is guarded by the engine's lock."""

    __slots__ = ("batch", "copies", "is_cancelled", "next_op", "ops", "remaining", "results", "ticket")

    def __init__(self, ticket: Ticket, batch: Batch) -> None:
        self.ticket = ticket
        self.batch = batch
        self.ops: NDArray[Any] = np.frombuffer(batch.ops, dtype=OP_DTYPE)
        self.copies: NDArray[Any] = (
            np.empty(0, COPY_DTYPE) if batch.copies is None else np.frombuffer(batch.copies, dtype=COPY_DTYPE)
        )
        self.results: NDArray[Any] = np.frombuffer(batch.results, dtype=RESULT_DTYPE)
        self.next_op = 0
        self.remaining = batch.op_count
        self.is_cancelled = False


class PythonEngine:
    """Reads and writes of batches on a fixed table of files through Python threads; see `Engine` for each method."""

    def __init__(self, fds: Sequence[int], limits: IoLimits, options: EngineOptions) -> None:
        self.options = options
        self.limits = limits
        self.is_uring = False
        self._pid = os.getpid()
        self._fds = tuple(fds)
        self._lock = threading.Lock()
        self._has_work = threading.Condition(self._lock)
        self._waiter = TicketWaiter(self, self._poke)
        self._queue: list[tuple[int, int, _Work]] = []
        self._works: dict[int, _Work] = {}
        self._finished: list[Ticket] = []
        self._is_stopping = False
        self._is_closed = False
        self._held = 0
        self._sequence = 0
        self._counts = dict.fromkeys(EngineStatistics.__dataclass_fields__, 0)
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._threads = [
            threading.Thread(target=self._run, name=f"aio_kv-{i}", daemon=True)
            for i in range(options.threads)
        ]
        self._alive = len(self._threads)
        for thread in self._threads:
            thread.start()

    def submit(self, batch: Batch, *, tag: object = None) -> Ticket:
        """Hand a batch over; see `Engine.submit`."""
        ticket = Ticket(-1, (batch,), batch.op_count, ring=0, tag=tag)
        work = _Work(ticket, batch)
        self._check_batch(work)
        self._check_process()
        with self._lock:
            self._check_open()
            if self._held + batch.op_count > self.options.max_requests:
                raise BusyError("the engine holds as many requests as it may: drain it, then try again")
            self._held += batch.op_count
            self._sequence += 1
            ticket.number = self._sequence
            self._works[ticket.number] = work
            self._counts["batches"] += 1
            heapq.heappush(self._queue, (batch.priority, self._sequence, work))
            self._has_work.notify(batch.op_count)
        return ticket

    def submit_region(
        self, kind: Kind, address: int, nbytes: int, *, ring: int, tag: object = None, device_address: int = 0
    ) -> Ticket:
        """Answer at once: there is no ring to register memory with."""
        ticket = Ticket(-1, (), 0, ring=ring, tag=tag)
        ticket.status = -errno.EOPNOTSUPP if kind is Kind.REGION_ADD else -errno.ENOENT
        self._check_process()
        with self._lock:
            self._check_open()
            self._sequence += 1
            ticket.number = self._sequence
            self._finish(ticket)
        return ticket

    def drain(self, within_us: int = 0) -> list[Ticket]:
        """Collect finished tickets; see `Engine.drain`."""
        self._check_process()
        if within_us:
            return []  # the threads need the GIL to answer: there is nothing to look for
        with contextlib.suppress(OSError):
            while self._reader.recv(4096):
                pass
        with self._lock:
            finished, self._finished = self._finished, []
            for ticket in finished:
                self._works.pop(ticket.number, None)
                self._held -= ticket.op_count
                ticket.owners = ()
                ticket.is_done = True
        self._waiter.after_drain(bool(finished))
        return finished

    def rouse(self) -> None:
        """Python threads need the GIL, which the caller has: nothing could happen meanwhile."""

    def fileno(self) -> int:
        """A descriptor that polls readable when `drain` has something."""
        return self._reader.fileno()

    def wait(self, ticket: Ticket, timeout: float | None = None) -> bool:
        """Wait for a ticket without an event loop; see `Engine.wait`."""
        if ticket.is_done:
            return True
        self._check_process()
        return self._waiter.wait(ticket, timeout)

    def cancel(self, ticket: Ticket) -> None:
        """Drop what has not begun; see `Engine.cancel`."""
        self._check_process()
        with self._lock:
            work = self._works.get(ticket.number)
            if work is not None:
                work.is_cancelled = True
                self._has_work.notify_all()

    def stop(self) -> None:
        """Refuse new batches and drop what has not begun."""
        self._check_process()
        with self._lock:
            self._is_stopping = True
            for work in self._works.values():
                work.is_cancelled = True
            self._has_work.notify_all()

    @property
    def is_stopped(self) -> bool:
        """Whether every thread has ended."""
        return self._alive == 0

    @property
    def is_closed(self) -> bool:
        """Whether the engine has been closed."""
        return self._is_closed

    def close(self, timeout: float | None = None) -> bool:
        """Stop and wait for the threads; see `Engine.close`."""
        if self._is_closed or os.getpid() != self._pid:
            return True
        self.stop()
        until = time.monotonic() + (self.options.drain_timeout if timeout is None else timeout)
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if not self.is_stopped:
            _log.error(
                "the device did not answer in time: %d batches are leaked, not freed", len(self._works)
            )
            return False
        self.drain()
        self._waiter.dismiss()
        self._is_closed = True
        self._reader.close()
        self._writer.close()
        return True

    def statistics(self) -> EngineStatistics:
        """Counters since the engine opened."""
        self._check_process()
        with self._lock:
            return EngineStatistics(**self._counts)

    def ring_info(self, ring: int = 0) -> RingInfo:
        """There is no ring: nothing is registered."""
        return RingInfo(0, False, False, errno.EOPNOTSUPP, 0, 0)

    def _check_process(self) -> None:
        # Before the lock is taken: in a forked child a thread that is not there may hold it.
        if os.getpid() != self._pid:
            raise ClosedError(f"the engine belongs to process {self._pid}: open a new backend in this one")

    def _check_open(self) -> None:
        if self._is_stopping:
            raise ClosedError("the engine is closed or closing: open a new backend")

    def _check_batch(self, work: _Work) -> None:
        batch, count = work.batch, work.batch.op_count
        if count < 1 or min(len(work.ops), len(work.results)) < count:
            raise LayoutError(f"the batch counts {count} ops: its buffers do not hold as many")
        if count > self.options.max_requests:
            raise LayoutError(f"a batch of {count} ops is larger than max_requests: hand it over in parts")
        if len(work.copies) < batch.copy_count:
            raise LayoutError(f"the batch counts {batch.copy_count} copies but holds {len(work.copies)}")
        is_known = batch.kind in (Kind.READ, Kind.WRITE, Kind.SYNC) and batch.priority in (0, 1, 2)
        if not is_known or batch.deadline_ns < 0 or not work.results.flags.writeable:
            raise LayoutError("the batch is malformed: its kind, priority, deadline or read-only results")

    def _finish(self, ticket: Ticket) -> None:
        # Called with the lock.
        self._finished.append(ticket)
        self._poke()

    def _poke(self) -> None:
        # A full pipe is as good as a written one: it is readable.
        with contextlib.suppress(BlockingIOError):
            self._writer.send(b"x")

    def _run(self) -> None:
        bounce = aligned_buffer(self.limits.op_nbytes_max)
        while (taken := self._take()) is not None:
            work, index, refusal = taken
            code, arrived = (refusal, 0) if refusal else self._perform(work, index, bounce)
            with self._lock:
                self._account(work, index, code, arrived)
            del taken, work  # a thread that waits for its next op must not keep the caller's memory
        with self._lock:
            self._alive -= 1
            if self._alive == 0:
                with contextlib.suppress(OSError):
                    self._writer.send(b"x")

    def _take(self) -> tuple[_Work, int, int] | None:
        """The next op, its index, and the errno (negative) that keeps it from starting; None: end of work."""
        with self._lock:
            while not self._queue:
                if self._is_stopping:
                    return None
                self._has_work.wait()
            work = self._queue[0][2]
            index = work.next_op
            work.next_op += 1
            batch = work.batch
            if work.next_op == batch.op_count:
                heapq.heappop(self._queue)
            if work.is_cancelled:
                return work, index, -errno.ECANCELED
            if batch.deadline_ns and time.monotonic_ns() >= batch.deadline_ns:
                return work, index, -errno.ETIME
            self._counts["ops"] += 1
            self._counts["in_flight"] += 1
            return work, index, 0

    def _account(self, work: _Work, index: int, code: int, arrived: int) -> None:
        ticket = work.ticket
        batch = work.batch
        work.results[index] = (code, arrived)
        if code in (-errno.ECANCELED, -errno.ETIME):
            self._counts["dropped_ops"] += 1
        else:
            self._counts["in_flight"] -= 1
            self._counts["failed_ops"] += code != 0
            if not code and batch.kind is not Kind.SYNC:
                name = "bytes_read" if batch.kind is Kind.READ else "bytes_written"
                self._counts[name] += arrived
        if code:
            ticket.failed += 1
            ticket.status = ticket.status or code
        work.remaining -= 1
        if work.remaining == 0:
            self._finish(ticket)

    def _perform(self, work: _Work, index: int, bounce: memoryview) -> tuple[int, int]:
        op = work.ops[index].tolist()
        file_offset, address, nbytes, file, first, count, placement, owed = op
        kind, copies = work.batch.kind, work.copies[first : first + count]
        refusal = self._refusal(work, op, copies)
        if refusal:
            return refusal, 0
        is_direct = placement == Placement.DIRECT
        try:
            if kind is Kind.SYNC:
                os.fsync(self._fds[file])
                return 0, 0
            view = raw_view(address, nbytes) if is_direct else bounce[:nbytes]
            if kind is Kind.WRITE and not is_direct:
                view[:] = bytes(nbytes)
                _copy(copies, view, is_write=True)
            step = self.limits.offset_alignment
            if kind is Kind.WRITE:
                write_all(self._fds[file], view, file_offset, file="", alignment=step)
            else:
                nbytes = _read(self._fds[file], view, file_offset, owed or nbytes, step)
            if kind is Kind.READ and not is_direct:
                _copy(copies, view, is_write=False)
        except ShortReadError as error:
            return -errno.ENODATA, error.arrived
        except StorageError as error:
            return -(error.errno or errno.EIO), 0
        except (OSError, ValueError) as error:
            return -(getattr(error, "errno", None) or errno.EINVAL), 0
        return 0, nbytes

    def _refusal(self, work: _Work, op: tuple[int, ...], copies: NDArray[Any]) -> int:
        """What the native engine answers to an op that makes no sense (check_op in native/src/flight.c), or 0."""
        file_offset, address, nbytes, file, first, count, placement, owed = op
        step = self.limits.offset_alignment
        if file >= len(self._fds) or placement > Placement.VECTORED:
            return -errno.EINVAL
        if work.batch.kind is Kind.SYNC:
            return -errno.EINVAL if nbytes or placement != Placement.DIRECT else 0
        if not 0 < nbytes <= self.limits.op_nbytes_max or file_offset > 2**63 - 1 - nbytes:
            return -errno.EINVAL
        if file_offset % step or nbytes % step:
            return -errno.EINVAL
        is_read_once = work.batch.kind is Kind.READ and placement != Placement.VECTORED
        if owed and not (is_read_once and owed <= nbytes):
            return -errno.EINVAL
        if placement == Placement.DIRECT and not address:
            return -errno.EFAULT
        if placement == Placement.DIRECT:
            return -errno.EINVAL if address % self.limits.memory_alignment else 0
        starts = copies["op_offset"].astype(np.int64)
        ends = starts + copies["nbytes"]
        if (
            first + count > work.batch.copy_count
            or (ends > (owed or nbytes)).any()
            or not copies["address"].all()
        ):
            return -errno.EINVAL
        has_gaps = not np.array_equal(np.append(starts, nbytes), np.append(0, ends))
        is_misaligned = bool((copies["address"] % self.limits.memory_alignment).any())
        return -errno.EINVAL if placement == Placement.VECTORED and (has_gaps or is_misaligned) else 0


def _read(fd: int, view: memoryview, file_offset: int, owed: int, alignment: int) -> int:
    """Fill `view`, or as much of it as the file has if that is `owed` bytes at least; return how many came."""
    try:
        read_exactly(fd, view, file_offset, file="", alignment=alignment)
    except ShortReadError as error:
        if error.arrived < owed:
            raise
        return error.arrived
    return view.nbytes


def _copy(copies: NDArray[Any], view: memoryview, *, is_write: bool) -> None:
    for address, start, nbytes in copies.tolist():
        memory = raw_view(address, nbytes)
        if is_write:
            view[start : start + nbytes] = memory
        else:
            memory[:] = view[start : start + nbytes]
