"""From segments to the I/Os that read them: windows rounded outward, and what of them is owed. Pure and vectorised.

Past the page cache a read begins and ends on multiples of the file's alignment. The *window* of a segment is the
segment rounded outward; it is cut into ops, and an op of which every byte is owed lands where the bytes belong if that
place is aligned as well. All others go through staging, and a copy takes what is owed out of them. The last window of a
file may pass its end.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from aio_kv.experts.segments import DirectSegment
from aio_kv.integers import Int64Array
from aio_kv.plan import COPY_DTYPE, OP_DTYPE, IoLimits, Placement, Plan

__all__ = ["cut", "plan_segments", "window_of"]


def window_of(segment: DirectSegment, alignment: int) -> tuple[int, int]:
    """Return the file offsets at which the window of a segment begins and ends."""
    end = segment.file_offset + segment.nbytes
    return segment.file_offset // alignment * alignment, -(-end // alignment) * alignment


def plan_segments(
    requests: Sequence[Sequence[DirectSegment]],
    addresses: Sequence[int] | Int64Array,
    limits: IoLimits,
    *,
    is_device: bool = False,
) -> Plan:
    """Plan reads of `requests`, the segments of each going to its own address plus their slot offsets.

    Request i is done when all of its segments are. `is_device` says that the addresses are those of device memory.
    """
    counts = np.array([len(segments) for segments in requests], dtype=np.int64)
    rows = [
        (segment.shard, segment.file_offset, segment.nbytes, address + segment.slot_offset)
        for segments, address in zip(requests, addresses, strict=True)
        for segment in segments
    ]
    table = np.array(rows, dtype=np.int64).reshape(-1, 4)
    shard, start, nbytes, address = table.T
    step = limits.offset_alignment
    window_start = start // step * step
    window_end = -(-(start + nbytes) // step) * step
    pieces = -(-(window_end - window_start) // limits.op_nbytes_max)
    first_op = np.cumsum(pieces) - pieces  # of each segment
    segment_of = np.repeat(np.arange(len(table)), pieces)
    op_start = window_start[segment_of] + (np.arange(len(segment_of)) - first_op[segment_of]) * (
        limits.op_nbytes_max
    )
    op_end = np.minimum(op_start + limits.op_nbytes_max, window_end[segment_of])
    owed_start = np.maximum(op_start, start[segment_of])
    owed_end = np.minimum(op_end, (start + nbytes)[segment_of])
    # Where the first byte of the op would go; it is owed only in the middle of a segment.
    place = address[segment_of] + op_start - start[segment_of]
    lands = (owed_start == op_start) & (owed_end == op_end) & (place % limits.memory_alignment == 0)
    if is_device:
        lands[:] = False
    ops = np.zeros(len(op_start), dtype=OP_DTYPE)
    ops["file"], ops["file_offset"], ops["nbytes"] = shard[segment_of], op_start, op_end - op_start
    ops["nbytes_owed"] = np.where(owed_end < op_end, owed_end - op_start, 0)
    ops["placement"] = np.where(lands, int(Placement.DIRECT), int(Placement.STAGED))
    ops["address"] = np.where(lands, place, 0)
    is_staged = ~lands
    ops["copy_count"] = is_staged
    ops["copy_first"] = np.where(is_staged, np.cumsum(is_staged) - 1, 0)
    copies = np.empty(int(is_staged.sum()), dtype=COPY_DTYPE)
    copies["address"] = (place + owed_start - op_start)[is_staged]
    copies["op_offset"] = (owed_start - op_start)[is_staged]
    copies["nbytes"] = (owed_end - owed_start)[is_staged]
    ops_before = np.append(first_op, len(ops))  # of each segment, and all of them behind the last
    first_segment = np.cumsum(counts) - counts
    first = ops_before[first_segment]
    return Plan(ops, len(ops), copies, len(copies), first, ops_before[first_segment + counts] - first)


def cut(segments: Sequence[DirectSegment], nbytes_max: int, alignment: int) -> list[list[DirectSegment]]:
    """Cut segments into lists of about `nbytes_max` bytes each (a multiple of `alignment`), in order.

    A segment is cut only on file offsets that are multiples of `alignment`, so that no block is read twice.
    """
    assert nbytes_max % alignment == 0
    lists: list[list[DirectSegment]] = [[]]
    room = nbytes_max
    for segment in segments:
        start, end = segment.file_offset, segment.file_offset + segment.nbytes
        while start < end:
            if room <= 0:
                lists.append([])
                room = nbytes_max
            stop = min(end, -(-(start + room) // alignment) * alignment)
            place = segment.slot_offset + start - segment.file_offset
            lists[-1].append(DirectSegment(segment.shard, start, place, stop - start))
            room -= stop - start
            start = stop
    return lists
