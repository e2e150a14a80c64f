"""The directory of a packed file: what its layers hold, and where the record of each expert begins."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from aio_kv.errors import CorruptionError, LayoutError
from aio_kv.experts.packed_format import (
    HEAD_NBYTES,
    TRAILER_NBYTES,
    PackedHead,
    aligned_up,
    check_alignment,
)
from aio_kv.experts.safetensors_header import parse_json
from aio_kv.experts.slot_image import ExpertTensor, LayerExperts

__all__ = ["PackedDirectory", "PackedLayer", "PackedPart", "PackedSource"]

_FORMAT = "aio_kv.experts"
# What a directory may make us allocate: far more than 61 layers of 256 experts with 9 tensors each.
_EXPERTS_MAX = 1 << 16
_SHARES_MAX = 1 << 23
_NUMBER_MAX = 1 << 31
_NBYTES_MAX = 1 << 62

Item = TypeVar("Item", str, int)


@dataclass(frozen=True, slots=True)
class PackedSource:
    """A file that experts were packed from: its name without folders, and its size in bytes."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class PackedPart:
    """One tensor of the experts of a layer, in the order of the slot. Per expert: its name, and its size in bytes."""

    role: str
    type_name: str
    names: Sequence[str]
    nbytes: Sequence[int]


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """The records of one layer: that of expert e begins `record_offset + e * record_nbytes` after the first of all."""

    layer: int
    num_experts: int
    record_offset: int
    record_nbytes: int
    parts: tuple[PackedPart, ...]

    @property
    def end(self) -> int:
        """Where the records of the next layer begin."""
        return self.record_offset + self.num_experts * self.record_nbytes

    def payload_nbytes(self, expert: int) -> int:
        """Bytes of the slot image of `expert`, which is not checked."""
        return sum(part.nbytes[expert] for part in self.parts)

    def experts(self, data_start: int) -> LayerExperts:
        """Return the layer as a map has it. What is in one record is neighbours in the file, and so one segment."""
        first = data_start + self.record_offset
        starts = list(range(first, first + self.num_experts * self.record_nbytes, self.record_nbytes))
        tensors: list[ExpertTensor] = []
        for part in self.parts:
            shards = (0,) * self.num_experts
            tensors.append(
                ExpertTensor(part.role, part.type_name, part.names, shards, tuple(starts), part.nbytes)
            )
            starts = [start + nbytes for start, nbytes in zip(starts, part.nbytes, strict=True)]
        return LayerExperts(self.num_experts, tuple(tensors))


@dataclass(frozen=True, slots=True)
class PackedDirectory:
    """What a packed file says of itself. `model` is the name of the architecture, if the source had one."""

    model: str | None
    sources: tuple[PackedSource, ...]
    layers: tuple[PackedLayer, ...]

    @property
    def payload_nbytes(self) -> int:
        """Bytes of all experts together."""
        return sum(sum(part.nbytes) for layer in self.layers for part in layer.parts)

    @classmethod
    def plan(
        cls,
        experts: Mapping[int, LayerExperts],
        *,
        alignment: int,
        model: str | None,
        sources: tuple[PackedSource, ...],
    ) -> PackedDirectory:
        """Lay out the records of `experts`. Raises `LayoutError` for an alignment that records may not have."""
        check_alignment(alignment)
        layers: list[PackedLayer] = []
        for number, layer in sorted(experts.items()):
            start = layers[-1].end if layers else 0
            record_nbytes = aligned_up(layer.slot_nbytes + TRAILER_NBYTES, alignment)
            parts = tuple(PackedPart(t.role, t.type_name, t.names, t.nbytes) for t in layer.tensors)
            layers.append(PackedLayer(number, layer.num_experts, start, record_nbytes, parts))
        return cls(model, sources, tuple(layers))

    def encode(self, alignment: int) -> tuple[PackedHead, bytes]:
        """Return the head for records of this alignment, and all the bytes that stand before the first record."""
        directory = self._json()
        start = aligned_up(HEAD_NBYTES + len(directory), alignment)
        head = PackedHead(
            alignment, len(directory), zlib.crc32(directory), start, start + self.layers[-1].end
        )
        return head, (head.encode() + directory).ljust(start, b"\0")

    @classmethod
    def decode(cls, data: bytes, head: PackedHead, *, file: str) -> PackedDirectory:
        """Return the directory in `data`, which follows `head` in `file`. Raises `CorruptionError`."""
        checksum = zlib.crc32(data)
        if checksum != head.directory_crc32:
            raise CorruptionError(
                "the directory has a wrong checksum",
                file=file,
                file_offset=HEAD_NBYTES,
                expected=head.directory_crc32,
                found=checksum,
            )
        fields = parse_json(data, file=file, file_offset=HEAD_NBYTES)
        try:
            directory = _directory_of(fields)
            _check_places(directory, head)
        except (KeyError, TypeError, AttributeError, LayoutError) as error:
            raise CorruptionError(
                "the directory is wrong", file=file, file_offset=HEAD_NBYTES, found=f"{error!r:.200}"
            ) from error
        return directory

    def _json(self) -> bytes:
        fields = {
            "format": _FORMAT,
            "model": self.model,
            "sources": [{"name": source.name, "nbytes": source.nbytes} for source in self.sources],
            "layers": [_layer_fields(layer) for layer in self.layers],
        }
        # A name that is not text, as a file may have, is written with escapes.
        return json.dumps(fields, separators=(",", ":")).encode()


def _layer_fields(layer: PackedLayer) -> dict[str, Any]:
    parts = [
        {
            "role": part.role,
            "type": part.type_name,
            "name": _folded(part.names),
            "nbytes": _folded(part.nbytes),
        }
        for part in layer.parts
    ]
    return {
        "layer": layer.layer,
        "num_experts": layer.num_experts,
        "record_offset": layer.record_offset,
        "record_nbytes": layer.record_nbytes,
        "parts": parts,
    }


def _folded(items: Sequence[Item]) -> Item | list[Item]:
    """What is the same for all experts is said once."""
    return items[0] if all(item == items[0] for item in items) else list(items)


def _directory_of(fields: dict[str, Any]) -> PackedDirectory:
    if fields["format"] != _FORMAT:
        raise LayoutError(f"format is {fields['format']!r}")
    model = fields["model"] if fields["model"] is None else _text(fields["model"])
    sources = tuple(PackedSource(_text(each["name"]), _number(each["nbytes"])) for each in fields["sources"])
    layers = tuple(_layer_of(each) for each in fields["layers"])
    shares = sum(layer.num_experts * len(layer.parts) for layer in layers)
    if not layers or shares > _SHARES_MAX:
        raise LayoutError(f"{len(layers)} layers of {shares} tensors")
    return PackedDirectory(model, sources, layers)


def _layer_of(fields: dict[str, Any]) -> PackedLayer:
    num_experts = _number(fields["num_experts"], first=1, limit=_EXPERTS_MAX + 1)
    parts = tuple(
        PackedPart(
            _text(part["role"]),
            _text(part["type"]),
            _unfolded(part["name"], num_experts, _text),
            _unfolded(part["nbytes"], num_experts, lambda value: _number(value, first=1)),
        )
        for part in fields["parts"]
    )
    return PackedLayer(
        _number(fields["layer"], limit=_NUMBER_MAX),
        num_experts,
        _number(fields["record_offset"]),
        _number(fields["record_nbytes"], first=1),
        parts,
    )


def _unfolded(value: Any, count: int, check: Callable[[Any], Item]) -> tuple[Item, ...]:
    if not isinstance(value, list):
        return (check(value),) * count
    if len(value) != count:
        raise LayoutError(f"{len(value)} values for {count} experts")
    return tuple(map(check, value))


def _check_places(directory: PackedDirectory, head: PackedHead) -> None:
    """Check that the records lie one after the other, each with room for its payload, and fill the file."""
    end, last = 0, -1
    for layer in directory.layers:
        largest = max(layer.payload_nbytes(expert) for expert in range(layer.num_experts))
        if layer.layer <= last or layer.record_offset != end:
            raise LayoutError(f"layer {layer.layer} begins at {layer.record_offset} after layer {last}")
        if not largest or layer.record_nbytes != aligned_up(largest + TRAILER_NBYTES, head.alignment):
            raise LayoutError(f"layer {layer.layer} has records of {layer.record_nbytes} for {largest} bytes")
        end, last = layer.end, layer.layer
    if head.data_start + end != head.file_nbytes:
        raise LayoutError(f"records end at {head.data_start + end} in a file of {head.file_nbytes}")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise LayoutError(f"{value!r:.40} is no text")
    return value


def _number(value: Any, *, first: int = 0, limit: int = _NBYTES_MAX) -> int:
    if type(value) is not int or not first <= value < limit:
        raise LayoutError(f"{value!r:.40} is no number from {first} to {limit - 1}")
    return value
