"""An engine whose files are memory: the same interface and the same rules as the native engine, without a device.

Everything happens in `drain`, in the thread of the event loop, so a run repeats itself exactly. An op *begins* when
fewer than `queue_depth` are in flight, and *lands* as late as a real device might: its bytes move when a drain says so
and not a moment earlier, cancelled or not. A `Scheduler` chooses how many ops land in a drain, in which order, and
which of them fail.
"""

from __future__ import annotations

import ctypes
import errno
import heapq
import logging
import random
import socket
import time
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aio_kv.engine import Batch, EngineStatistics, Kind, RingInfo, Ticket
from aio_kv.engine.options import EngineOptions
from aio_kv.engine.waiting import TicketWaiter
from aio_kv.errors import BusyError, ClosedError, LayoutError
from aio_kv.layout import GroupLayout
from aio_kv.plan import COPY_DTYPE, OP_DTYPE, RESULT_DTYPE, IoLimits, Placement

__all__ = ["MemoryEngine", "MemoryFiles", "Scheduler", "SeededScheduler"]

_log = logging.getLogger("aio_kv")
# Looked up once: every look at a member of an enumeration is a search.
_READ: Final = Kind.READ
_SYNC: Final = Kind.SYNC
_REGION_ADD: Final = Kind.REGION_ADD
_DIRECT: Final = int(Placement.DIRECT)
_NO_COPIES: Final = np.empty(0, COPY_DTYPE)


class MemoryFiles:
    """The bytes of every layer, zeros at first. Several `MemoryBackend` may use the same ones, at once or in turn.

    A layer's memory is taken when it is first touched.
    """

    read_only = False
    closed = False
    directories = ("memory",)

    def __init__(self, layout: GroupLayout) -> None:
        self.layout = layout
        self._layers: dict[int, bytearray] = {}

    def layer(self, layer: int) -> bytearray:
        """The bytes of one layer's file: not a copy."""
        if layer not in self._layers:
            self._layers[layer] = bytearray(self.layout.nbytes_per_layer)
        return self._layers[layer]

    def path_of(self, layer: int) -> str:
        """The name of a layer for error messages."""
        return f"memory/layer_{layer:05d}.kv"

    def drop_page_cache(self) -> None:
        """Do nothing: there is no page cache."""

    def close(self) -> None:
        """Do nothing: the bytes stay for the next backend."""


class Scheduler:
    """Decides what becomes of the ops in flight. This one is kind: everything lands, at once and in order."""

    def count(self, in_flight: int) -> int:
        """How many of `in_flight` ops, above zero, land in this drain. With 0 the loop asks again in its next turn."""
        return in_flight

    def choose(self, in_flight: int) -> int:
        """Which one lands next: an index below `in_flight`, 0 being the one that began first."""
        return 0

    def fate(self, kind: Kind, layer: int, file_offset: int, nbytes: int) -> int:
        """What the device answers: 0, or a negative errno with which no bytes move."""
        return 0


class SeededScheduler(Scheduler):
    """Lands ops late and in random order, and fails a share `failing` of them with EIO: the same run for each seed."""

    def __init__(self, seed: int, *, failing: float = 0.0) -> None:
        self._random = random.Random(seed)
        self._failing = failing

    def count(self, in_flight: int) -> int:
        return int(self._random.random() * (in_flight + 1))

    def choose(self, in_flight: int) -> int:
        return int(self._random.random() * in_flight)

    def fate(self, kind: Kind, layer: int, file_offset: int, nbytes: int) -> int:
        return -errno.EIO if self._random.random() < self._failing else 0


@dataclass(slots=True, eq=False)
class _Work:
    """A batch and how far it is."""

    ticket: Ticket
    batch: Batch
    ops: NDArray[Any]
    copies: NDArray[Any]
    results: NDArray[Any]
    remaining: int
    next_op: int = 0


class _Op(NamedTuple):
    """An OP_DTYPE record as Python's own numbers."""

    file_offset: int
    address: int
    nbytes: int
    file: int
    copy_first: int
    copy_count: int
    placement: int
    nbytes_owed: int


def _records(buffer: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    return (
        buffer if buffer.__class__ is np.ndarray and buffer.dtype is dtype else np.frombuffer(buffer, dtype)
    )


class MemoryEngine:
    """Reads and writes of batches on `MemoryFiles`; see `aio_kv.engine.Engine` for each method.

    Of `options` it obeys `queue_depth`, `max_requests` and `drain_timeout`. To be used from one thread.
    """

    def __init__(
        self, files: MemoryFiles, limits: IoLimits, options: EngineOptions, scheduler: Scheduler
    ) -> None:
        self.options = options
        self.limits = limits
        self._files = files
        self._scheduler = scheduler
        self._waiter = TicketWaiter(self)
        self._queue: list[tuple[int, int, _Work]] = []
        self._works: dict[int, _Work] = {}
        self._in_flight: list[tuple[_Work, int]] = []
        self._finished: list[Ticket] = []
        self._held = self._sequence = 0
        self._is_paused = self._is_stopping = self._is_closed = self._is_poked = False
        self._counts = dict.fromkeys(EngineStatistics.__dataclass_fields__, 0)
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def pause(self) -> None:
        """Have the device stop answering: what is in flight stays there, and can be neither dropped nor landed."""
        self._is_paused = True

    def resume(self) -> None:
        """End `pause`."""
        self._is_paused = False
        self._poke()

    def submit(self, batch: Batch, *, tag: object = None) -> Ticket:
        """Hand a batch over; see `Engine.submit`."""
        if self._is_stopping:
            raise ClosedError("the engine is closed or closing: open a new backend")
        copies = _NO_COPIES if batch.copies is None else _records(batch.copies, COPY_DTYPE)
        ops, results = _records(batch.ops, OP_DTYPE), _records(batch.results, RESULT_DTYPE)
        if batch.op_count < 1 or min(len(ops), len(results)) < batch.op_count:
            raise LayoutError(f"the batch counts {batch.op_count} ops: its buffers do not hold as many")
        if batch.op_count > self.options.max_requests:
            raise LayoutError(f"a batch of {batch.op_count} ops is larger than max_requests")
        if self._held + batch.op_count > self.options.max_requests:
            raise BusyError("the engine holds as many requests as it may: drain it, then try again")
        self._sequence += 1
        ticket = Ticket(self._sequence, (batch,), batch.op_count, ring=0, tag=tag)
        work = _Work(ticket, batch, ops, copies, results, batch.op_count)
        self._works[ticket.number] = work
        self._held += batch.op_count
        self._counts["batches"] += 1
        heapq.heappush(self._queue, (batch.priority, self._sequence, work))
        self._begin()
        self._poke()
        return ticket

    def submit_region(
        self, kind: Kind, address: int, nbytes: int, *, ring: int, tag: object = None, device_address: int = 0
    ) -> Ticket:
        """Answer at once: there is nothing to register memory with."""
        if self._is_stopping:
            raise ClosedError("the engine is closed or closing: open a new backend")
        self._sequence += 1
        ticket = Ticket(self._sequence, (), 0, ring=ring, tag=tag)
        ticket.status = -errno.EOPNOTSUPP if kind is _REGION_ADD else -errno.ENOENT
        self._finish(ticket)
        return ticket

    def drain(self, within_us: int = 0) -> list[Ticket]:
        """Let ops land, and collect the tickets that this finishes; whoever looks for a moment sees nothing happen."""
        if within_us:
            return []
        if self._is_poked and not self._is_closed:
            self._is_poked = False
            self._reader.recv(1)
        if self._in_flight and not self._is_paused:
            for _ in range(self._scheduler.count(len(self._in_flight))):
                self._land(*self._in_flight.pop(self._scheduler.choose(len(self._in_flight))))
            self._begin()
        finished, self._finished = self._finished, []
        for ticket in finished:
            self._works.pop(ticket.number, None)
            self._held -= ticket.op_count
            ticket.owners = ()
            ticket.is_done = True
        self._poke()
        return finished

    def rouse(self) -> None:
        """There is no thread that could sleep."""

    def fileno(self) -> int:
        """A descriptor that polls readable while `drain` has something to do."""
        return self._reader.fileno()

    def wait(self, ticket: Ticket, timeout: float | None = None) -> bool:
        """Wait for a ticket without an event loop; see `Engine.wait`."""
        return self._waiter.wait(ticket, timeout)

    def cancel(self, ticket: Ticket) -> None:
        """Drop what has not begun; see `Engine.cancel`."""
        work = self._works.get(ticket.number)
        if work is not None:
            self._drop(work)

    def stop(self) -> None:
        """Refuse new batches and drop what has not begun."""
        self._is_stopping = True
        for work in list(self._works.values()):
            self._drop(work)
        self._poke()

    @property
    def is_stopped(self) -> bool:
        """Whether nothing is in flight any more and nothing will be."""
        return self._is_stopping and not self._in_flight

    @property
    def is_closed(self) -> bool:
        """Whether the engine has been closed."""
        return self._is_closed

    def close(self, timeout: float | None = None) -> bool:
        """Stop and let everything land; False while the engine is paused, as with a device that does not answer."""
        if self._is_closed:
            return True
        self.stop()
        while self._in_flight and not self._is_paused:
            self.drain()
        if self._in_flight:
            _log.error("the device did not answer: %d batches are leaked, not freed", len(self._works))
            return False
        self.drain()
        self._is_closed = True
        self._reader.close()
        self._writer.close()
        return True

    def statistics(self) -> EngineStatistics:
        """Counters since the engine opened."""
        return EngineStatistics(**{**self._counts, "in_flight": len(self._in_flight)})

    def ring_info(self, ring: int = 0) -> RingInfo:
        """There is no ring: nothing is registered."""
        return RingInfo(0, False, False, errno.EOPNOTSUPP, 0, 0)

    def _poke(self) -> None:
        # Readable as long as there is something to do.
        if self._is_poked or self._is_closed:
            return
        if (self._in_flight and not self._is_paused) or self._finished or self.is_stopped:
            self._is_poked = True
            self._writer.send(b"x")

    def _begin(self) -> None:
        while self._queue and len(self._in_flight) < self.options.queue_depth:
            work = self._queue[0][2]
            index = work.next_op
            work.next_op += 1
            if work.next_op == work.batch.op_count:
                heapq.heappop(self._queue)
            if work.batch.deadline_ns and time.monotonic_ns() >= work.batch.deadline_ns:
                self._counts["dropped_ops"] += 1
                self._answer(work, index, -errno.ETIME)
                continue
            self._in_flight.append((work, index))
            self._counts["ops"] += 1
            if len(self._in_flight) > self._counts["in_flight_max"]:
                self._counts["in_flight_max"] = len(self._in_flight)

    def _drop(self, work: _Work) -> None:
        if work.next_op == work.batch.op_count:
            return
        self._queue = [entry for entry in self._queue if entry[2] is not work]
        heapq.heapify(self._queue)
        for index in range(work.next_op, work.batch.op_count):
            self._counts["dropped_ops"] += 1
            self._answer(work, index, -errno.ECANCELED)
        work.next_op = work.batch.op_count

    def _land(self, work: _Work, index: int) -> None:
        op, kind = _Op._make(work.ops[index].item()), work.batch.kind
        nbytes = op.nbytes
        code = self._scheduler.fate(kind, op.file, op.file_offset, nbytes) or self._check(op, kind)
        if code == 0 and kind is not _SYNC:
            stored = memoryview(self._files.layer(op.file))[op.file_offset : op.file_offset + nbytes]
            nbytes = len(stored)  # less where the file ends behind what is owed
            self._move(work, op, stored)
            self._counts["bytes_read" if kind is _READ else "bytes_written"] += nbytes
        self._counts["failed_ops"] += code != 0
        self._answer(work, index, code, nbytes if code == 0 else 0)

    def _check(self, op: _Op, kind: Kind) -> int:
        """What a real device says to an op that it cannot do."""
        if kind is _SYNC:
            return 0
        if (op.file_offset | op.nbytes) % self.limits.offset_alignment:
            return -errno.EINVAL
        if op.placement == _DIRECT and op.address % self.limits.memory_alignment:
            return -errno.EINVAL
        try:
            size = len(self._files.layer(op.file))
        except MemoryError:
            return -errno.ENOMEM
        return -errno.ENODATA if op.file_offset + (op.nbytes_owed or op.nbytes) > size else 0

    def _move(self, work: _Work, op: _Op, stored: memoryview) -> None:
        is_read = work.batch.kind is _READ
        if op.placement == _DIRECT:
            self._copy(stored, op.address, is_read)
            return
        if not is_read:
            stored[:] = bytes(len(stored))  # What no copy covers is padding.
        for address, offset, piece in work.copies[op.copy_first : op.copy_first + op.copy_count].tolist():
            self._copy(stored[offset : offset + piece], address, is_read)

    def _copy(self, stored: memoryview, address: int, is_read: bool) -> None:
        place = ctypes.addressof(ctypes.c_char.from_buffer(stored)) if len(stored) else 0
        target, source = (address, place) if is_read else (place, address)
        ctypes.memmove(target, source, len(stored))

    def _answer(self, work: _Work, index: int, code: int, arrived: int = 0) -> None:
        work.results[index] = (code, arrived)
        if code:
            work.ticket.failed += 1
            work.ticket.status = work.ticket.status or code
        work.remaining -= 1
        if work.remaining == 0:
            self._finish(work.ticket)

    def _finish(self, ticket: Ticket) -> None:
        self._finished.append(ticket)
        self._poke()
