"""What a `SlotCache` answers: where groups are, where they may go, and what has to go down first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from aio_kv.integers import Int64Array

__all__ = ["CacheCounts", "FillPlan", "FlushPlan", "ReadPlan"]

Flags = NDArray[np.bool_]


class ReadPlan(NamedTuple):
    """Where the groups of a read are.

    Attributes:
        rows: the row of each group in the slab (slot * groups_per_slot + place in the slot); -1 for a miss.
        is_hit: whether each group is resident.
        hits: how many are.
    """

    rows: Int64Array
    is_hit: Flags
    hits: int


class FillPlan(NamedTuple):
    """Where groups that are coming in go. The slots are FILLING until `SlotCache.commit`.

    Attributes:
        rows: the row of each group; -1 for those that found no room.
        slots: the slots, each once.
        copied_from, copied_to: rows to copy inside the slab, before anything else: the other groups of a slot that
            could not be written in place. Empty for most calls.
    """

    rows: Int64Array
    slots: Int64Array
    copied_from: Int64Array
    copied_to: Int64Array


class FlushPlan(NamedTuple):
    """Dirty groups on their way down. The slots are FLUSHING and leased until `SlotCache.flushed`.

    Attributes:
        group_ids: the dirty groups, in rising order within each slot.
        rows: the row of each.
        slots: the slots, each once.
    """

    group_ids: Int64Array
    rows: Int64Array
    slots: Int64Array


@dataclass(frozen=True, slots=True)
class CacheCounts:
    """What has happened since the start, and how things are."""

    evicted_slots: int
    superseded_slots: int
    resident_slots: int
    dirty_slots: int
    leases: int
