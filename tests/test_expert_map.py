"""`ExpertMap`: which reads fill a slot, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from aio_kv import LayoutError
from aio_kv.experts import DirectSegment, ExpertMap
from aio_kv.experts.slot_image import ExpertTensor, LayerExperts


def stacked(role: str, *, start: int, nbytes: int, num_experts: int, shard: int = 0) -> ExpertTensor:
    """A tensor in which every expert has the same share."""
    return ExpertTensor(
        role=role,
        type_name="F16",
        names=(role,) * num_experts,
        shards=(shard,) * num_experts,
        file_offsets=range(start, start + num_experts * nbytes, nbytes),
        nbytes=(nbytes,) * num_experts,
    )


@pytest.fixture
def experts() -> ExpertMap:
    gate = stacked("gate", start=1000, nbytes=10, num_experts=4)
    up = stacked("up", start=2000, nbytes=20, num_experts=4, shard=1)
    down = stacked("down", start=5000, nbytes=7, num_experts=4)
    small = stacked("gate", start=9000, nbytes=3, num_experts=2)
    layers = {
        5: LayerExperts(4, (gate, up, down)),
        2: LayerExperts(2, (small,)),
        6: LayerExperts(2, (small,)),
    }
    return ExpertMap((Path("a"), Path("b")), layers)


def test_segments_fill_the_slot_without_gaps(experts: ExpertMap) -> None:
    assert experts.segments(5, 3) == (
        DirectSegment(shard=0, file_offset=1030, slot_offset=0, nbytes=10),
        DirectSegment(shard=1, file_offset=2060, slot_offset=10, nbytes=20),
        DirectSegment(shard=0, file_offset=5021, slot_offset=30, nbytes=7),
    )
    assert [(part.role, part.slot_offset, part.file_offset) for part in experts.parts(5, 3)] == [
        ("gate", 0, 1030),
        ("up", 10, 2060),
        ("down", 30, 5021),
    ]


def test_layers_and_sizes(experts: ExpertMap) -> None:
    assert experts.layers == (2, 5, 6)
    assert [experts.num_experts(layer) for layer in experts.layers] == [2, 4, 2]
    assert [experts.slot_nbytes(layer) for layer in experts.layers] == [3, 37, 3]
    assert experts.slot_nbytes_max == 37
    assert experts.paths == (Path("a"), Path("b"))


def test_numpy_integers_are_integers(experts: ExpertMap) -> None:
    assert experts.segments(np.int64(5), np.uint8(3)) == experts.segments(5, 3)


@pytest.mark.parametrize("layer", [-1, 7, 2**63, 1.0, True, "5", None])
def test_a_layer_that_is_not_there(experts: ExpertMap, layer: int) -> None:
    with pytest.raises(LayoutError, match="layer is"):
        experts.segments(layer, 0)


@pytest.mark.parametrize("ask", [ExpertMap.num_experts, ExpertMap.slot_nbytes])
def test_a_layer_without_experts_is_named(experts: ExpertMap, ask: object) -> None:
    with pytest.raises(LayoutError, match="layer is 4, which has no experts: layers 2, 5 to 6 have"):
        ask(experts, 4)  # type: ignore[operator]


@pytest.mark.parametrize("expert", [-1, 4, 2**63, 0.0, False, "0"])
@pytest.mark.parametrize("ask", [ExpertMap.segments, ExpertMap.parts])
def test_an_expert_that_is_not_there(experts: ExpertMap, ask: object, expert: int) -> None:
    with pytest.raises(LayoutError, match="expert of layer 5 is"):
        ask(experts, 5, expert)  # type: ignore[operator]


def test_neighbours_in_the_file_are_read_at_once() -> None:
    gate = stacked("gate", start=0, nbytes=10, num_experts=1)
    up = stacked("up", start=10, nbytes=20, num_experts=1)
    elsewhere = stacked("down", start=30, nbytes=5, num_experts=1, shard=1)
    experts = ExpertMap((Path("a"), Path("b")), {0: LayerExperts(1, (gate, up, elsewhere))})
    assert experts.segments(0, 0) == (DirectSegment(0, 0, 0, 30), DirectSegment(1, 30, 30, 5))
    assert len(experts.parts(0, 0)) == 3


def test_a_slot_fits_the_largest_expert() -> None:
    uneven = ExpertTensor("gate", "F16", ("a", "b"), (0, 0), (0, 8), (8, 24))
    even = stacked("down", start=100, nbytes=6, num_experts=2)
    experts = ExpertMap((Path("a"),), {0: LayerExperts(2, (uneven, even))})
    assert experts.slot_nbytes(0) == 30
    assert [segment.slot_offset for segment in experts.segments(0, 0)] == [0, 8]
    assert [segment.slot_offset for segment in experts.segments(0, 1)] == [0, 24]


def test_a_map_of_nothing_is_refused() -> None:
    with pytest.raises(LayoutError, match="a, b: no experts"):
        ExpertMap((Path("a"), Path("b")), {})
