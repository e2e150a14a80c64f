"""What a cascade has done so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["CascadeStatistics", "ConductorCounts"]


@dataclass(slots=True)
class ConductorCounts:
    """Counters since the start. Hits and misses are groups; waits are transfers, by what they waited for."""

    transfers: int = 0
    hits: int = 0
    misses: int = 0
    hit_nbytes: int = 0
    written_groups: int = 0
    written_nbytes: int = 0
    promoted_groups: int = 0
    waits_for_order: int = 0
    waits_for_room: int = 0
    waits_for_backing: int = 0
    failed: int = 0
    cancelled: int = 0
    refused: int = 0
    unobserved_failures: int = 0
    quarantined_slots: int = 0


@dataclass(frozen=True, slots=True)
class CascadeStatistics:
    """Counters of a cascade since it opened, and how it is now.

    Attributes:
        policy, slots, slot_nbytes: its size and rule. `slab_nbytes` of memory hold the slots, of which
            `registered_nbytes` are registered with the backing and `is_pinned` with the GPU.
        hits, misses: groups read from here and from below; `hit_nbytes` payload bytes of the hits.
        written_groups, written_nbytes: what was written to here; promoted_groups: what was brought up.
        flushes, failed_flushes, flushed_groups: what went down.
        evicted_slots, superseded_slots: slots given up for other keys; slots whose key moved to another slot, because
            they were written while a copy or a flush read them.
        resident_slots, dirty_slots, leases, quarantined_slots: as they are now. A quarantined slot may still be written
            by a lost device.
        waits_for_room, waits_for_order, waits_for_backing: transfers that did not begin in their call, by cause.
        transfers, failed, cancelled, refused, unobserved_failures: transfers; those that went past the cascade to the
            backing are counted there.
        backing: the statistics of the backing.
    """

    policy: str
    slots: int
    slot_nbytes: int
    slab_nbytes: int
    registered_nbytes: int
    is_pinned: bool
    hits: int
    misses: int
    hit_nbytes: int
    written_groups: int
    written_nbytes: int
    promoted_groups: int
    flushes: int
    failed_flushes: int
    flushed_groups: int
    evicted_slots: int
    superseded_slots: int
    resident_slots: int
    dirty_slots: int
    leases: int
    quarantined_slots: int
    waits_for_room: int
    waits_for_order: int
    waits_for_backing: int
    transfers: int
    failed: int
    cancelled: int
    refused: int
    unobserved_failures: int
    backing: Any
