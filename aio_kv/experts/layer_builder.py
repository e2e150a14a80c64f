"""Putting the tensors of one layer's experts together, whatever file format they were found in.

Two forms occur, also side by side: one tensor in which the experts are stacked, each with one contiguous share of it,
and one tensor per expert. A slot holds stacked tensors first, in the order gate, up, down, and what belongs to them
(biases, scales) after that; tensors per expert follow in the order in which the file has them, since those that are
neighbours there can be read at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from aio_kv.errors import CorruptionError
from aio_kv.experts.slot_image import ExpertTensor, LayerExperts

__all__ = ["FoundLayer", "TensorPlace"]

# Far above any model's (512 in 2025): what a layer takes in memory is not decided by a number in a file.
_EXPERTS_MAX = 1 << 16
_ORDER = ("gate_up", "gate", "up", "down")


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """One tensor as found in a file: `nbytes` at `file_offset` of shard `shard`."""

    name: str
    type_name: str
    shard: int
    file_offset: int
    nbytes: int


@dataclass(slots=True)
class FoundLayer:
    """What was found of one layer: `stacked` by role with the number of experts, `single` by role and expert."""

    number: int
    paths: Sequence[Path]
    stacked: dict[str, tuple[TensorPlace, int]] = field(default_factory=dict)
    single: dict[str, dict[int, TensorPlace]] = field(default_factory=dict)

    def build(self, *, num_experts: int | None = None) -> LayerExperts:
        """Return the experts of the layer.

        `num_experts` is how many the file says there are, if it does. Raises `CorruptionError` where tensors
        contradict that or one another, or one is missing.
        """
        count = num_experts if num_experts is not None else self._count()
        for role in self.stacked.keys() & self.single.keys():
            place, stack = next(iter(self.single[role].values())), self.stacked[role][0]
            raise self._damaged(f"tensors {place.name!r} and {stack.name!r} are the same thing twice", place)
        tensors = [self._shares(role, count) for role in sorted(self.stacked, key=_rank)]
        for role, places in self.single.items():
            self._check_complete(role, places, count)
        first = {role: places[0] for role, places in self.single.items()}
        in_file_order = sorted(first, key=lambda role: (first[role].shard, first[role].file_offset))
        tensors += [_joined(role, self.single[role], count) for role in in_file_order]
        return LayerExperts(count, tuple(tensors))

    def _count(self) -> int:
        if self.stacked:
            role = min(self.stacked, key=_rank)
            return self.stacked[role][1]
        return 1 + max(max(places) for places in self.single.values())

    def _shares(self, role: str, count: int) -> ExpertTensor:
        place, found = self.stacked[role]
        if found != count or not 0 < count <= _EXPERTS_MAX or not place.nbytes or place.nbytes % count:
            raise self._damaged(
                f"tensor {place.name!r} of {place.nbytes} bytes does not hold the experts of layer {self.number}",
                place,
                expected=f"{count} equal shares",
                found=found,
            )
        share = place.nbytes // count
        return ExpertTensor(
            role=role,
            type_name=place.type_name,
            names=(place.name,) * count,
            shards=(place.shard,) * count,
            file_offsets=range(place.file_offset, place.file_offset + place.nbytes, share),
            nbytes=(share,) * count,
        )

    def _check_complete(self, role: str, places: dict[int, TensorPlace], count: int) -> None:
        some = next(iter(places.values()))
        beyond = [place for expert, place in places.items() if expert >= count]
        if beyond:
            raise self._damaged(
                f"tensor {beyond[0].name!r} is of an expert that layer {self.number} does not have",
                beyond[0],
                expected=f"{count} experts",
                found=f"one more at least: {max(places)}",
            )
        if len(places) < count:
            lacking = next(expert for expert in range(count) if expert not in places)
            raise self._damaged(
                f"expert {lacking} of layer {self.number} has no tensor like {some.name!r}",
                some,
                expected=f"{count} of them",
                found=len(places),
            )
        for place in places.values():
            if not place.nbytes:
                raise self._damaged(f"tensor {place.name!r} is empty", place)

    def _damaged(
        self, what: str, place: TensorPlace, *, expected: object = None, found: object = None
    ) -> CorruptionError:
        file = str(self.paths[place.shard])
        return CorruptionError(what, file=file, file_offset=place.file_offset, expected=expected, found=found)


def _rank(role: str) -> tuple[bool, int, str]:
    """Sort matrices before what belongs to them, and the matrices as a computation uses them."""
    projection, _, belongs = role.partition(".")
    return bool(belongs), _ORDER.index(projection) if projection in _ORDER else len(_ORDER), role


def _joined(role: str, places: dict[int, TensorPlace], count: int) -> ExpertTensor:
    ordered = [places[expert] for expert in range(count)]
    return ExpertTensor(
        role=role,
        type_name=ordered[0].type_name,
        names=tuple(place.name for place in ordered),
        shards=tuple(place.shard for place in ordered),
        file_offsets=tuple(place.file_offset for place in ordered),
        nbytes=tuple(place.nbytes for place in ordered),
    )
