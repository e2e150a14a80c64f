"""The work that all contenders get: the same file, blocks, order, depth and kind of memory.

Groups are drawn at random and never side by side: neighbours would be merged into one I/O, and the run would measure
the merging. `check_io_count` holds every run of ours to that.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np

from aio_kv.blockdevice import BlockDevice
from aio_kv.engine.extension import allocate_host
from aio_kv.engine.options import EngineOptions
from aio_kv.errors import UnavailableError
from aio_kv.files import LayerFiles
from aio_kv.integers import Int64Array
from aio_kv.layout import GroupLayout
from aio_kv.positional import aligned_buffer
from aio_kv.protocols import Scatter

__all__ = [
    "Batch",
    "BufferedFiles",
    "Shape",
    "Workload",
    "check_io_count",
    "draw_batches",
    "fill",
    "layout_of",
    "pieces_of",
    "shape_of",
    "workload_memory",
]

_MIB = 1 << 20
_FILL_NBYTES = 8 * _MIB
_SEED = 20240229  # the same draws in every run


@dataclass(frozen=True, slots=True)
class Shape:
    """How a block size is asked for: `in_flight` batches of `batch` blocks, of which `depth` are at the device."""

    batch: int
    in_flight: int
    depth: int


def shape_of(block: int, device: BlockDevice | None = None) -> Shape:
    """The shape for blocks of `block` bytes; the depth is what an engine with default options allows itself there."""
    options = EngineOptions()
    queue_depth = options.queue_depth
    if device is not None and device.requests_max:
        queue_depth = min(queue_depth, device.requests_max)
    if block <= options.small_nbytes:
        return Shape(batch=256, in_flight=4, depth=queue_depth)
    depth = min(options.bulk_nbytes // block, queue_depth * 3 // 4)
    if block < 256 << 10:
        return Shape(batch=64, in_flight=4, depth=depth)
    return Shape(batch=64 if block < _MIB else 32, in_flight=2, depth=max(1, depth))


def pieces_of(block: int, device: BlockDevice | None = None) -> int:
    """How many I/Os a block becomes: none is larger than an engine with default options makes them there."""
    nbytes_max = EngineOptions().op_nbytes_max
    if device is not None and device.request_nbytes_max:
        nbytes_max = max(4096, min(nbytes_max, device.request_nbytes_max) // 4096 * 4096)
    return -(-block // nbytes_max)


def layout_of(block: int, file_nbytes: int) -> GroupLayout:
    """One layer of `file_nbytes` at most, its groups of exactly `block` bytes, its own blocks of 1 MiB or more."""
    heads = max(1, _MIB // block // 2)
    layout = GroupLayout(1, file_nbytes // (2 * heads * block), heads, 1, block, 1)
    assert layout.payload_nbytes == layout.stride == block
    return layout


class BufferedFiles(LayerFiles):
    """Layer files that go through the page cache even where direct I/O works, for the warm runs."""

    @property
    def direct_alignment(self) -> None:
        """None: backends then use the buffered descriptors."""

    @property
    def direct_refusal(self) -> str:
        """Why."""
        return "the benchmark measures the page cache here"


async def fill(files: LayerFiles) -> None:
    """Write every byte of the first layer and make it durable: extents that are only reserved read at no cost."""
    layout = files.layout
    fd = files.fd(0, direct=files.direct_alignment is not None)
    memory = workload_memory(min(_FILL_NBYTES, layout.nbytes_per_layer))
    pages = np.frombuffer(memory, dtype=np.uint64).reshape(-1, 512)
    pages[:] = np.random.default_rng(_SEED).integers(0, 2**63, pages.shape, dtype=np.uint64)
    for start in range(0, layout.nbytes_per_layer, _FILL_NBYTES):
        pages[:, 0] += np.uint64(1)  # no two pages alike, for storage that looks
        end = min(layout.nbytes_per_layer - start, len(memory))
        os.pwritev(fd, [memory[:end]], start)
        await asyncio.sleep(0)  # so that Ctrl-C is heard
    files.sync()


def workload_memory(nbytes: int) -> memoryview:
    """The memory that I/O is fastest with, where there is the extension; else page-aligned memory."""
    try:
        return allocate_host(nbytes)
    except UnavailableError:
        return aligned_buffer(nbytes)


@dataclass(frozen=True, slots=True)
class Batch:
    """Groups read or written together, as numbers and as byte offsets in the file."""

    ids: Int64Array
    offsets: list[int]


def draw_batches(layout: GroupLayout, batch: int) -> list[Batch]:
    """Every group once, in batches at random: first the even ones, then the odd ones, so that none of a batch touch."""
    random = np.random.default_rng(_SEED)
    batches = []
    for first in (0, 1):
        ids = random.permutation(np.arange(first, layout.groups_per_layer, 2, dtype=np.int64))
        for start in range(0, len(ids) - batch + 1, batch):
            chosen = np.ascontiguousarray(ids[start : start + batch])
            batches.append(Batch(chosen, (chosen * layout.stride).tolist()))
    return batches


class Workload:
    """The batches of one file, and memory for those in flight: lane i has `scatters[i]`, or `vectors[i]` for preadv.

    The memory is one piece, so that it can be registered as one landing region. With `is_spread` every block in flight
    has its own place; else blocks share a window of as many places as fio uses, one per block at the device. Where
    storage is emulated, as in most virtual machines, the bytes are copied by a processor, and memory that stays in its
    cache is a quarter faster: only contenders that touch equally much can be compared.

    Contenders take batches from one endless supply: none reads what another has just read.
    """

    def __init__(
        self,
        layout: GroupLayout,
        *,
        device: BlockDevice | None = None,
        shape: Shape | None = None,
        is_spread: bool = False,
    ) -> None:
        self.layout = layout
        self.block = layout.stride
        self.pieces = pieces_of(self.block, device)
        self.shape = shape = shape or shape_of(self.block, device)
        self.batches = draw_batches(layout, shape.batch)
        self._supply: Iterator[Batch] = cycle(self.batches)
        places = shape.in_flight * shape.batch if is_spread else shape.depth
        self.memory = workload_memory(places * self.block)
        words = np.frombuffer(self.memory, dtype=np.uint64)
        words[:] = np.random.default_rng(_SEED).integers(0, 2**63, len(words), dtype=np.uint64)
        lanes = np.arange(shape.in_flight * shape.batch, dtype=np.int64).reshape(shape.in_flight, -1)
        offsets = lanes % places * self.block
        self.scatters = [Scatter(self.memory, lane) for lane in offsets]
        self.vectors: list[list[list[memoryview]]] = [
            [[self.memory[start : start + self.block]] for start in lane.tolist()] for lane in offsets
        ]

    def take(self) -> Batch:
        """The next batch."""
        return next(self._supply)


def check_io_count(before: Any, after: Any, *, requests: int, pieces: int) -> None:
    """Raise AssertionError unless the engine began exactly `pieces` I/Os per request between two statistics.

    Fewer means that neighbours were merged, more that blocks were split: the run then compares nothing.
    """
    begun = after.engine.ops - before.engine.ops
    if begun != requests * pieces:
        raise AssertionError(
            f"{requests} requests of {pieces} I/Os each became {begun} I/Os: the groups must not lie side by side"
        )
