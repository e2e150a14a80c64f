"""Pinned memory to the GPU: throughput by group size, the latency of a small restore, and of learning of an event."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import cycle

import numpy as np

from aio_kv.backends.engine_backend import EngineBackend
from aio_kv.cli.bench_gpu_desk import GpuDesk, Latency, keep_in_flight, latency_of
from aio_kv.cli.bench_gpu_driver import CopyJob, Driver, flat_out
from aio_kv.cli.bench_gpu_pool import PinnedPool
from aio_kv.cli.bench_gpu_report import at_least, at_most
from aio_kv.cli.benches.desk import name_of
from aio_kv.cli.benches.workload import layout_of
from aio_kv.engine import Batch, Engine, Kind
from aio_kv.files import LayerFiles
from aio_kv.plan import RESULT_DTYPE, new_record, plan_pinned
from aio_kv.protocols import Priority
from aio_kv.transfer import LandingRegion, Transfer

__all__ = ["bench_events", "bench_pinned", "bench_restore"]

_KIB = 1 << 10
_SMALL = 4 * _KIB
_BLOCKS = (_SMALL, 64 * _KIB, 256 * _KIB, 1024 * _KIB)
_JOB_NBYTES_MAX = 32 << 20  # 8192 groups of 4 KiB
_IN_FLIGHT = 4
_FILE_NBYTES = 4 << 20  # only there because a backend has files
_RESTORE_GROUPS = 64
_RESTORE_JOBS = 32
_LOOK_US = 50
_WORK_GROUPS = 1280  # 5 MiB: about 100 us of PCIe gen5 x16

Timed = Callable[[], Awaitable[float]]


@asynccontextmanager
async def _pinned_backend(
    desk: GpuDesk, pool: PinnedPool, nbytes: int
) -> AsyncIterator[tuple[EngineBackend, LandingRegion]]:
    """A backend for groups of `nbytes` with the pool as a landing region."""
    with (
        desk.scratch_directory(f"pinned-{nbytes}") as path,
        LayerFiles(path, layout_of(nbytes, _FILE_NBYTES), create=True) as files,
    ):
        async with desk.backend(files) as kv, await kv.register_landing_region(pool.memory) as region:
            yield kv, region


async def bench_pinned(desk: GpuDesk, pool: PinnedPool) -> None:
    """GB/s of shuffled groups, beside the calls that a loop of one's own would make, and the copy engine."""
    for nbytes in _BLOCKS:
        async with _pinned_backend(desk, pool, nbytes) as (kv, region):
            await _bench_size(desk, pool, kv, region, nbytes)


async def _bench_size(
    desk: GpuDesk, pool: PinnedPool, kv: EngineBackend, region: LandingRegion, nbytes: int
) -> None:
    driver, seconds = desk.driver, desk.settings.seconds
    jobs = pool.jobs(nbytes, min(_JOB_NBYTES_MAX, pool.nbytes // 8) // nbytes)
    streams = [driver.new_stream() for _ in range(_IN_FLIGHT)]

    def start(lane: int, number: int) -> Transfer:
        job = jobs[number % len(jobs)]
        return kv.load(region, job.offsets, job.scatter, stream=streams[lane])

    async def ours() -> float:
        total = jobs[0].total_nbytes
        return await keep_in_flight(start, nbytes=total, in_flight=_IN_FLIGHT, seconds=seconds)

    async def theirs(issue: Callable[[CopyJob], None]) -> float:
        return flat_out(driver, issue, jobs, seconds)

    def copy_whole(job: CopyJob) -> None:
        driver.copy_once(pool.target.data_ptr(), pool.pin.address, job.total_nbytes)

    pool.clear_target()
    await start(0, 0)
    driver.check_bytes(jobs[0], pool.target, pool.bytes)
    others: dict[str, Timed] = {
        name: partial(theirs, issue) for name, issue in _issues(driver, nbytes).items()
    }
    engine: dict[str, Timed] = {"copy_engine": partial(theirs, copy_whole)}
    # The first baseline is the one that a target or a reader looks at first.
    baselines = {**others, **engine} if nbytes == _SMALL else {**engine, **others}
    title = f"pinned memory to GPU, {name_of(nbytes)}"
    contenders: dict[str, Timed] = {"aio_kv": ours, **baselines}
    found = await desk.run_rounds(contenders, title)
    desk.report.add(
        f"pinned_to_gpu_{nbytes}",
        "GB/s",
        found["aio_kv"],
        baselines={name: found[name] for name in baselines},
        target=at_least(40, design=45) if nbytes == _SMALL else at_least(50, design=52),
        note=f"{name_of(nbytes)} groups, shuffled, {len(jobs[0].calls)} a transfer, {_IN_FLIGHT} in flight",
    )
    if nbytes == _SMALL:
        await desk.measure_lags(ours, "pinned")


def _issues(driver: Driver, nbytes: int) -> dict[str, Callable[[CopyJob], None]]:
    issues: dict[str, Callable[[CopyJob], None]] = {"copy_loop": driver.copy_one_by_one}
    if driver.has_batches:
        issues["memcpy_batch"] = driver.copy_in_batches
    if driver.kernels is not None and nbytes == _SMALL:
        issues["bare_kernel"] = driver.gather
    return issues


async def bench_restore(desk: GpuDesk, pool: PinnedPool) -> None:
    """Latency of 64 groups of 4 KiB: until the event of the copies is done, until `enqueued`, until the await ends."""
    prepared = pool.jobs(_SMALL, _RESTORE_GROUPS, count=_RESTORE_JOBS)
    jobs = cycle(prepared)
    async with _pinned_backend(desk, pool, _SMALL) as (kv, region):
        ours = _Restore(kv, region, prepared, desk.driver)
        contenders: dict[str, Timed] = {
            "event": ours.until_event,
            "hand_over": ours.from_hand_over,
            "await": ours.until_awaited,
            "enqueued": ours.until_enqueued,
        }
        raw = {
            name: partial(_issue_and_spin, desk.driver, issue, jobs)
            for name, issue in _issues(desk.driver, _SMALL).items()
        }
        found = await _latencies(desk, {**contenders, **raw}, "restore of 64 x 4 KiB")
    baselines = {name: [each.p50_us for each in found[name]] for name in raw}
    p50 = {name: [each.p50_us for each in found[name]] for name in contenders}
    add, prefix = desk.report.add, "restore_64x4096"
    note = "from submitting a planned batch to its event done; others: issue to a spinning query"
    add(f"{prefix}_event_p50", "us", p50["event"], baselines=baselines, target=at_most(30), note=note)
    note = "from handing over, with checks, list and fence, to the event done"
    add(f"{prefix}_hand_over_p50", "us", p50["hand_over"], baselines=baselines, note=note)
    note = "from the call to the awaiting task, back to back; others: issue to a spinning query"
    add(f"{prefix}_await_p50", "us", p50["await"], baselines=baselines, target=at_most(60), note=note)
    p99 = [each.p99_us for each in found["await"]]
    baselines_p99 = {name: [each.p99_us for each in found[name]] for name in raw}
    add(f"{prefix}_await_p99", "us", p99, baselines=baselines_p99, note=note)
    note = "the caller's stream may be given work that reads the bytes"
    add(f"{prefix}_enqueued_p50", "us", p50["enqueued"], baselines=baselines, note=note)


class _Restore:
    """Single small restores through a backend, each timed in one of three ways and then awaited."""

    def __init__(
        self, kv: EngineBackend, region: LandingRegion, jobs: Sequence[CopyJob], driver: Driver
    ) -> None:
        session = kv._require_session()
        assert isinstance(session.opened.engine, Engine)
        assert session.device is not None
        self._kv = kv
        self._engine = session.opened.engine
        self._side = session.device
        self._region = region
        self._jobs = cycle(jobs)
        self._stream = driver.new_stream()
        known = session.device.ordered(self._stream)
        assert known is not None
        known.release()

    def _start(self) -> Transfer:
        job = next(self._jobs)
        return self._kv.load(self._region, job.offsets, job.scatter, stream=self._stream)

    async def until_awaited(self) -> float:
        start = time.perf_counter()
        await self._start()
        return time.perf_counter() - start

    async def until_enqueued(self) -> float:
        start = time.perf_counter()
        transfer = self._start()
        await transfer.enqueued()
        seconds = time.perf_counter() - start
        await transfer
        return seconds

    async def until_event(self) -> float:
        """From submitting a planned and fenced batch until the engine has found its event done.

        No event loop takes part: the calling thread looks without a pause.
        """
        job = next(self._jobs)
        self._engine.rouse()
        caller = self._side.ordered(self._stream)
        assert caller is not None
        target = self._side.memory(job.scatter.memory, what="into")
        region = self._region.address, self._region.nbytes
        plan = plan_pinned(region, job.offsets, target.address + job.scatter.offsets, job.nbytes)
        results = np.zeros(plan.op_count, RESULT_DTYPE)
        batch = Batch(Kind.LOAD, plan.ops, plan.op_count, results, plan.copies, plan.copy_count)
        batch = batch._replace(owner=job, order=caller.order)
        start = time.perf_counter()
        ticket = self._engine.submit(batch)
        while not ticket.is_done:
            self._engine.drain(_LOOK_US)
        seconds = time.perf_counter() - start
        caller.release()
        return seconds

    async def from_hand_over(self) -> float:
        """The same from where `load` hands over: with the checks, the list and the fence, which are one step there."""
        job = next(self._jobs)
        self._engine.rouse()
        caller = self._side.begin_fence(self._stream)
        assert caller is not None
        target, scatter = self._side.memory(job.scatter.memory, what="into"), job.scatter
        region = self._region.address, self._region.nbytes, job.offsets
        device = target.address, target.nbytes, scatter.offsets
        record = new_record(len(job.offsets))
        index = self._side.device.index
        start = time.perf_counter()
        ticket = self._engine.copy_pinned(
            Kind.LOAD, Priority.DEMAND, index, region, device, job.nbytes, record, caller.fence, job
        )
        assert ticket is not None
        while not ticket.is_done:
            self._engine.drain(_LOOK_US)
        seconds = time.perf_counter() - start
        caller.release()
        return seconds


async def _issue_and_spin(driver: Driver, issue: Callable[[CopyJob], None], jobs: cycle[CopyJob]) -> float:
    job = next(jobs)
    start = time.perf_counter()
    issue(job)
    driver.record_and_spin()
    return time.perf_counter() - start


async def bench_events(desk: GpuDesk, pool: PinnedPool) -> None:
    """How late a task learns that a stream has got somewhere: idle, and behind some 100 us of work."""
    driver = desk.driver
    (job,) = pool.jobs(_SMALL, _WORK_GROUPS, count=1)

    def work() -> None:
        if driver.kernels is not None:
            driver.gather(job)
        else:
            driver.copy_once(pool.target.data_ptr(), pool.pin.address, job.total_nbytes)

    async with _pinned_backend(desk, pool, _SMALL) as (kv, _):

        async def awaited(has_work: bool) -> float:
            start = time.perf_counter()
            if has_work:
                work()
            await kv.record_event(driver.stream)
            return time.perf_counter() - start

        async def spun(has_work: bool) -> float:
            start = time.perf_counter()
            if has_work:
                work()
            driver.record_and_spin()
            return time.perf_counter() - start

        notified = _HostFunction(driver)
        try:

            async def told(has_work: bool) -> float:
                start = time.perf_counter()
                if has_work:
                    work()
                await notified.wait()
                return time.perf_counter() - start

            for has_work, name in ((False, "idle"), (True, "after_100us")):
                contenders: dict[str, Timed] = {
                    "await": partial(awaited, has_work),
                    "spin": partial(spun, has_work),
                }
                if driver.has_host_functions:
                    contenders["host_function"] = partial(told, has_work)
                found = await _latencies(desk, contenders, f"event, {name.replace('_', ' ')}")
                _add_event_rows(desk, name, found)
        finally:
            notified.close()


class _HostFunction:
    """The other way to learn of an event: a host function on a stream of its own writes an eventfd."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._stream = driver.new_stream()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[None] | None = None
        self._loop.add_reader(self._fd, self._on_ready)

    async def wait(self) -> None:
        self._future = self._loop.create_future()
        self._driver.tell_after(self._stream, self._fd)
        await self._future

    def _on_ready(self) -> None:
        os.eventfd_read(self._fd)
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)


def _add_event_rows(desk: GpuDesk, name: str, found: dict[str, list[Latency]]) -> None:
    p50 = {way: [each.p50_us for each in found[way]] for way in found}
    p99 = {way: [each.p99_us for each in found[way]] for way in found}
    note = "record_event to the awaiting task; the baseline asks without pause"
    for percentile, figures in (("p50", p50), ("p99", p99)):
        baselines = {"spinning_query": figures["spin"]}
        if "host_function" in figures:
            baselines["host_function"] = figures["host_function"]
        desk.report.add(f"event_{name}_{percentile}", "us", figures["await"], baselines=baselines, note=note)
    if name != "idle":
        late = [ours - other for ours, other in zip(p50["await"], p50["spin"], strict=True)]
        desk.report.add(f"event_{name}_wakeup_p50", "us", late, note="the difference of the two medians")


async def _latencies(desk: GpuDesk, contenders: dict[str, Timed], title: str) -> dict[str, list[Latency]]:
    """Rounds of many single repetitions, of which the first few do not count."""

    async def repeat(once: Timed) -> Latency:
        for _ in range(5):
            await once()
        return latency_of([await once() for _ in range(desk.settings.repeats)])

    return await desk.run_rounds({name: partial(repeat, once) for name, once in contenders.items()}, title)
