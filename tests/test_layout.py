"""The geometry: a bijection, the published formulas computed again, and a refusal for everything else."""

import dataclasses
import itertools
import pickle
from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aio_kv import NAMED_LAYOUTS, GroupKey, GroupLayout, KvKind, LayoutError, Scatter, named_layout

K, V, LATENT = KvKind.K, KvKind.V, KvKind.LATENT
SMALL = GroupLayout(3, 5, 4, 2, 8, 2)


@st.composite
def layouts(draw: st.DrawFn) -> GroupLayout:
    count = st.integers(1, 6)
    kinds = draw(
        st.permutations([K, V, LATENT]).flatmap(lambda p: st.integers(1, 3).map(lambda n: tuple(p[:n])))
    )
    alignment = 2 ** draw(st.integers(9, 14))
    sizes = [draw(count) for _ in range(3)]
    return GroupLayout(
        *sizes,
        draw(st.integers(1, 40)),
        draw(st.integers(1, 300)),
        draw(count),
        kinds=kinds,
        alignment=alignment,
    )


def all_keys(layout: GroupLayout) -> list[GroupKey]:
    """Every key in file order, by plain loops."""
    return [
        GroupKey(layer, block, kv_head, kind)
        for layer in range(layout.num_layers)
        for block in range(layout.num_blocks)
        for kind in layout.kinds
        for kv_head in range(layout.num_kv_heads)
    ]


@given(layouts())
def test_ids_are_dense_and_in_file_order(layout: GroupLayout) -> None:
    keys = all_keys(layout)
    assert layout.num_groups == len(keys)
    assert [layout.group_id(key) for key in keys] == list(range(len(keys)))
    assert [layout.key(group_id) for group_id in range(len(keys))] == keys


@given(layouts())
def test_formulas(layout: GroupLayout) -> None:
    payload = layout.block_size * layout.head_dim * layout.itemsize
    stride = payload + -payload % layout.alignment
    assert (layout.payload_nbytes, layout.stride) == (payload, stride)
    assert layout.nbytes_per_layer == layout.num_blocks * layout.num_kinds * layout.num_kv_heads * stride
    assert layout.nbytes == layout.num_layers * layout.nbytes_per_layer
    assert layout.block_nbytes * layout.num_blocks == layout.nbytes_per_layer
    assert layout.groups_per_block * layout.num_blocks == layout.groups_per_layer
    for key in all_keys(layout):
        kind = layout.kinds.index(key.kind)
        index = (key.block * len(layout.kinds) + kind) * layout.num_kv_heads + key.kv_head
        assert layout.offset(key) == index * stride
        assert layout.group_id(key) == key.layer * layout.groups_per_layer + index


@given(layouts())
def test_places_in_a_file_never_overlap(layout: GroupLayout) -> None:
    offsets = sorted(layout.offset(key) for key in all_keys(layout) if key.layer == 0)
    assert offsets == list(range(0, layout.nbytes_per_layer, layout.stride))


@given(layouts(), st.data())
def test_vectors_agree_with_scalars(layout: GroupLayout, data: st.DataObject) -> None:
    def some(limit: int) -> st.SearchStrategy[list[int]]:
        return st.lists(st.integers(0, limit - 1), max_size=4)

    layers, blocks = data.draw(some(layout.num_layers)), data.draw(some(layout.num_blocks))
    heads, kinds = (
        data.draw(some(layout.num_kv_heads)),
        data.draw(st.lists(st.sampled_from(layout.kinds), max_size=4)),
    )
    ids = layout.group_ids(layers, blocks, heads, kinds)
    product = itertools.product(layers, blocks, kinds, heads)
    keys = [GroupKey(layer, block, head, kind) for layer, block, kind, head in product]
    assert ids.dtype == np.int64
    assert ids.tolist() == [layout.group_id(key) for key in keys]
    assert layout.offsets(ids).tolist() == [layout.offset(key) for key in keys]
    assert layout.layers_of(ids).tolist() == [key.layer for key in keys]


@given(layouts())
def test_a_block_is_one_run(layout: GroupLayout) -> None:
    for layer, block in itertools.product(range(layout.num_layers), range(layout.num_blocks)):
        first = layout.block_group_id(layer, block)
        ids = layout.group_ids(layer, block, range(layout.num_kv_heads), layout.kinds)
        assert ids.tolist() == list(range(first, first + layout.groups_per_block))


@pytest.mark.parametrize(
    "blocks",
    [
        [4, 2, 0],
        (4, 2, 0),
        range(4, -1, -2),
        np.array([4, 2, 0], dtype=np.uint8),
        np.array([4, 9, 2, 9, 0])[::2],
        np.array([4, 2, 0], dtype=">i4"),
        deque([4, 2, 0]),
        [np.int32(4), 2, np.uint64(0)],
        memoryview(np.array([4, 2, 0])),
    ],
)
def test_each_form_of_integers_is_taken(blocks: Any) -> None:
    ids = SMALL.group_ids(1, blocks, 2, V)
    assert ids.tolist() == [SMALL.group_id(GroupKey(1, block, 2, V)) for block in (4, 2, 0)]


def test_scalars_of_numpy_are_taken() -> None:
    assert SMALL.group_ids(np.int8(1), np.array(4), np.uint64(2), K).tolist() == [
        SMALL.group_id(GroupKey(1, 4, 2, K))
    ]
    assert GroupLayout(np.int64(3), 5, 4, 2, 8, 2) == SMALL  # type: ignore[arg-type]
    assert type(GroupLayout(np.int64(3), 5, 4, 2, 8, 2).num_layers) is int  # type: ignore[arg-type]


BAD_IDS: list[tuple[Any, str]] = [
    ([0, 1, -1], r"group_ids\[2\] is -1: must be 0 to 119"),
    ([0, 120], r"group_ids\[1\] is 120: must be 0 to 119"),
    (np.array([0, 120], dtype=np.uint16), r"\[1\] is 120"),
    (np.array([0, 2**63 + 5], dtype=np.uint64), rf"\[1\] is {2**63 + 5}"),
    (np.array([2**64 - 1], dtype=np.uint64), rf"\[0\] is {2**64 - 1}"),
    ([0, 2**63], r"\[1\] is 9223372036854775808"),
    ([0, -(2**64)], r"\[1\] is -18446744073709551616"),
    ([np.uint64(2**64 - 1)], r"\[0\] is 18446744073709551615"),
    ([0, 1.0], r"\[1\] is 1.0 \(float\)"),
    ([0, True], r"\[1\] is True \(bool\)"),
    ([0, np.bool_(True)], r"\[1\] is .*True.*bool"),
    ([0, "1"], r"\[1\] is '1' \(str\)"),
    ([0, None], r"\[1\] is None"),
    ([[0, 1]], r"\[0\] is \[0, 1\] \(list\)"),
    (np.array([1.0]), r"dtype float64.*index 0"),
    (np.array([]), "dtype float64"),
    (np.array([True]), "dtype bool"),
    (np.array(["1"]), "dtype <U1"),
    (np.array([1], dtype="m8[s]"), "dtype timedelta64"),
    (np.array([1, 2], dtype=object), "dtype object"),
    (np.zeros((2, 2), dtype=np.int64), "2-dimensional"),
    (np.array(3), "0-dimensional"),
    (3, "0-dimensional"),
    ("12", "must be integers"),
    (b"12", "must be integers"),
    (None, "dtype object"),
    ({1: 2}, "dtype object"),
    (range(118, 122), r"\[3\] is 121"),
    (range(3, -2, -1), r"\[4\] is -1"),
    (range(10**30), r"must be 0 to 119"),
]


@pytest.mark.parametrize(("ids", "message"), BAD_IDS)
def test_bad_ids_are_refused(ids: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        SMALL.check_ids(ids)
    with pytest.raises(LayoutError):
        SMALL.offsets(ids)
    with pytest.raises(LayoutError):
        SMALL.layers_of(ids)


def test_good_arrays_are_not_copied_and_odd_ones_are_straightened() -> None:
    ids = np.array([3, 1, 2])
    assert SMALL.check_ids(ids) is ids
    unaligned = np.frombuffer(bytearray(25), dtype=np.int64, count=3, offset=1)
    for odd in (np.arange(10)[::2], unaligned, np.array([1, 2], dtype=">i8")):
        checked = SMALL.check_ids(odd)
        assert checked.dtype == np.dtype("int64")
        assert checked.flags.c_contiguous
        assert checked.flags.aligned
        assert checked.tolist() == odd.tolist()
    assert SMALL.check_ids([]).dtype == np.int64


BAD_LAYOUTS: list[tuple[dict[str, Any], str]] = [
    ({"num_layers": 0}, "num_layers is 0: must be 1 to"),
    ({"num_blocks": -1}, "num_blocks is -1"),
    ({"num_kv_heads": True}, "num_kv_heads is True"),
    ({"block_size": 16.0}, r"block_size is 16.0 \(float\)"),
    ({"head_dim": "8"}, "head_dim is '8'"),
    ({"itemsize": None}, "itemsize is None"),
    ({"kinds": ()}, "at least one KvKind"),
    ({"kinds": (K, K)}, "none twice"),
    ({"kinds": ("k",)}, "kinds holds 'k'"),
    ({"kinds": "kv"}, "sequence of KvKind"),
    ({"kinds": K}, "sequence of KvKind"),
    ({"alignment": 256}, "alignment is 256"),
    ({"alignment": 4095}, "power of two"),
    ({"alignment": 4096.0}, "alignment is 4096.0"),
    ({"num_layers": 2**40, "num_blocks": 2**30}, "at most 9223372036854775807"),
    ({"num_blocks": 2**64}, "num_blocks is"),
]


@pytest.mark.parametrize(("change", "message"), BAD_LAYOUTS)
def test_bad_layouts_are_refused(change: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {
        "num_layers": 3, "num_blocks": 5, "num_kv_heads": 4, "block_size": 2, "head_dim": 8, "itemsize": 2
    }  # fmt: skip
    with pytest.raises(LayoutError, match=message):
        GroupLayout(**(fields | change))


BAD_KEYS: list[tuple[Any, str]] = [
    (GroupKey(3, 0, 0, K), "key.layer is 3: must be 0 to 2"),
    (GroupKey(-1, 0, 0, K), "key.layer is -1"),
    (GroupKey(0, 5, 0, K), "key.block is 5: must be 0 to 4"),
    (GroupKey(0, 0, 4, K), "key.kv_head is 4: must be 0 to 3"),
    (GroupKey(0, 0, 0, LATENT), "key.kind is .*LATENT.*must be one of KvKind.K, KvKind.V"),
    (GroupKey(0, 0, 0, "k"), "key.kind is 'k'"),  # type: ignore[arg-type]
    (GroupKey(True, 0, 0, K), "key.layer is True"),
    (GroupKey(0, 1.0, 0, K), "key.block is 1.0"),  # type: ignore[arg-type]
    ((0, 0, 0, K), "must be a GroupKey"),
    (7, "must be a GroupKey"),
]


@pytest.mark.parametrize(("key", "message"), BAD_KEYS)
def test_bad_keys_are_refused(key: Any, message: str) -> None:
    for method in (SMALL.offset, SMALL.group_id):
        with pytest.raises(LayoutError, match=message):
            method(key)


@pytest.mark.parametrize("group_id", [-1, 120, True, 1.0, "1", None, np.uint64(2**63)])
def test_bad_single_ids_are_refused(group_id: Any) -> None:
    with pytest.raises(LayoutError, match="group_id is"):
        SMALL.key(group_id)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, 0, 0, K), "layers is 3"),
        (([0, 3], 0, 0, K), r"layers\[1\] is 3"),
        ((0, range(6), 0, K), r"blocks\[5\] is 5"),
        ((0, 0, [4], K), r"kv_heads\[0\] is 4"),
        ((0, 0, 0, LATENT), "kinds is"),
        ((0, 0, 0, 0), "kinds is 0"),
        ((0, 0, 0, "k"), "kinds is 'k'"),
        ((0, 0, 0, [K, 1]), "kinds is 1"),
        ((True, 0, 0, K), "layers is True"),
        ((0, None, 0, K), "blocks has dtype object"),
    ],
)
def test_bad_products_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        SMALL.group_ids(*arguments)


def test_blocks_are_checked() -> None:
    with pytest.raises(LayoutError, match="layer is 3"):
        SMALL.block_group_id(3, 0)
    with pytest.raises(LayoutError, match="block is 5"):
        SMALL.block_group_id(0, 5)


def test_layouts_are_values() -> None:
    same = GroupLayout(3, 5, 4, 2, 8, 2, kinds=[K, V])  # type: ignore[arg-type]
    assert same == SMALL
    assert hash(same) == hash(SMALL)
    assert pickle.loads(pickle.dumps(SMALL)) == SMALL
    assert dataclasses.replace(SMALL, num_layers=9).nbytes == 3 * SMALL.nbytes
    with pytest.raises(dataclasses.FrozenInstanceError):
        SMALL.num_layers = 4  # type: ignore[misc]


def test_largest_layout_does_not_wrap() -> None:
    layout = GroupLayout(1, 2**51 - 1, 1, 1, 1, 1, kinds=(LATENT,))
    last = layout.num_groups - 1
    assert layout.offsets([last]).tolist() == [last * 4096]
    assert layout.key(last) == GroupKey(0, last, 0, LATENT)


@pytest.mark.parametrize(
    ("name", "token_nbytes"),
    [("llama3-8b", 131072), ("qwen3-30b-a3b", 98304), ("deepseek-v3", 70272), ("smollm2-135m", 23040)],
)
def test_named_layouts(name: str, token_nbytes: int) -> None:
    layout = named_layout(name, num_blocks=10, block_size=32)
    assert (layout.num_blocks, layout.block_size) == (10, 32)
    assert layout.num_layers * layout.groups_per_block * layout.payload_nbytes == 32 * token_nbytes


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(LayoutError) as caught:
        named_layout("gpt-9", num_blocks=1)
    assert all(name in str(caught.value) for name in NAMED_LAYOUTS)


@pytest.mark.parametrize(
    "offsets", [[-1], [1.5], np.zeros((2, 2), dtype=int), np.array([2**63], dtype=np.uint64), "1"]
)
def test_bad_scatter_offsets_are_refused(offsets: Any) -> None:
    with pytest.raises(LayoutError, match=r"Scatter\.offsets"):
        Scatter(bytearray(8), offsets)


def test_scatter_keeps_memory_and_straightens_offsets() -> None:
    memory = bytearray(8)
    scatter = Scatter(memory, [4, 0])  # type: ignore[arg-type]
    assert scatter.memory is memory
    assert scatter.offsets.dtype == np.int64
    assert scatter.offsets.tolist() == [4, 0]
