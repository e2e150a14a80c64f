"""The flusher: dirty slots on their way down, a bounded number at a time, oldest first.

It has no task of its own. The conductor asks it to go on whenever something has ended or somebody wants more, and every
flush in flight is counted until it has landed or failed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from aio_kv.cascade.errand import Child, child_of
from aio_kv.cascade.plans import FlushPlan
from aio_kv.cascade.slab import Slab
from aio_kv.cascade.slot_cache import SlotCache
from aio_kv.errors import AioKvError, BusyError
from aio_kv.flags import every
from aio_kv.integers import Int64Array
from aio_kv.protocols import Priority, Scatter
from aio_kv.transfer import LoopBinding, Outcome

__all__ = ["Flusher"]

_DONE: Final = int(Outcome.DONE)
_BATCH_NBYTES: Final = 4 << 20
_BATCHES_MAX: Final = 4


@dataclass(slots=True)
class FlushCounts:
    """What the flusher has done."""

    flushes: int = 0
    failed_flushes: int = 0
    flushed_groups: int = 0


@dataclass(slots=True)
class Unsynced:
    """Groups that have come down since the last sync, which only a sync makes durable."""

    parts: list[Int64Array] = field(default_factory=list)
    count: int = 0

    def add(self, ids: Int64Array) -> None:
        """More groups."""
        self.parts.append(ids)
        self.count += len(ids)
        if len(self.parts) > 64 and self.count > 1 << 16:
            self.parts = [self.all()]
            self.count = len(self.parts[0])

    def all(self) -> Int64Array:
        """Each of them once, in rising order."""
        return np.unique(np.concatenate([np.empty(0, np.int64), *self.parts]))


class Flusher:
    """Hands flush plans to the backing and tells the cache what became of them."""

    def __init__(
        self, cache: SlotCache, slab: Slab, backing: Any, binding: LoopBinding, dirty_max: int
    ) -> None:
        self._cache = cache
        self._slab = slab
        self._backing = backing
        self._binding = binding
        self._dirty_max = dirty_max
        slot_nbytes = cache.groups_per_slot * slab.payload
        self._batch_slots = max(1, _BATCH_NBYTES // slot_nbytes)
        self._flights: dict[Child, FlushPlan] = {}
        self.slots_in_flight = 0
        self.drains = 0  # how many wait for everything to come down
        self.on_end: Callable[[], None] = lambda: (
            None
        )  # set once by the conductor, which it tells of every end
        self.last_error: AioKvError | None = None
        self.unsynced = Unsynced()
        self.counts = FlushCounts()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in flight."""
        return not self._flights

    @property
    def has_work(self) -> bool:
        """Whether there may be something to start when nobody waits for room."""
        return self.drains > 0 or self._cache.dirty_count - self._dirty_max > self.slots_in_flight

    def go_on(self, short: int, priority: Priority) -> bool:
        """Start as many flushes as are wanted now and fit; `short` slots are waited for by somebody of `priority`.

        Returns whether one of them has ended already. Raises `BusyError` when the backing has no room: then nothing is
        lost, and it is tried again.
        """
        has_ended = False
        while len(self._flights) < _BATCHES_MAX:
            wanted = self._wanted(short)
            if wanted <= 0:
                break
            plan = self._cache.plan_flush(min(wanted, self._batch_slots))
            if plan is None:
                break
            is_urgent = short > 0 or self.drains > 0
            has_ended |= self._start(plan, priority if is_urgent else Priority.BACKGROUND)
        return has_ended

    def _wanted(self, short: int) -> int:
        if self.drains:
            return self._batch_slots
        over = self._cache.dirty_count - self._dirty_max
        return max(over, short) - self.slots_in_flight

    def _start(self, plan: FlushPlan, priority: Priority) -> bool:
        source = Scatter(self._slab.memory, self._slab.offsets(plan.rows))
        try:
            transfer = self._backing.write_groups(plan.group_ids, source, priority=priority)
        except BusyError:
            self._cache.flushed(plan, np.zeros(len(plan.rows), np.bool_))
            self._cache.retry(plan.slots)
            raise
        except AioKvError as error:
            self._fail(plan, error)
            return True
        child = child_of(transfer, self._binding)
        self._flights[child] = plan
        self.slots_in_flight += len(plan.slots)
        self.counts.flushes += 1
        if child.is_done:
            self._end(child)
            return True
        child.add_waiter(lambda: self._ended(child))
        return False

    def _ended(self, child: Child) -> None:
        self._end(child)
        self.on_end()

    def _end(self, child: Child) -> None:
        plan = self._flights.pop(child)
        self.slots_in_flight -= len(plan.slots)
        try:
            report = child.report
        except AioKvError as error:
            self._fail(plan, error)
            return
        is_landed = report.outcomes == _DONE
        self._cache.flushed(plan, is_landed)
        landed = plan.group_ids
        if not every(is_landed):
            landed = landed[is_landed]
            self._note_failure(report.errors[0] if report.errors else None)
        self.unsynced.add(landed)
        self.counts.flushed_groups += len(landed)

    def _fail(self, plan: FlushPlan, error: AioKvError) -> None:
        self._cache.flushed(plan, np.zeros(len(plan.rows), np.bool_))
        self._note_failure(error)

    def _note_failure(self, error: AioKvError | None) -> None:
        self.counts.failed_flushes += 1
        self.last_error = error or self.last_error
