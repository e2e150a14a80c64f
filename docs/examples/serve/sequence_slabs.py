"""Memory for the keys and values of running sequences, which the model and the disk use in place.

A slab is [layer, kind, head, token, head_dim] for one sequence of up to `capacity` tokens. In it the group of a (layer,
block, head, kind) is one piece, so reads land where attention looks for them and writes leave from there: nothing is
copied in between. All slabs lie in one piece of memory, which is registered with the backend as a landing region.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import Cache, CacheLayerMixin

from aio_kv import GroupLayout, Scatter, allocate_host

__all__ = ["Slab", "SlabPool"]


class Slab:
    """The place of one sequence; `length` tokens of it are filled."""

    def __init__(self, memory: memoryview, start: int, tensor: torch.Tensor, layout: GroupLayout) -> None:
        self._memory = memory
        self._start = start
        self._layout = layout
        self._layers = [SlabLayer(keys[None], values[None]) for keys, values in tensor]
        self.capacity = int(tensor.shape[3])
        self.cache: Any = Cache(layers=[*self._layers])

    @property
    def length(self) -> int:
        """Tokens that the model may attend to."""
        return self._layers[0].length

    @length.setter
    def length(self, tokens: int) -> None:
        for layer in self._layers:
            layer.length = tokens

    def groups(self, layer: int, blocks: Sequence[int], slots: Sequence[int]) -> tuple[Any, Scatter]:
        """The groups of a layer that hold some blocks of the sequence in `slots`, and where they are in this slab."""
        layout, heads = self._layout, range(self._layout.num_kv_heads)
        ids = layout.group_ids(layer, slots, heads, layout.kinds)
        runs = np.arange(layout.num_kinds * len(heads)) + layer * layout.num_kinds * len(heads)
        blocks_per_run = self.capacity // layout.block_size
        places: NDArray[np.int64] = (
            np.asarray(blocks)[:, None] + runs * blocks_per_run
        )  # block, then (kind, head)
        return ids, Scatter(self._memory, self._start + places.reshape(-1) * layout.payload_nbytes)


class SlabPool:
    """`count` slabs of `capacity` tokens each, a multiple of the block size. `memory` is all of them."""

    def __init__(self, layout: GroupLayout, *, count: int, capacity: int, dtype: torch.dtype) -> None:
        if capacity % layout.block_size:
            raise ValueError(f"a slab of {capacity} tokens does not hold whole blocks of {layout.block_size}")
        shape = (
            count,
            layout.num_layers,
            layout.num_kinds,
            layout.num_kv_heads,
            capacity,
            layout.head_dim,
        )
        elements = int(np.prod(shape))
        self.memory = allocate_host(elements * layout.itemsize)
        tensor = torch.frombuffer(self.memory, dtype=dtype, count=elements).view(shape)
        step = elements // count * layout.itemsize
        self._free = [Slab(self.memory, index * step, part, layout) for index, part in enumerate(tensor)]
        self._room = anyio.Semaphore(count)

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[Slab]:
        """An empty slab for as long as the block runs; waits for one. Nothing may use it any more at the end."""
        async with self._room:
            slab = self._free.pop()
            slab.length = 0
            try:
                yield slab
            finally:
                self._free.append(slab)


class SlabLayer(CacheLayerMixin):  # type: ignore[misc] # transformers is not typed here
    """One layer of a slab as transformers wants it: new keys and values are put behind those that are there."""

    is_sliding = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.length = 0
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: the memory is there."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Put new tokens behind those that are there; gives views of all of them."""
        start, end = self.length, self.length + key_states.shape[-2]
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many positions `query_length` new tokens see, and the first of them."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens so far."""
        return self.length

    def get_max_length(self) -> int:
        """Tokens at most."""
        return int(self.keys.shape[2])
