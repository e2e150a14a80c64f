"""`ExpertMap.from_safetensors`: every byte where the safetensors package has it, neighbours read at once."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from moe_models import all_experts, slot_bytes

from aio_kv import CorruptionError, LayoutError, StorageError
from aio_kv.experts import ExpertMap
from aio_kv.experts.safetensors_header import read_safetensors_header

safetensors = pytest.importorskip("safetensors")
safetensors_numpy = pytest.importorskip("safetensors.numpy")

Tensors = dict[str, Any]
SHARD = "model-{:05}-of-{:05}.safetensors"
LAYER = "model.layers.{}.mlp.experts."


def random_tensor(*shape: int, seed: int, dtype: Any = np.float16) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def per_expert(layers: range = range(1, 3), num_experts: int = 3) -> Tensors:
    """Like DeepSeek's: three matrices per expert, each with a tensor of scales of another type."""
    tensors: Tensors = {"model.embed_tokens.weight": random_tensor(10, 8, seed=0)}
    for layer in layers:
        tensors[f"model.layers.{layer}.mlp.shared_experts.up_proj.weight"] = random_tensor(6, 8, seed=1)
        for expert in range(num_experts):
            for seed, (role, shape) in enumerate({"gate": (6, 8), "up": (6, 8), "down": (8, 6)}.items()):
                name = LAYER.format(layer) + f"{expert}.{role}_proj.weight"
                tensors[name] = random_tensor(*shape, seed=100 * layer + 10 * expert + seed)
                tensors[name + "_scale_inv"] = random_tensor(2, 1, seed=seed, dtype=np.float32)
    return tensors


def put(path: Path, tensors: Tensors) -> Path:
    safetensors_numpy.save_file(tensors, path)
    return path


def check_against(tensors: Tensors, experts: ExpertMap) -> None:
    for layer, expert in all_experts(experts):
        slot = slot_bytes(experts, layer, expert)
        assert len(slot) == experts.slot_nbytes(layer)
        parts = experts.parts(layer, expert)
        mine = {name for name in tensors if name.startswith(LAYER.format(layer) + f"{expert}.")}
        assert {part.name for part in parts} == mine
        for part in parts:
            assert slot[part.slot_offset : part.slot_offset + part.nbytes] == tensors[part.name].tobytes()


def test_every_byte_of_every_expert(tmp_path: Path) -> None:
    tensors = per_expert()
    experts = ExpertMap.from_safetensors(put(tmp_path / "m.safetensors", tensors))
    assert experts.layers == (1, 2)
    assert experts.num_experts(1) == 3
    check_against(tensors, experts)


def test_neighbours_are_one_segment(tmp_path: Path) -> None:
    """The writer sorts by the size of a number, then by name: an expert has its scales together, and its matrices."""
    experts = ExpertMap.from_safetensors(put(tmp_path / "m.safetensors", per_expert()))
    assert {len(experts.parts(*place)) for place in all_experts(experts)} == {6}
    assert {len(experts.segments(*place)) for place in all_experts(experts)} == {2}
    roles = [part.role for part in experts.parts(1, 0)]
    assert roles == [f"{role}.weight_scale_inv" for role in ("down", "gate", "up")] + ["down", "gate", "up"]


def test_old_names(tmp_path: Path) -> None:
    name = "model.layers.0.block_sparse_moe.experts.{}.{}.weight"
    tensors = {name.format(e, w): random_tensor(4, 4, seed=e) for e in range(2) for w in ("w1", "w2", "w3")}
    experts = ExpertMap.from_safetensors(put(tmp_path / "m.safetensors", tensors))
    assert [part.role for part in experts.parts(0, 1)] == ["gate", "down", "up"]
    assert len(experts.segments(0, 1)) == 1


@pytest.mark.parametrize("suffix", ["", ".weight"])
def test_stacked_tensors(tmp_path: Path, suffix: str) -> None:
    name = "model.layers.4.mlp.experts."
    tensors = {
        f"{name}gate_up_proj{suffix}": random_tensor(3, 8, 12, seed=1),
        f"{name}down_proj{suffix}": random_tensor(3, 6, 8, seed=2),
        f"{name}down_proj_bias": random_tensor(3, 8, seed=3),
        f"{name}gate_up_proj_scales": random_tensor(3, 8, 2, seed=4, dtype=np.float32),
    }
    experts = ExpertMap.from_safetensors(put(tmp_path / "m.safetensors", tensors))
    roles = [part.role for part in experts.parts(4, 2)]
    assert roles == ["gate_up", "down", "gate_up.scales", "down.bias"]
    for expert in range(3):
        slot = slot_bytes(experts, 4, expert)
        for part in experts.parts(4, expert):
            wanted = tensors[part.name][expert].tobytes()
            assert slot[part.slot_offset : part.slot_offset + part.nbytes] == wanted


def in_shards(folder: Path) -> tuple[Tensors, list[Path]]:
    """Experts whose tensors lie in two files."""
    tensors = per_expert()
    names = sorted(tensors)
    halves = [names[::2], names[1::2]]
    paths = [
        put(folder / SHARD.format(number + 1, 2), {name: tensors[name] for name in half})
        for number, half in enumerate(halves)
    ]
    weights = {name: paths[number].name for number, half in enumerate(halves) for name in half}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    return tensors, paths


def test_shards(tmp_path: Path) -> None:
    tensors, paths = in_shards(tmp_path)
    for given_paths in (paths, paths[0], str(paths[0]), [tmp_path / "model.safetensors.index.json"]):
        experts = ExpertMap.from_safetensors(given_paths)
        assert experts.paths == tuple(paths)
        check_against(tensors, experts)


def test_shards_that_are_not_all_there(tmp_path: Path) -> None:
    _, paths = in_shards(tmp_path)
    with pytest.raises(LayoutError, match=f"is shard 2 of 2: give the first one, {paths[0].name}"):
        ExpertMap.from_safetensors(paths[1])
    with pytest.raises(LayoutError, match="no safetensors file"):
        ExpertMap.from_safetensors([])
    paths[1].unlink()
    with pytest.raises(StorageError, match="this is shard 2 of 2 of the model") as caught:
        ExpertMap.from_safetensors(paths[0])
    assert caught.value.file == str(paths[1])


@pytest.mark.parametrize(
    "index",
    [
        b"{",
        b"[]",
        b"{}",
        b'{"weight_map": {}}',
        b'{"weight_map": {"a": 1}}',
        b'{"weight_map": {"a": "../b"}}',
        b'{"weight_map": {"a": "/etc/passwd"}}',
        b'{"weight_map": {"a": ".."}}',
    ],
)
def test_an_index_that_is_wrong(tmp_path: Path, index: bytes) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_bytes(index)
    with pytest.raises(CorruptionError) as caught:
        ExpertMap.from_safetensors(path)
    assert caught.value.file == str(path)


def test_a_dense_model(tmp_path: Path) -> None:
    path = put(tmp_path / "m.safetensors", {"model.layers.0.mlp.up_proj.weight": random_tensor(2, 2, seed=0)})
    with pytest.raises(LayoutError, match=r"m.safetensors has no experts: .*a dense model has none"):
        ExpertMap.from_safetensors(path)


def test_several_models_in_one(tmp_path: Path) -> None:
    name = "{}.model.layers.0.mlp.experts.{}.up_proj.weight"
    tensors = {
        name.format(tower, expert): random_tensor(2, 2, seed=expert)
        for tower, count in {"talker": 2, "thinker": 3}.items()
        for expert in range(count)
    }
    path = put(tmp_path / "m.safetensors", tensors)
    with pytest.raises(
        LayoutError, match=r"several models with experts, 'talker\.model\.', 'thinker\.model\.'"
    ):
        ExpertMap.from_safetensors(path)
    assert ExpertMap.from_safetensors(path, prefix="thinker.").num_experts(0) == 3
    with pytest.raises(LayoutError, match="begins with 'walker'"):
        ExpertMap.from_safetensors(path, prefix="walker")


def test_an_expert_that_lacks_a_tensor(tmp_path: Path) -> None:
    tensors = per_expert()
    del tensors[LAYER.format(2) + "1.up_proj.weight"]
    with pytest.raises(CorruptionError, match="expert 1 of layer 2 has no tensor like"):
        ExpertMap.from_safetensors(put(tmp_path / "m.safetensors", tensors))


def test_a_tensor_that_is_there_twice(tmp_path: Path) -> None:
    paths = [put(tmp_path / name, per_expert()) for name in ("a.safetensors", "b.safetensors")]
    with pytest.raises(CorruptionError, match=r"is there twice, also as .* in .*a.safetensors"):
        ExpertMap.from_safetensors(paths)


# --- the header ------------------------------------------------------------------------------------------------------


def header_bytes(fields: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(begin: Any = 0, end: Any = 8, dtype: Any = "F32", shape: Any = (2,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


UNSOUND = {
    "empty": b"",
    "length": header_bytes({}, length=(1 << 64) - 1),
    "length past the end": header_bytes({}, length=3),
    "over the limit": header_bytes({}, length=100_000_001),
    "not JSON": header_bytes(b"{]"),
    "not an object": header_bytes(b"[1]"),
    "deep": header_bytes(b"[" * 100_000),
    "not UTF-8": header_bytes(b'{"\xff": 1}'),
    "twice": header_bytes(b'{"a": %b, "a": %b}' % ((json.dumps(entry()).encode(),) * 2), bytes(8)),
    "entry": header_bytes({"a": 3}),
    "no offsets": header_bytes({"a": {"dtype": "F32", "shape": [1]}}),
    "three offsets": header_bytes({"a": entry() | {"data_offsets": [0, 4, 8]}}, bytes(8)),
    "negative": header_bytes({"a": entry(begin=-8, end=0)}),
    "descending": header_bytes({"a": entry(8, 0)}, bytes(8)),
    "float": header_bytes({"a": entry(0.0)}, bytes(8)),
    "bool": header_bytes({"a": entry(begin=False)}, bytes(8)),
    "shape": header_bytes({"a": entry(shape="ab")}, bytes(8)),
    "shape negative": header_bytes({"a": entry(shape=[-2])}, bytes(8)),
    "size": header_bytes({"a": entry(shape=[3])}, bytes(8)),
    "dtype": header_bytes({"a": entry(dtype=4)}, bytes(8)),
    "hole": header_bytes({"a": entry(), "b": entry(12, 20)}, bytes(20)),
    "hole at the start": header_bytes({"a": entry(4, 12)}, bytes(12)),
    "overlap": header_bytes({"a": entry(), "b": entry(4, 12)}, bytes(12)),
    "cut short": header_bytes({"a": entry()}, bytes(7)),
    "too long": header_bytes({"a": entry()}, bytes(9)),
    "name": header_bytes({"a" * 2000: entry()}, bytes(8)),
}


@pytest.mark.parametrize("name", UNSOUND)
def test_an_unsound_file_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(UNSOUND[name])
    with pytest.raises(CorruptionError) as caught:
        read_safetensors_header(path)
    assert caught.value.file == str(path)
    assert caught.value.file_offset is not None


def test_a_type_that_is_not_known_has_the_size_of_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(header_bytes({"a": entry(dtype="F2", shape=[32])}, bytes(8)))
    assert read_safetensors_header(path)[0].nbytes == 8


@pytest.fixture
def oracle(tmp_path: Path) -> Callable[[bytes], dict[str, Any] | None]:
    """What the safetensors package says of a file: its tensors' shapes, or None where it refuses it."""

    def ask(data: bytes) -> dict[str, Any] | None:
        path = tmp_path / "oracle.safetensors"
        path.write_bytes(data)
        try:
            with safetensors.safe_open(path, framework="np") as file:
                return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except safetensors.SafetensorError:
            return None

    return ask


SIZES = st.sampled_from([0, 1, 2, 4, 8, 12, 16])


@given(
    entries=st.dictionaries(
        st.sampled_from("abc"),
        st.builds(entry, SIZES, SIZES, st.sampled_from(["F32", "U8", "F16"]), st.lists(SIZES, max_size=2)),
        max_size=3,
    ),
    nbytes=SIZES,
)
def test_accepts_what_the_package_accepts(
    tmp_path: Path, oracle: Callable[[bytes], Any], entries: dict[str, Any], nbytes: int
) -> None:
    data = header_bytes(entries, bytes(nbytes))
    path = tmp_path / "m.safetensors"
    path.write_bytes(data)
    try:
        found: object = {tensor.name: tensor.shape for tensor in read_safetensors_header(path)}
    except CorruptionError:
        found = None
    assert found == oracle(data)


@given(data=st.binary(max_size=60))
def test_random_headers(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(header_bytes(b'{"a":' + data + b"}"))
    with pytest.raises(CorruptionError):
        read_safetensors_header(path)
