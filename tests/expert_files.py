"""Files with random bytes in the place of a model, and maps that say where in them experts lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from aio_kv.experts import ExpertMap
from aio_kv.experts.slot_image import ExpertTensor, LayerExperts


@dataclass(frozen=True)
class Model:
    """Shards on disk, the map over them, and their bytes."""

    experts: ExpertMap
    content: tuple[bytes, ...]

    def image(self, layer: int, expert: int) -> bytes:
        """What a slot of the layer begins with once the expert is in it."""
        return b"".join(
            self.content[part.shard][part.file_offset : part.file_offset + part.nbytes]
            for part in self.experts.segments(layer, expert)
        )

    def everything(self) -> list[tuple[int, int]]:
        """Every (layer, expert)."""
        layers = self.experts.layers
        return [(layer, expert) for layer in layers for expert in range(self.experts.num_experts(layer))]


def make_model(
    folder: Path,
    *,
    sizes: Sequence[Sequence[int]] = ((5000, 5000, 7001), (4096, 8192, 4096), (33,)),
    num_experts: int = 4,
    gap: int = 96,
    shards: int = 2,
    alignment: int = 32,
    seed: int = 1,
) -> Model:
    """Write `shards` files: layer l has tensors of `sizes[l]` bytes per expert, one after the other, `gap` bytes apart.

    Tensors begin on multiples of `alignment`. The last tensor of each file ends with the file.
    """
    ends = [17] * shards  # a header of sorts
    layers: dict[int, LayerExperts] = {}
    for layer, widths in enumerate(sizes):
        tensors = []
        for index, nbytes in enumerate(widths):
            shard = (layer + index) % shards
            start = -(-(ends[shard] + gap) // alignment) * alignment
            ends[shard] = start + nbytes * num_experts
            tensors.append(
                ExpertTensor(
                    role=f"role{index}",
                    type_name="F16",
                    names=(f"{layer}.{index}",) * num_experts,
                    shards=(shard,) * num_experts,
                    file_offsets=range(start, ends[shard], nbytes),
                    nbytes=(nbytes,) * num_experts,
                )
            )
        layers[layer] = LayerExperts(num_experts, tuple(tensors))
    random = np.random.default_rng(seed)
    content = tuple(random.bytes(end) for end in ends)
    paths = tuple(folder / f"shard-{index}.bin" for index in range(shards))
    for path, data in zip(paths, content, strict=True):
        path.write_bytes(data)
    return Model(ExpertMap(paths, layers), content)
