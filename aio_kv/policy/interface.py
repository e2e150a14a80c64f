"""What an eviction policy is: it orders slots and remembers keys, and knows nothing of bytes, states and leases.

A policy is told of every use and of every key that comes in, in order, so that one that looks at more than recency
(the parents of a block, the time of its conversation) can be added without a change elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from aio_kv.integers import Int64Array

__all__ = ["Policy", "SlotKeys"]


class SlotKeys(Protocol):
    """The key of each slot, by number."""

    def __getitem__(self, slot: int, /) -> int:
        """The key of a slot that holds one."""


class Policy(Protocol):
    """Which slot goes next. `takeable[slot]` is 1 for slots that may be given up now, and no other is ever taken."""

    def touch(self, slots: Int64Array) -> None:
        """Resident slots were used, in this order. One that is named twice counts once."""

    def admit(self, keys: Sequence[int], free: list[int], takeable: bytearray, key_of: SlotKeys) -> list[int]:
        """Find a slot for each of `keys`, none of which is resident, in order; fewer if there are no more to take.

        Slots of `free` are popped first. A slot that was given up for a key comes back as that key's slot;
        none comes back twice, and `takeable` of it may have been set to 0.
        """

    def evict(self, count: int, free: list[int], takeable: bytearray, key_of: SlotKeys) -> list[int]:
        """Find up to `count` slots for no key in particular; the policy does not know them any more."""

    def substitute(self, old: int, new: int) -> None:
        """The key of a resident slot lives in another slot from here on, and was used."""

    def forget(self, slot: int) -> None:
        """A slot holds its key no longer, and was not evicted."""

    def restore(self, slots: Int64Array) -> None:
        """These slots may be taken again."""

    def residents(self) -> list[int]:
        """All slots that the policy knows, in no order, for tests."""
