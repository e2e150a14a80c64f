"""Backends whose device takes its time, so that a test can act while I/O is in flight.

The native engines get DELAY faults below their logic: the I/O is done, its answer comes late, and what goes through a
staging slot reaches its destination only with the answer. The engine in memory counts turns of the loop instead.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
from backends import KINDS, SMALL, TMPFS, make_backend

from aio_kv import GroupLayout
from aio_kv.backends.engine_backend import EngineBackend
from aio_kv.engine import Fault, FaultAction, Kind
from aio_kv.testing import MemoryBackend, Scheduler

SLOW_KINDS = ("uring", "threads", "memory")
DELAY_US = 30_000
# A payload of 4096 bytes that lands directly where the destination is aligned, and one that never does.
WHOLE = GroupLayout(2, 8, 2, 16, 64, 4)
PADDED = GroupLayout(2, 8, 2, 3, 7, 5)
assert KINDS.keys() > set(SLOW_KINDS)


class TurnScheduler(Scheduler):
    """Lets nothing land in `turns` turns of the loop, then everything, in order."""

    def __init__(self, turns: int) -> None:
        self.turns = turns
        self.left = turns

    def count(self, in_flight: int) -> int:
        if self.left:
            self.left -= 1
            return 0
        self.left = self.turns
        return in_flight


class Recorder(Scheduler):
    """Notes what lands, in order: (kind, layer, offset in groups)."""

    def __init__(self, layout: GroupLayout) -> None:
        self.layout = layout
        self.landed: list[tuple[Kind, int]] = []

    def fate(self, kind: Kind, layer: int, file_offset: int, nbytes: int) -> int:
        first = layer * self.layout.groups_per_layer + file_offset // self.layout.stride
        self.landed.append((kind, first))
        return 0


@asynccontextmanager
async def slow_backend(
    kind: str,
    folder: Path,
    layout: GroupLayout,
    *,
    delay_us: int = DELAY_US,
    only: Kind | None = None,
    **changes: Any,
) -> AsyncIterator[EngineBackend]:
    """A backend in which each I/O (of `only`, if that is given) is in flight for `delay_us`, or for 50 turns."""
    if kind == "memory":
        options = {name: value for name, value in changes.items() if name != "faults"}
        async with memory_backend(layout, TurnScheduler(50), **options) as backend:
            yield backend
        return
    fault = Fault(FaultAction.DELAY, delay_us, kind=only)
    place = Path(TMPFS) if os.path.isdir(TMPFS) else folder
    async with make_backend(kind, place, faults=(fault,), **changes)(layout) as backend:
        yield backend


async def has_begun(backend: EngineBackend, ops: int = 1) -> None:
    """Wait until `ops` I/Os are at the device: before that, a cancellation could still drop them."""
    with anyio.fail_after(10):
        while backend.statistics().engine.in_flight < ops:
            await anyio.lowlevel.checkpoint()


def memory_backend(layout: GroupLayout, scheduler: Scheduler | None = None, **changes: Any) -> MemoryBackend:
    """A `MemoryBackend` with small bounds. A test that fails while it is paused must not wait long for its close."""
    options = replace(SMALL, **{"drain_timeout": 1.0, **changes})
    return MemoryBackend(layout, scheduler=scheduler, options=options)


def unaligned(layout: GroupLayout, groups: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Packed memory for groups at an odd address: everything goes through staging. Filled with a pattern."""
    memory = np.full(groups * layout.payload_nbytes + 1, 0xA5, dtype=np.uint8)
    return memory[1:].reshape(groups, layout.payload_nbytes)


def payloads(layout: GroupLayout, count: int, seed: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Random contents without zeros, one row per group."""
    return np.random.default_rng(seed).integers(1, 256, (count, layout.payload_nbytes), dtype=np.uint8)


async def filled(backend: EngineBackend, seed: int = 1) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Write every group; returns the contents, one row per group."""
    rows = payloads(backend.layout, backend.layout.num_groups, seed)
    await backend.write_groups(np.arange(backend.layout.num_groups), rows)
    return rows
