"""The keys and values of one text on their way to disk and back, through an asynchronous backend.

A group is the K or V of one (layer, block of 16 tokens, head). transformers keeps [1, heads, tokens, head_dim], so the
bytes of a group lie side by side, and whole blocks are written from the tensors where they are. Only the last block,
when the text does not fill it, is copied out and filled up with zeros first.

What comes back has room for whole blocks: [layer, kind, head, block, token in block, head_dim]. There, too, a group is
one piece, and the first `tokens` of each head are what the model sees.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio.to_thread
import numpy as np
import torch
from numpy.typing import NDArray

from aio_kv.backends.engine_backend import EngineBackend
from aio_kv.backends.posix import PosixBackend
from aio_kv.cli.demo_generated import count_mismatches, forget
from aio_kv.cli.demo_report import DemoReport, Measured, report_of
from aio_kv.cli.heartbeat import Lag, heartbeat, idle_lag, lag_of
from aio_kv.cli.language_model import KeyValue, LanguageModel
from aio_kv.cli.window import in_window
from aio_kv.engine.extension import allocate_host
from aio_kv.files import LayerFiles
from aio_kv.integers import Int64Array
from aio_kv.layout import GroupLayout
from aio_kv.open import open_backend
from aio_kv.protocols import Scatter

__all__ = ["Offload", "Offloaded"]

_BLOCK_SIZE = 16
_POISON = 0xA5  # In memory that is about to be read into, and in tensors that must not be used any more.
_PAGE = 4096

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Offloaded:
    """What came back: a cache to go on from, the seconds until it was there, and the findings."""

    cache: Any
    restore_s: float
    is_identical: bool
    report: DemoReport


class Offload:
    """One offload of the tensors of all layers, which it takes over and overwrites once they are saved."""

    def __init__(self, layers: list[KeyValue]) -> None:
        _, heads, self._tokens, head_dim = layers[0].keys.shape
        self._layers = layers
        self._dtype = layers[0].keys.dtype
        self.layout = GroupLayout(
            num_layers=len(layers),
            num_blocks=-(-self._tokens // _BLOCK_SIZE),
            num_kv_heads=heads,
            block_size=_BLOCK_SIZE,
            head_dim=head_dim,
            itemsize=self._dtype.itemsize,
        )
        # Kept only to be compared with in the end.
        self._expected = _bytes_of(torch.stack([self._filled_up(torch.cat(layer)) for layer in layers]))

    async def run(self, directory: Path, *, model: LanguageModel, backend: str) -> Offloaded:
        """Save, forget, restore, compare. Raises `AioKvError` where the backend fails."""
        async with open_backend(directory, self.layout, backend=backend) as kv:
            await self._save(kv)
            self._overwrite()
            await forget(kv)
            idle = await idle_lag()
            found = self._fresh_memory()
            read_s, lag = await self._restore(kv, found)
            started = time.perf_counter()
            cache = model.cache_of(self._tensors_in(found))
            restore_s = read_s + time.perf_counter() - started
            await forget(kv)
            told, oracle_s = await anyio.to_thread.run_sync(self._ask_oracle, kv.files)
            payload = self.layout.payload_nbytes
            mismatches = count_mismatches(payload, found, told, self._expected)
            measured = Measured(self.layout.num_groups, payload, mismatches, read_s, oracle_s, lag, idle)
            is_identical = bool(np.array_equal(found, self._expected))
            return Offloaded(cache, restore_s, is_identical, report_of(kv, model.name, measured))

    async def _save(self, kv: EngineBackend) -> None:
        """Write every group, and make all of them durable."""
        layout, heads = self.layout, range(self.layout.num_kv_heads)
        whole, rest = divmod(self._tokens, _BLOCK_SIZE)
        starts = np.arange(whole)[:, None] * _BLOCK_SIZE + np.arange(len(heads)) * self._tokens
        offsets = starts.reshape(-1) * (layout.head_dim * layout.itemsize)
        for index, layer in enumerate(self._layers):
            for kind, tensor in zip(layout.kinds, layer, strict=True):
                if whole:
                    await kv.wait_ready()
                    ids = layout.group_ids(index, range(whole), heads, kind)
                    kv.write_groups(ids, Scatter(tensor.contiguous(), offsets))
                if rest:
                    await kv.wait_ready()
                    ids = layout.group_ids(index, whole, heads, kind)
                    kv.write_groups(ids, self._filled_up(tensor[:, :, -rest:]))
        await kv.flush()  # Waits for all of these writes, and raises if one of them failed.

    def _overwrite(self) -> None:
        """See to it that nothing can come from the tensors that the model computed."""
        while self._layers:
            for tensor in self._layers.pop():
                tensor.view(torch.uint8).fill_(_POISON)

    async def _restore(self, kv: EngineBackend, memory: Bytes) -> tuple[float, Lag]:
        """Read every layer into `memory`; gives the seconds, and how late the loop was meanwhile.

        One transfer per layer, several in flight, and awaited in turn as a model would need them.
        """
        layers, offsets = memory.reshape(self.layout.num_layers, -1), self._offsets()
        async with heartbeat() as lags:
            started = time.perf_counter()
            await in_window(
                kv,
                range(len(layers)),
                lambda index: kv.read_groups(self._ids(index), Scatter(layers[index], offsets)),
            )
            seconds = time.perf_counter() - started
        return seconds, lag_of(lags)

    def _ask_oracle(self, files: LayerFiles) -> tuple[Bytes, float]:
        """Read the same groups one by one; gives the bytes and the seconds."""
        told = self._fresh_memory()
        layers, offsets = told.reshape(self.layout.num_layers, -1), self._offsets()
        with PosixBackend(files) as oracle:
            started = time.perf_counter()
            for index, layer in enumerate(layers):
                oracle.read_groups(self._ids(index), Scatter(layer, offsets))
            return told, time.perf_counter() - started

    def _ids(self, layer: int) -> Int64Array:
        """All groups of a layer in file order: block, then kind, then head."""
        layout = self.layout
        return layout.group_ids(layer, range(layout.num_blocks), range(layout.num_kv_heads), layout.kinds)

    def _offsets(self) -> Int64Array:
        """Where these groups go in the memory of their layer: kind, then head, then block."""
        layout = self.layout
        numbers = np.arange(layout.groups_per_layer).reshape(layout.num_kinds, layout.num_kv_heads, -1)
        return np.ascontiguousarray(numbers.transpose(2, 0, 1)).reshape(-1) * layout.payload_nbytes

    def _fresh_memory(self) -> Bytes:
        nbytes = self.layout.num_groups * self.layout.payload_nbytes
        memory = np.frombuffer(allocate_host(-(-nbytes // _PAGE) * _PAGE), dtype=np.uint8)[:nbytes]
        memory.fill(_POISON)
        return memory

    def _tensors_in(self, memory: Bytes) -> list[KeyValue]:
        """The restored layers, as views of `memory` in the shape that the model's own had."""
        layout = self.layout
        shape = (layout.num_layers, layout.num_kinds, 1, layout.num_kv_heads, -1, layout.head_dim)
        tensors = torch.from_numpy(memory).view(self._dtype).view(shape)[..., : self._tokens, :]
        return [KeyValue(keys, values) for keys, values in tensors]

    def _filled_up(self, tensor: Any) -> Any:
        """The tensor, of shape [..., tokens, head_dim], with zeros after its tokens up to a whole block."""
        missing = -tensor.shape[-2] % _BLOCK_SIZE
        return torch.nn.functional.pad(tensor, (0, 0, 0, missing)).contiguous()


def _bytes_of(tensor: Any) -> Bytes:
    found: Bytes = tensor.view(torch.uint8).numpy().reshape(-1)
    return found
