"""Carries out plans: which transfer may go, what it needs from below, what has to make room. Knows no event loop.

Order. Transfers that share a group take effect in the order of their calls when either of them writes. Most need not
wait for that: a write from host memory is done in its call; a write to a slot that is being read or flushed goes to
another slot; a read below was handed to the backing before any later flush, and the backing keeps their order. What
is left is held: behind a write that has not ended, and, if it writes, behind a read that has not begun.

Room. Writes that find no slot wait in one line, first come first served. Every end of a transfer below is a chance: the
*pump* looks at the line and at the flusher. If nothing is in flight that could make room, because what is dirty cannot
be flushed, the first in line fails with that error, and what was dirty stays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from aio_kv.cascade.call import Call
from aio_kv.cascade.errand import Errand, child_of
from aio_kv.cascade.flusher import Flusher
from aio_kv.cascade.movers import Mover
from aio_kv.cascade.plans import FillPlan, ReadPlan
from aio_kv.cascade.slab import Slab
from aio_kv.cascade.slot_cache import SlotCache
from aio_kv.cascade.statistics import ConductorCounts
from aio_kv.cascade.transfer import CascadeTransfer, cancelled_error
from aio_kv.errors import AioKvError, BusyError, ClosedError, DeadlineError, DeviceError, StorageError
from aio_kv.flags import every, some
from aio_kv.integers import Int64Array
from aio_kv.protocols import Priority, Scatter
from aio_kv.transfer import LoopBinding, Outcome, TransferReport
from aio_kv.transfer.binding import require_current
from aio_kv.transfer.dispatcher import overlaps

__all__ = ["Conductor"]

# Looked up once: an attribute of an enumeration costs more than a small array operation.
_DONE: Final = int(Outcome.DONE)
_NOTHING: Final = np.empty(0, np.int64)
_MAX_TRANSFERS = 1024


@dataclass(slots=True, eq=False)
class _Fill:
    """Groups arriving in the slots of one plan, by one or several copies."""

    plan: FillPlan
    landed: list[Int64Array]
    is_dirty: bool
    open: int = 0


class Conductor:
    """The transfers of one cascade; used from one thread."""

    def __init__(
        self,
        cache: SlotCache,
        slab: Slab,
        backing: Any,
        binding: LoopBinding,
        flusher: Flusher,
        movers: tuple[Mover, Mover | None],
        *,
        promote: bool,
    ) -> None:
        self.binding = binding
        self.counts = ConductorCounts()
        self.is_closing = False
        self.failed_writes: list[Int64Array] = []  # of which nothing is certain, until a flush has told so
        self._cache = cache
        self._slab = slab
        self._backing = backing
        self._flusher = flusher
        self._host_mover, self._device_mover = movers
        self._promotes = promote
        self._active: dict[CascadeTransfer, None] = {}
        self._writers: dict[CascadeTransfer, None] = {}  # active ones that write, or bring groups up
        self._line: deque[CascadeTransfer] = deque()
        self._ready: deque[CascadeTransfer] = deque()
        self._news: list[Callable[[], None]] = []
        self._children = 0
        self.errand: Errand | None = None  # waits for room below
        self._is_pumping = False
        flusher.on_end = self.pump

    # From calls.

    def start(self, transfer: CascadeTransfer, plan: ReadPlan | None = None) -> None:
        """Accept a transfer: carry it out, begin it, or hold it. What it raises is for the call to raise.

        `plan` is what the cache has just answered for the whole of a read that need not be held.
        """
        if len(self._active) >= _MAX_TRANSFERS:
            self.counts.refused += 1
            raise BusyError(f"{len(self._active)} transfers are in flight: await wait_ready() first")
        self._hold_behind_conflicts(transfer)
        if transfer.blockers:
            self.counts.waits_for_order += 1
        else:
            self._begin(transfer, plan)
        self.counts.transfers += 1
        if not self._is_over(transfer):
            self._active[transfer] = None
            if transfer.is_write or transfer.is_filling:
                self._writers[transfer] = None
        else:
            self._finish(transfer)
        self.pump()

    def _begin(self, transfer: CascadeTransfer, plan: ReadPlan | None) -> None:
        """Begin a new transfer. What goes wrong is the call's to raise as long as nothing of it is under way."""
        try:
            self._advance(transfer, plan)
        except AioKvError as error:
            if not transfer.has_partly_begun:
                raise
            if isinstance(error, BusyError):
                self._wait_for_backing(transfer)
            else:
                transfer.drop_pending(Outcome.FAILED, error)

    @property
    def has_writers(self) -> bool:
        """Whether a read must look if it has to wait for somebody."""
        return bool(self._writers)

    def note_hits(self, count: int, payload: int) -> None:
        """Count groups that were read from here."""
        self.counts.hits += count
        self.counts.hit_nbytes += count * payload

    def _hold_behind_conflicts(self, transfer: CascadeTransfer) -> None:
        for other in self._active if transfer.is_write else self._writers:
            is_ahead = other.is_write or other.is_filling or not other.has_begun
            if is_ahead and overlaps(other.sorted_ids, transfer.sorted_ids):
                transfer.blockers += 1
                other.dependents.append(transfer)

    def cancel(self, transfer: CascadeTransfer) -> None:
        """Drop what has not begun; the transfer finishes when what has begun is done."""
        if transfer.is_done:
            return
        require_current(self.binding)
        self.counts.cancelled += 1
        transfer.drop_pending(Outcome.CANCELLED, cancelled_error(transfer.action))
        for child in tuple(transfer.children):
            child.cancel()
        self._conclude(transfer)
        self.pump()

    def spin(self, transfer: Any) -> None:
        """Nothing to look for: what is quick is done in its call, or is the backing's own transfer."""

    def is_waiting(self, transfer: Any) -> bool:
        """Whether some of it has not begun, which nobody but its awaiter watches the deadline of."""
        return not transfer.has_begun

    def expire(self, transfer: Any) -> None:
        """Past its deadline: answer what has not begun."""
        if not transfer.is_done and not transfer.has_begun:
            transfer.drop_pending(Outcome.LATE, _late(transfer))
            self._conclude(transfer)
            self.pump()

    def count_unobserved(self) -> None:
        """Count a failure that nobody awaited."""
        self.counts.unobserved_failures += 1

    # Carrying out.

    def _advance(self, transfer: CascadeTransfer, plan: ReadPlan | None = None) -> None:
        """Begin as much of a transfer as can begin. Raises `BusyError` if the backing takes no more for now."""
        if transfer.call.how.is_late:
            transfer.drop_pending(Outcome.LATE, _late(transfer))
        index = transfer.pending
        if not len(index):
            return
        if transfer.is_write:
            self._advance_write(transfer, index)
        else:
            if plan is None:
                ids = transfer.call.ids
                plan = self._cache.plan_read(ids if len(index) == len(ids) else ids[index])
            self._advance_read(transfer, index, plan)

    def _advance_read(self, transfer: CascadeTransfer, index: Int64Array, plan: ReadPlan) -> None:
        if plan.hits == len(index):
            self._load(transfer, index, plan.rows)
            return
        rows = plan.rows[plan.is_hit]
        # What is missing first, so that the device works while hits are copied; what comes up must not evict them.
        hits = self._cache.slots_of(rows)
        self._cache.lease(hits)
        try:
            missing = index[~plan.is_hit]
            if self._promotes:
                missing = self._promote(transfer, missing)
            if len(missing):
                self._read_below(transfer, missing)
            if plan.hits:
                self._load(transfer, index[plan.is_hit], rows)
        finally:
            self._cache.release(hits)

    def _read_below(self, transfer: CascadeTransfer, index: Int64Array) -> None:
        child = transfer.call.read_below(self._backing, index)
        transfer.begin(index)
        self.counts.misses += len(index)
        self._watch(transfer, child, lambda report: self._settle(transfer, index, report))

    def _settle(self, transfer: CascadeTransfer, index: Int64Array, report: TransferReport) -> None:
        transfer.settle(index, report.outcomes, report.errors)

    def _load(self, transfer: CascadeTransfer, index: Int64Array, rows: Int64Array) -> None:
        """Copy resident groups to the caller; the slots are leased until each copy has ended."""
        mover = self._mover(transfer.call)
        for part in transfer.call.parts(index):
            self._load_part(transfer, mover, index[part], rows[part])

    def _load_part(
        self, transfer: CascadeTransfer, mover: Mover, index: Int64Array, rows: Int64Array
    ) -> None:
        slots = self._cache.slots_of(rows)
        self._cache.touch(slots)
        self._cache.lease(slots)
        try:
            child = mover.load(transfer.call, index, rows)
        except BaseException:
            self._cache.release(slots)
            raise
        transfer.begin(index)
        self.note_hits(len(index), transfer.call.payload)
        if child is None:
            self._cache.release(slots)
            transfer.settle(index, _DONE)
            return

        def loaded(report: TransferReport) -> None:
            self._cache.release(slots)
            self._settle(transfer, index, report)

        self._watch(transfer, child, loaded)

    def _mover(self, call: Call) -> Mover:
        if not call.is_device:
            return self._host_mover
        assert self._device_mover is not None, "a call with device memory was checked against a device"
        return self._device_mover

    def _advance_write(self, transfer: CascadeTransfer, index: Int64Array) -> None:
        mover = self._mover(transfer.call)
        ids = transfer.call.ids if len(index) == transfer.request_count else transfer.call.ids[index]
        plan = self._cache.plan_write(ids, keeps_all=mover.is_late)
        self._slab.copy_within(plan.copied_from, plan.copied_to)
        rows = plan.rows
        has_room = rows >= 0
        transfer.tried_at, transfer.short = self._cache.openings, 0
        if not every(has_room):
            transfer.short = self._slots_for(ids[~has_room])
            if not some(has_room):
                self._wait_for_room(transfer)
                return
            index, rows = index[has_room], rows[has_room]
        fill = _Fill(plan, [], is_dirty=True, open=1)
        try:
            for part in transfer.call.parts(index):
                self._save_part(transfer, mover, fill, index[part], rows[part])
        finally:
            self._close_fill(fill)
        if transfer.short:
            self._wait_for_room(transfer)

    def _slots_for(self, ids: Int64Array) -> int:
        """How many slots hold these groups, each named once."""
        per_slot = self._cache.groups_per_slot
        return len(ids) if per_slot == 1 or len(ids) == 1 else len(np.unique(ids // per_slot))

    def _wait_for_room(self, transfer: CascadeTransfer) -> None:
        if transfer not in self._line:
            self.counts.waits_for_room += 1
            self._cache.retry()
            self._line.append(transfer)

    def _save_part(
        self, transfer: CascadeTransfer, mover: Mover, fill: _Fill, index: Int64Array, rows: Int64Array
    ) -> None:
        child = mover.save(transfer.call, index, rows)
        transfer.begin(index)
        if child is None:
            fill.landed.append(rows)
            self._saved(transfer, index, _DONE, ())
            return
        fill.open += 1

        def saved(report: TransferReport) -> None:
            self._keep_landed(transfer, fill, rows, report)
            self._close_fill(fill)
            self._saved(transfer, index, report.outcomes, report.errors)

        self._watch(transfer, child, saved)

    def _saved(
        self, transfer: CascadeTransfer, index: Int64Array, outcomes: Any, errors: tuple[AioKvError, ...]
    ) -> None:
        transfer.settle(index, outcomes, errors)
        landed = len(index) if outcomes.__class__ is int else int(np.count_nonzero(outcomes == _DONE))
        self.counts.written_groups += landed
        self.counts.written_nbytes += landed * transfer.call.payload

    def _keep_landed(
        self, transfer: CascadeTransfer, fill: _Fill, rows: Int64Array, report: TransferReport
    ) -> None:
        is_landed = report.outcomes == _DONE
        if every(is_landed):
            fill.landed.append(rows)
            return
        fill.landed.append(rows[is_landed])
        torn = rows[report.outcomes == Outcome.FAILED]
        if not len(torn):
            return
        self._cache.invalidate(torn)
        if any(isinstance(error, DeviceError) for error in report.errors):
            # A lost device may still be writing: the slots are never used again.
            slots = np.unique(self._cache.slots_of(torn))
            self._cache.lease(slots)
            self.counts.quarantined_slots += len(slots)

    def _close_fill(self, fill: _Fill) -> None:
        fill.open -= 1
        if fill.open == 0:
            landed = fill.landed[0] if len(fill.landed) == 1 else np.concatenate([_NOTHING, *fill.landed])
            self._cache.commit(fill.plan, landed, is_dirty=fill.is_dirty)

    def _promote(self, transfer: CascadeTransfer, index: Int64Array) -> Int64Array:
        """Have what is missing read into slots, for as much as finds one at once; returns the rest."""
        ids, which = np.unique(transfer.call.ids[index], return_inverse=True)
        plan = self._cache.plan_promote(ids)
        has_room = plan.rows >= 0
        rows = plan.rows[has_room]
        if not len(rows):
            return index
        fill = _Fill(plan, [], is_dirty=False, open=1)
        try:
            child = self._backing.read_groups(
                ids[has_room],
                Scatter(self._slab.memory, self._slab.offsets(rows)),
                deadline=transfer.call.how.deadline,
                priority=transfer.call.how.priority,
            )
        except BaseException:
            self._close_fill(fill)
            raise
        is_coming = has_room[which]
        coming = index[is_coming]
        place = (np.cumsum(has_room) - 1)[which[is_coming]]  # in `rows`, for each request
        transfer.begin(coming)
        transfer.fills += 1
        self.counts.misses += len(coming)

        def arrived(report: TransferReport) -> None:
            self._arrived(transfer, fill, rows, coming, place, report)

        self._watch(transfer, child, arrived)
        return index[~is_coming]

    def _arrived(
        self,
        transfer: CascadeTransfer,
        fill: _Fill,
        rows: Int64Array,
        coming: Int64Array,
        place: Int64Array,
        report: TransferReport,
    ) -> None:
        is_landed = report.outcomes == _DONE
        fill.landed.append(rows[is_landed])
        self._close_fill(fill)
        self.counts.promoted_groups += int(np.count_nonzero(is_landed))
        outcomes = report.outcomes[place]
        is_here = outcomes == _DONE
        transfer.settle(coming[~is_here], outcomes[~is_here], report.errors)
        arrived = coming[is_here]
        transfer.begin_again(arrived)  # they are resident: what is left is an ordinary read of them
        transfer.fills -= 1
        if len(arrived):
            self._ready.append(transfer)

    def _watch(
        self, transfer: CascadeTransfer, handed: Any, on_end: Callable[[TransferReport], None]
    ) -> None:
        child = child_of(handed, self.binding)
        transfer.children.append(child)
        self._children += 1

        def end() -> None:
            transfer.children.remove(child)
            self._children -= 1
            try:
                report = child.report
            except AioKvError as error:
                report = _failed_report(handed, error)
            on_end(report)

        def ended() -> None:
            end()
            self._conclude(transfer)
            self.pump()

        if child.is_done:
            end()
            return
        child.add_waiter(ended)
        if transfer.call.how.stream is not None:
            child.add_enqueued_waiter(transfer.note_enqueued)

    # Going on.

    def pump(self) -> None:
        """Look what can go on: transfers that were held, the line for room, the flusher."""
        if self._is_pumping:
            return  # from inside: the loop below looks again
        if not (self._ready or self._line or self._news or self._flusher.has_work):
            return
        self._is_pumping = True
        try:
            while self._pump_once():
                pass
        finally:
            self._is_pumping = False
        news, self._news = self._news, []
        for wake in news:
            wake()

    def _pump_once(self) -> bool:
        """One round; whether another may find more to do."""
        while self._ready:
            transfer = self._ready.popleft()
            if not transfer.is_done:
                self._advance_or_fail(transfer)
        while self._line and self._has_gone(self._line[0]):
            self._line.popleft()
        if self._flush() or self._ready:
            return True
        return self._is_stuck() and self._give_up_first()

    def _has_gone(self, first: CascadeTransfer) -> bool:
        """Let the first in line go as far as it can; whether that is to its end."""
        if first.is_done or first.has_begun:
            return True
        if first.short and first.tried_at == self._cache.openings and not first.call.how.is_late:
            return False  # nothing has changed for it
        self._advance_or_fail(first)
        return first.has_begun

    def _advance_or_fail(self, transfer: CascadeTransfer) -> None:
        try:
            self._advance(transfer)
        except BusyError:
            self._wait_for_backing(transfer)
        except AioKvError as error:
            transfer.drop_pending(Outcome.FAILED, error)
        if transfer.is_filling:
            self._writers[transfer] = None
        transfer.note_enqueued()
        self._conclude(transfer)

    def _flush(self) -> bool:
        """Have the flusher go on; whether something has come down already."""
        first = next((transfer for transfer in self._line if transfer.short), None)
        short = first.short if first is not None else 0
        priority = first.call.how.priority if first is not None else Priority.BACKGROUND
        try:
            return self._flusher.go_on(short, priority)
        except BusyError:
            self._ask_for_room_below()
            return False

    def _wait_for_backing(self, transfer: CascadeTransfer) -> None:
        if transfer not in self._line:
            self.counts.waits_for_backing += 1
            self._line.append(transfer)
        self._ask_for_room_below()

    def _ask_for_room_below(self) -> None:
        if self.errand is None:
            self.errand = Errand(self.binding, self._backing.wait_ready)
            self.errand.on_end(self._has_room_below)

    def _has_room_below(self) -> None:
        errand, self.errand = self.errand, None
        if errand is not None and isinstance(errand.error, AioKvError):
            while self._line:
                first = self._line.popleft()
                first.drop_pending(Outcome.FAILED, errand.error)
                self._conclude(first)
        self.pump()

    def _is_stuck(self) -> bool:
        return bool(self._line and self.errand is None and self._children == 0 and self._flusher.is_idle)

    def _give_up_first(self) -> bool:
        """Nothing can make room any more: the first in line fails, and the next may be luckier."""
        first = self._line.popleft()
        error = self._flusher.last_error or StorageError(
            "write",
            hint="no slot of the cascade can be had: after a fault of the device they are not used again",
        )
        first.drop_pending(Outcome.FAILED, error)
        self._conclude(first)
        return True

    def _is_over(self, transfer: CascadeTransfer) -> bool:
        return transfer.has_begun and not transfer.children

    def _conclude(self, transfer: CascadeTransfer) -> None:
        if not transfer.is_done and self._is_over(transfer):
            self._finish(transfer)

    def _finish(self, transfer: CascadeTransfer) -> None:
        self._active.pop(transfer, None)
        self._writers.pop(transfer, None)
        if transfer.has_failed:
            self.counts.failed += 1
            if transfer.is_write:
                self.failed_writes.append(transfer.call.ids[transfer.outcomes == Outcome.FAILED])
        transfer.finish()
        for dependent in transfer.dependents:
            dependent.blockers -= 1
            if dependent.blockers == 0 and not dependent.is_done:
                self._ready.append(dependent)
        transfer.dependents = []

    # For flush and close.

    @property
    def writers(self) -> tuple[CascadeTransfer, ...]:
        """The writes that have not ended."""
        return tuple(self._writers)

    @property
    def is_idle(self) -> bool:
        """Whether no transfer is in flight."""
        return not self._active

    @property
    def has_room(self) -> bool:
        """Whether one more transfer would be accepted (or refused as closed)."""
        return self.is_closing or len(self._active) < _MAX_TRANSFERS

    def on_news(self, wake: Callable[[], None]) -> None:
        """Have `wake` called once when something has ended."""
        self._news.append(wake)

    def off_news(self, wake: Callable[[], None]) -> None:
        """Take back `on_news`."""
        if wake in self._news:
            self._news.remove(wake)

    def require_open(self) -> None:
        """Raise `ClosedError` once closing has begun."""
        if self.is_closing:
            raise ClosedError("the cascade is closed or closing: open a new one")

    def close(self) -> int:
        """Refuse new transfers and drop what has not begun; returns how many writes that were."""
        self.is_closing = True
        dropped = 0
        for transfer in tuple(self._active):
            is_pending = not transfer.has_begun
            dropped += transfer.is_write and is_pending
            transfer.excuse()
            transfer.drop_pending(Outcome.CANCELLED, cancelled_error(transfer.action))
            if not transfer.is_write:
                for child in tuple(transfer.children):
                    child.cancel()
            self._conclude(transfer)
        self.pump()
        return dropped


def _late(transfer: CascadeTransfer) -> DeadlineError:
    return DeadlineError(f"{transfer.action} through the cascade: not begun before its deadline")


def _failed_report(handed: Any, error: AioKvError) -> TransferReport:
    """The report of a transfer that raised instead of reporting: nothing of it is certain."""
    count = len(getattr(handed, "group_ids", ())) or 1
    return TransferReport(np.full(count, Outcome.FAILED, np.int8), 0, 0, (error,))
