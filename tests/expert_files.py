"""Files with random bytes in the place of a model, and maps that say where in them experts lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from aio_kv import EngineOptions
from aio_kv.backends.engine_session import EngineSession
from aio_kv.backends.rungs import OpenedEngine
from aio_kv.experts import ExpertMap, ExpertReader
from aio_kv.experts.reader import ReaderSession
from aio_kv.experts.slot_image import ExpertTensor, LayerExperts
from aio_kv.plan import IoLimits
from aio_kv.testing import Scheduler
from aio_kv.testing.memory_engine import MemoryEngine
from aio_kv.transfer import LoopBinding


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
    model = _planned(folder, sizes, num_experts, gap, shards, alignment, seed)
    for path, data in zip(model.experts.paths, model.content, strict=True):
        path.write_bytes(data)
    return model


def memory_model(sizes: Sequence[Sequence[int]], num_experts: int = 8, seed: int = 1) -> Model:
    """A model for `MemoryReader`, with no file on any disk."""
    return _planned(Path("memory"), sizes, num_experts, 96, 2, 32, seed)


def _planned(
    folder: Path,
    sizes: Sequence[Sequence[int]],
    num_experts: int,
    gap: int,
    shards: int,
    alignment: int,
    seed: int,
) -> Model:
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
    return Model(ExpertMap(paths, layers), content)


class MemoryShards:
    """What an engine in memory and a session ask of files, over the bytes of a model."""

    read_only = True
    closed = False
    directories = ("memory",)
    direct_alignment = None
    direct_refusal = None

    def __init__(self, content: Sequence[bytes]) -> None:
        self._content = [bytearray(data) for data in content]

    def layer(self, shard: int) -> bytearray:
        """The bytes of one shard, by the name that the engine knows."""
        return self._content[shard]

    def path_of(self, shard: int) -> str:
        return f"memory/shard-{shard}.bin"

    def close(self) -> None:
        pass


class MemoryReader(ExpertReader):
    """An `ExpertReader` whose files are memory and whose device does what a scheduler, or `pause`, says."""

    def __init__(
        self,
        model: Model,
        *,
        scheduler: Scheduler | None = None,
        options: EngineOptions | None = None,
        alignment: int = 512,
    ) -> None:
        super().__init__(model.experts, options=options, keep_page_cache=True)
        self._shards = MemoryShards(model.content)
        self._scheduler = scheduler or Scheduler()
        self._alignment = alignment
        self.engine: MemoryEngine | None = None

    def pause(self) -> None:
        """Have the device stop answering: what is at the device stays there until `resume`."""
        assert self.engine is not None
        self.engine.pause()

    def resume(self) -> None:
        """End `pause`."""
        assert self.engine is not None
        self.engine.resume()

    async def _open_session(self, binding: LoopBinding) -> ReaderSession:
        options = self._plan.options
        limits = IoLimits(self._alignment, self._alignment, options.op_nbytes_max)
        self.engine = MemoryEngine(cast(Any, self._shards), limits, options, self._scheduler)
        opened = OpenedEngine(self.engine, "memory", "direct", limits, ())
        return EngineSession(cast(Any, self._plan), cast(Any, self._shards), opened, binding)
