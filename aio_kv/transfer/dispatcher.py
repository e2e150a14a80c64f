"""Feeds transfers to an engine, in order, and finishes them. Knows no event loop, does no I/O of its own.

Order. Transfers that touch the same group take effect in the order of their calls when either of them writes: the
later one is held until the earlier one has ended. Without it a read behind an un-awaited write returned old bytes 93
times in 100. While nothing writes, the check is one comparison.

Bounds. The engine holds `max_requests` ops; what does not fit waits here, and its transfer's place in line with it.
More than `max_transfers` transfers are refused with `BusyError`.
"""

from __future__ import annotations

import errno
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic_ns
from typing import Final

import numpy as np

from aio_kv.engine import Batch, Engine, IoEngine, Kind, Ticket
from aio_kv.errors import BusyError, ClosedError
from aio_kv.flags import some
from aio_kv.integers import Int64Array
from aio_kv.plan import OP_DTYPE, Placement, Plan
from aio_kv.transfer.binding import LoopBinding, require_current
from aio_kv.transfer.transfer import Transfer

__all__ = ["Dispatcher", "DispatcherStatistics", "OpDescription", "overlaps"]

_log = logging.getLogger("aio_kv")
# Looked up once: every look at a member of an enumeration is a search.
_READ: Final = Kind.READ
_WRITE: Final = Kind.WRITE
_SYNC: Final = Kind.SYNC
_ORDERED: Final = (_READ, _WRITE, _SYNC)  # loads and saves touch no file
_SPIN_NBYTES_MAX = {Kind.READ: 16 << 10, Kind.LOAD: 512 << 10}  # where a short look can pay
_SET_MAX: Final = 32  # up to here a set answers: NumPy has to begin four times
_CHUNK_OPS = 4096  # ops per batch: long enough to cost nothing, short enough to spread over rings


@dataclass(frozen=True, slots=True)
class OpDescription:
    """An op in words for an error message."""

    file: str
    file_offset: int | None
    nbytes: int


@dataclass(frozen=True, slots=True)
class DispatcherStatistics:
    """Counters of transfers: accepted, failed, cancelled by a call, held for order, and refused for want of room."""

    transfers: int = 0
    failed: int = 0
    cancelled: int = 0
    held: int = 0
    refused: int = 0
    unobserved_failures: int = 0
    active: int = 0


class Dispatcher:
    """The queue between transfers and one engine; used from one thread."""

    def __init__(self, engine: IoEngine, binding: LoopBinding, *, path_of: Callable[[int], str]) -> None:
        self.engine = engine
        self.binding = binding
        self._path_of = path_of
        self._max_transfers = engine.options.max_transfers
        self._rings = engine.options.rings if isinstance(engine, Engine) else 1
        # A batch must fit into an engine that holds nothing else, or it would wait for room for ever.
        self._batch_ops_max = min(_CHUNK_OPS, engine.options.max_requests)
        self._spin_us = engine.options.await_spin_us
        self._spins = self._spin_misses = 0
        self._awake_until_ns = 0  # after news the engine looks for more by itself for spin_us
        self._awake_ns = engine.options.spin_us * 400
        self._active: dict[Transfer, None] = {}
        self._writers: dict[Transfer, None] = {}
        self._unfed: tuple[deque[Transfer], ...] = (deque(), deque(), deque())
        self._has_unfed = False
        self._line: dict[object, Callable[[], None]] = {}  # who waits for room, first come first
        self._drain_waiters: list[Callable[[], None]] = []
        self._is_closing = False
        self._counts = dict.fromkeys(DispatcherStatistics.__dataclass_fields__, 0)

    def start(self, transfer: Transfer) -> None:
        """Accept a transfer: feed it, queue it, or hold it behind others. Raises `BusyError`, `ClosedError`."""
        if self._is_closing:
            raise ClosedError("the backend is closed or closing: open a new one")
        if len(self._active) >= self._max_transfers:
            self._counts["refused"] += 1
            raise BusyError(
                f"{len(self._active)} transfers are in flight (max_transfers): await wait_ready() first"
            )
        if transfer.kind in _ORDERED and (self._writers or (transfer.kind is not _READ and self._active)):
            self._hold_behind_conflicts(transfer)
        self._active[transfer] = None
        self._counts["transfers"] += 1
        if transfer.kind is _WRITE or transfer.kind is _SYNC:
            self._writers[transfer] = None
        if transfer.blockers:
            transfer.is_held = True
            self._counts["held"] += 1
        elif transfer.plan.op_count == 0:
            self._finish(transfer)
        elif self._unfed[transfer.priority] or not self._feed(transfer):
            self._unfed[transfer.priority].append(transfer)
            self._has_unfed = True

    def is_free(self, kind: Kind, priority: int) -> bool:
        """Whether a read, load or save would go to the engine at once. Then it may, before its transfer exists.

        So the device works while Python prepares the rest; `adopt` follows at once.
        """
        return (
            not self._is_closing
            and not self._unfed[priority]
            and not (kind is _READ and self._writers)
            and len(self._active) < self._max_transfers
        )

    def announce(self) -> None:
        """A small transfer is about to be started: have an engine that may be asleep wake up meanwhile."""
        if not self._active and monotonic_ns() > self._awake_until_ns:
            self.engine.rouse()

    def adopt(self, transfer: Transfer, ticket: Ticket) -> None:
        """Take in the transfer of a batch that the engine has been given already."""
        ticket.tag = transfer
        transfer.tickets.append(ticket)
        transfer.fed_ops = ticket.op_count
        self._active[transfer] = None
        self._counts["transfers"] += 1

    def _hold_behind_conflicts(self, transfer: Transfer) -> None:
        earlier = self._writers if transfer.kind is _READ else self._active
        for other in earlier:
            if transfer.kind is _SYNC:
                is_conflict = other.kind is _WRITE
            elif other.kind is _SYNC:
                is_conflict = False
            else:
                is_conflict = overlaps(other.sorted_ids, transfer.sorted_ids)
            if is_conflict:
                transfer.blockers += 1
                if other.dependents is None:
                    other.dependents = []
                other.dependents.append(transfer)

    def _feed(self, transfer: Transfer) -> bool:
        """Hand the rest of a transfer to the engine; False if it does not take all of it now."""
        plan, step = transfer.plan, self._batch_ops_max
        ops, op_count, copies, copy_count = plan[:4]
        results = transfer.results
        if self._rings > 1:
            step = min(step, -(-op_count // self._rings))
        while (first := transfer.fed_ops) < op_count:
            count = min(step, op_count - first)
            is_whole = count == op_count
            batch = Batch(
                transfer.kind,
                ops if is_whole else ops[first : first + count],
                count,
                results if is_whole else results[first : first + count],
                copies,
                copy_count,
                transfer.priority,
                transfer.deadline_ns,
                transfer.owner,
                transfer.order,
            )
            try:
                ticket = self.engine.submit(batch, tag=transfer)
            except BusyError:
                return False
            transfer.tickets.append(ticket)
            transfer.fed_ops = first + count
        return True

    def spin(self, transfer: Transfer) -> None:
        """Look for the end of one small read or load for a moment, if it is all there is in flight.

        Where the device is slower than the spin, looking is a waste: after a few misses it is only tried now and then.
        """
        if (
            self._spin_us == 0
            or len(self._active) != 1
            or transfer.plan.op_count != 1
            or transfer.request_count * transfer.payload_nbytes > _SPIN_NBYTES_MAX.get(transfer.kind, 0)
        ):
            return
        self._spins += 1
        if self._spin_misses > 3 and self._spins % 64:
            return
        for _ in range(2):  # with device memory the first news is that the copies are queued
            if not transfer.is_done and (news := self.engine.drain(self._spin_us)):
                self._digest(news)
        self._spin_misses = 0 if transfer.is_done else self._spin_misses + 1
        self._awake_until_ns = monotonic_ns() + self._awake_ns if transfer.is_done else 0

    def drain(self) -> None:
        """Take what the engine has news of; finish, release and feed what that allows."""
        self._digest(self.engine.drain())

    def _digest(self, news: list[Ticket]) -> None:
        for ticket in news:
            transfer = ticket.tag
            if isinstance(transfer, Transfer):
                if ticket.is_done:
                    self._account(transfer, ticket)
                else:
                    transfer.note_enqueued()
            elif callable(transfer):
                transfer()
        if self._has_unfed:
            self._feed_queued()
        if self._drain_waiters:
            waiters, self._drain_waiters = self._drain_waiters, []
            for wake in waiters:
                wake()

    def on_drain(self, wake: Callable[[], None]) -> None:
        """Have `wake` called once after the next drain."""
        self._drain_waiters.append(wake)

    def _account(self, transfer: Transfer, ticket: Ticket) -> None:
        transfer.tickets.remove(ticket)
        if ticket.status:
            transfer.worst = transfer.worst or ticket.status
        if not transfer.tickets and transfer.fed_ops == transfer.plan.op_count:
            self._finish(transfer)

    def _finish(self, transfer: Transfer) -> None:
        self._active.pop(transfer)
        self._writers.pop(transfer, None)
        if transfer.worst:
            self._counts["failed"] += 1
        dependents, transfer.dependents = transfer.dependents, None
        if transfer.regions:
            transfer.release_regions()
        transfer.finish()
        for dependent in dependents or ():
            dependent.blockers -= 1
            if dependent.blockers == 0 and not dependent.is_done:
                dependent.is_held = False
                self._unfed[dependent.priority].append(dependent)
                self._has_unfed = True
        if self._has_unfed:
            self._feed_queued()
        if self._line:
            self._wake_first()

    def _feed_queued(self) -> None:
        for queue in self._unfed:
            while queue:
                transfer = queue[0]
                if (
                    not transfer.is_done
                    and transfer.fed_ops < transfer.plan.op_count
                    and not self._feed(transfer)
                ):
                    return
                if queue and queue[0] is transfer:
                    queue.popleft()
        self._has_unfed = any(self._unfed)

    def cancel(self, transfer: Transfer) -> None:
        """Drop what has not begun; the transfer finishes when what has begun is done."""
        if not transfer.is_done:
            require_current(self.binding)
            self._counts["cancelled"] += 1
            self._drop(transfer, -errno.ECANCELED)

    def _drop(self, transfer: Transfer, code: int) -> None:
        transfer.drop_rest(code)
        for ticket in transfer.tickets:
            self.engine.cancel(ticket)
        if not transfer.tickets:
            self._finish(transfer)

    def expire(self, transfer: Transfer) -> None:
        """Past its deadline: answer what the engine has not been given; the engine sees to the rest itself."""
        if not transfer.is_done and transfer.fed_ops < transfer.plan.op_count:
            transfer.drop_rest(-errno.ETIME)
            if not transfer.tickets:
                self._finish(transfer)

    def is_waiting(self, transfer: Transfer) -> bool:
        """Whether some of the transfer is held or queued here, where no deadline is watched but by its awaiter."""
        return transfer.fed_ops < transfer.plan.op_count

    def close(self) -> None:
        """Refuse new transfers, drop what has not begun, stop the engine; drain until `is_idle`."""
        self._is_closing = True
        dropped = [transfer for transfer in self._active if not transfer.is_done]
        writes = sum(transfer.kind is _WRITE for transfer in dropped)
        if writes:
            _log.warning("closed with %d writes in flight: those that had not begun are dropped", writes)
        for transfer in dropped:
            transfer.excuse()  # said once, above, and not once for each
            if not transfer.is_done:
                self._drop(transfer, -errno.ECANCELED)
        self.engine.stop()
        self._wake_first()

    @property
    def is_idle(self) -> bool:
        """Whether no transfer is in flight."""
        return not self._active

    @property
    def has_room(self) -> bool:
        """Whether one more transfer would be accepted (or refused as closed)."""
        return self._is_closing or len(self._active) < self._max_transfers

    @property
    def is_closing(self) -> bool:
        """Whether new transfers are refused for good."""
        return self._is_closing

    def may_go(self, turn: object) -> bool:
        """Whether a caller may start a transfer: there is room, and nobody is before it in line."""
        return self.has_room and (not self._line or next(iter(self._line)) is turn)

    def wait_in_line(self, turn: object, wake: Callable[[], None]) -> None:
        """Have `wake` called when `may_go` is worth asking again. Whoever is in line already keeps its place."""
        self._line[turn] = wake

    def leave_line(self, turn: object) -> None:
        """Give up a place in line, having gone or not. The next one looks as well: a turn need not be used."""
        self._line.pop(turn, None)
        self._wake_first()

    def _wake_first(self) -> None:
        if self._line and self.has_room:
            next(iter(self._line.values()))()

    def count_unobserved(self, transfer: Transfer) -> None:
        """Count a failure that nobody awaited."""
        self._counts["unobserved_failures"] += 1

    def describe_op(self, plan: Plan, index: int) -> OpDescription:
        """Where an op goes: file, offset, and how much of it is owed; a load or save has a region for a file."""
        op = np.frombuffer(plan.ops, dtype=OP_DTYPE)[index]
        nbytes = int(op["nbytes_owed"]) or int(op["nbytes"])
        if op["placement"] == Placement.PINNED:
            unit = int(op["file_offset"]) or 1
            return OpDescription(f"landing region at {int(op['address']):#x}", None, nbytes * unit)
        return OpDescription(self._path_of(int(op["file"])), int(op["file_offset"]), nbytes)

    def statistics(self) -> DispatcherStatistics:
        """Counters since the start."""
        return DispatcherStatistics(**{**self._counts, "active": len(self._active)})


def overlaps(a: Int64Array, b: Int64Array) -> bool:
    """Whether two sorted arrays share an element."""
    if len(a) == 0 or len(b) == 0 or a[-1] < b[0] or b[-1] < a[0]:
        return False
    few, many = (a, b) if len(a) <= len(b) else (b, a)
    if len(many) <= _SET_MAX:
        return not set(many.tolist()).isdisjoint(few.tolist())
    places = np.searchsorted(many, few)
    places[places == len(many)] = 0  # past the end: compared with the first, which is smaller
    return some(many[places] == few)
