"""The book of the cascade: its policies, its states, and that no plan of it can lose or mix bytes."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aio_kv import LayoutError
from aio_kv.cascade.slot_cache import SlotCache
from aio_kv.cascade.states import TRANSITIONS, SlotEvent, SlotState, diagram, next_states
from aio_kv.policy import POLICY_NAMES, make_policy
from aio_kv.policy.order import SlotOrder

ROOT = Path(__file__).resolve().parent.parent


def ids_of(*values: int) -> Any:
    return np.array(values, np.int64)


def write(cache: SlotCache, *ids: int) -> Any:
    plan = cache.plan_write(ids_of(*ids))
    cache.commit(plan, plan.rows[plan.rows >= 0])
    return plan


def clean(cache: SlotCache) -> None:
    while (plan := cache.plan_flush(1 << 30)) is not None:
        cache.flushed(plan, np.ones(len(plan.rows), bool))


class CacheAgainstModel(RuleBasedStateMachine):
    """A cache whose rows hold values, and a plain record of the last value of every group."""

    groups = 12
    capacity = 3
    per_slot = 2
    policy = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.cache = SlotCache(self.capacity, self.groups, self.per_slot, self.policy)
        self.rows = np.full(self.capacity * self.per_slot, -1)
        self.below = np.zeros(self.groups, np.int64)
        self.latest = np.zeros(self.groups, np.int64)
        self.clock = 0
        self.fills: list[tuple[Any, Any, Any]] = []
        self.copies: list[tuple[Any, Any, Any]] = []
        self.flushes: list[tuple[Any, Any]] = []

    @property
    def arriving(self) -> set[int]:
        return {group for _, ids, _ in self.fills for group in ids.tolist()}

    def values(self, count: int) -> Any:
        self.clock += count
        return np.arange(self.clock - count, self.clock) + 1

    @rule(ids=st.lists(st.integers(0, 11), min_size=1, max_size=6, unique=True), is_late=st.booleans())
    def write(self, ids: list[int], is_late: bool) -> None:
        ids = [group for group in ids if group not in self.arriving]
        if not ids:
            return
        wanted = np.array(ids)
        plan = self.cache.plan_write(wanted, keeps_all=is_late)
        self.rows[plan.copied_to] = self.rows[plan.copied_from]
        has_room = plan.rows >= 0
        fill = (plan, wanted[has_room], self.values(len(wanted))[has_room])
        if is_late:
            self.fills.append(fill)
        else:
            self.land(fill, 2**12 - 1)

    @precondition(lambda self: self.fills)
    @rule(data=st.data())
    def finish_write(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.fills) - 1))
        self.land(self.fills.pop(index), data.draw(st.sampled_from([0, 1, 2, 5, 2**12 - 1])))

    def land(self, fill: tuple[Any, Any, Any], which: int) -> None:
        plan, ids, values = fill
        landed = np.array([bool(which >> i & 1) for i in range(len(ids))], bool)
        rows = plan.rows[plan.rows >= 0][landed]
        self.rows[rows] = values[landed]
        self.latest[ids[landed]] = values[landed]
        self.cache.commit(plan, rows)

    @rule(ids=st.lists(st.integers(0, 11), min_size=1, max_size=6))
    def promote(self, ids: list[int]) -> None:
        wanted = np.array([group for group in dict.fromkeys(ids) if group not in self.arriving], np.int64)
        wanted = wanted[self.cache.plan_read(wanted).rows < 0]
        if not len(wanted):
            return
        plan = self.cache.plan_promote(wanted)
        rows, found = plan.rows[plan.rows >= 0], wanted[plan.rows >= 0]
        self.rows[rows] = self.below[found]
        self.cache.commit(plan, rows, is_dirty=False)

    @rule(ids=st.lists(st.integers(0, 11), min_size=1, max_size=6))
    def begin_copy(self, ids: list[int]) -> None:
        wanted = np.array([group for group in ids if group not in self.arriving], np.int64)
        plan = self.cache.plan_read(wanted)
        if not plan.hits:
            return
        rows = plan.rows[plan.is_hit]
        slots = self.cache.slots_of(rows)
        self.cache.touch(slots)
        self.cache.lease(slots)
        self.copies.append((slots, rows, self.latest[wanted[plan.is_hit]].copy()))

    @precondition(lambda self: self.copies)
    @rule(data=st.data())
    def end_copy(self, data: st.DataObject) -> None:
        slots, rows, values = self.copies.pop(data.draw(st.integers(0, len(self.copies) - 1)))
        assert (self.rows[rows] == values).all(), "the slot was written while a copy read it"
        self.cache.release(slots)

    @rule(slots_max=st.integers(1, 3))
    def begin_flush(self, slots_max: int) -> None:
        plan = self.cache.plan_flush(slots_max)
        if plan is not None:
            self.flushes.append((plan, self.rows[plan.rows].copy()))

    @precondition(lambda self: self.flushes)
    @rule(which=st.sampled_from([0, 1, 2, 2**12 - 1, 2**12 - 1]))
    def end_flush(self, which: int) -> None:
        # Writes of one group land in the order of their calls: the backing sees to that.
        plan, values = self.flushes.pop(0)
        assert (self.rows[plan.rows] == values).all(), "the slot was written while it was being flushed"
        landed = np.array([bool(which >> i & 1) for i in range(len(plan.rows))], bool)
        self.below[plan.group_ids[landed]] = values[landed]
        self.cache.flushed(plan, landed)

    @rule()
    def retry(self) -> None:
        self.cache.retry()

    @invariant()
    def nothing_is_lost(self) -> None:
        self.cache.check_invariants()
        groups = np.array([group for group in range(self.groups) if group not in self.arriving], np.int64)
        plan = self.cache.plan_read(groups)
        found = np.where(plan.is_hit, self.rows[plan.rows], self.below[groups])
        assert (found == self.latest[groups]).all()
        single = [self.cache.row_of(group) for group in groups.tolist()]
        assert single == plan.rows.tolist()
        is_older = self.below != self.latest
        dirty = self.cache.dirty_groups().tolist()
        assert {group for group in groups.tolist() if is_older[group]} <= set(dirty)

    def teardown(self) -> None:
        while self.copies:
            slots, rows, values = self.copies.pop()
            assert (self.rows[rows] == values).all()
            self.cache.release(slots)
        while self.fills:
            self.land(self.fills.pop(), 2**12 - 1)
        while self.flushes:
            self.end_flush(2**12 - 1)
        self.cache.retry()
        mark = self.cache.dirt
        while (plan := self.cache.plan_flush(2)) is not None:
            self.flushes.append((plan, self.rows[plan.rows].copy()))
            self.end_flush(2**12 - 1)
        assert not self.cache.is_dirty_before(mark)
        assert self.cache.dirty_count == 0
        assert (self.below == self.latest).all(), "not everything came down"
        assert self.cache.counts().leases == 0


def machine(capacity: int, per_slot: int, policy: str) -> type[CacheAgainstModel]:
    return type(
        f"{policy}_{capacity}_{per_slot}",
        (CacheAgainstModel,),
        {"capacity": capacity, "per_slot": per_slot, "policy": policy},
    )


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize(("capacity", "per_slot"), [(1, 1), (3, 2), (4, 1), (2, 6)])
def test_no_plan_loses_or_mixes_bytes(policy: str, capacity: int, per_slot: int) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        machine(capacity, per_slot, policy), settings=settings(max_examples=25, stateful_step_count=40)
    )


def test_the_first_not_used_goes_first() -> None:
    cache = SlotCache(3, 100)
    write(cache, 10, 11, 12)
    clean(cache)
    cache.touch(cache.slots_of(cache.plan_read(ids_of(10)).rows))
    write(cache, 13)
    assert cache.residents().tolist() == [10, 12, 13]
    assert cache.counts().evicted_slots == 1


def test_a_dirty_slot_is_not_evicted() -> None:
    cache = SlotCache(2, 100)
    write(cache, 1, 2)
    assert cache.plan_write(ids_of(3)).rows.tolist() == [-1]
    flush = cache.plan_flush(1)
    assert flush is not None
    assert flush.group_ids.tolist() == [1]
    assert cache.plan_write(ids_of(3)).rows.tolist() == [-1], "its flush has not landed"
    assert cache.plan_read(ids_of(1)).hits == 1, "a victim is read until its flush has landed"
    cache.flushed(flush, np.array([True]))
    write(cache, 3)
    assert cache.residents().tolist() == [2, 3]
    cache.check_invariants()


def test_a_leased_slot_is_neither_evicted_nor_written() -> None:
    cache = SlotCache(2, 100)
    write(cache, 1, 2)
    clean(cache)
    rows = cache.plan_read(ids_of(1)).rows
    leased = cache.slots_of(rows)
    cache.lease(leased)
    plan = write(cache, 3, 4)
    assert (plan.rows >= 0).sum() == 1
    assert cache.plan_read(ids_of(1)).hits == 1
    cache.release(leased)
    cache.check_invariants()
    clean(cache)
    cache.lease(leased)
    assert cache.plan_read(ids_of(1)).rows.tolist() == rows.tolist()
    again = write(cache, 1)
    assert again.rows[0] >= 0
    assert again.rows[0] != rows[0]
    assert cache.counts().superseded_slots == 1
    cache.check_invariants()
    cache.release(leased)
    assert cache.counts().resident_slots == 1, "the other one was evicted for the newer bytes"
    cache.check_invariants()


def test_groups_of_a_slot_move_together() -> None:
    cache = SlotCache(2, 100, 4)
    first = write(cache, 0, 1, 2, 3)
    slots = cache.slots_of(first.rows)
    cache.lease(slots)
    plan = cache.plan_write(ids_of(2))
    assert plan.copied_from.tolist() == [first.rows[0], first.rows[1], first.rows[3]]
    assert (plan.copied_to // 4 == plan.rows[0] // 4).all()
    cache.commit(plan, plan.rows)
    assert cache.dirty_groups().tolist() == [0, 1, 2, 3]
    cache.release(slots)
    cache.check_invariants()


def test_a_slot_that_failed_waits_to_be_tried_again() -> None:
    cache = SlotCache(2, 100)
    write(cache, 1, 2)
    mark = cache.dirt
    flush = cache.plan_flush(2)
    assert flush is not None
    cache.flushed(flush, np.array([True, False]))
    assert cache.failed_groups().tolist() == [2]
    assert cache.plan_flush(2) is None
    assert not cache.is_dirty_before(mark)
    assert cache.retry() == 1
    assert cache.is_dirty_before(mark)
    flush = cache.plan_flush(2)
    assert flush is not None
    assert flush.group_ids.tolist() == [2]
    cache.flushed(flush, np.array([True]))
    assert cache.dirty_count == 0
    cache.check_invariants()


def test_when_an_older_flush_fails_the_newer_slot_is_due_as_early() -> None:
    """Or a flush of everything would return although what it had to bring down is nowhere but here."""
    cache = SlotCache(2, 100)
    write(cache, 1)
    mark = cache.dirt
    flush = cache.plan_flush(1)
    assert flush is not None
    write(cache, 1)  # to another slot, and dirty since after the mark
    assert cache.counts().superseded_slots == 1
    cache.flushed(flush, np.array([False]))
    cache.check_invariants()
    assert cache.is_dirty_before(mark)
    clean(cache)
    assert not cache.is_dirty_before(mark)


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_every_policy_keeps_what_is_used_in_a_small_cache(policy: str) -> None:
    cache = SlotCache(20, 10_000, 1, policy)
    hot = np.arange(5)
    for turn in range(200):
        plan = cache.plan_read(hot)
        cache.touch(plan.rows[plan.is_hit])
        write(cache, *hot[~plan.is_hit].tolist(), 100 + turn)
        clean(cache)
        cache.check_invariants()
    assert set(hot.tolist()) <= set(cache.residents().tolist())


def test_an_unknown_policy_is_refused_by_name() -> None:
    for wrong in ("mru", None, 3, "LRU"):
        with pytest.raises(LayoutError, match=r"must be one of lru, arc, s3fifo"):
            make_policy(wrong, 4)
    with pytest.raises(LayoutError, match="0 slots"):
        SlotCache(0, 10)
    with pytest.raises(LayoutError, match='slot="block"'):
        SlotCache(4, 2**40)


def test_an_order_is_what_an_ordered_dict_would_be() -> None:
    random = np.random.default_rng(0)
    order, model = SlotOrder(50), {}
    takeable = bytearray(b"\1" * 50)
    for _ in range(20_000):
        slot = int(random.integers(50))
        if slot in order:
            order.renew(ids_of(slot, slot))
            model[slot] = model.pop(slot)
        else:
            order.append(slot)
            model[slot] = None
        if random.random() < 0.3:
            count = int(random.choice([1, 3, 20]))
            wanted = list(model)[:count]
            assert order.take_many(count, takeable) == wanted
            for taken in wanted:
                del model[taken]
        assert order.count == len(model)
    assert sorted(order.members()) == sorted(model)


@pytest.mark.parametrize("count", [1, 30])
def test_what_cannot_be_taken_stands_aside_and_comes_back_first(count: int) -> None:
    order, takeable = SlotOrder(100), bytearray(b"\1" * 100)
    order.append_many(np.arange(100))
    takeable[3] = takeable[5] = 0
    assert order.take_many(10, takeable) == [0, 1, 2, 4, 6, 7, 8, 9, 10, 11]
    order.restore(ids_of(3, 3, 50))
    takeable[3] = takeable[5] = 1
    assert order.take_many(2, takeable) == [3, 12]
    order.renew(ids_of(5))
    assert 5 in order
    assert order.take_many(count, takeable)[:1] == [13]
    assert order.take_many(100, takeable)[-1] == 5


def test_states_move_by_the_table_only() -> None:
    for event in SlotEvent:
        for state in SlotState:
            states = np.array([state], np.uint8)
            if (state, event) in TRANSITIONS:
                next_states(states, ids_of(0), event)
                assert states[0] == TRANSITIONS[state, event]
            else:
                with pytest.raises(AssertionError, match=event.name):
                    next_states(states, ids_of(0), event)


def test_the_diagram_in_the_docs_is_the_table() -> None:
    text = (ROOT / "docs" / "explanation" / "cascade.md").read_text()
    assert diagram() in text


@pytest.mark.parametrize("name", ["slot_cache", "states", "plans"])
def test_the_book_is_pure(name: str) -> None:
    tree = ast.parse((ROOT / "aio_kv" / "cascade" / f"{name}.py").read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    pure = (
        "aio_kv.cascade.invariants",
        "aio_kv.cascade.plans",
        "aio_kv.cascade.states",
        "aio_kv.errors",
        "aio_kv.flags",
        "aio_kv.integers",
        "aio_kv.policy",
    )
    outside = {"__future__", "array", "dataclasses", "enum", "numpy", "numpy.typing", "typing"}
    assert all(module in outside or module.startswith(pure) for module in modules), modules
