"""`SlotOrder`: slots in the order in which they would be given up, the first one first.

A log of slot numbers in which a slot's last entry counts: `_place[slot]` is where that is, and every other entry of the
slot is skipped when it is met. So a batch of a thousand uses is two array operations and no search. (An `OrderedDict`
took four times as long at 100,000 slots: it is a linked list whose nodes are all over the memory.) The log has room for
several times the slots and is packed when it is full, which costs O(1) for each entry written.

A slot that cannot be taken at the moment (dirty, being read, being written) and would have been next *stands aside*
until it can be taken again, so that it is looked at once and not by everybody who needs room.
"""

from __future__ import annotations

from array import array
from typing import Final

import numpy as np

from aio_kv.flags import some
from aio_kv.integers import Int64Array

__all__ = ["SlotOrder"]

_ABSENT: Final = -1
_ASIDE: Final = -2
_ROOM_MIN: Final = 512
_FEW: Final = 16  # up to here slots are listed one by one


class SlotOrder:
    """An ordered set of slot numbers below `capacity`. 8 bytes for each slot, and 32 for each that is in use."""

    def __init__(self, capacity: int) -> None:
        # C values with a NumPy view: whole batches through the view, single ones through the array, which is faster.
        self._place_list = array("q", [_ABSENT]) * capacity
        self._place = np.frombuffer(self._place_list, np.int64)
        self._aside = 0
        self.count = 0  # members, those that stand aside included
        self._make_log(_ROOM_MIN)

    def _make_log(self, room: int) -> None:
        self._log_list = array("q", bytes(8 * room))
        self._log = np.frombuffer(self._log_list, np.int64)
        self._room = room
        self._first = self._end = room // 4  # what comes back goes in front

    def __contains__(self, slot: int) -> bool:
        return self._place_list[slot] != _ABSENT

    def members(self) -> list[int]:
        """All members, in no order."""
        found: list[int] = np.flatnonzero(self._place != _ABSENT).tolist()
        return found

    def contains(self, slots: Int64Array) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which of `slots` are members."""
        is_member: np.ndarray[tuple[int], np.dtype[np.bool_]] = self._place[slots] != _ABSENT
        return is_member

    def append_many(self, slots: Int64Array) -> None:
        """Add slots, none of which is a member, behind all others."""
        self.count += len(slots)
        self.renew(slots)

    def append(self, slot: int) -> None:
        """Add one slot behind all others."""
        if self._end == self._room:
            self._pack(1)
        self.count += 1
        self._log_list[self._end] = slot
        self._place_list[slot] = self._end
        self._end += 1

    def renew(self, slots: Int64Array) -> None:
        """Move members behind all others, in the given order; of one that is named twice the last counts."""
        count = len(slots)
        if self._end + count > self._room:
            self._pack(count)
        if self._aside and some(is_aside := self._place[slots] == _ASIDE):
            self._aside -= len(np.unique(slots[is_aside]))
        end = self._end
        if count <= _FEW:
            for slot in slots.tolist():
                self._log_list[end] = slot
                self._place_list[slot] = end
                end += 1
        else:
            self._log[end : end + count] = slots
            self._place[slots] = np.arange(end, end + count)
        self._end += count

    def remove(self, slot: int) -> None:
        """Take a member out."""
        self._aside -= self._place_list[slot] == _ASIDE
        self._place_list[slot] = _ABSENT
        self.count -= 1

    def remove_many(self, slots: Int64Array) -> None:
        """Take members out, each named once."""
        if self._aside:
            self._aside -= int(np.count_nonzero(self._place[slots] == _ASIDE))
        self._place[slots] = _ABSENT
        self.count -= len(slots)

    def take_first(self, takeable: bytearray) -> int | None:
        """Remove and return the first slot for which `takeable` is not 0; None if there is none."""
        log, place, first, end = self._log_list, self._place_list, self._first, self._end
        while first < end:
            slot = log[first]
            if place[slot] == first:
                if takeable[slot]:
                    place[slot] = _ABSENT
                    self.count -= 1
                    self._first = first + 1
                    return slot
                place[slot] = _ASIDE
                self._aside += 1
            first += 1
        self._first = first
        return None

    def take_many(self, count: int, takeable: bytearray) -> list[int]:
        """Remove and return up to `count` slots as `take_first` would, one after the other."""
        if count < _FEW:
            few: list[int] = []
            while len(few) < count and (slot := self.take_first(takeable)) is not None:
                few.append(slot)
            return few
        found: list[int] = []
        can_go = np.frombuffer(takeable, np.uint8)
        while len(found) < count and self._first < self._end:
            at = np.arange(self._first, min(self._first + 2 * count, self._end))
            slots = self._log[at[0] : at[-1] + 1]
            is_alive = self._place[slots] == at
            is_taken = is_alive & (can_go[slots] != 0)
            taken = np.flatnonzero(is_taken)[: count - len(found)]
            looked = len(at) if len(found) + len(taken) < count else int(taken[-1]) + 1
            aside = slots[:looked][is_alive[:looked] & ~is_taken[:looked]]
            self._place[aside] = _ASIDE
            self._aside += len(aside)
            chosen = slots[taken]
            self._place[chosen] = _ABSENT
            self.count -= len(chosen)
            self._first += looked
            found += chosen.tolist()
        return found

    def restore(self, slots: Int64Array) -> None:
        """Put those of `slots` that stand aside back in front of all others: they can be taken again."""
        if not self._aside:
            return
        is_aside = self._place[slots] == _ASIDE
        if not some(is_aside):
            return
        back = slots[is_aside]
        back = np.fromiter(dict.fromkeys(back.tolist()), np.int64)
        if self._first < len(back):
            self._pack(len(back))
        first = self._first - len(back)
        self._log[first : self._first] = back
        self._place[back] = np.arange(first, self._first)
        self._first = first
        self._aside -= len(back)

    def _pack(self, coming: int) -> None:
        """Drop the entries that do not count, and make room for `coming` more at either end."""
        at = np.arange(self._first, self._end)
        slots = self._log[self._first : self._end]
        alive = slots[self._place[slots] == at]
        room = max(_ROOM_MIN, 4 * (len(alive) + self._aside + coming))
        self._make_log(room)
        self._first = room // 4
        self._end = self._first + len(alive)
        self._log[self._first : self._end] = alive
        self._place[alive] = np.arange(self._first, self._end)
