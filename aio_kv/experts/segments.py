"""Where the bytes of one expert lie in files, and where they go in memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["DirectSegment", "coalesced"]


@dataclass(frozen=True, slots=True)
class DirectSegment:
    """One read: `nbytes` from `file_offset` of a file to `slot_offset` of a slot. All but `shard` in bytes.

    `shard` counts the files of a model (`ExpertMap.paths`) from 0.
    """

    shard: int
    file_offset: int
    slot_offset: int
    nbytes: int


def coalesced(segments: Iterable[DirectSegment]) -> tuple[DirectSegment, ...]:
    """Return the same bytes in as few segments as there can be: neighbours in file and slot become one."""
    joined: list[DirectSegment] = []
    for segment in segments:
        if joined and _follows(segment, joined[-1]):
            last = joined.pop()
            segment = DirectSegment(
                last.shard, last.file_offset, last.slot_offset, last.nbytes + segment.nbytes
            )
        joined.append(segment)
    return tuple(joined)


def _follows(segment: DirectSegment, last: DirectSegment) -> bool:
    return (
        segment.shard == last.shard
        and segment.file_offset == last.file_offset + last.nbytes
        and segment.slot_offset == last.slot_offset + last.nbytes
    )
