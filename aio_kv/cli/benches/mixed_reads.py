"""A 4 KiB read at a time while 1 MiB reads saturate the disk: how long does the small one wait?

Both go through one backend (or one thread pool), on one file: a layout's block is 1 MiB here, 256 groups of 4 KiB.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass

import numpy as np

from aio_kv.backends.engine_backend import EngineBackend
from aio_kv.cli.benches.desk import Desk
from aio_kv.cli.benches.measure import Sample, alternating, cpu_seconds, percentile_us
from aio_kv.cli.benches.results import Rounds
from aio_kv.cli.benches.throughput import opened
from aio_kv.cli.benches.workload import Shape, Workload
from aio_kv.files import LayerFiles
from aio_kv.open import open_backend

__all__ = ["bench_mixed_reads"]

_LANES = 4
_BLOCKS = 8  # per bulk batch: all lanes together are four times what the backend lets to the device at a time
_POOL_THREADS = 16  # less than there are bulk reads in flight: the pool has a queue too
_SMALL, _BULK = "mixed-small", "mixed-bulk"


@dataclass(frozen=True, slots=True)
class MixedReads:
    """One way of reading: `read_bulk(lane, blocks)` and `read_small(group)`."""

    name: str
    note: str
    read_bulk: Callable[[int, list[int]], Awaitable[object]]
    read_small: Callable[[int], Awaitable[object]]
    latency_of: str = "request"

    async def drive(self, files: LayerFiles, seconds: float) -> tuple[Sample, Sample]:
        """Run both for about `seconds`; returns the samples of the small and of the bulk reads."""
        layout, random, clock = files.layout, np.random.default_rng(2), time.perf_counter
        small: list[float] = []
        bulk: list[float] = []
        cpu, begin = cpu_seconds(), clock()

        async def run_bulk(lane: int) -> None:
            while clock() - begin < seconds:
                # Every other block, as everywhere: neighbours would be merged.
                blocks = random.permutation(layout.num_blocks // 2)[:_BLOCKS] * 2
                start = clock()
                await self.read_bulk(lane, blocks.tolist())
                bulk.append(clock() - start)

        async def run_small() -> None:
            while clock() - begin < seconds:
                group = int(random.integers(layout.num_groups))
                start = clock()
                await self.read_small(group)
                small.append(clock() - start)

        async with asyncio.TaskGroup() as tasks:
            for lane in range(_LANES):
                tasks.create_task(run_bulk(lane))
            tasks.create_task(run_small())
        elapsed, cpu = clock() - begin, cpu_seconds() - cpu
        return (
            _sample(small, len(small), layout.stride, elapsed, cpu),
            _sample(bulk, len(bulk) * _BLOCKS, layout.block_nbytes, elapsed, cpu),
        )


def _sample(latencies: list[float], requests: int, nbytes: int, seconds: float, cpu: float) -> Sample:
    # The CPU time is that of both together: there is no telling them apart.
    p50, p99 = percentile_us(latencies, 50), percentile_us(latencies, 99)
    return Sample(requests, requests * nbytes, seconds, cpu, p50, p99)


async def bench_mixed_reads(desk: Desk, files: LayerFiles) -> None:
    """Our backend beside a thread pool in which everything waits its turn."""
    layout = files.layout
    # One lane more than bulk needs: the small read lands there.
    shape = Shape(batch=_BLOCKS * layout.groups_per_block, in_flight=_LANES + 1, depth=1)
    if layout.num_blocks < 2 * _BLOCKS:
        desk.report.remark(f"no mixed reads: --size must be {2 * _BLOCKS} or more")
        return
    workload = Workload(layout, shape=shape, is_spread=True)
    async with AsyncExitStack() as stack:
        kv = await opened(stack, open_backend(files), workload, desk)
        executor = stack.enter_context(ThreadPoolExecutor(_POOL_THREADS))
        contenders = [_ours(kv, workload), _pooled(executor, files, workload)]
        rounds = {_SMALL: Rounds(), _BULK: Rounds()}
        for number in range(desk.settings.rounds):
            desk.say(f"mixed reads, round {number + 1} of {desk.settings.rounds}")
            for contender in alternating(contenders, number):
                small, bulk = await contender.drive(files, desk.settings.seconds)
                rounds[_SMALL].add(contender.name, small)
                rounds[_BULK].add(contender.name, bulk)
            desk.advance()
    desk.report.add_rows(contenders, rounds[_SMALL], mode=_SMALL, block=layout.stride)
    desk.report.add_rows(contenders, rounds[_BULK], mode=_BULK, block=layout.block_nbytes)
    small_p50 = rounds[_SMALL].ratio("aio_kv", "thread-pool", lambda sample: sample.p50_us)
    desk.report.add_ratio("mixed_small_p50_vs_threads", small_p50)
    bulk_gb_s = rounds[_BULK].ratio("aio_kv", "thread-pool", lambda sample: sample.gb_s)
    desk.report.add_ratio("mixed_bulk_vs_threads", bulk_gb_s)


def _ours(kv: EngineBackend, workload: Workload) -> MixedReads:
    layout, scatters = workload.layout, workload.scatters
    ids_of_block = np.arange(layout.num_groups, dtype=np.int64).reshape(layout.num_blocks, -1)
    small = workload.vectors[_LANES][0][0]

    async def read_bulk(lane: int, blocks: list[int]) -> None:
        await kv.read_groups(ids_of_block[blocks].reshape(-1), scatters[lane])

    async def read_small(group: int) -> None:
        await kv.read_groups([group], small)

    return MixedReads("aio_kv", kv.rung, read_bulk, read_small)


def _pooled(executor: ThreadPoolExecutor, files: LayerFiles, workload: Workload) -> MixedReads:
    layout, fd = files.layout, files.fd(0, direct=True)
    nbytes, lane_nbytes = layout.block_nbytes, _BLOCKS * layout.block_nbytes
    loop = asyncio.get_running_loop()
    lanes = [
        [
            [workload.memory[start : start + nbytes]]
            for start in range(lane * lane_nbytes, (lane + 1) * lane_nbytes, nbytes)
        ]
        for lane in range(_LANES)
    ]
    small = workload.vectors[_LANES][0]

    async def read_bulk(lane: int, blocks: list[int]) -> None:
        jobs = [
            loop.run_in_executor(executor, os.preadv, fd, vector, block * nbytes)
            for vector, block in zip(lanes[lane], blocks, strict=True)
        ]
        await asyncio.gather(*jobs)

    async def read_small(group: int) -> None:
        await loop.run_in_executor(executor, os.preadv, fd, small, group * layout.stride)

    return MixedReads(
        "thread-pool", f"{_POOL_THREADS} threads, first come, first served", read_bulk, read_small
    )
