"""`aio-kv bench disk`: which parts run, in which order, in a scratch directory that is gone afterwards."""

from __future__ import annotations

import asyncio
import errno
import importlib
import tempfile
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from aio_kv.cli.benches.busy_thread import bench_busy_thread
from aio_kv.cli.benches.desk import Desk, name_of
from aio_kv.cli.benches.fio import fio_version, why_no_fio
from aio_kv.cli.benches.machine import machine_facts
from aio_kv.cli.benches.mixed_reads import bench_mixed_reads
from aio_kv.cli.benches.peers.run import peers_to_run
from aio_kv.cli.benches.results import Report
from aio_kv.cli.benches.settings import DiskSettings
from aio_kv.cli.benches.single_reads import bench_single_reads
from aio_kv.cli.benches.throughput import bench_buffered, bench_direct, bench_spread
from aio_kv.cli.benches.workload import BufferedFiles, fill, layout_of
from aio_kv.cli.benches.writes import bench_writes
from aio_kv.errors import StorageError, UnavailableError
from aio_kv.files import LayerFiles

__all__ = ["run_disk_benchmark"]

_SMALL = 4096
_WRITE_BLOCKS = (_SMALL, 256 << 10)


def run_disk_benchmark(settings: DiskSettings, console: Console) -> Report:
    """Run everything, showing progress on `console`. Blocks; raises what the parts raise, and KeyboardInterrupt.

    The scratch directory is made below `settings.directory` and removed whatever happens.
    """
    loop_factory: Any = None
    if settings.loop != "asyncio":
        loop_factory = importlib.import_module(settings.loop).new_event_loop
    with (
        _scratch_in(settings.directory) as scratch,
        asyncio.Runner(loop_factory=loop_factory) as runner,
        _progress_on(console) as progress,
    ):
        return runner.run(_run(settings, scratch, progress))


def _scratch_in(directory: str) -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="aio-kv-bench-", dir=directory)
    except OSError as error:
        number, hint = error.errno or errno.EIO, "--dir takes a writable directory"
        raise StorageError("create", errno=number, file=directory, hint=hint) from error


def _progress_on(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, auto_refresh=False)


async def _run(settings: DiskSettings, scratch: str, progress: Progress) -> Report:
    desk = Desk(settings, scratch, progress)
    desk.report.machine = machine_facts(scratch, loop=settings.loop, fio=await fio_version())
    modes = await _possible_modes(desk)
    if "direct" in modes:
        desk.peers = peers_to_run(desk)
    desk.expect(sum(_sets_of_rounds(desk, block, modes) for block in settings.blocks))
    for block in settings.blocks:
        await _bench_block(desk, block, modes)
        if "direct" in modes and block in _WRITE_BLOCKS:
            await bench_writes(desk, block)
    return desk.report


def _sets_of_rounds(desk: Desk, block: int, modes: tuple[str, ...]) -> int:
    direct = 1 + _has_spread(desk) + 4 * (block == _SMALL) + (block in _WRITE_BLOCKS)
    return direct * ("direct" in modes) + 2 * ("warm" in modes)


def _has_spread(desk: Desk) -> bool:
    # Without a contender that uses as much memory the figure would mean nothing.
    return desk.has_fio and not desk.settings.is_quick


async def _possible_modes(desk: Desk) -> tuple[str, ...]:
    """Try direct I/O and fio on a small file; returns the modes that can be measured."""
    modes = desk.settings.modes
    with (
        desk.scratch_directory("probe") as path,
        LayerFiles(path, layout_of(_SMALL, 1 << 20), create=True) as files,
    ):
        await fill(files)
        refusal = files.direct_refusal
        if refusal is None and "direct" in modes:
            problem = await why_no_fio(files.path_of(0))
            desk.has_fio = problem is None
            if problem is not None:
                desk.report.remark(f"no fio rows: {problem}")
    if refusal is None or "direct" not in modes:
        return modes
    if modes == ("direct",):
        hint = "keep the files on ext4 or XFS (--dir), or measure --modes warm"
        raise UnavailableError(f"direct I/O does not work here: {refusal}", hint=hint)
    desk.report.remark(f"no direct rows: {refusal}")
    return tuple(mode for mode in modes if mode != "direct")


async def _bench_block(desk: Desk, block: int, modes: tuple[str, ...]) -> None:
    """Everything about one block size, on one set of files that is removed again."""
    layout = layout_of(block, desk.settings.file_nbytes)
    with desk.scratch_directory(f"blocks-{block}") as path:
        with LayerFiles(path, layout, create=True) as files:
            desk.say(f"writing {name_of(layout.nbytes)} in blocks of {name_of(block)}")
            await fill(files)
            if "direct" in modes:
                await bench_direct(desk, files)
                if _has_spread(desk):
                    await bench_spread(desk, files)
                if block == _SMALL:
                    await bench_single_reads(desk, files)
                    await bench_mixed_reads(desk, files)
                    await bench_busy_thread(desk, files)
        if "warm" in modes:
            with BufferedFiles(path, layout) as files:
                await bench_buffered(desk, files)
