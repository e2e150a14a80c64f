"""What an arena has done so far."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ArenaStatistics"]


@dataclass(frozen=True, slots=True)
class ArenaStatistics:
    """Counters of an arena since it opened; the first block is of now.

    Attributes:
        slots, slot_nbytes: how many slots there are, and their size.
        resident, filling, leases, waiting: slots with an expert in them, slots being filled, leases held, and calls
            that wait for slots.
        demands: calls of `experts` that got their slots.
        hits, joined, misses: experts in them that were there, were on their way for somebody else, had to be read.
        evictions: experts that made room.
        failures, cancelled: fills that failed, and that were given up because nobody waited any more.
        bytes_demanded: of all experts that were asked for.
        bytes_read: of the fills that were begun for somebody who waited.
        prefetches: experts that `prefetch` was asked for; of those
        prefetches_refused: were beyond the bound, or there already;
        prefetches_dropped: were given up because a demand came;
        prefetches_used: were there, or on their way, when they were asked for;
        prefetches_wasted: were read, at least in part, and never used.
        bytes_prefetched: read ahead of any demand, in whole or in part.
    """

    slots: int = 0
    slot_nbytes: int = 0
    resident: int = 0
    filling: int = 0
    leases: int = 0
    waiting: int = 0
    demands: int = 0
    hits: int = 0
    joined: int = 0
    misses: int = 0
    evictions: int = 0
    failures: int = 0
    cancelled: int = 0
    bytes_demanded: int = 0
    bytes_read: int = 0
    prefetches: int = 0
    prefetches_refused: int = 0
    prefetches_dropped: int = 0
    prefetches_used: int = 0
    prefetches_wasted: int = 0
    bytes_prefetched: int = 0

    @property
    def hit_ratio(self) -> float:
        """The share of experts asked for that were there; 0 before the first."""
        asked = self.hits + self.joined + self.misses
        return self.hits / asked if asked else 0.0
