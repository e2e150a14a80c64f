"""S3-FIFO: a small queue filters what is used once, a main queue gives what was used another round.

After J. Yang and others, "FIFO queues are all you need for cache eviction", SOSP 2023: a tenth of the cache for the
small queue, a ghost queue of as many keys as the main queue may hold, uses counted up to three.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from aio_kv.integers import Int64Array
from aio_kv.policy.interface import SlotKeys
from aio_kv.policy.order import SlotOrder

__all__ = ["S3Fifo"]

_USES_MAX = 3
_SMALL_SHARE = 10  # one slot in as many


class S3Fifo:
    """Small, main and ghost queue, all first in, first out."""

    def __init__(self, capacity: int) -> None:
        self._small_max = max(1, capacity // _SMALL_SHARE)
        self._ghosts_max = max(1, capacity - self._small_max)
        self._small, self._main = SlotOrder(capacity), SlotOrder(capacity)
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        self._uses = bytearray(capacity)
        self._uses_view = np.frombuffer(self._uses, np.uint8)

    def touch(self, slots: Int64Array) -> None:
        """See `Policy.touch`."""
        self._uses_view[slots] = np.minimum(self._uses_view[slots] + 1, _USES_MAX)

    def admit(self, keys: Sequence[int], free: list[int], takeable: bytearray, key_of: SlotKeys) -> list[int]:
        """See `Policy.admit`."""
        slots: list[int] = []
        small: list[int] = []
        main: list[int] = []
        ghosts = self._ghosts
        for key in keys:
            is_ghost = key in ghosts
            slot = free.pop() if free else self._give_up(len(small), takeable, key_of)
            if slot is None:
                break
            takeable[slot] = 0  # or it might be given to the next key as well
            slots.append(slot)
            if is_ghost:
                ghosts.pop(key, None)
                main.append(slot)
            else:
                small.append(slot)
        # They could not have been given up before, so that they come in together makes no difference.
        if slots:
            self._uses_view[slots] = 0
        if small:
            self._small.append_many(np.array(small, np.int64))
        if main:
            self._main.append_many(np.array(main, np.int64))
        return slots

    def _give_up(self, coming: int, takeable: bytearray, key_of: SlotKeys) -> int | None:
        """Give up a slot; `coming` more than there are will be in the small queue."""
        if self._small.count + coming >= self._small_max:
            slot = self._give_up_small(takeable, key_of)
            return slot if slot is not None else self._give_up_main(takeable)
        slot = self._give_up_main(takeable)
        return slot if slot is not None else self._give_up_small(takeable, key_of)

    def _give_up_small(self, takeable: bytearray, key_of: SlotKeys) -> int | None:
        uses, ghosts = self._uses, self._ghosts
        while (slot := self._small.take_first(takeable)) is not None:
            if uses[slot] <= 1:
                ghosts[key_of[slot]] = None
                if len(ghosts) > self._ghosts_max:
                    ghosts.popitem(last=False)
                return slot
            uses[slot] = 0
            self._main.append(slot)
        return None

    def _give_up_main(self, takeable: bytearray) -> int | None:
        while (slot := self._main.take_first(takeable)) is not None:
            if not self._uses[slot]:
                return slot
            self._uses[slot] -= 1
            self._main.append(slot)
        return None

    def evict(self, count: int, free: list[int], takeable: bytearray, key_of: SlotKeys) -> list[int]:
        """See `Policy.evict`."""
        slots: list[int] = []
        while len(slots) < count:
            slot = free.pop() if free else self._give_up(0, takeable, key_of)
            if slot is None:
                break
            slots.append(slot)
        return slots

    def substitute(self, old: int, new: int) -> None:
        """See `Policy.substitute`."""
        queue = self._small if old in self._small else self._main
        queue.remove(old)
        queue.append(new)
        self._uses[new] = min(self._uses[old] + 1, _USES_MAX)

    def forget(self, slot: int) -> None:
        """See `Policy.forget`."""
        (self._small if slot in self._small else self._main).remove(slot)

    def restore(self, slots: Int64Array) -> None:
        """See `Policy.restore`."""
        self._small.restore(slots)
        self._main.restore(slots)

    def residents(self) -> list[int]:
        """See `Policy.residents`."""
        return self._small.members() + self._main.members()
