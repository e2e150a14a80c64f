"""Arenas over a device in memory that answers when told to, for tests of who gets which slot and when."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
from backends import SMALL
from expert_files import MemoryReader, Model

from aio_kv import EngineOptions
from aio_kv.engine import Kind
from aio_kv.experts import ExpertArena
from aio_kv.testing import Scheduler

SIZES = [(5000, 3000), (2000,)]
SLOT = 8192
PATIENCE_SECONDS = 20


class Failing(Scheduler):
    """A device on which the reads of some offsets fail, for as long as the test says."""

    def __init__(self) -> None:
        self.is_failing: Callable[[int, int], bool] = lambda shard, file_offset: False

    def fate(self, kind: Kind, layer: int, file_offset: int, nbytes: int) -> int:
        return -errno.EIO if self.is_failing(layer, file_offset) else 0


@asynccontextmanager
async def arena_on(
    model: Model,
    slots: int,
    *,
    scheduler: Scheduler | None = None,
    options: EngineOptions = SMALL,
    alignment: int = 512,
    **changes: Any,
) -> AsyncIterator[tuple[ExpertArena, MemoryReader]]:
    slot_nbytes = -(-model.experts.slot_nbytes_max // 4096) * 4096
    with anyio.fail_after(PATIENCE_SECONDS):
        async with MemoryReader(model, scheduler=scheduler, options=options, alignment=alignment) as reader:
            async with ExpertArena(reader, capacity_bytes=slots * slot_nbytes, **changes) as arena:
                yield arena, reader
                arena._table.check()
            assert arena._table.leases == 0


async def turns(count: int = 50) -> None:
    """Give every other task, and the device, more than enough turns to do what they can."""
    for _ in range(count):
        await anyio.lowlevel.checkpoint()


async def until(is_true: Callable[[], bool]) -> None:
    """Wait for something that other tasks bring about."""
    while not is_true():
        await anyio.lowlevel.checkpoint()


async def use(arena: ExpertArena, model: Model, layer: int, ids: list[int]) -> None:
    """Demand experts and compare their bytes."""
    async with arena.experts(layer, ids) as slots:
        for view, expert in zip(slots, ids, strict=True):
            assert bytes(view) == model.image(layer, expert)
