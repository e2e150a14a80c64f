"""Making MoE models in GGUF files to try things on: the shapes of public models, made of random weights.

The weights are random normal numbers, really quantised, so their bytes look like a model's to a disk that compresses
and to a checksum. Of each encoding only a pool of rows is quantised; every row of an expert is one drawn from it, so
that several gigabytes take seconds, no two experts are the same, and memory stays small. Needs the package gguf.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from aio_kv.cli.k_quants import quantize_q4_k, quantize_q6_k
from aio_kv.errors import AioKvError, LayoutError, StorageError, UnavailableError, storage_error
from aio_kv.experts.gguf_header import read_gguf_header
from aio_kv.experts.gguf_types import TENSOR_TYPES

__all__ = ["FORMS", "MODEL_SHAPES", "ExpertModel", "ensure_expert_model", "model_paths", "write_expert_model"]

_POOL_ROWS = 512
_VOCABULARY = 64
_DESCRIPTION_KEY = "aio_kv.made_as"
FORMS = ("separate", "fused", "single")


@dataclass(frozen=True, slots=True)
class ExpertModel:
    """What to make. `matrix_type` is the encoding of gate and up, `down_type` that of down.

    `form`: "separate" stacks for gate, up and down, "fused" for gate and up in one, or "single" tensors per expert as
    old files have them. The first `num_dense_layers` of `num_layers` have no experts. `shards` is the number of files.
    """

    architecture: str
    num_layers: int
    num_experts: int
    hidden: int
    expert_ffn: int
    matrix_type: str = "F16"
    down_type: str = "F16"
    form: str = "separate"
    num_dense_layers: int = 0
    has_biases: bool = False
    alignment: int = 32
    shards: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        counts = (self.num_layers, self.num_experts, self.hidden, self.expert_ffn, self.shards)
        if self.form not in FORMS or min(counts) < 1 or not 0 <= self.num_dense_layers <= self.num_layers:
            raise LayoutError(
                f"{self} cannot be made: counts must be positive and form one of {', '.join(FORMS)}"
            )
        if not 8 <= self.alignment <= 1 << 20 or self.alignment & (self.alignment - 1):
            raise LayoutError(f"alignment is {self.alignment}: must be a power of two from 8 to {1 << 20}")
        known = [kind.name for kind in TENSOR_TYPES.values()]
        for name in (self.matrix_type, self.down_type):
            if name not in known:
                raise LayoutError(f"encoding {name!r} is not known: must be one of {', '.join(known)}")

    @property
    def experts_nbytes(self) -> int:
        """Bytes of the matrices of all experts."""
        numbers = self.num_experts * self.hidden * self.expert_ffn * (self.num_layers - self.num_dense_layers)
        return sum(
            numbers * count // kind.block_elements * kind.block_nbytes
            for kind in TENSOR_TYPES.values()
            for count in [2 * (kind.name == self.matrix_type) + (kind.name == self.down_type)]
        )


# Source: the config.json of each model; encodings as in their usual files.
MODEL_SHAPES = {
    "qwen3-30b-a3b": ExpertModel("qwen3moe", 48, 128, 2048, 768, "Q4_K", "Q6_K"),
    "qwen3-235b-a22b": ExpertModel("qwen3moe", 94, 128, 4096, 1536, "Q4_K", "Q6_K"),
    "deepseek-v3": ExpertModel("deepseek2", 61, 256, 7168, 2048, "Q4_K", "Q6_K", num_dense_layers=3),
    "mixtral-8x7b": ExpertModel("llama", 32, 8, 4096, 14336, "Q4_K", "Q6_K"),
    "gpt-oss-120b": ExpertModel("gpt-oss", 36, 128, 2880, 2880, "MXFP4", "MXFP4", has_biases=True),
    "tiny": ExpertModel("qwen3moe", 3, 4, 256, 256, "Q8_0", "F16", num_dense_layers=1),
}


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One tensor to write: `dims` as in NumPy (slowest first), `shares` of equal size one after the other."""

    name: str
    type_name: str
    dims: tuple[int, ...]
    shares: int = 1


def write_expert_model(
    path: Path, model: ExpertModel, *, on_written: Callable[[int], None] = lambda nbytes: None
) -> tuple[Path, ...]:
    """Write `model` and return its files: `path`, or what `path` becomes where there are several shards.

    `on_written` is told of bytes as they are written. Raises `UnavailableError` without the package gguf, `LayoutError`
    where rows are not whole blocks of their encoding, `StorageError` for what the system refuses.
    """
    gguf = _gguf()
    paths = model_paths(path, model.shards)
    try:
        _write_shards(gguf, paths, model, on_written)
    except BaseException:
        # Half a model would be taken for damage, and several gigabytes for nothing.
        for shard in paths:
            shard.unlink(missing_ok=True)
        raise
    return paths


def ensure_expert_model(
    path: Path, model: ExpertModel, *, on_written: Callable[[int], None] = lambda nbytes: None
) -> tuple[Path, ...]:
    """Return the files of `model`, written only if they are not there already.

    Other models that were made here are replaced, and no other file is: then `StorageError` is raised. Raises as
    `write_expert_model` as well.
    """
    paths = model_paths(path, model.shards)
    made_as = [_made_as(shard) for shard in paths if shard.exists()]
    if made_as == [repr(model)] * len(paths):
        return paths
    if None in made_as:
        other = next(shard for shard in paths if shard.exists() and _made_as(shard) is None)
        hint = "it was not made by this, or not to the end: remove it, or choose another name"
        raise StorageError("create", errno=errno.EEXIST, file=str(other), hint=hint)
    return write_expert_model(path, model, on_written=on_written)


def _made_as(path: Path) -> str | None:
    try:
        description = read_gguf_header(path).metadata.get(_DESCRIPTION_KEY)
    except AioKvError:
        return None
    return description if isinstance(description, str) else None


def model_paths(path: Path, shards: int) -> tuple[Path, ...]:
    """Return the files that `write_expert_model` writes."""
    if shards == 1:
        return (path,)
    return tuple(path.with_name(f"{path.stem}-{n + 1:05}-of-{shards:05}.gguf") for n in range(shards))


def _write_shards(
    gguf: Any, paths: tuple[Path, ...], model: ExpertModel, on_written: Callable[[int], None]
) -> None:
    parts = _dealt_out(list(_tensors(model)), model.shards)
    pools = _Pools(gguf, model.seed)
    for number, (shard, tensors) in enumerate(zip(paths, parts, strict=True)):
        writer = gguf.GGUFWriter(None, model.architecture)
        if number == 0:
            _describe(writer, model)
        else:
            writer.kv_data[0].clear()
        writer.add_string(_DESCRIPTION_KEY, repr(model))
        if model.shards > 1:
            writer.add_uint16("split.no", number)
            writer.add_uint16("split.count", model.shards)
            writer.add_int32("split.tensors.count", sum(map(len, parts)))
        if model.alignment != gguf.GGUF_DEFAULT_ALIGNMENT:
            # In every shard: the writer's own splitting puts the key into the first one only.
            writer.add_custom_alignment(model.alignment)
        try:
            _write(gguf, writer, shard, tensors, pools, on_written)
        except OSError as error:
            raise storage_error(
                error.errno or errno.EIO, action="write", file=str(shard), file_offset=None, nbytes=None
            ) from error


def _gguf() -> Any:
    try:
        # Imported late: only this command needs it, and it is an extra.
        import gguf
    except ImportError as error:
        hint = "pip install 'aio-kv[model]'"
        raise UnavailableError("making a model needs the package gguf", hint=hint) from error
    return gguf


def _describe(writer: Any, model: ExpertModel) -> None:
    writer.add_name(f"random weights, seed {model.seed}")
    writer.add_block_count(model.num_layers)
    writer.add_embedding_length(model.hidden)
    writer.add_expert_count(model.num_experts)
    writer.add_expert_used_count(min(2, model.num_experts))
    writer.add_expert_feed_forward_length(model.expert_ffn)
    writer.add_leading_dense_block_count(model.num_dense_layers)
    writer.add_token_list([f"token {number}" for number in range(_VOCABULARY)])


def _tensors(model: ExpertModel) -> Iterator[_Tensor]:
    yield _Tensor("token_embd.weight", "F16", (_VOCABULARY, model.hidden))
    for layer in range(model.num_layers):
        block = f"blk.{layer}."
        yield _Tensor(f"{block}ffn_norm.weight", "F32", (model.hidden,))
        if layer < model.num_dense_layers:
            yield _Tensor(f"{block}ffn_up.weight", model.matrix_type, (model.expert_ffn, model.hidden))
            yield _Tensor(f"{block}ffn_down.weight", model.down_type, (model.hidden, model.expert_ffn))
            continue
        yield _Tensor(f"{block}ffn_gate_inp.weight", "F32", (model.num_experts, model.hidden))
        yield from _single(block, model) if model.form == "single" else _stacked(block, model)


def _matrices(model: ExpertModel) -> dict[str, tuple[str, tuple[int, int]]]:
    """Encoding, rows and columns of each matrix of an expert."""
    inner, down = (model.expert_ffn, model.hidden), (model.hidden, model.expert_ffn)
    if model.form == "fused":
        both = (2 * model.expert_ffn, model.hidden)
        return {"gate_up": (model.matrix_type, both), "down": (model.down_type, down)}
    # Old converters wrote w1, w2, w3, which are gate, down, up.
    order = ("gate", "down", "up") if model.form == "single" else ("gate", "up", "down")
    kinds = {
        "gate": (model.matrix_type, inner),
        "up": (model.matrix_type, inner),
        "down": (model.down_type, down),
    }
    return {role: kinds[role] for role in order}


def _stacked(block: str, model: ExpertModel) -> Iterator[_Tensor]:
    for role, (type_name, shape) in _matrices(model).items():
        dims = (model.num_experts, *shape)
        yield _Tensor(f"{block}ffn_{role}_exps.weight", type_name, dims, model.num_experts)
        if model.has_biases:
            yield _Tensor(f"{block}ffn_{role}_exps.bias", "F32", dims[:2], model.num_experts)


def _single(block: str, model: ExpertModel) -> Iterator[_Tensor]:
    for expert in range(model.num_experts):
        for role, (type_name, shape) in _matrices(model).items():
            yield _Tensor(f"{block}ffn_{role}.{expert}.weight", type_name, shape)


def _dealt_out(tensors: list[_Tensor], shards: int) -> list[list[_Tensor]]:
    """Return neighbouring tensors in `shards` lists of nearly the same number."""
    if shards > len(tensors):
        raise LayoutError(f"{shards} shards are more than the {len(tensors)} tensors")
    bounds = [len(tensors) * number // shards for number in range(shards + 1)]
    return [tensors[start:end] for start, end in pairwise(bounds)]


def _write(
    gguf: Any,
    writer: Any,
    path: Path,
    tensors: list[_Tensor],
    pools: _Pools,
    on_written: Callable[[int], None],
) -> None:
    for tensor in tensors:
        kind = gguf.GGMLQuantizationType[tensor.type_name]
        shape = _byte_shape(gguf, tensor, kind)
        # The writer wants the shape in bytes of what is quantised, and that of other types in numbers.
        nbytes = int(np.prod(shape, dtype=np.int64))
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), nbytes, raw_dtype=kind)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    try:
        output = writer.fout[0]
        writer.write_padding(output, output.tell())
        for tensor in tensors:
            nbytes = _write_tensor(output, tensor, pools, on_written)
            writer.write_padding(output, nbytes)
    finally:
        writer.close()


def _byte_shape(gguf: Any, tensor: _Tensor, kind: Any) -> tuple[int, ...]:
    try:
        return tuple(gguf.quant_shape_to_byte_shape(tensor.dims, kind))
    except ValueError as error:
        raise LayoutError(f"tensor {tensor.name} of {tensor.dims}: {error}") from error


def _write_tensor(output: BinaryIO, tensor: _Tensor, pools: _Pools, on_written: Callable[[int], None]) -> int:
    total = 0
    rows = int(np.prod(tensor.dims[:-1], dtype=np.int64)) // tensor.shares
    for _ in range(tensor.shares):
        share = pools.rows(tensor.type_name, rows, tensor.dims[-1])
        output.write(share.data)
        on_written(share.nbytes)
        total += share.nbytes
    return total


class _Pools:
    """Quantised rows of random numbers, some of each encoding and length, from which rows are drawn."""

    def __init__(self, gguf: Any, seed: int) -> None:
        self._gguf = gguf
        self._random = np.random.default_rng(seed)
        self._pools: dict[tuple[str, int], NDArray[np.uint8]] = {}

    def rows(self, type_name: str, count: int, columns: int) -> NDArray[np.uint8]:
        """Return `count` rows of `columns` numbers each, as bytes."""
        pool = self._pools.get((type_name, columns))
        if pool is None:
            numbers = self._random.standard_normal((_POOL_ROWS, columns), dtype=np.float32) * np.float32(0.02)
            pool = self._pools[type_name, columns] = self._quantized(type_name, numbers)
        return pool[self._random.integers(0, len(pool), count)]

    def _quantized(self, type_name: str, numbers: NDArray[np.float32]) -> NDArray[np.uint8]:
        own = {"Q4_K": quantize_q4_k, "Q6_K": quantize_q6_k}.get(type_name)
        if own is not None:
            return own(numbers)
        try:
            found = self._gguf.quantize(numbers, self._gguf.GGMLQuantizationType[type_name])
        except (KeyError, NotImplementedError) as error:
            raise UnavailableError(f"nothing here can quantise to {type_name}") from error
        return np.ascontiguousarray(found).view(np.uint8).reshape(len(numbers), -1)
