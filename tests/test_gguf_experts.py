"""`ExpertMap.from_gguf`: every byte of every expert where the gguf package has it, and models that are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_bytes import STRING, U32, Info, gguf_bytes, key_value
from moe_models import MODELS, all_experts, slot_bytes

from aio_kv import CorruptionError, LayoutError, UnavailableError
from aio_kv.cli.expert_models import MODEL_SHAPES, ExpertModel, write_expert_model
from aio_kv.experts import ExpertMap, GgufIndex

gguf = pytest.importorskip("gguf")

ROLES = {"separate": ["gate", "up", "down"], "fused": ["gate_up", "down"], "single": ["gate", "down", "up"]}


def oracle_tensors(paths: tuple[Path, ...]) -> dict[str, Any]:
    """The tensors of all shards as the gguf package reads them: bytes of each, and their type."""
    return {tensor.name: tensor for path in paths for tensor in gguf.GGUFReader(path).tensors}


def oracle_slot(tensors: dict[str, Any], model: ExpertModel, layer: int, expert: int) -> bytes:
    slot = b""
    for suffix in ("weight", "bias") if model.has_biases else ("weight",):
        for role in ROLES[model.form]:
            if model.form == "single":
                slot += tensors[f"blk.{layer}.ffn_{role}.{expert}.{suffix}"].data.tobytes()
            else:
                slot += tensors[f"blk.{layer}.ffn_{role}_exps.{suffix}"].data[expert].tobytes()
    return slot


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> ExpertModel:
    return MODELS[request.param]


def test_every_byte_of_every_expert(tmp_path: Path, model: ExpertModel) -> None:
    paths = write_expert_model(tmp_path / "m.gguf", model)
    experts = ExpertMap.from_gguf(paths[0])
    tensors = oracle_tensors(paths)
    assert experts.paths == paths
    assert experts.layers == tuple(range(model.num_dense_layers, model.num_layers))
    slots = set()
    for layer, expert in all_experts(experts):
        slot = slot_bytes(experts, layer, expert)
        assert slot == oracle_slot(tensors, model, layer, expert)
        assert len(slot) == experts.slot_nbytes(layer) == experts.slot_nbytes_max
        slots.add(slot)
    assert len(slots) == len(experts.layers) * model.num_experts, "no two experts are the same"


def test_parts_say_what_is_where(tmp_path: Path, model: ExpertModel) -> None:
    paths = write_expert_model(tmp_path / "m.gguf", model)
    experts = ExpertMap.from_gguf(GgufIndex.open(paths))
    layer = experts.layers[-1]
    slot, tensors = slot_bytes(experts, layer, 0), oracle_tensors(paths)
    parts = experts.parts(layer, 0)
    roles = ROLES[model.form]
    assert [part.role for part in parts] == roles + [f"{role}.bias" for role in roles if model.has_biases]
    for part in parts:
        tensor = tensors[part.name]
        share = tensor.data if model.form == "single" else tensor.data[0]
        assert slot[part.slot_offset : part.slot_offset + part.nbytes] == share.tobytes()
        assert part.type_name == tensor.tensor_type.name


def test_weights_are_random_numbers(tmp_path: Path, model: ExpertModel) -> None:
    for tensor in oracle_tensors(write_expert_model(tmp_path / "m.gguf", model)).values():
        numbers = gguf.dequantize(tensor.data, tensor.tensor_type).ravel()
        assert np.isclose(numbers.std(), 0.02, rtol=0.3)
        assert abs(numbers.mean()) < 0.02


def test_old_tensors_of_an_expert_are_read_at_once(tmp_path: Path) -> None:
    experts = ExpertMap.from_gguf(write_expert_model(tmp_path / "m.gguf", MODELS["single"]))
    assert {len(experts.segments(*place)) for place in all_experts(experts)} == {1}
    assert {len(experts.parts(*place)) for place in all_experts(experts)} == {3}


def test_alignment_is_kept_by_every_expert(tmp_path: Path) -> None:
    """Matrices of K-quants are whole pages, so direct I/O on an aligned file reads not a byte too much."""
    model = ExpertModel("qwen3moe", 2, 4, 2048, 768, "Q4_K", "Q6_K", alignment=4096, shards=2)
    experts = ExpertMap.from_gguf(write_expert_model(tmp_path / "m.gguf", model)[0])
    for place in all_experts(experts):
        for segment in experts.segments(*place):
            assert segment.file_offset % 4096 == segment.nbytes % 4096 == segment.slot_offset % 4096 == 0


# Figures of public models: gate or up, down, and the whole of an expert, in bytes.
@pytest.mark.parametrize(
    ("name", "matrix", "down"),
    [
        ("qwen3-30b-a3b", 884_736, 1_290_240),
        ("qwen3-235b-a22b", 3_538_944, 5_160_960),
        ("deepseek-v3", 8_257_536, 12_042_240),
        ("mixtral-8x7b", 33_030_144, 48_168_960),
        ("gpt-oss-120b", 4_406_400, 4_406_400),
    ],
)
def test_sizes_of_public_models(tmp_path: Path, name: str, matrix: int, down: int) -> None:
    shape = MODEL_SHAPES[name]
    inner, outer = (shape.hidden, shape.expert_ffn), (shape.expert_ffn, shape.hidden)
    types = {kind.name: int(kind) for kind in gguf.GGMLQuantizationType}
    infos = []
    for number, (role, dims) in enumerate({"gate": inner, "up": inner, "down": outer}.items()):
        kind = types[shape.down_type if role == "down" else shape.matrix_type]
        infos.append(Info(f"blk.7.ffn_{role}_exps.weight", (*dims, 2), kind, number << 30))
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(infos=infos))
    with path.open("r+b") as file:
        file.truncate(4 << 30)  # nothing is in it
    parts = ExpertMap.from_gguf(path).parts(7, 1)
    assert [(part.role, part.nbytes) for part in parts] == [("gate", matrix), ("up", matrix), ("down", down)]


# --- what is refused -------------------------------------------------------------------------------------------------


def stack(role: str, count: int = 2, **changes: Any) -> Info:
    """A stack of matrices of 4 by 2 numbers of 4 bytes."""
    return Info(**{"name": f"blk.0.ffn_{role}_exps.weight", "dims": (4, 2, count)} | changes)


def single(role: str, expert: int, **changes: Any) -> Info:
    return Info(**{"name": f"blk.0.ffn_{role}.{expert}.weight", "dims": (4, 2)} | changes)


@pytest.fixture
def refused(tmp_path: Path) -> Callable[..., str]:
    """Makes a file of some tensors, each in a place of its own, and gives the message with which it is refused."""

    def refuse(*infos: Info, error: type[Exception] = CorruptionError, keys: tuple[bytes, ...] = ()) -> str:
        path = tmp_path / "m.gguf"
        apart = [
            Info(info.name, info.dims, info.type_number, number << 12) for number, info in enumerate(infos)
        ]
        path.write_bytes(gguf_bytes(infos=apart, key_values=keys, data=bytes(len(infos) << 12)))
        with pytest.raises(error) as caught:
            ExpertMap.from_gguf(path)
        assert str(path) in str(caught.value)
        return str(caught.value)

    return refuse


def test_a_dense_model(refused: Callable[..., str]) -> None:
    keys = (key_value("general.architecture", STRING, "llama"),)
    said = refused(Info("blk.0.ffn_up.weight"), error=LayoutError, keys=keys)
    assert "has no experts" in said
    assert "architecture 'llama': a dense model has none" in said


@pytest.mark.parametrize(
    "name", ["blk.0.ffn_up_shexp.weight", "blk.0.ffn_norm_exps.weight", "blk.00.ffn_up_exps.weight"]
)
def test_names_that_are_no_experts(refused: Callable[..., str], name: str) -> None:
    assert "has no experts" in refused(Info(name, (4, 2, 2)), error=LayoutError)


def test_an_unknown_quantisation(refused: Callable[..., str]) -> None:
    said = refused(stack("up"), stack("down", type_number=77), error=LayoutError)
    assert "'blk.0.ffn_down_exps.weight'" in said
    assert "type 77" in said
    assert "at offset" in said


@pytest.mark.parametrize(
    ("infos", "message"),
    [
        ([stack("up", dims=(4, 2)), stack("down")], "is not a stack of matrices"),
        ([stack("up", 2), stack("down", 3)], "does not hold the experts"),
        ([stack("up", 0), stack("down", 0)], "does not hold the experts"),
        ([stack("up"), stack("down"), stack("up", name="blk.0.ffn_up_exps.bias", dims=(4,))], "not hold"),
        ([stack("down")], "not complete.*expected 'blk.0.ffn_up_exps.weight', found down"),
        ([stack("gate"), stack("up")], "not complete.*expected 'blk.0.ffn_down_exps.weight'"),
        ([single("up", 0), single("up", 2), single("down", 0)], "expert 1 of layer 0 has no tensor like"),
        ([single("up", 0), single("up", 1), single("down", 0)], "expert 1 of layer 0 has no tensor like"),
        ([single("up", 999_999_999), single("down", 0)], "expert 0 of layer 0 has no tensor like"),
        ([single("up", 0, dims=(0, 2)), single("down", 0)], "is empty"),
        ([stack("up", 1), stack("down", 1), single("up", 0)], "are the same thing twice"),
    ],
)
def test_tensors_that_contradict_one_another(
    refused: Callable[..., str], infos: list[Info], message: str
) -> None:
    assert re.search(message, refused(*infos))


def test_metadata_that_contradict_the_tensors(refused: Callable[..., str]) -> None:
    keys = (key_value("general.architecture", STRING, "x"), key_value("x.expert_count", U32, 3))
    assert "expected 3 equal shares" in refused(stack("up"), stack("down"), keys=keys)
    ours = [single(role, expert) for expert in range(4) for role in ("up", "down")]
    assert "does not have" in refused(*ours, keys=keys)


def test_more_experts_than_any_model_has(tmp_path: Path) -> None:
    infos = [stack("up", 1 << 30), stack("down", 1 << 30, offset=1 << 36)]
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(infos=infos))
    with path.open("r+b") as file:
        file.truncate(1 << 37)
    with pytest.raises(CorruptionError, match="does not hold the experts"):
        ExpertMap.from_gguf(path)


def test_fused_needs_no_gate_and_no_up(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    infos = [stack("gate_up"), stack("down", offset=64)]
    path.write_bytes(gguf_bytes(infos=infos, data=bytes(128)))
    assert [part.role for part in ExpertMap.from_gguf(path).parts(0, 0)] == ["gate_up", "down"]


# --- making models ---------------------------------------------------------------------------------------------------


def test_models_that_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="counts must be positive"):
        ExpertModel("x", 1, 0, 32, 32)
    with pytest.raises(LayoutError, match="one of separate, fused, single"):
        ExpertModel("x", 1, 1, 32, 32, form="other")
    with pytest.raises(LayoutError, match=r"tensor blk\.0\.ffn_gate_exps\.weight"):
        write_expert_model(tmp_path / "m.gguf", ExpertModel("x", 1, 1, 100, 100, "Q4_K"))
    with pytest.raises(UnavailableError, match="quantise to IQ2_XS"):
        write_expert_model(tmp_path / "m.gguf", ExpertModel("x", 1, 1, 256, 256, "IQ2_XS"))
    with pytest.raises(LayoutError, match="9 shards are more than the 6 tensors"):
        write_expert_model(tmp_path / "m.gguf", ExpertModel("x", 1, 1, 32, 32, shards=9))


def test_the_same_seed_is_the_same_model(tmp_path: Path) -> None:
    first, second = (write_expert_model(tmp_path / name, MODELS["biases"])[0] for name in "ab")
    assert first.read_bytes() == second.read_bytes()
