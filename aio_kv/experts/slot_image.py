"""What one slot holds: the tensors of an expert, one after the other without gaps.

Every layer says which tensors those are, in which order, and where each expert's share of them lies in the files. In a
stacked tensor the share of expert e begins at `start + e * nbytes`, which is a `range`: a layer takes the same few
hundred bytes whether it has 8 experts or 512.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aio_kv.experts.segments import DirectSegment, coalesced

__all__ = ["ExpertTensor", "LayerExperts", "SlotPart"]


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """The shares that the experts of one layer have in one tensor, or in one tensor each.

    `role` says what it is ("gate", "up", "down", "gate_up", and after a dot what belongs to one of them), `type_name`
    how its numbers are encoded. The sequences have one item per expert: the tensor's name in the file, the file it is
    in (counted from 0), where the share begins in that file, and how long it is (bytes).
    """

    role: str
    type_name: str
    names: Sequence[str]
    shards: Sequence[int]
    file_offsets: Sequence[int]
    nbytes: Sequence[int]


@dataclass(frozen=True, slots=True)
class SlotPart:
    """One tensor of one expert: what it is, where it lies in the slot and in the file. Offsets and sizes in bytes."""

    role: str
    type_name: str
    name: str
    slot_offset: int
    shard: int
    file_offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class LayerExperts:
    """The experts of one layer. `tensors` are in the order in which a slot holds them."""

    num_experts: int
    tensors: tuple[ExpertTensor, ...]

    @property
    def slot_nbytes(self) -> int:
        """Bytes of a slot that any expert of this layer fits in."""
        return max(map(sum, zip(*(tensor.nbytes for tensor in self.tensors), strict=True)))

    def parts(self, expert: int) -> tuple[SlotPart, ...]:
        """Return what the slot of `expert` holds, in slot order. `expert` is not checked."""
        parts: list[SlotPart] = []
        slot_offset = 0
        for tensor in self.tensors:
            nbytes = tensor.nbytes[expert]
            parts.append(
                SlotPart(
                    role=tensor.role,
                    type_name=tensor.type_name,
                    name=tensor.names[expert],
                    slot_offset=slot_offset,
                    shard=tensor.shards[expert],
                    file_offset=tensor.file_offsets[expert],
                    nbytes=nbytes,
                )
            )
            slot_offset += nbytes
        return tuple(parts)

    def segments(self, expert: int) -> tuple[DirectSegment, ...]:
        """Return the reads that fill a slot with `expert`, in slot order. `expert` is not checked."""
        segments: list[DirectSegment] = []
        slot_offset = 0
        for tensor in self.tensors:
            nbytes = tensor.nbytes[expert]
            segments.append(
                DirectSegment(tensor.shards[expert], tensor.file_offsets[expert], slot_offset, nbytes)
            )
            slot_offset += nbytes
        return coalesced(segments)
