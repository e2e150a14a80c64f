"""One awaited 4 KiB read at a time, back to back and after an idle millisecond, beside a preadv that blocks."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack

import numpy as np

from aio_kv.cli.benches.desk import Desk, name_of
from aio_kv.cli.benches.measure import Sample, alternating, cpu_seconds, sample_of
from aio_kv.cli.benches.results import Rounds
from aio_kv.cli.benches.throughput import opened
from aio_kv.cli.benches.workload import Shape, Workload
from aio_kv.files import LayerFiles
from aio_kv.open import open_backend

__all__ = ["bench_single_reads"]

_SLICES = 10  # per round: in one long run each contender would meet another mood of the machine
_SLICE_SHARE = 0.06  # of the run time
_IDLE_SECONDS = 0.001


class SingleReads:
    """Single reads by one way of reading, done in slices and collected once a round."""

    latency_of = "request"

    def __init__(
        self, name: str, note: str, workload: Workload, read: Callable[[int], Awaitable[object]]
    ) -> None:
        self.name = name
        self.note = note
        self._workload = workload
        self._read = read
        self._random = np.random.default_rng(1)
        self._latencies: list[float] = []
        self._seconds = self._cpu = 0.0

    async def drive_slice(self, seconds: float, *, pause: float) -> None:
        """Read for about `seconds`, each time somewhere else, after `pause` seconds of sleep each."""
        clock, read, latencies = time.perf_counter, self._read, self._latencies
        groups = self._random.integers(0, self._workload.layout.num_groups, 1 << 14).tolist()
        cpu, begin = cpu_seconds(), clock()
        while clock() - begin < seconds and groups:
            if pause:
                await asyncio.sleep(pause)
            group = groups.pop()
            start = clock()
            await read(group)
            latencies.append(clock() - start)
        self._seconds += clock() - begin
        self._cpu += cpu_seconds() - cpu

    def collect(self) -> Sample:
        """All slices since the last call as one sample."""
        latencies, self._latencies = self._latencies, []
        sample = sample_of(
            self._workload, latencies, seconds=self._seconds, cpu=self._cpu, requests=len(latencies)
        )
        self._seconds = self._cpu = 0.0
        return sample


async def bench_single_reads(desk: Desk, files: LayerFiles) -> None:
    """Our awaited read beside a preadv that blocks the loop, and one in an executor."""
    workload = Workload(files.layout, shape=Shape(batch=1, in_flight=1, depth=1))
    vector, fd, stride = workload.vectors[0][0], files.fd(0, direct=True), files.layout.stride
    async with AsyncExitStack() as stack:
        kv = await opened(stack, open_backend(files), workload, desk)
        executor = stack.enter_context(ThreadPoolExecutor(1))
        loop = asyncio.get_running_loop()

        async def read_ours(group: int) -> None:
            await kv.read_groups([group], workload.memory)

        async def read_blocking(group: int) -> None:
            os.preadv(fd, vector, group * stride)

        async def read_in_executor(group: int) -> None:
            await loop.run_in_executor(executor, os.preadv, fd, vector, group * stride)

        contenders = [
            SingleReads("aio_kv", kv.rung, workload, read_ours),
            SingleReads("preadv", "blocks the event loop", workload, read_blocking),
            SingleReads("executor", "run_in_executor(preadv)", workload, read_in_executor),
        ]
        await _compare(desk, contenders, workload, mode="single", pause=0.0)
        await _compare(desk, contenders, workload, mode="single-idle", pause=_IDLE_SECONDS)


async def _compare(
    desk: Desk, contenders: list[SingleReads], workload: Workload, *, mode: str, pause: float
) -> None:
    rounds, settings = Rounds(), desk.settings
    for number in range(settings.rounds):
        desk.say(f"{mode} reads of {name_of(workload.block)}, round {number + 1} of {settings.rounds}")
        for part in range(_SLICES):
            for contender in alternating(contenders, part):
                await contender.drive_slice(settings.seconds * _SLICE_SHARE, pause=pause)
        for contender in contenders:
            rounds.add(contender.name, contender.collect())
        desk.advance()
    desk.report.add_rows(contenders, rounds, mode=mode, block=workload.block)
    prefix = "single_read_idle" if pause else "single_read"
    for other in ("preadv", "executor"):
        value = rounds.ratio("aio_kv", other, lambda sample: sample.p50_us)
        desk.report.add_ratio(f"{prefix}_vs_{other}", value)
