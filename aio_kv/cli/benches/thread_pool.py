"""The usual ways without io_uring: a pool of threads that call preadv, and a plain loop that blocks."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

from aio_kv.cli.benches.measure import (
    Sample,
    cpu_seconds,
    for_batches,
    for_seconds,
    keep_in_flight,
    sample_of,
)
from aio_kv.cli.benches.workload import Batch, Workload

__all__ = ["BlockingRun", "PoolRun", "best_pool"]

_WIDTHS = (4, 8, 16, 32, 64)
_QUICK_WIDTHS = (16,)


class PoolRun:
    """Batches through a `ThreadPoolExecutor`: one job per request, or one per chunk of a batch (a chunk per thread).

    A context manager, since its threads must be gone before the memory that they read into.
    """

    latency_of = "batch"
    is_on_loop = True
    share = 1.0

    def __init__(
        self, fd: int, workload: Workload, *, width: int, is_chunked: bool, is_write: bool = False
    ) -> None:
        self.name = "thread-pool"
        self.note = f"{width} threads, one job per {'chunk' if is_chunked else 'request'}"
        self.width = width
        self.is_chunked = is_chunked
        self.executor = ThreadPoolExecutor(width)
        self._fd = fd
        self._workload = workload
        self._call = os.pwritev if is_write else os.preadv

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.executor.shutdown(wait=True, cancel_futures=True)

    async def drive(self, seconds: float) -> Sample:
        """Run for about `seconds`."""
        return await self._run(for_seconds(seconds))

    async def drive_batches(self, count: int) -> Sample:
        """Run `count` batches."""
        return await self._run(for_batches(count))

    async def _run(self, goes_on: Callable[[], bool]) -> Sample:
        move = self._move_chunks if self.is_chunked else self._move_requests
        return await keep_in_flight(self._workload, move, goes_on)

    async def _move_chunks(self, lane: int, batch: Batch) -> None:
        vectors, offsets = self._workload.vectors[lane], batch.offsets
        loop, executor = asyncio.get_running_loop(), self.executor
        step = -(-len(offsets) // self.width)
        jobs = [
            loop.run_in_executor(
                executor, self._move_all, vectors[start : start + step], offsets[start : start + step]
            )
            for start in range(0, len(offsets), step)
        ]
        _check_moved(sum(await asyncio.gather(*jobs)), len(offsets) * self._workload.block)

    def _move_all(self, vectors: list[list[memoryview]], offsets: list[int]) -> int:
        fd, call, moved = self._fd, self._call, 0
        for vector, offset in zip(vectors, offsets, strict=True):
            moved += call(fd, vector, offset)
        return moved

    async def _move_requests(self, lane: int, batch: Batch) -> None:
        loop, executor, fd, call = asyncio.get_running_loop(), self.executor, self._fd, self._call
        jobs = [
            loop.run_in_executor(executor, call, fd, vector, offset)
            for vector, offset in zip(self._workload.vectors[lane], batch.offsets, strict=True)
        ]
        _check_moved(sum(await asyncio.gather(*jobs)), len(jobs) * self._workload.block)


class BlockingRun:
    """Batches by one preadv after the other, in the event loop's own thread: nothing else runs meanwhile."""

    name = "preadv-loop"
    note = "blocks the event loop"
    latency_of = "batch"
    is_on_loop = False

    def __init__(self, fd: int, workload: Workload, *, share: float = 1.0) -> None:
        self.share = share
        self._fd = fd
        self._workload = workload

    async def drive(self, seconds: float) -> Sample:
        """Run for about `seconds`, without giving the loop a turn."""
        fd, workload, clock, preadv = self._fd, self._workload, time.perf_counter, os.preadv
        lanes, goes_on = workload.vectors, for_seconds(seconds)
        latencies: list[float] = []
        moved = 0
        cpu, begin = cpu_seconds(), clock()
        while goes_on():
            batch, vectors = workload.take(), lanes[len(latencies) % len(lanes)]
            start = clock()
            for vector, offset in zip(vectors, batch.offsets, strict=True):
                moved += preadv(fd, vector, offset)
            latencies.append(clock() - start)
        elapsed, cpu = clock() - begin, cpu_seconds() - cpu
        requests = len(latencies) * workload.shape.batch
        _check_moved(moved, requests * workload.block)
        return sample_of(workload, latencies, seconds=elapsed, cpu=cpu, requests=requests)


async def best_pool(
    fd: int, workload: Workload, seconds: float, *, is_quick: bool, is_write: bool = False
) -> PoolRun:
    """The fastest of several widths and both ways of cutting, each tried twice for `seconds`; the caller closes it."""
    candidates = [
        PoolRun(fd, workload, width=width, is_chunked=is_chunked, is_write=is_write)
        for width in (_QUICK_WIDTHS if is_quick else _WIDTHS)
        for is_chunked in (True, False)
    ]
    try:
        speeds = [0.0] * len(candidates)
        for order in (range(len(candidates)), reversed(range(len(candidates)))):
            for index in order:
                speeds[index] += (await candidates[index].drive(seconds)).gb_s
    except BaseException:
        _close(candidates)
        raise
    best = candidates.pop(speeds.index(max(speeds)))
    _close(candidates)
    return best


def _close(pools: Sequence[PoolRun]) -> None:
    for pool in pools:
        pool.__exit__(None, None, None)


def _check_moved(moved: int, wanted: int) -> None:
    if moved != wanted:
        raise AssertionError(f"{moved} bytes were moved instead of {wanted}")
