"""`aio-kv bench gpu`: which parts run, in which order, with everything given back afterwards."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from aio_kv.cli.bench_gpu_desk import GpuDesk
from aio_kv.cli.bench_gpu_driver import Driver
from aio_kv.cli.bench_gpu_files import bench_disk, bench_memory_files
from aio_kv.cli.bench_gpu_machine import gpu_machine_facts
from aio_kv.cli.bench_gpu_pinned import bench_events, bench_pinned, bench_restore
from aio_kv.cli.bench_gpu_pool import PinnedPool
from aio_kv.cli.bench_gpu_report import GpuReport, at_most
from aio_kv.cli.bench_gpu_settings import GpuSettings
from aio_kv.cuda import Device, DevicePath

__all__ = ["run_gpu_benchmark"]

_SLOW_FRACTION_MAX = 0.001  # of the CUDA calls: with p99.9 at 50 us or less, no more are above


def run_gpu_benchmark(settings: GpuSettings, console: Console, *, device: Device | None = None) -> GpuReport:
    """Run everything, showing progress on `console`. Blocks; call it outside of any event loop.

    `device` stays the caller's; without one GPU `settings.device` is opened. A scratch directory is made below
    `settings.directory` and removed whatever happens. Raises `UnavailableError` where there is no GPU, and what the
    parts raise.
    """
    if device is None:
        with Device(settings.device) as opened:
            return run_gpu_benchmark(settings, console, device=opened)
    with (
        tempfile.TemporaryDirectory(prefix="aio-kv-bench-", dir=settings.directory) as scratch,
        _progress_on(console) as progress,
        DevicePath(device) as path,
        device.activated(),
        _driver_of(path) as driver,
        asyncio.Runner() as runner,
    ):
        desk = GpuDesk(settings, device, driver, scratch, progress)
        runner.run(_run(desk))
        desk.report.machine.update(gpu_machine_facts(scratch, path))
        return desk.report


@contextmanager
def _driver_of(path: DevicePath) -> Iterator[Driver]:
    driver = Driver(path.device, path.kernels)
    try:
        yield driver
    finally:
        driver.close()


def _progress_on(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, auto_refresh=False)


async def _run(desk: GpuDesk) -> None:
    desk.say("filling pinned memory")
    with PinnedPool(desk.settings.nbytes, desk.driver) as pool:
        await bench_pinned(desk, pool)
        await bench_restore(desk, pool)
        await bench_events(desk, pool)
    await bench_memory_files(desk)
    await bench_disk(desk)
    _add_call_rows(desk)


def _add_call_rows(desk: GpuDesk) -> None:
    """How long the engine's own CUDA calls took, over all that was measured."""
    found, add = desk.cuda_calls, desk.report.add
    fraction = [found.slow / found.calls] if found.calls else []
    note = f"{found.slow} of {found.calls} CUDA calls of the engine took more than 50 us"
    add("cuda_calls_above_50us", "fraction", fraction, target=at_most(_SLOW_FRACTION_MAX), note=note)
    longest = [found.longest_ns / 1e3] if found.calls else []
    add("cuda_call_longest", "us", longest, note="the longest of these calls")
