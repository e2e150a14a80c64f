"""Our backends as contenders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aio_kv.backends.engine_backend import EngineBackend
from aio_kv.cli.benches.measure import Sample, for_batches, for_seconds, keep_in_flight
from aio_kv.cli.benches.workload import Batch, Workload, check_io_count

__all__ = ["BackendRun"]


class BackendRun:
    """Batches through an open backend, into memory registered with it.

    `note` is the rung in force. Reads, or writes of whatever the workload's memory holds.
    """

    latency_of = "batch"
    is_on_loop = True

    def __init__(
        self, name: str, kv: EngineBackend, workload: Workload, *, share: float = 1.0, is_write: bool = False
    ) -> None:
        self.name = name
        self.note = kv.rung
        self.share = share
        self._kv = kv
        self._workload = workload
        self._start: Callable[..., Any] = kv.write_groups if is_write else kv.read_groups

    async def drive(self, seconds: float) -> Sample:
        """Run for about `seconds`."""
        return await self._run(for_seconds(seconds))

    async def drive_batches(self, count: int) -> Sample:
        """Run `count` batches."""
        return await self._run(for_batches(count))

    async def _run(self, goes_on: Callable[[], bool]) -> Sample:
        scatters, start = self._workload.scatters, self._start

        def move(lane: int, batch: Batch) -> Any:
            return start(batch.ids, scatters[lane])

        before = self._kv.statistics()
        sample = await keep_in_flight(self._workload, move, goes_on)
        pieces = self._workload.pieces
        check_io_count(before, self._kv.statistics(), requests=sample.requests, pieces=pieces)
        return sample
