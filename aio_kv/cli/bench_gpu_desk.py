"""What every part of the GPU benchmark works with: settings, the device, a scratch directory, the report, progress."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

import numpy as np
from rich.progress import Progress

from aio_kv.backends.engine_backend import EngineBackend
from aio_kv.cli.bench_gpu_driver import Driver
from aio_kv.cli.bench_gpu_report import GpuReport
from aio_kv.cli.bench_gpu_settings import GpuSettings
from aio_kv.cli.benches.measure import alternating
from aio_kv.cli.heartbeat import Lag, heartbeat, idle_lag, lag_of
from aio_kv.cuda import Device
from aio_kv.engine.options import EngineOptions
from aio_kv.files import LayerFiles
from aio_kv.open import open_backend

__all__ = ["CudaCalls", "GpuDesk", "Latency", "keep_in_flight", "latency_of"]

IDLE = "idle loop"
T = TypeVar("T")


@dataclass(slots=True)
class CudaCalls:
    """CUDA calls of all engines of a run, those above 50 us among them, and the longest."""

    calls: int = 0
    slow: int = 0
    longest_ns: int = 0


@dataclass(frozen=True, slots=True)
class Latency:
    """Microseconds, of one run of a contender."""

    p50_us: float
    p99_us: float


class GpuDesk:
    """The state of one benchmark run."""

    def __init__(
        self, settings: GpuSettings, device: Device, driver: Driver, scratch: str, progress: Progress
    ) -> None:
        self.settings = settings
        self.device = device
        self.driver = driver
        self.report = GpuReport()
        self.cuda_calls = CudaCalls()
        self._scratch = scratch
        self._progress = progress
        self._task = progress.add_task("looking around", total=None)

    def say(self, text: str) -> None:
        """Show what is going on."""
        # Refreshed by hand: a thread that draws ten times a second would be measured along with the rest.
        self._progress.update(self._task, description=text, refresh=True)

    @contextmanager
    def scratch_directory(self, name: str, *, parent: str | None = None) -> Iterator[str]:
        """A directory below the scratch directory or `parent`, removed at the end of the context: files are large."""
        path = os.path.join(parent or self._scratch, name)
        os.mkdir(path)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    @asynccontextmanager
    async def backend(
        self, files: LayerFiles, *, rings: int = 1, has_device: bool = True, **changes: Any
    ) -> AsyncIterator[EngineBackend]:
        """An open backend, `changes` being further options; its CUDA calls are counted at the end."""
        options = EngineOptions(rings=rings, staging_nbytes=self.settings.staging_nbytes, **changes)
        device = self.device if has_device else None
        async with open_backend(files, device=device, options=options) as kv:
            self.report.machine.setdefault("rung", kv.rung)
            yield kv
            if has_device:
                self._count_calls(kv)

    def _count_calls(self, kv: EngineBackend) -> None:
        engine, total = kv.statistics().engine, self.cuda_calls
        total.calls += engine.cuda_calls
        total.slow += engine.cuda_calls_slow
        total.longest_ns = max(total.longest_ns, engine.cuda_call_ns_max)

    async def run_rounds(
        self, contenders: Mapping[str, Callable[[], Awaitable[T]]], title: str
    ) -> dict[str, list[T]]:
        """Run every contender once per round, in alternating order; what each gave, in the order of the rounds."""
        found: dict[str, list[T]] = {name: [] for name in contenders}
        for number in range(self.settings.rounds):
            self.say(f"{title}, round {number + 1} of {self.settings.rounds}")
            for name in alternating(list(contenders), number):
                found[name].append(await contenders[name]())
        return found

    async def measure_lags(self, drive: Callable[[], Awaitable[object]], name: str) -> None:
        """Rows for how late a heartbeat of 1 ms is while `drive` runs, beside an idle loop."""

        async def busy() -> Lag:
            async with heartbeat() as lags:
                await drive()
            return lag_of(lags)

        async def idle() -> Lag:
            return await idle_lag(self.settings.seconds)

        title = f"loop lag, {name}"
        lags = await self.run_rounds({"busy": busy, IDLE: idle}, title)
        for percentile, of in (("p50", _p50_ms), ("p99", _p99_ms)):
            self.report.add(
                f"loop_lag_{name}_{percentile}",
                "ms",
                [of(lag) for lag in lags["busy"]],
                baselines={IDLE: [of(lag) for lag in lags[IDLE]]},
                note="a 1 ms heartbeat while reading to the GPU flat out",
            )


def _p50_ms(lag: Lag) -> float:
    return lag.p50_ms


def _p99_ms(lag: Lag) -> float:
    return lag.p99_ms


async def keep_in_flight(
    start: Callable[[int, int], Awaitable[object]], *, nbytes: int, in_flight: int, seconds: float
) -> float:
    """GB/s of transfers of `nbytes`, so many in flight, for about `seconds`; `start(lane, number)` begins one.

    Each lane starts its next one when its last has ended; all are awaited before the clock is stopped.
    """
    clock, numbers, done = time.perf_counter, count(), 0
    begin = clock()

    async def run_lane(lane: int) -> None:
        nonlocal done
        while True:
            await start(lane, next(numbers))
            done += 1
            if clock() - begin >= seconds:
                return

    async with asyncio.TaskGroup() as lanes:
        for lane in range(in_flight):
            lanes.create_task(run_lane(lane))
    return done * nbytes / (clock() - begin) / 1e9


def latency_of(seconds: Sequence[float]) -> Latency:
    """The percentiles of some repetitions."""
    p50, p99 = np.percentile(seconds, [50, 99]) * 1e6
    return Latency(float(p50), float(p99))
