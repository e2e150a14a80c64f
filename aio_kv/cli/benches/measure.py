"""One run of one contender, and what is measured around it."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from aio_kv.cli.benches.workload import Batch, Workload

__all__ = [
    "Contender",
    "ContenderFailed",
    "Named",
    "Sample",
    "alternating",
    "cpu_seconds",
    "for_batches",
    "for_seconds",
    "keep_in_flight",
    "percentile_us",
    "sample_of",
]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sample:
    """One run. Latencies are of a batch or of a request, as the contender says; None where they mean nothing.

    `process_cpu_seconds` is set where start-up is part of a process's CPU time but not of the run.
    """

    requests: int
    nbytes: int
    seconds: float
    cpu_seconds: float
    p50_us: float | None
    p99_us: float | None
    process_cpu_seconds: float | None = None

    @property
    def gb_s(self) -> float:
        """Gigabytes (10^9 bytes) per second."""
        return self.nbytes / self.seconds / 1e9

    @property
    def iops(self) -> float:
        """Requests per second."""
        return self.requests / self.seconds

    @property
    def cpu_s_per_gb(self) -> float:
        """User and system seconds of all threads per gigabyte."""
        return self.cpu_seconds / (self.nbytes / 1e9)


class Named(Protocol):
    """What a row says about who was measured."""

    @property
    def name(self) -> str:
        """Who."""

    @property
    def note(self) -> str:
        """How."""

    @property
    def latency_of(self) -> str:
        """What a latency is of: "batch" or "request"."""


class Contender(Named, Protocol):
    """Something that can be run for a while."""

    @property
    def share(self) -> float:
        """The part of the run time it gets."""

    @property
    def is_on_loop(self) -> bool:
        """Whether others get a turn of the event loop while it runs."""

    async def drive(self, seconds: float) -> Sample:
        """Run for about `seconds`."""


class ContenderFailed(Exception):
    """A contender that is not ours could not do its part: it takes no further part, and the message says why."""


def alternating(contenders: Sequence[T], number: int) -> Sequence[T]:
    """The order of round `number`: every other round is reversed, so that drift of the machine hits all alike."""
    return contenders[::-1] if number % 2 else contenders


def cpu_seconds(who: int = resource.RUSAGE_SELF) -> float:
    """User and system time so far, of all threads of this process, or with RUSAGE_CHILDREN of those it waited for."""
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


def percentile_us(seconds: Sequence[float], percent: float) -> float | None:
    """A percentile of some seconds, in microseconds; None of none."""
    return float(np.percentile(seconds, percent)) * 1e6 if seconds else None


def for_seconds(seconds: float) -> Callable[[], bool]:
    """A condition that holds for so long."""
    until = time.perf_counter() + seconds
    return lambda: time.perf_counter() < until


def for_batches(count: int) -> Callable[[], bool]:
    """A condition that holds so many times."""
    left = iter(range(count))
    return lambda: next(left, None) is not None


def sample_of(
    workload: Workload, latencies: Sequence[float], *, seconds: float, cpu: float, requests: int
) -> Sample:
    """The sample of a run over blocks of a workload."""
    return Sample(
        requests=requests,
        nbytes=requests * workload.block,
        seconds=seconds,
        cpu_seconds=cpu,
        p50_us=percentile_us(latencies, 50),
        p99_us=percentile_us(latencies, 99),
    )


async def keep_in_flight(
    workload: Workload, move: Callable[[int, Batch], Awaitable[object]], goes_on: Callable[[], bool]
) -> Sample:
    """Keep the workload's number of batches in flight while `goes_on()`; `move(lane, batch)` does one.

    Each lane starts its next batch when its last one has ended; all are awaited before the clock is stopped.
    """
    latencies: list[float] = []
    clock = time.perf_counter

    async def run_lane(lane: int) -> None:
        while goes_on():
            batch = workload.take()
            start = clock()
            await move(lane, batch)
            latencies.append(clock() - start)

    cpu, start = cpu_seconds(), clock()
    async with asyncio.TaskGroup() as lanes:
        for lane in range(workload.shape.in_flight):
            lanes.create_task(run_lane(lane))
    seconds, cpu = clock() - start, cpu_seconds() - cpu
    requests = len(latencies) * workload.shape.batch
    return sample_of(workload, latencies, seconds=seconds, cpu=cpu, requests=requests)
