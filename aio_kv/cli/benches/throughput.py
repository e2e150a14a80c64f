"""Batches flat out: past the page cache (`direct`) and out of it (`warm`)."""

from __future__ import annotations

import os
from contextlib import AsyncExitStack

from aio_kv.backends.engine_backend import EngineBackend, ThreadedBackend
from aio_kv.cli.benches.backend_runs import BackendRun
from aio_kv.cli.benches.desk import IDLE, Desk, name_of
from aio_kv.cli.benches.file_libraries import LibraryRun, installed_libraries
from aio_kv.cli.benches.fio import FioRun
from aio_kv.cli.benches.measure import Contender
from aio_kv.cli.benches.peers.run import best_run
from aio_kv.cli.benches.results import Rounds, Row
from aio_kv.cli.benches.thread_pool import BlockingRun, best_pool
from aio_kv.cli.benches.workload import Workload
from aio_kv.engine.options import EngineOptions
from aio_kv.files import LayerFiles
from aio_kv.open import open_backend

__all__ = ["bench_buffered", "bench_direct", "bench_spread", "opened"]

_LESSER_SHARE = 0.5  # of the run time, for contenders that no target is about
_WARM_SHARE = 0.3  # memory drifts less than a disk
_LIBRARY_SHARE = 0.3
_RINGS = (1, 2)
_WARM_UP_NBYTES = 8 << 20


async def opened(stack: AsyncExitStack, kv: EngineBackend, workload: Workload, desk: Desk) -> EngineBackend:
    """Open a backend for as long as the stack, and register the workload's memory with it."""
    await stack.enter_async_context(kv)
    region = await stack.enter_async_context(await kv.register_landing_region(workload.memory))
    if not region.is_registered and kv.rung.startswith("uring"):
        desk.report.remark(f"the landing region is not registered with the ring (errno {region.refusal})")
    return kv


def _tuning_seconds(desk: Desk) -> float:
    """How long each candidate for the best thread pool is tried, twice."""
    return max(0.02, min(0.2, desk.settings.seconds / 6))


async def bench_direct(desk: Desk, files: LayerFiles) -> None:
    """Direct reads: our backends, fio, the best thread pool, the blocking loop, all into one small window of memory."""
    workload = Workload(files.layout, device=desk.device)
    block, report = workload.block, desk.report
    fd = files.fd(0, direct=True)
    title = f"direct reads of {name_of(block)}"
    async with AsyncExitStack() as stack:
        ours = await opened(stack, open_backend(files), workload, desk)
        threaded = await opened(stack, ThreadedBackend(files), workload, desk)
        report.machine.setdefault("rung", ours.rung)
        desk.say(f"{title}: looking for the best thread pool")
        pool = stack.enter_context(
            await best_pool(fd, workload, _tuning_seconds(desk), is_quick=desk.settings.is_quick)
        )
        contenders: list[Contender] = [
            BackendRun("aio_kv", ours, workload),
            pool,
            BackendRun("aio_kv-threads", threaded, workload, share=_LESSER_SHARE),
            BlockingRun(fd, workload, share=_LESSER_SHARE),
        ]
        if desk.has_fio:
            contenders.insert(1, FioRun(files.path_of(0), workload, depth=workload.shape.depth))
        peers = [await best_run(desk, peer, files, workload, _tuning_seconds(desk)) for peer in desk.peers]
        taking_part = [peer for peer in peers if peer is not None]
        contenders += taking_part
        rounds = await desk.run_rounds(contenders, title, has_lags=True)
    caches = {peer.name: peer.cache for peer in taking_part}
    report.add_rows(contenders, rounds, mode="direct", block=block, caches=caches)
    _add_idle_row(desk, rounds)
    _add_direct_ratios(desk, rounds, block)


def _add_direct_ratios(desk: Desk, rounds: Rounds, block: int) -> None:
    report = desk.report
    usual = (("fio", "fio"), ("threads", "thread-pool"), ("preadv_loop", "preadv-loop"))
    for label, other in (*usual, *((peer.name, peer.name) for peer in desk.peers)):
        report.add_ratio(f"vs_{label}", rounds.ratio("aio_kv", other, lambda s: s.gb_s), block=block)
        report.add_ratio(
            f"cpu_vs_{label}", rounds.ratio("aio_kv", other, lambda s: s.cpu_s_per_gb), block=block
        )
    report.add_ratio("lag_vs_idle", rounds.lag_ratio("aio_kv", IDLE), block=block)
    report.add_ratio("lag_vs_threads", rounds.lag_ratio("aio_kv", "thread-pool"), block=block)
    native = rounds.ratio("aio_kv-threads", "thread-pool", lambda s: s.gb_s)
    report.add_ratio("threaded_backend_vs_threads", native, block=block)
    native = rounds.ratio("aio_kv-threads", "thread-pool", lambda s: s.cpu_s_per_gb)
    report.add_ratio("threaded_backend_cpu_vs_threads", native, block=block)


def _add_idle_row(desk: Desk, rounds: Rounds) -> None:
    lags = sorted(rounds.lags_ms.get(IDLE, ()))
    if lags and not any(row.engine == IDLE for row in desk.report.rows):
        lag = lags[len(lags) // 2]
        desk.report.rows.append(
            Row(engine=IDLE, mode=IDLE, block=0, loop_lag_ms_p50=lag, rounds=len(lags), note="an idle loop")
        )


async def bench_spread(desk: Desk, files: LayerFiles) -> None:
    """Direct reads with a place for every block that is asked for, beside fio with as many: more memory and depth."""
    workload = Workload(files.layout, device=desk.device, is_spread=True)
    depth = workload.shape.in_flight * workload.shape.batch
    async with AsyncExitStack() as stack:
        ours = await opened(stack, open_backend(files), workload, desk)
        contenders: list[Contender] = [
            BackendRun("aio_kv", ours, workload, share=_LESSER_SHARE),
            FioRun(files.path_of(0), workload, depth=depth, share=_LESSER_SHARE),
        ]
        title = f"direct reads of {name_of(workload.block)} into {name_of(len(workload.memory))}"
        rounds = await desk.run_rounds(contenders, title)
    desk.report.add_rows(contenders, rounds, mode="direct-spread", block=workload.block)
    value = rounds.ratio("aio_kv", "fio", lambda sample: sample.gb_s)
    desk.report.add_ratio("spread_vs_fio", value, block=workload.block)


async def bench_buffered(desk: Desk, files: LayerFiles) -> None:
    """Reads through the page cache: cold for the libraries that cannot read otherwise, then warm for everybody."""
    workload = Workload(files.layout, device=desk.device, is_spread=True)
    await _bench_cold(desk, files, workload)
    _warm_up(files)
    await _bench_warm(desk, files, workload)


async def _bench_cold(desk: Desk, files: LayerFiles, workload: Workload) -> None:
    contenders = [
        LibraryRun(name, files.path_of(0), workload, share=_LIBRARY_SHARE, drop_cache=files.drop_page_cache)
        for name in installed_libraries()
    ]
    rounds = await desk.run_rounds(contenders, f"buffered cold reads of {name_of(workload.block)}")
    desk.report.add_rows(contenders, rounds, mode="buffered-cold", block=workload.block)


def _warm_up(files: LayerFiles) -> None:
    memory = memoryview(bytearray(_WARM_UP_NBYTES))
    for start in range(0, files.layout.nbytes_per_layer, len(memory)):
        os.preadv(files.fd(0), [memory], start)


async def _bench_warm(desk: Desk, files: LayerFiles, workload: Workload) -> None:
    title = f"warm reads of {name_of(workload.block)}"
    fd, path, share = files.fd(0), files.path_of(0), _WARM_SHARE
    async with AsyncExitStack() as stack:
        contenders: list[Contender] = []
        for rings in _RINGS:
            kv = await opened(stack, open_backend(files, options=EngineOptions(rings=rings)), workload, desk)
            name = "aio_kv" if rings == 1 else f"aio_kv-{rings}rings"
            contenders.append(BackendRun(name, kv, workload, share=share))
        contenders.append(BlockingRun(fd, workload, share=share))
        desk.say(f"{title}: looking for the best thread pool")
        pool = await best_pool(fd, workload, _tuning_seconds(desk) / 2, is_quick=desk.settings.is_quick)
        pool.share = share
        contenders.append(stack.enter_context(pool))
        contenders += [
            LibraryRun(name, path, workload, share=_LIBRARY_SHARE) for name in installed_libraries()
        ]
        rounds = await desk.run_rounds(contenders, title, has_lags=True)
    desk.report.add_rows(contenders, rounds, mode="warm", block=workload.block)
    for label, ours in (("warm", "aio_kv"), ("warm_2rings", "aio_kv-2rings")):
        for other in ("preadv-loop", "thread-pool"):
            value = rounds.ratio(ours, other, lambda sample: sample.gb_s)
            name = f"{label}_vs_{'threads' if other == 'thread-pool' else 'preadv_loop'}"
            desk.report.add_ratio(name, value, block=workload.block)
    _add_idle_row(desk, rounds)
