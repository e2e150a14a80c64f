"""How late an event loop is: a task that asks to be woken every millisecond and notes how long it was kept waiting.

A stall longer than the period hides the beats that should have happened meanwhile. They are put back in when the
percentiles are taken (`with_missed_beats`): a stall of 50 ms then weighs as the fifty late beats that it caused, not
as one.

asyncio waits in whole milliseconds, rounded up. Any other event wakes it before the timer is due, and it then waits a
whole millisecond for the rest: on a busy loop that nobody holds up, a lag of up to 1 ms is its own.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import anyio
import numpy as np
from anyio.abc import TaskStatus
from numpy.typing import NDArray

__all__ = ["Lag", "heartbeat", "idle_lag", "lag_of", "with_missed_beats"]

PERIOD_S = 0.001
IDLE_S = 1.0


@dataclass(frozen=True, slots=True)
class Lag:
    """Milliseconds between wanted and real wake, and the number of beats that they come from."""

    p50_ms: float
    p99_ms: float
    beats: int


@asynccontextmanager
async def heartbeat(period_s: float = PERIOD_S) -> AsyncIterator[list[float]]:
    """Beat on the caller's loop while the block runs; gives the list that the lags, in seconds, are added to.

    A block that ends within the first period waits for that beat, so that there always is one.
    """
    lags: list[float] = []
    first = anyio.Event()
    failure: Exception | None = None
    async with anyio.create_task_group() as group:
        # Unlike start_soon this waits until the task runs, so that it sees the block from its first moment.
        await group.start(partial(_beat, lags, first, period_s))
        try:
            yield lags
            await first.wait()
        except Exception as error:
            failure = error  # Raised below: leaving the task group it would be wrapped in an ExceptionGroup.
        group.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def _beat(
    lags: list[float], first: anyio.Event, period_s: float, *, task_status: TaskStatus[None]
) -> None:
    task_status.started()
    while True:
        wanted = time.perf_counter() + period_s
        await anyio.sleep(period_s)
        lags.append(max(0.0, time.perf_counter() - wanted))
        first.set()


async def idle_lag(seconds: float | None = None) -> Lag:
    """Measure the loop while nothing else happens on it, for a second unless told otherwise, for comparison."""
    async with heartbeat() as lags:
        await anyio.sleep(IDLE_S if seconds is None else seconds)
    return lag_of(lags)


def lag_of(lags: Sequence[float], period_s: float = PERIOD_S) -> Lag:
    """Return the percentiles of measured lags, of which there is at least one, given in seconds."""
    p50, p99 = np.percentile(with_missed_beats(lags, period_s), [50, 99]) * 1e3
    return Lag(float(p50), float(p99), len(lags))


def with_missed_beats(lags: Sequence[float], period_s: float = PERIOD_S) -> NDArray[np.float64]:
    """Return the lags and, for each one above the period, those of the beats that it swallowed."""
    measured = np.asarray(lags, dtype=np.float64)
    missed = [np.arange(lag - period_s, 0.0, -period_s) for lag in measured[measured > period_s]]
    return np.concatenate([measured, *missed])
