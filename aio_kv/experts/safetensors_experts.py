"""Finding the experts among the tensors of safetensors files, as models are published for PyTorch.

    model.layers.L.mlp.experts.E.gate_proj.weight     one tensor per expert and matrix; `w1`, `w3`, `w2` are older names
    model.layers.L.mlp.experts.gate_up_proj           one for all experts, which are the first dimension

With every matrix comes what its encoding needs (`weight_scale_inv`, `bias`, `_blocks` and `_scales`): all that is named
after an expert goes into its slot. Shared experts have other names and do not.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence
from pathlib import Path

from aio_kv.creation import open_regular
from aio_kv.errors import CorruptionError, LayoutError, StorageError
from aio_kv.experts.header_cursor import HeaderCursor
from aio_kv.experts.layer_builder import FoundLayer, TensorPlace
from aio_kv.experts.safetensors_header import (
    HEADER_NBYTES_MAX,
    SafetensorsTensor,
    parse_json,
    read_safetensors_header,
)
from aio_kv.experts.slot_image import LayerExperts

__all__ = ["safetensors_experts", "safetensors_paths"]

_NUMBER = "0|[1-9][0-9]{0,8}"
_LAYER = rf"(?P<tower>.*?)(?:layers|blocks|h)\.(?P<layer>{_NUMBER})\.(?:.*\.)?experts\."
_SINGLE = re.compile(_LAYER + rf"(?P<expert>{_NUMBER})\.(?P<rest>.+)", re.DOTALL)
_STACKED = re.compile(_LAYER + r"(?P<rest>(?:gate_up|gate|up|down)_proj(?:[._]\w+)?)", re.DOTALL)
_PROJECTION = re.compile(r"(?P<name>(?:gate_up|gate|up|down)_proj|w[123])(?:[._](?P<belongs>.+))?", re.DOTALL)
_OLD_NAMES = {"w1": "gate", "w2": "down", "w3": "up"}
_SHARD_NAME = re.compile(r"(?P<stem>.*)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.safetensors", re.DOTALL)


def safetensors_paths(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
) -> tuple[Path, ...]:
    """Return the files of the model: those given, or those that one path leads to.

    One path may be a single file, the first of several shards, or the index of the shards
    (`model.safetensors.index.json`). Raises `LayoutError`, `CorruptionError` or `StorageError`.
    """
    if not isinstance(paths, str | os.PathLike):
        given = tuple(Path(path) for path in paths)
        if len(given) != 1:
            if not given:
                raise LayoutError("no safetensors file was given")
            return given
        paths = given[0]
    path = Path(paths)
    if path.name.endswith(".index.json"):
        return _indexed(path)
    match = _SHARD_NAME.fullmatch(path.name)
    if match is None:
        return (path,)
    number, count = int(match["number"]), int(match["count"])
    first = f"{match['stem']}-{1:05}-of-{count:05}.safetensors"
    if number != 1:
        raise LayoutError(f"{path} is shard {number} of {count}: give the first one, {first}, or all")
    return tuple(
        path.with_name(f"{match['stem']}-{place + 1:05}-of-{count:05}.safetensors") for place in range(count)
    )


def safetensors_experts(paths: Sequence[Path], *, prefix: str) -> dict[int, LayerExperts]:
    """Return the experts of each layer that has any, of tensors whose name begins with `prefix`.

    Raises `LayoutError` for a model without experts and for several models in one, `CorruptionError` where a file is
    not sound or tensors contradict one another, `StorageError` where one cannot be opened.
    """
    towers: dict[str, dict[int, FoundLayer]] = {}
    for shard, path in enumerate(paths):
        for tensor in _read(path, shard, len(paths)):
            match = _SINGLE.fullmatch(tensor.name) or _STACKED.fullmatch(tensor.name)
            if match is not None and tensor.name.startswith(prefix):
                number = int(match["layer"])
                layers = towers.setdefault(match["tower"], {})
                _add(layers.setdefault(number, FoundLayer(number, paths)), match, tensor, shard)
    if not towers:
        raise LayoutError(
            f"{paths[0]} has no experts: no tensor is named like 'model.layers.0.mlp.experts.0.up_proj.weight'"
            + (f" and begins with {prefix!r}" if prefix else " (a dense model has none)")
        )
    if len(towers) > 1:
        raise LayoutError(
            f"{paths[0]} holds several models with experts, {', '.join(map(repr, sorted(towers)))}: say which with "
            "prefix="
        )
    return {number: layer.build() for layers in towers.values() for number, layer in layers.items()}


def _read(path: Path, shard: int, count: int) -> tuple[SafetensorsTensor, ...]:
    try:
        return read_safetensors_header(path)
    except StorageError as error:
        if error.errno != errno.ENOENT or count == 1:
            raise
        hint = f"this is shard {shard + 1} of {count} of the model: fetch it as well"
        raise StorageError("open", errno=errno.ENOENT, file=str(path), hint=hint) from error


def _add(layer: FoundLayer, match: re.Match[str], tensor: SafetensorsTensor, shard: int) -> None:
    place = TensorPlace(tensor.name, tensor.dtype, shard, tensor.file_offset, tensor.nbytes)
    role = _role(match["rest"])
    if match.re is _SINGLE:
        found = layer.single.setdefault(role, {})
        expert = int(match["expert"])
        if expert in found:
            raise _twice(layer, place, found[expert])
        found[expert] = place
        return
    if role in layer.stacked:
        raise _twice(layer, place, layer.stacked[role][0])
    layer.stacked[role] = (place, tensor.shape[0] if len(tensor.shape) > 1 else 0)


def _role(rest: str) -> str:
    match = _PROJECTION.fullmatch(rest)
    if match is None:
        return rest
    projection = _OLD_NAMES.get(match["name"], match["name"].removesuffix("_proj"))
    belongs = match["belongs"]
    return projection if belongs in (None, "weight") else f"{projection}.{belongs}"


def _twice(layer: FoundLayer, place: TensorPlace, other: TensorPlace) -> CorruptionError:
    return CorruptionError(
        f"tensor {place.name!r} is there twice, also as {other.name!r} in {layer.paths[other.shard]}",
        file=str(layer.paths[place.shard]),
        file_offset=place.file_offset,
    )


def _indexed(path: Path) -> tuple[Path, ...]:
    """Return the files that an index of shards names, in alphabetical order, which is that of their numbers."""
    fd = open_regular(os.path.realpath(path), os.O_RDONLY)
    try:
        nbytes = os.fstat(fd).st_size
        cursor = HeaderCursor(fd, file=str(path), nbytes=nbytes, limit_nbytes=HEADER_NBYTES_MAX)
        data = cursor.take(nbytes, "the index")
    finally:
        os.close(fd)
    weights = parse_json(data, file=str(path), file_offset=0).get("weight_map")
    names = set(weights.values()) if isinstance(weights, dict) and _are_names(weights) else set()
    # An index comes from a stranger: it may not lead out of its own folder.
    if not names or any(os.path.basename(name) != name or name in ("", ".", "..") for name in names):
        raise CorruptionError(
            "the index of shards is wrong",
            file=str(path),
            expected="a weight_map of tensors to files beside the index",
            found=f"{weights!r:.120}",
        )
    return tuple(path.with_name(name) for name in sorted(names))


def _are_names(weights: dict[str, object]) -> bool:
    return all(isinstance(name, str) for name in weights.values())
