"""LRU: what has not been used for longest goes first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from aio_kv.integers import Int64Array
from aio_kv.policy.interface import SlotKeys
from aio_kv.policy.order import SlotOrder

__all__ = ["Lru"]


class Lru:
    """Least recently used."""

    def __init__(self, capacity: int) -> None:
        self._order = SlotOrder(capacity)

    def touch(self, slots: Int64Array) -> None:
        """See `Policy.touch`."""
        self._order.renew(slots)

    def admit(self, keys: Sequence[int], free: list[int], takeable: bytearray, key_of: SlotKeys) -> list[int]:
        """See `Policy.admit`."""
        slots = self.evict(len(keys), free, takeable, key_of)
        if slots:
            self._order.append_many(np.array(slots, np.int64))
        return slots

    def evict(self, count: int, free: list[int], takeable: bytearray, key_of: SlotKeys) -> list[int]:
        """See `Policy.evict`."""
        taken = min(count, len(free))
        slots = free[len(free) - taken :][::-1]
        del free[len(free) - taken :]
        return slots + self._order.take_many(count - taken, takeable) if taken < count else slots

    def substitute(self, old: int, new: int) -> None:
        """See `Policy.substitute`."""
        self._order.remove(old)
        self._order.append(new)

    def forget(self, slot: int) -> None:
        """See `Policy.forget`."""
        self._order.remove(slot)

    def restore(self, slots: Int64Array) -> None:
        """See `Policy.restore`."""
        self._order.restore(slots)

    def residents(self) -> list[int]:
        """See `Policy.residents`."""
        return self._order.members()
