"""Windows of segments: every owed byte is read once and lands in its place, and nothing else is promised."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aio_kv.experts import DirectSegment
from aio_kv.experts.windows import cut, plan_segments, window_of
from aio_kv.plan import IoLimits, Placement, Plan

BASE = 1 << 20  # where memory begins in these tests
LIMITS = [
    IoLimits(1, 1, 4096),
    IoLimits(512, 512, 4096),
    IoLimits(4096, 4096, 8192),
    IoLimits(512, 4096, 4096),
]

segments = st.lists(
    st.builds(
        DirectSegment,
        shard=st.integers(0, 2),
        file_offset=st.one_of(st.integers(0, 30000), st.integers(0, 60).map(lambda n: n * 512)),
        slot_offset=st.integers(0, 40000),
        nbytes=st.one_of(st.integers(1, 30000), st.integers(1, 60).map(lambda n: n * 512)),
    ),
    max_size=4,
)


def landings(plan: Plan) -> list[tuple[int, int, int, int]]:
    """(file, file offset, address, bytes) of everything that reaches memory."""
    found = []
    for op in np.frombuffer(plan.ops, plan.ops.dtype):  # type: ignore[union-attr]
        file, start, nbytes = int(op["file"]), int(op["file_offset"]), int(op["nbytes"])
        owed = int(op["nbytes_owed"]) or nbytes
        if op["placement"] == Placement.DIRECT:
            assert owed == nbytes
            found.append((file, start, int(op["address"]), nbytes))
            continue
        for copy in plan.copies[op["copy_first"] :][: op["copy_count"]]:  # type: ignore[index]
            assert int(copy["op_offset"]) + int(copy["nbytes"]) == owed
            found.append((file, start + int(copy["op_offset"]), int(copy["address"]), int(copy["nbytes"])))
    return found


@given(
    requests=st.lists(segments, min_size=1, max_size=3),
    limits=st.sampled_from(LIMITS),
    is_device=st.booleans(),
)
def test_every_owed_byte_lands_in_its_place(
    requests: list[list[DirectSegment]], limits: IoLimits, is_device: bool
) -> None:
    addresses = [BASE + 512 * index for index in range(len(requests))]
    plan = plan_segments(requests, addresses, limits, is_device=is_device)
    wanted = [
        (one.shard, one.file_offset + byte, address + one.slot_offset + byte)
        for chosen, address in zip(requests, addresses, strict=True)
        for one in chosen
        for byte in (0, one.nbytes // 2, one.nbytes - 1)
    ]
    found = landings(plan)
    for shard, file_offset, address in wanted:
        assert any(
            file == shard and start <= file_offset < start + nbytes and address - file_offset == place - start
            for file, start, place, nbytes in found
        )
    assert sum(nbytes for *_, nbytes in found) == sum(one.nbytes for chosen in requests for one in chosen)


@given(requests=st.lists(segments, min_size=1, max_size=3), limits=st.sampled_from(LIMITS))
def test_ops_are_what_the_file_asks_for(requests: list[list[DirectSegment]], limits: IoLimits) -> None:
    plan = plan_segments(requests, [BASE] * len(requests), limits)
    ops = np.frombuffer(plan.ops, plan.ops.dtype)  # type: ignore[union-attr]
    assert not (ops["file_offset"] % limits.offset_alignment).any()
    assert not (ops["nbytes"] % limits.offset_alignment).any()
    assert not (ops["address"] % limits.memory_alignment).any()
    assert (ops["nbytes"] > 0).all()
    assert (ops["nbytes"] <= limits.op_nbytes_max).all()
    # The requests share the ops out among themselves, in order.
    first, counts = plan.op_of_request, np.broadcast_to(plan.ops_per_request, (len(requests),))
    assert first is not None
    assert np.array_equal(first, np.cumsum(counts) - counts)
    assert counts.sum() == plan.op_count == len(ops)


def test_what_fits_lands_without_a_copy() -> None:
    segment = DirectSegment(shard=0, file_offset=8192, slot_offset=4096, nbytes=3 * 4096)
    plan = plan_segments([[segment]], [BASE], IoLimits(4096, 4096, 8192))
    assert plan.copy_count == 0
    plan = plan_segments([[segment]], [BASE], IoLimits(4096, 4096, 8192), is_device=True)
    assert plan.copy_count == plan.op_count == 2


def test_only_the_ends_of_a_segment_are_staged_where_the_middle_fits() -> None:
    segment = DirectSegment(shard=0, file_offset=4096 + 100, slot_offset=100, nbytes=3 * 4096)
    plan = plan_segments([[segment]], [BASE], IoLimits(512, 4096, 4096))
    placements = np.frombuffer(plan.ops, plan.ops.dtype)["placement"].tolist()  # type: ignore[union-attr]
    assert placements == [Placement.STAGED, Placement.DIRECT, Placement.DIRECT, Placement.STAGED]


@pytest.mark.parametrize(("file_offset", "nbytes", "window"), [(0, 1, (0, 512)), (511, 2, (0, 1024))])
def test_a_window_is_rounded_outward(file_offset: int, nbytes: int, window: tuple[int, int]) -> None:
    assert window_of(DirectSegment(0, file_offset, 0, nbytes), 512) == window


@given(chosen=segments, blocks=st.integers(1, 8), alignment=st.sampled_from([512, 4096]))
def test_cutting_keeps_every_byte_and_reads_no_block_twice(
    chosen: list[DirectSegment], blocks: int, alignment: int
) -> None:
    pieces = cut(chosen, blocks * alignment, alignment)
    flat = [piece for one in pieces for piece in one]
    assert sum(piece.nbytes for piece in flat) == sum(segment.nbytes for segment in chosen)
    rest = iter(flat)
    for segment in chosen:
        at = 0
        while at < segment.nbytes:
            piece = next(rest)
            assert piece.shard == segment.shard
            assert piece.file_offset == segment.file_offset + at
            assert piece.slot_offset == segment.slot_offset + at
            assert at == 0 or piece.file_offset % alignment == 0
            at += piece.nbytes
        assert at == segment.nbytes
    assert all(sum(piece.nbytes for piece in one) <= (blocks + 1) * alignment for one in pieces)
