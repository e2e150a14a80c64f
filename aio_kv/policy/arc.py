"""ARC: two orders, used once and used again, whose shares follow what was missed of late.

After N. Megiddo and D. Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003; the names `t1`, `t2`
(resident), `b1`, `b2` (keys that were given up) and `p` (the target size of `t1`) are theirs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from aio_kv.integers import Int64Array
from aio_kv.policy.interface import SlotKeys
from aio_kv.policy.order import SlotOrder

__all__ = ["Arc"]


class Arc:
    """Adaptive replacement."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._t1, self._t2 = SlotOrder(capacity), SlotOrder(capacity)
        self._b1: OrderedDict[int, None] = OrderedDict()
        self._b2: OrderedDict[int, None] = OrderedDict()
        self._p = 0.0

    def touch(self, slots: Int64Array) -> None:
        """See `Policy.touch`."""
        once, again = self._t1, self._t2
        if once.count and len(moved := slots[once.contains(slots)]):
            moved = np.unique(moved)
            once.remove_many(moved)
            again.append_many(moved)
        again.renew(slots)

    def admit(self, keys: Sequence[int], free: list[int], takeable: bytearray, key_of: SlotKeys) -> list[int]:
        """See `Policy.admit`."""
        slots: list[int] = []
        ghosts_1, ghosts_2 = self._b1, self._b2
        for key in keys:
            if key in ghosts_1 or key in ghosts_2:
                slot = self._readmit(key, free, takeable, key_of)
            else:
                slot = free.pop() if free else self._make_room(takeable, key_of)
                if slot is not None:
                    self._t1.append(slot)
            if slot is None:
                break
            takeable[slot] = 0  # or it might be given to the next key as well
            slots.append(slot)
        self._trim()
        return slots

    def _readmit(self, key: int, free: list[int], takeable: bytearray, key_of: SlotKeys) -> int | None:
        """A slot for a key that was given up not long ago: it counts as used again, and the shares move."""
        is_ghost_1 = key in self._b1
        self._adapt(is_ghost_1)
        slot = free.pop() if free else self._replace(not is_ghost_1, takeable, key_of)
        if slot is not None:
            del (self._b1 if is_ghost_1 else self._b2)[key]
            self._t2.append(slot)
        return slot

    def _adapt(self, is_ghost_1: bool) -> None:
        ghosts_1, ghosts_2 = len(self._b1), len(self._b2)
        if is_ghost_1:
            self._p = min(float(self._capacity), self._p + max(1.0, ghosts_2 / ghosts_1))
        else:
            self._p = max(0.0, self._p - max(1.0, ghosts_1 / ghosts_2))

    def _make_room(self, takeable: bytearray, key_of: SlotKeys) -> int | None:
        """Give up a slot for a key that was never seen, and a ghost where there are too many."""
        seen_once = self._t1.count + len(self._b1)
        if seen_once >= self._capacity:
            if self._b1:
                self._b1.popitem(last=False)
            else:  # all of the cache was used once: what goes is not worth remembering
                slot = self._t1.take_first(takeable)
                return slot if slot is not None else self._replace(False, takeable, key_of)
        elif seen_once + self._t2.count + len(self._b2) >= 2 * self._capacity:
            self._b2.popitem(last=False)
        return self._replace(False, takeable, key_of)

    def _replace(self, is_ghost_2: bool, takeable: bytearray, key_of: SlotKeys) -> int | None:
        once = self._t1.count
        is_first = once > 0 and (once > self._p or (is_ghost_2 and once == self._p))
        for is_once in (is_first, not is_first):
            slot = (self._t1 if is_once else self._t2).take_first(takeable)
            if slot is not None:
                (self._b1 if is_once else self._b2)[key_of[slot]] = None
                return slot
        return None

    def evict(self, count: int, free: list[int], takeable: bytearray, key_of: SlotKeys) -> list[int]:
        """See `Policy.evict`."""
        slots: list[int] = []
        while len(slots) < count:
            slot = free.pop() if free else self._replace(False, takeable, key_of)
            if slot is None:
                break
            slots.append(slot)
        self._trim()
        return slots

    def _trim(self) -> None:
        while self._b1 and self._t1.count + len(self._b1) > self._capacity:
            self._b1.popitem(last=False)
        while self._b2 and self._t2.count + len(self._b2) > 2 * self._capacity:
            self._b2.popitem(last=False)

    def substitute(self, old: int, new: int) -> None:
        """See `Policy.substitute`."""
        self.forget(old)
        self._t2.append(new)

    def forget(self, slot: int) -> None:
        """See `Policy.forget`."""
        (self._t1 if slot in self._t1 else self._t2).remove(slot)

    def restore(self, slots: Int64Array) -> None:
        """See `Policy.restore`."""
        self._t1.restore(slots)
        self._t2.restore(slots)

    def residents(self) -> list[int]:
        """See `Policy.residents`."""
        return self._t1.members() + self._t2.members()
