"""Finding the experts among the tensors of a GGUF model.

    blk.L.ffn_gate_exps.weight, ffn_up_exps, ffn_down_exps    one tensor for all experts, its slowest dimension
    blk.L.ffn_gate_up_exps.weight, ffn_down_exps              the same, gate and up in one
    blk.L.ffn_gate.E.weight, ffn_up.E, ffn_down.E             one tensor per expert, in files of early 2024 and before

In place of `weight`, what else an expert needs: `bias`, `scale`. Shared experts (`_shexp`) are no experts here: every
token needs them, so nothing chooses. Source of the names: `MODEL_TENSOR` in the gguf package.
"""

from __future__ import annotations

import re

from aio_kv.errors import CorruptionError, LayoutError
from aio_kv.experts.gguf_header import GgufTensor
from aio_kv.experts.gguf_index import GgufIndex
from aio_kv.experts.layer_builder import FoundLayer, TensorPlace
from aio_kv.experts.slot_image import LayerExperts

__all__ = ["gguf_experts"]

# Written in one way only, so that no two names mean the same tensor.
_NUMBER = "(0|[1-9][0-9]{0,8})"
_STACKED = re.compile(rf"blk\.{_NUMBER}\.ffn_(gate_up|gate|up|down)_exps\.(\w+)")
_SINGLE = re.compile(rf"blk\.{_NUMBER}\.ffn_(gate|up|down)\.{_NUMBER}\.(\w+)")


def gguf_experts(index: GgufIndex) -> dict[int, LayerExperts]:
    """Return the experts of each layer that has any.

    Raises `LayoutError` for a model without experts, and for experts in an encoding that is not known;
    `CorruptionError` where tensors contradict one another.
    """
    layers: dict[int, FoundLayer] = {}
    for name, tensor in index.tensors.items():
        match = _STACKED.fullmatch(name) or _SINGLE.fullmatch(name)
        if match is not None:
            number = int(match[1])
            layer = layers.setdefault(number, FoundLayer(number, index.paths))
            _add(layer, match, tensor, index)
    if not layers:
        raise LayoutError(
            f"{index.paths[0]} has no experts: none of its {len(index.tensors)} tensors is named like "
            f"'blk.0.ffn_up_exps.weight' (architecture {index.architecture!r}: a dense model has none)"
        )
    count = _expert_count(index)
    for layer in layers.values():
        _check_roles(layer, index)
    return {number: layer.build(num_experts=count) for number, layer in layers.items()}


def _add(layer: FoundLayer, match: re.Match[str], tensor: GgufTensor, index: GgufIndex) -> None:
    place = _place(tensor, index)
    suffix = match[match.lastindex or 0]
    role = match[2] if suffix == "weight" else f"{match[2]}.{suffix}"
    if match.re is _SINGLE:
        layer.single.setdefault(role, {})[int(match[3])] = place
        return
    if suffix == "weight" and len(tensor.dims) != 3:
        raise CorruptionError(
            f"tensor {tensor.name!r} is not a stack of matrices",
            file=str(index.paths[tensor.shard]),
            file_offset=tensor.file_offset,
            expected="3 dimensions",
            found=tensor.dims,
        )
    layer.stacked[role] = (place, tensor.dims[-1] if tensor.dims else 1)


def _place(tensor: GgufTensor, index: GgufIndex) -> TensorPlace:
    if tensor.nbytes is None:
        raise LayoutError(
            f"tensor {tensor.name!r} of {index.paths[tensor.shard]} at offset {tensor.file_offset} has "
            f"{tensor.type_name}, a quantisation that is not known, so the size of an expert is not either: update "
            "aio_kv, or quantise the model differently"
        )
    return TensorPlace(tensor.name, tensor.type_name, tensor.shard, tensor.file_offset, tensor.nbytes)


def _check_roles(layer: FoundLayer, index: GgufIndex) -> None:
    roles = layer.stacked.keys() | layer.single.keys()
    lacking = [role for role in ("up", "down") if role not in roles]
    if "gate_up" in roles and "up" in lacking:
        lacking.remove("up")
    # Some models have no gate, so nothing can be said about that.
    if lacking:
        raise CorruptionError(
            f"the experts of layer {layer.number} are not complete",
            file=str(index.paths[0]),
            expected=" and ".join(f"'blk.{layer.number}.ffn_{role}_exps.weight'" for role in lacking),
            found=" and ".join(sorted(roles)),
        )


def _expert_count(index: GgufIndex) -> int | None:
    """Return how many experts the metadata promises, if it does."""
    count = index.metadata.get(f"{index.architecture}.expert_count")
    return count if isinstance(count, int) and not isinstance(count, bool) and count > 0 else None
