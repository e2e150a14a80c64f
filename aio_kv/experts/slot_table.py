"""Which expert is in which slot of an arena, who leases it, and which slot goes next. Pure: no I/O, no event loop.

| state | key | leases | what happens to it |
|---|---|---|---|
| free | none | 0 | taken first |
| filling | its expert | 0 or more | bytes are on their way: neither taken nor free |
| resident, leased | its expert | 1 or more | not taken: somebody reads its bytes |
| resident | its expert | 0 | the policy may take it |
| abandoned | none | 1 or more | its fill failed; free when the last lease ends |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from aio_kv.policy import Policy

__all__ = ["Grant", "SlotTable"]

_NO_KEY = -1


@dataclass(frozen=True, slots=True)
class Grant:
    """Slots leased for a set of experts: where each key is, which of them were resident, and which have to be read."""

    slots: dict[int, int]
    hits: tuple[int, ...]
    filling: tuple[int, ...]
    missing: tuple[int, ...]
    evicted: int = 0
    prefetched: tuple[int, ...] = field(
        default=()
    )  # keys that a prefetch has brought, or is bringing, used for once


class SlotTable:
    """The slots of one arena, by number. A key is an expert's number among all experts of the model."""

    def __init__(self, capacity: int, policy: Policy) -> None:
        self.capacity = capacity
        self._policy = policy
        self._slot_of: dict[int, int] = {}
        self._key_of = [_NO_KEY] * capacity
        self._free = list(range(capacity - 1, -1, -1))
        self._leases = [0] * capacity
        self._is_filling = bytearray(capacity)
        self._takeable = bytearray(capacity)
        self._takeable_count = 0
        self._is_unproven = bytearray(capacity)  # a prefetch brought it and nobody has used it yet
        self.unproven = 0
        self.wasted = 0  # unproven ones that were evicted or whose fill ended in nothing

    def slot_of(self, key: int) -> int | None:
        """The slot that holds an expert or is being filled with it."""
        return self._slot_of.get(key)

    def is_filling(self, slot: int) -> bool:
        """Whether the bytes of a slot are on their way."""
        return bool(self._is_filling[slot])

    def is_leased(self, slot: int) -> bool:
        """Whether anybody has the right to a slot."""
        return self._leases[slot] > 0

    @property
    def leases(self) -> int:
        """All leases there are."""
        return sum(self._leases)

    @property
    def filling(self) -> int:
        """How many slots are being filled."""
        return sum(self._is_filling)

    @property
    def resident(self) -> int:
        """How many slots hold an expert."""
        return len(self._slot_of) - self.filling

    def acquire(self, keys: Sequence[int]) -> Grant | None:
        """Lease a slot for each of `keys`, all or none. None if there are not enough slots to be had now.

        All at once, because two that each held half of what they need would wait for each other for ever. Slots for
        keys that are missing begin to be filled: the caller sees to that.
        """
        present = {key: slot for key in keys if (slot := self._slot_of.get(key)) is not None}
        missing = tuple(key for key in keys if key not in present)
        for slot in present.values():
            self._lease(slot)  # first of all, or the policy might take it for one of the others
        if len(missing) > len(self._free) + self._takeable_count:
            for slot in present.values():
                self.release(slot)
            return None
        filling = tuple(key for key, slot in present.items() if self._is_filling[slot])
        hits = tuple(key for key in present if key not in filling)
        prefetched = tuple(key for key, slot in present.items() if self._is_unproven[slot])
        for key in prefetched:
            self._prove(present[key])
        self._policy.touch(np.array(list(present.values()), np.int64))
        slots, evicted = self._admit(missing)
        for slot in slots.values():
            self._leases[slot] = 1
        return Grant({**present, **slots}, hits, filling, missing, evicted, prefetched)

    def admit_unproven(self, key: int) -> tuple[int, int] | None:
        """A slot for an expert that nobody waits for, and how many were evicted; None if there is none to be had."""
        assert key not in self._slot_of
        if not self._free and not self._takeable_count:
            return None
        slots, evicted = self._admit((key,))
        self._is_unproven[slots[key]] = 1
        self.unproven += 1
        return slots[key], evicted

    def _admit(self, keys: Sequence[int]) -> tuple[dict[int, int], int]:
        slots: dict[int, int] = {}
        evicted = 0
        for key in keys:  # one by one: a slot that was given to one key must not look takeable to the next
            found = self._policy.admit((key,), self._free, self._takeable, self._key_of)
            assert len(found) == 1, "the policy found fewer slots than there are"
            slots[key] = slot = found[0]
            if self._key_of[slot] != _NO_KEY:
                evicted += 1
                self._vacate(slot)
            self._key_of[slot] = key
            self._slot_of[key] = slot
            self._is_filling[slot] = 1
        return slots, evicted

    def _vacate(self, slot: int) -> None:
        del self._slot_of[self._key_of[slot]]
        self._takeable[slot] = 0
        self._takeable_count -= 1
        self.wasted += self._is_unproven[slot]
        self._prove(slot)

    def filled(self, slot: int) -> None:
        """The bytes of a slot are there."""
        assert self._is_filling[slot]
        self._is_filling[slot] = 0
        if not self._leases[slot]:
            self._offer(slot)

    def unfilled(self, slot: int) -> None:
        """The bytes of a slot did not come, and nothing writes to it any more: it holds nothing."""
        assert self._is_filling[slot]
        self._is_filling[slot] = 0
        del self._slot_of[self._key_of[slot]]
        self._key_of[slot] = _NO_KEY
        self._policy.forget(slot)
        self.wasted += self._is_unproven[slot]
        self._prove(slot)
        if not self._leases[slot]:
            self._free.append(slot)

    def release(self, slot: int) -> None:
        """End one lease."""
        assert self._leases[slot] > 0, "a lease ends once"
        self._leases[slot] -= 1
        if self._leases[slot] or self._is_filling[slot]:
            return
        if self._key_of[slot] == _NO_KEY:
            self._free.append(slot)
        else:
            self._offer(slot)

    def _lease(self, slot: int) -> None:
        self._leases[slot] += 1
        if self._takeable[slot]:
            self._takeable[slot] = 0
            self._takeable_count -= 1

    def _offer(self, slot: int) -> None:
        self._takeable[slot] = 1
        self._takeable_count += 1
        self._policy.restore(np.array((slot,), np.int64))

    def _prove(self, slot: int) -> None:
        self.unproven -= self._is_unproven[slot]
        self._is_unproven[slot] = 0

    def check(self) -> None:
        """Assert what must be true at any moment; for tests."""
        held = {slot: key for slot, key in enumerate(self._key_of) if key != _NO_KEY}
        assert self._slot_of == {key: slot for slot, key in held.items()}
        assert sorted(self._policy.residents()) == sorted(held)
        assert len(set(self._free)) == len(self._free)
        for slot in range(self.capacity):
            is_idle = not self._leases[slot] and not self._is_filling[slot]
            assert bool(self._takeable[slot]) == (slot in held and is_idle)
            assert (slot in self._free) == (slot not in held and is_idle)
            assert slot in held or not (self._is_filling[slot] or self._is_unproven[slot])
        assert self._takeable_count == sum(self._takeable)
        assert self.unproven == sum(self._is_unproven)
