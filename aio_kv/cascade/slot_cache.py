"""`SlotCache`: which group is in which slot, and what may be done to it. Pure: it moves no bytes and waits for nothing.

The cascade asks for a plan, moves the bytes, and says what became of them. All calls take NumPy batches and cost O(1)
for each key; group numbers are trusted (the caller has checked them).

Rules that it keeps:
- A slot that is leased (a copy or a flush reads it) is neither written nor evicted. A write to its key goes to another
  slot, which takes over the key and the other groups; the old slot is detached.
- A dirty slot is never evicted. It is flushed first, and stays resident until the flush has landed.
- Dirty slots are flushed in the order in which they became dirty.
"""

from __future__ import annotations

from array import array
from typing import Final

import numpy as np

from aio_kv.cascade.invariants import check_book
from aio_kv.cascade.plans import CacheCounts, FillPlan, Flags, FlushPlan, ReadPlan
from aio_kv.cascade.states import SlotEvent, SlotState, next_state, next_states
from aio_kv.errors import LayoutError
from aio_kv.flags import every, some
from aio_kv.integers import Int64Array, without_repeats
from aio_kv.policy import make_policy
from aio_kv.policy.order import SlotOrder

__all__ = ["SlotCache"]

# Looked up once, and states as integers: every look at a member of an enumeration is a search.
_FREE, _FILLING, _CLEAN, _DIRTY, _FLUSHING = (int(state) for state in SlotState)
_FILL, _FILLED_CLEAN, _FILLED_DIRTY, _FLUSH, _LANDED, _FAILED, _SUPERSEDED, _EMPTIED = SlotEvent
_NOTHING: Final = np.empty(0, np.int64)
_FIRST: Final = np.zeros(1, np.int64)
_NO_SLOT: Final = np.array([-1])  # for any number of keys
_NEVER: Final = int(np.iinfo(np.int64).max)
_CAPACITY_MAX: Final = 2**31 - 2  # slot numbers are 32 bit in the table of keys
_KEYS_MAX: Final = 2**31  # 8 GiB of table, of which the touched pages count
_FEW: Final = 4  # groups are looked up one by one: NumPy has to begin ten times


class SlotCache:
    """The book of a cache of `capacity` slots.

    Args:
        capacity: slots.
        num_groups: how many groups there are below.
        groups_per_slot: neighbours that share a slot: the groups of a block, or 1.
        policy: "lru", "arc" or "s3fifo".

    Raises `LayoutError` for a policy that does not exist and for sizes that do not fit.
    """

    def __init__(self, capacity: int, num_groups: int, groups_per_slot: int = 1, policy: str = "lru") -> None:
        if not 1 <= capacity <= _CAPACITY_MAX:
            raise LayoutError(f"a cache of {capacity} slots: must be 1 to {_CAPACITY_MAX}")
        keys = -(-num_groups // groups_per_slot)
        if keys > _KEYS_MAX:
            raise LayoutError(
                f"{num_groups} groups in slots of {groups_per_slot}: at most {_KEYS_MAX} slots can be told apart; "
                'use slot="block"'
            )
        self.capacity = capacity
        self.groups_per_slot = groups_per_slot
        self._policy = make_policy(policy, capacity)
        # The slot of each key plus one. Zeros that nobody touches cost no memory.
        self._slot_of = np.zeros(keys, np.int32)
        # Buffers of C values with a NumPy view each, for many slots at once: a single one is slow in NumPy. Calls that
        # are about one slot, as most writes are, use the buffers.
        self._key_list = array("q", [-1]) * capacity
        self._key_of = np.frombuffer(self._key_list, np.int64)
        self._takeable_list = bytearray(capacity)  # CLEAN, not leased, with a key
        self._takeable = np.frombuffer(self._takeable_list, np.uint8)
        self._state_list = bytearray(capacity)
        self._state = np.frombuffer(self._state_list, np.uint8)
        self._lease_list = array("i", [0]) * capacity
        self._leases = np.frombuffer(self._lease_list, np.int32)
        self._fill_list = array("i", [0]) * capacity
        self._fills = np.frombuffer(self._fill_list, np.int32)
        self._valid = np.zeros((capacity, groups_per_slot), np.bool_)
        self._valid_rows = self._valid.reshape(-1)
        self._dirty = np.zeros((capacity, groups_per_slot), np.bool_)
        self._since_list = array("q", [_NEVER]) * capacity
        self._dirty_since = np.frombuffer(self._since_list, np.int64)
        self._failed_list = bytearray(capacity)
        self._has_failed = np.frombuffer(self._failed_list, np.bool_)
        self._dirty_order = SlotOrder(capacity)  # dirty, not FLUSHING; the oldest first
        self._flushable_list = bytearray(capacity)  # DIRTY, and not failed since the last `retry`
        self._flushable = np.frombuffer(self._flushable_list, np.uint8)
        self._free = list(range(capacity - 1, -1, -1))
        self._dirt = self._dirty_count = self._evicted = self._superseded = 0
        self._detached = 0  # slots that are there only for those who still read them
        self.openings = 0  # changes whenever a write that found no room might find some

    # Reading.

    def plan_read(self, ids: Int64Array) -> ReadPlan:
        """Look groups up. Changes nothing."""
        if len(ids) <= _FEW:
            rows = np.array([self.row_of(group) for group in ids.tolist()], np.int64)
            is_hit = rows >= 0
            return ReadPlan(rows, is_hit, is_hit.tobytes().count(1))
        per_slot = self.groups_per_slot
        keys = ids // per_slot if per_slot > 1 else ids
        found = self._slot_of.take(keys)  # the slot plus one
        rows = found.astype(np.int64)
        # (found - 1) * per_slot + ids % per_slot, in place: a new array costs as much as the sum.
        if per_slot > 1:
            rows *= per_slot
            rows += ids
            keys *= per_slot
            rows -= keys
        rows -= per_slot
        is_hit = found > 0
        is_hit &= self._valid_rows.take(rows, mode="clip")
        hits = int(np.count_nonzero(is_hit))
        return ReadPlan(rows if hits == len(ids) else np.where(is_hit, rows, -1), is_hit, hits)

    def row_of(self, group_id: int) -> int:
        """The row of one group, or -1: `plan_read` for a single one, without arrays."""
        key, place = divmod(group_id, self.groups_per_slot)
        slot = self._slot_of.item(key) - 1
        return slot * self.groups_per_slot + place if slot >= 0 and self._valid.item(slot, place) else -1

    def slots_of(self, rows: Int64Array) -> Int64Array:
        """The slots of rows, in order; a slot may come up again."""
        if self.groups_per_slot == 1:
            return rows
        slots = rows // self.groups_per_slot
        if len(slots) == 1:
            return slots
        # Of whole blocks one in eight is left; of groups from here and there too few would be for it to pay.
        changes = np.count_nonzero(slots[1:] != slots[:-1])
        return slots if 2 * changes > len(slots) else without_repeats(slots)

    def touch(self, slots: Int64Array) -> None:
        """Resident slots were used, in this order."""
        self._policy.touch(slots)

    def lease(self, slots: Int64Array) -> None:
        """Copies from these slots are in flight: they are not written or evicted until `release` of the same array.

        A slot that is in the array twice is leased once.
        """
        if len(slots) == 1:
            slot = slots.item()
            self._lease_list[slot] += 1
            self._takeable_list[slot] = 0
        elif len(slots):
            self._leases[slots] += 1
            self._takeable[slots] = 0

    def release(self, slots: Int64Array) -> None:
        """Give back what `lease` of the same array took."""
        ended = self._end_leases(slots)
        if len(ended):
            self.openings += 1
            self._settle(ended)

    def _end_leases(self, slots: Int64Array) -> Int64Array:
        """Take one lease from each slot; returns those that have none left."""
        if len(slots) == 1:
            self._lease_list[slot := slots.item()] -= 1
            return _NOTHING if self._lease_list[slot] else slots
        left = self._leases[slots] - 1
        self._leases[slots] = left
        has_ended = left == 0
        return slots if every(has_ended) else slots[has_ended]

    def _settle(self, slots: Int64Array) -> None:
        """Slots without leases: those that are CLEAN can be taken again, or are free if they are detached."""
        is_clean = self._state[slots] == _CLEAN
        if not some(is_clean):
            return
        clean = slots if every(is_clean) else slots[is_clean]
        self.openings += 1
        if self._detached:
            is_detached = self._key_of[clean] < 0
            if some(is_detached):
                freed = np.unique(clean[is_detached])
                self._empty(freed)
                self._detached -= len(freed)
                clean = clean[~is_detached]
        self._takeable[clean] = 1
        self._policy.restore(clean)

    def _empty(self, slots: Int64Array) -> None:
        self._step(slots, _EMPTIED)
        self._valid[slots] = False
        self._free.extend(slots.tolist())

    def _step(self, slots: Int64Array, event: SlotEvent) -> None:
        if len(slots) == 1:
            next_state(self._state_list, slots.item(), event)
        else:
            next_states(self._state, slots, event)

    # Filling.

    def plan_write(self, ids: Int64Array, *, keeps_all: bool = False) -> FillPlan:
        """Find a place for groups, each named once, that are about to be written; see `commit`.

        In place where the slot is resident and nobody reads it, else in a free or evicted slot. With `keeps_all` a
        group that goes to another slot keeps its old bytes until the new ones are there, for writes that may fail.
        """
        keys, key_index, places = self._keys_of(ids)
        slots = self._slot_of.take(keys).astype(np.int64) - 1
        if len(keys) == 1 and not (slots[0] >= 0 and self._lease_list[slots[0]]):
            return self._plan_write_one(keys, slots, places)
        is_resident = slots >= 0
        is_movable: Flags = is_resident
        has_movable = False
        if some(is_resident):
            is_movable = is_resident & (self._leases.take(slots, mode="clip") > 0)
            has_movable = some(is_movable)
            in_place = slots[is_resident & ~is_movable] if has_movable else slots[is_resident]
            self._begin_fill(in_place)
            self.touch(in_place)
        copied_from = copied_to = _NOTHING
        if not every(is_resident):
            slots[~is_resident] = self._admit(keys[~is_resident])
        if has_movable:
            is_written = self._written_places(is_movable, key_index, places, keeps_all)
            slots[is_movable], copied_from, copied_to = self._move(slots[is_movable], is_written)
        rows = slots[key_index] if len(keys) != len(ids) or self.groups_per_slot > 1 else slots
        if self.groups_per_slot > 1:
            rows = np.where(rows >= 0, rows * self.groups_per_slot + places, -1)
        has_slot = slots >= 0
        placed = slots if every(has_slot) else slots[has_slot]
        return FillPlan(rows, placed, copied_from, copied_to)

    def _plan_write_one(self, key: Int64Array, slot: Int64Array, places: Int64Array) -> FillPlan:
        if slot[0] >= 0:
            self._begin_fill(slot)
            self.touch(slot)
        else:
            slot = self._admit(key)
        if slot[0] < 0:
            return FillPlan(np.full(len(places), -1), _NOTHING, _NOTHING, _NOTHING)
        return FillPlan(slot * self.groups_per_slot + places, slot, _NOTHING, _NOTHING)

    def plan_promote(self, ids: Int64Array) -> FillPlan:
        """Find a place for groups, each once, that are about to be read from below; for as many as there is one.

        Only what can be had at once is used: slots that are resident, free, or can be evicted.
        """
        keys, key_index, places = self._keys_of(ids)
        slots = self._slot_of.take(keys).astype(np.int64) - 1
        is_resident = slots >= 0
        slots[is_resident & (self._leases.take(slots, mode="clip") > 0)] = -1
        resident = slots[is_resident & (slots >= 0)]
        self._begin_fill(resident)
        if not every(is_resident):
            slots[~is_resident] = self._admit(keys[~is_resident])
        rows = slots[key_index]
        rows = np.where(rows >= 0, rows * self.groups_per_slot + places, -1)
        return FillPlan(rows, slots[slots >= 0], _NOTHING, _NOTHING)

    def _keys_of(self, ids: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """The keys, each once; for each group the index of its key, and its place in the slot."""
        if self.groups_per_slot == 1:
            return ids, _FIRST if len(ids) == 1 else np.arange(len(ids)), _FIRST
        all_keys = ids // self.groups_per_slot
        places = ids - all_keys * self.groups_per_slot
        if len(ids) == 1:
            return all_keys, _FIRST, places
        keys = without_repeats(all_keys)
        if len(keys) < 2 or every(keys[1:] > keys[:-1]):  # in file order, as whole blocks are
            is_next = np.zeros(len(ids), np.int64)
            is_next[1:] = all_keys[1:] != all_keys[:-1]
            return keys, is_next.cumsum(), places
        keys, key_index = np.unique(all_keys, return_inverse=True)
        return keys, key_index, places

    def _begin_fill(self, slots: Int64Array) -> None:
        self._step(slots, _FILL)
        if len(slots) == 1:
            slot = slots.item()
            self._fill_list[slot] += 1
            self._takeable_list[slot] = self._flushable_list[slot] = 0
        elif len(slots):
            self._fills[slots] += 1
            self._takeable[slots] = 0
            self._flushable[slots] = 0

    def _has_nothing_to_give(self) -> bool:
        """Whether no slot is free and none can be evicted. A policy that is asked all the same remembers it."""
        return not self._free and 1 not in self._takeable_list

    def _admit(self, keys: Int64Array) -> Int64Array:
        """Slots for keys that are not resident; -1 from where there are no more."""
        if self._has_nothing_to_give():
            return _NO_SLOT
        found = self._policy.admit(keys.tolist(), self._free, self._takeable_list, self._key_list)
        if not found:
            return _NO_SLOT
        slots = np.array(found, np.int64)
        self._clear(slots)
        self._key_of[slots] = keys[: len(slots)]
        self._slot_of[keys[: len(slots)]] = slots + 1
        self._begin_fill(slots)
        if len(slots) == len(keys):
            return slots
        return np.concatenate([slots, np.full(len(keys) - len(slots), -1)])

    def _clear(self, slots: Int64Array) -> None:
        """Slots that the policy gave up, or had free: whatever was in them is gone."""
        has_key = self._key_of[slots] >= 0
        if some(has_key):
            evicted = slots[has_key]
            self._slot_of[self._key_of[evicted]] = 0
            self._key_of[evicted] = -1
            self._takeable[evicted] = 0
            self._valid[evicted] = False
            self._step(evicted, _EMPTIED)
            self._evicted += len(evicted)

    def _written_places(
        self, is_movable: Flags, key_index: Int64Array, places: Int64Array, keeps_all: bool
    ) -> Flags:
        """For each slot to be moved which of its groups will be written, and need not be copied."""
        written = np.zeros((len(is_movable), self.groups_per_slot), np.bool_)
        if not keeps_all:
            written[key_index, places] = True
        return written[is_movable]

    def _move(self, old: Int64Array, is_written: Flags) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Give keys whose slots are leased new slots, for as many as there are; returns slots (or -1) and copies."""
        new = np.full(len(old), -1)
        # Where something is arriving, its bytes cannot be taken along yet: those wait.
        (movable,) = (self._fills[old] == 0).nonzero()
        found = self._policy.evict(len(movable), self._free, self._takeable_list, self._key_list)
        chosen = movable[: len(found)]
        if not len(chosen):
            return new, _NOTHING, _NOTHING
        sources, targets = old[chosen], np.array(found, np.int64)
        self._clear(targets)
        for source, target in zip(sources.tolist(), found, strict=True):
            self._policy.substitute(source, target)
        copied = self._valid[sources] & ~is_written[chosen]
        copied_from, copied_to = self._rows_where(copied, sources), self._rows_where(copied, targets)
        self._valid[targets] = copied
        self._dirty[targets] = copied & self._dirty[sources]
        self._hand_over_key(sources, targets)
        self._begin_fill(targets)
        new[chosen] = targets
        return new, copied_from, copied_to

    def _hand_over_key(self, sources: Int64Array, targets: Int64Array) -> None:
        keys = self._key_of[sources]
        self._key_of[targets], self._key_of[sources] = keys, -1
        self._slot_of[keys] = targets + 1
        was_dirty = self._state[sources] == _DIRTY
        # What a flush in flight takes down counts as new here, or somebody who writes all the time would keep a flush
        # of everything from ever ending; the flush in flight is waited for by itself.
        since = np.where(was_dirty, self._dirty_since[sources], _NEVER)
        self._set_clean(sources[was_dirty])
        self._set_since(targets, since)
        self._step(sources, _SUPERSEDED)
        self._takeable[sources] = 0
        self._has_failed[sources] = False
        self._superseded += len(sources)
        self._detached += len(sources)

    def _set_since(self, slots: Int64Array, since: Int64Array | int) -> None:
        self._dirty_count -= int(np.count_nonzero(self._dirty_since[slots] != _NEVER))
        self._dirty_since[slots] = since
        self._dirty_count += int(np.count_nonzero(self._dirty_since[slots] != _NEVER))

    def _set_clean(self, slots: Int64Array) -> None:
        if len(slots) == 1:
            self._set_clean_one(slots.item())
        if len(slots) < 2:
            return
        self._dirty[slots] = False
        self._dirty_count -= int(np.count_nonzero(self._dirty_since[slots] != _NEVER))
        self._dirty_since[slots] = _NEVER
        self._has_failed[slots] = False
        self._flushable[slots] = 0
        is_listed = self._dirty_order.contains(slots)
        if some(is_listed):
            self._dirty_order.remove_many(slots[is_listed])

    def _set_clean_one(self, slot: int) -> None:
        self._dirty[slot] = False
        self._dirty_count -= self._since_list[slot] != _NEVER
        self._since_list[slot] = _NEVER
        self._failed_list[slot] = self._flushable_list[slot] = 0
        if slot in self._dirty_order:
            self._dirty_order.remove(slot)

    def _rows_where(self, flags: Flags, slots: Int64Array) -> Int64Array:
        which, place = np.nonzero(flags)
        return slots[which] * self.groups_per_slot + place

    def commit(self, plan: FillPlan, landed: Int64Array, *, is_dirty: bool = True) -> None:
        """The bytes of the rows `landed` are there, and what is not among them will not come.

        `is_dirty` says whether they are newer than what is below. A group that did not land is what it was before.
        """
        self._valid_rows[landed] = True
        if is_dirty:
            self._dirty.reshape(-1)[landed] = True
        slots = plan.slots
        if not len(slots):
            return
        self.openings += 1
        if len(slots) == 1:
            self._commit_one(slots)
            return
        self._fills[slots] -= 1
        has_dirt: Flags = np.logical_or.reduce(self._dirty[slots], axis=1)
        has_ended = self._fills[slots] == 0
        if every(has_dirt) and every(has_ended):
            self._date(slots)
            self._become_dirty(slots)
            return
        if some(has_dirt):
            self._date(slots[has_dirt])
            self._become_dirty(slots[has_ended & has_dirt])
        self._end_clean(slots[has_ended & ~has_dirt])

    def _commit_one(self, slots: Int64Array) -> None:
        slot = slots.item()
        self._fill_list[slot] -= 1
        has_dirt, has_ended = some(self._dirty[slot]), self._fill_list[slot] == 0
        if has_dirt and self._since_list[slot] == _NEVER:
            self._since_list[slot] = self._dirt
            self._dirt += 1
            self._dirty_count += 1
        if has_ended and has_dirt:
            next_state(self._state_list, slot, _FILLED_DIRTY)
            self._failed_list[slot], self._flushable_list[slot] = 0, 1
            if slot not in self._dirty_order:
                self._dirty_order.append(slot)
            self._dirty_order.restore(slots)
        elif has_ended:
            self._end_clean(slots)

    def _end_clean(self, clean: Int64Array) -> None:
        """Slots in which nothing is dirty are filled, or have nothing in them."""
        if not len(clean):
            return
        self._set_clean(clean)
        self._step(clean, _FILLED_CLEAN)
        is_empty = ~np.logical_or.reduce(self._valid[clean], axis=1)
        is_unread = self._leases[clean] == 0
        self._forget(clean[is_empty & is_unread])
        self._settle(clean[~is_empty & is_unread])

    def invalidate(self, rows: Int64Array) -> None:
        """Rows that are being filled hold nobody knows what: a failed copy. What was in them is lost."""
        self._valid_rows[rows] = False
        self._dirty.reshape(-1)[rows] = False

    def _date(self, slots: Int64Array) -> None:
        """Note since when slots are dirty, if they were not already."""
        is_new = self._dirty_since[slots] == _NEVER
        count = int(np.count_nonzero(is_new))
        if count:
            self._dirty_since[slots[is_new]] = np.arange(self._dirt, self._dirt + count)
            self._dirt += count
            self._dirty_count += count

    def _become_dirty(self, slots: Int64Array) -> None:
        if not len(slots):
            return
        self._step(slots, _FILLED_DIRTY)
        self._has_failed[slots] = False
        self._flushable[slots] = 1
        is_known = self._dirty_order.contains(slots)
        if not every(is_known):
            self._dirty_order.append_many(slots[~is_known])
        self._dirty_order.restore(slots)  # those whose turn came while they were being filled

    def _forget(self, slots: Int64Array) -> None:
        if not len(slots):
            return
        for slot in slots.tolist():
            self._policy.forget(slot)
        self._set_clean(slots)
        self._slot_of[self._key_of[slots]] = 0
        self._key_of[slots] = -1
        self._empty(slots)

    # Flushing.

    def plan_flush(self, slots_max: int) -> FlushPlan | None:
        """The oldest dirty slots, at most `slots_max`, to be written down; None if there are none to try."""
        found = self._dirty_order.take_many(slots_max, self._flushable_list)
        if not found:
            return None
        slots = np.array(found, np.int64)
        self._flushable[slots] = 0
        self._step(slots, _FLUSH)
        self.lease(slots)
        which, place = np.nonzero(self._dirty[slots])
        ids = self._key_of[slots][which] * self.groups_per_slot + place
        return FlushPlan(ids, slots[which] * self.groups_per_slot + place, slots)

    def flushed(self, plan: FlushPlan, is_landed: Flags) -> None:
        """What became of a flush, group by group. A slot of which something failed is dirty again; see `retry`."""
        slots = plan.slots
        self.openings += 1
        unread = self._end_leases(slots)
        landed = slots
        if not every(is_landed):
            is_failed = np.isin(slots, plan.rows[~is_landed] // self.groups_per_slot)
            self._flush_failed(plan, slots[is_failed], is_landed)
            landed = slots[~is_failed]
            unread = landed[self._leases[landed] == 0]
        self._set_clean(landed)
        self._step(landed, _LANDED)
        if len(unread):
            self._settle(unread)

    def _flush_failed(self, plan: FlushPlan, slots: Int64Array, is_landed: Flags) -> None:
        self._dirty.reshape(-1)[plan.rows[is_landed]] = False
        is_detached = self._key_of[slots] < 0
        attached, detached = slots[~is_detached], slots[is_detached]
        self._step(slots, _FAILED)
        self._has_failed[attached] = True
        self._dirty_order.append_many(attached)
        if len(detached):
            self._inherit(plan, detached)
            self._step(detached, _SUPERSEDED)
            self._set_clean(detached)
            self._settle(detached[self._leases[detached] == 0])

    def _inherit(self, plan: FlushPlan, detached: Int64Array) -> None:
        """The newer slots have all groups of the detached ones, dirty: nothing is lost, but they are due as early."""
        for slot in detached.tolist():
            first = int(np.argmax(plan.rows // self.groups_per_slot == slot))
            heir = (
                self._slot_of[plan.group_ids[first : first + 1] // self.groups_per_slot].astype(np.int64) - 1
            )
            self._set_since(heir, np.minimum(self._dirty_since[heir], self._dirty_since[slot]))

    def retry(self, slots: Int64Array | None = None) -> int:
        """Have what could not be flushed (all, or these slots) tried again; returns how many slots that is."""
        is_failed = self._has_failed & (self._state == _DIRTY)
        failed = is_failed.nonzero()[0] if slots is None else slots[is_failed[slots]]
        if not len(failed):
            return 0
        self._has_failed[failed] = False
        self._flushable[failed] = 1
        self._dirty_order.restore(failed)
        return len(failed)

    @property
    def dirt(self) -> int:
        """A mark in time: slots that become dirty from here on do so after it."""
        return self._dirt

    def is_dirty_before(self, mark: int) -> bool:
        """Whether a slot that became dirty before `mark` is still to be flushed, failed ones apart."""
        return some((self._dirty_since < mark) & ~self._has_failed)

    def failed_groups(self) -> Int64Array:
        """The groups that could not be flushed and were not tried again."""
        return self._dirty_groups(np.flatnonzero(self._has_failed))

    def dirty_groups(self) -> Int64Array:
        """All groups that are newer here than below, in rising order."""
        return self._dirty_groups(np.flatnonzero(self._dirty_since != _NEVER))

    def _dirty_groups(self, slots: Int64Array) -> Int64Array:
        slots = slots[self._key_of[slots] >= 0]
        which, place = np.nonzero(self._dirty[slots])
        return np.sort(self._key_of[slots][which] * self.groups_per_slot + place)

    # Looking.

    @property
    def dirty_count(self) -> int:
        """How many slots hold something newer than what is below, those being flushed included."""
        return self._dirty_count

    def residents(self) -> Int64Array:
        """All resident groups, in rising order."""
        slots = np.flatnonzero(self._key_of >= 0)
        which, place = np.nonzero(self._valid[slots])
        return np.sort(self._key_of[slots][which] * self.groups_per_slot + place)

    def counts(self) -> CacheCounts:
        """Counters since the start, and how things are now."""
        return CacheCounts(
            evicted_slots=self._evicted,
            superseded_slots=self._superseded,
            resident_slots=int(np.count_nonzero(self._key_of >= 0)),
            dirty_slots=self._dirty_count,
            leases=int(self._leases.sum()),
        )

    def check_invariants(self) -> None:
        """Raise AssertionError if the book contradicts itself. For tests: it looks at everything."""
        check_book(self)
