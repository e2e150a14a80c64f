"""`aio-kv demo` on generated data: write, forget, read back on the best rung, and hold every byte against the oracle.

A *load* is what a server asks for at once: up to 32 blocks of one layer, here in random order. Its content comes from
a seed and its number, so it can be made again when it is compared, and need not be kept meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import anyio.to_thread
import numpy as np
from numpy.typing import NDArray
from rich.progress import Progress, TaskID

from aio_kv.backends.engine_backend import EngineBackend
from aio_kv.backends.posix import PosixBackend
from aio_kv.cli.demo_report import DemoReport, Measured, report_of
from aio_kv.cli.heartbeat import Lag, heartbeat, idle_lag, lag_of
from aio_kv.cli.window import in_window
from aio_kv.engine.extension import allocate_host
from aio_kv.errors import LayoutError
from aio_kv.integers import Int64Array
from aio_kv.layout import GroupLayout
from aio_kv.models import named_layout
from aio_kv.open import open_backend

__all__ = ["Load", "content_of", "count_mismatches", "layout_within", "plan_loads", "run_generated"]

_SEED = 0x6B76
_LOAD_BLOCKS = 32
_POISON = 0xA5  # In memory that is about to be read into, so that a byte that never arrives shows.
_PAGE = 4096

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Load:
    """One load: its groups, and the `nbytes` from `start` on that it takes in the memory that all are read into."""

    number: int
    group_ids: Int64Array
    start: int
    nbytes: int

    @property
    def place(self) -> slice:
        """The bytes of the load in the memory for all of them."""
        return slice(self.start, self.start + self.nbytes)


def layout_within(name: str, nbytes_max: int) -> GroupLayout:
    """Return a named model's layout with as many blocks as fit in `nbytes_max` on disk, at least one.

    Raises `LayoutError` for an unknown name or a size that not even one block of every layer fits in.
    """
    one = named_layout(name, num_blocks=1)
    num_blocks = nbytes_max // one.nbytes
    if num_blocks < 1:
        raise LayoutError(
            f"--size is too small: one block in every layer of {name} takes {-(-one.nbytes // 2**20)} MiB"
        )
    return named_layout(name, num_blocks=num_blocks)


def plan_loads(layout: GroupLayout, seed: int = _SEED) -> list[Load]:
    """Divide all groups of a layout into loads of random blocks, in random order."""
    random = np.random.default_rng(seed)
    pieces: list[Int64Array] = []
    heads = range(layout.num_kv_heads)
    for layer in range(layout.num_layers):
        blocks = random.permutation(layout.num_blocks)
        for first in range(0, layout.num_blocks, _LOAD_BLOCKS):
            chosen = blocks[first : first + _LOAD_BLOCKS]
            pieces.append(layout.group_ids(layer, chosen, heads, layout.kinds))
    loads: list[Load] = []
    start = 0
    for number in random.permutation(len(pieces)).tolist():
        nbytes = len(pieces[number]) * layout.payload_nbytes
        loads.append(Load(number, pieces[number], start, nbytes))
        start += nbytes
    return loads


def content_of(load: Load, seed: int = _SEED) -> Bytes:
    """Return the pseudo-random bytes of a load, the same each time."""
    words = np.random.SFC64([seed, load.number]).random_raw(-(-load.nbytes // 8))
    return np.asarray(words).view(np.uint8)[: load.nbytes]


def count_mismatches(group_nbytes: int, found: Bytes, *others: Bytes) -> int:
    """Count the groups in which `found` differs from any of `others` by at least one byte."""
    differs = [(found != other).reshape(-1, group_nbytes).any(axis=1) for other in others]
    return int(np.logical_or.reduce(differs).sum())


async def run_generated(
    directory: Path, layout: GroupLayout, *, name: str, backend: str, progress: Progress
) -> DemoReport:
    """Run the demonstration in an empty directory, showing `progress` meanwhile.

    Raises `AioKvError` where it cannot be run.
    """
    async with open_backend(directory, layout, backend=backend) as kv:
        demo = _Demo(kv, plan_loads(layout), progress)
        with progress:
            await demo.write()
            await forget(kv)
            idle = await idle_lag()
            found, read_s, lag = await demo.read()
            await forget(kv)
            mismatches, oracle_s = await demo.compare(found)
        measured = Measured(layout.num_groups, layout.payload_nbytes, mismatches, read_s, oracle_s, lag, idle)
        return report_of(kv, name, measured)


async def forget(kv: EngineBackend) -> None:
    """Push the files out of the page cache, so that what is read next comes from the disk."""
    await anyio.to_thread.run_sync(kv.files.drop_page_cache)


class _Demo:
    """The steps of one demonstration, on an open backend."""

    def __init__(self, kv: EngineBackend, loads: list[Load], progress: Progress) -> None:
        self._kv = kv
        self._loads = loads
        self._progress = progress
        self._nbytes = sum(load.nbytes for load in loads)

    async def write(self) -> None:
        """Write every load and make it durable."""
        task = self._progress.add_task("write", total=self._nbytes)
        loads = sorted(self._loads, key=lambda load: load.number)
        await in_window(
            self._kv,
            loads,
            lambda load: self._kv.write_groups(load.group_ids, content_of(load)),
            self._advance(task),
        )
        await self._kv.flush()

    async def read(self) -> tuple[Bytes, float, Lag]:
        """Read every load; gives the bytes, the seconds, and how late the loop was meanwhile."""
        memory = allocate_host(-(-self._nbytes // _PAGE) * _PAGE)
        found = np.frombuffer(memory, dtype=np.uint8)
        found.fill(_POISON)
        task = self._progress.add_task("read, aio_kv", total=self._nbytes)
        async with await self._kv.register_landing_region(memory), heartbeat() as lags:
            started = time.perf_counter()
            await in_window(
                self._kv,
                self._loads,
                lambda load: self._kv.read_groups(load.group_ids, memory[load.place]),
                self._advance(task),
            )
            read_s = time.perf_counter() - started
        return found, read_s, lag_of(lags)

    async def compare(self, found: Bytes) -> tuple[int, float]:
        """Read the same groups through the oracle; gives the groups that differ from it or from what was written,
        and the seconds that the oracle's reads took.
        """
        task = self._progress.add_task("read, oracle", total=self._nbytes)
        payload = self._kv.layout.payload_nbytes
        mismatches, oracle_s = 0, 0.0

        def compare_load(load: Load) -> tuple[int, float]:
            told = np.full(load.nbytes, _POISON, dtype=np.uint8)
            started = time.perf_counter()
            oracle.read_groups(load.group_ids, told)
            seconds = time.perf_counter() - started
            return count_mismatches(payload, found[load.place], told, content_of(load)), seconds

        with PosixBackend(self._kv.files) as oracle:
            for load in self._loads:
                differing, seconds = await anyio.to_thread.run_sync(compare_load, load)
                mismatches += differing
                oracle_s += seconds
                self._progress.advance(task, load.nbytes)
        return mismatches, oracle_s

    def _advance(self, task: TaskID) -> Callable[[Load], None]:
        return lambda load: self._progress.advance(task, load.nbytes)
