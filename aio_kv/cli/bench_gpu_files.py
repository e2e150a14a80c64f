"""Files to the GPU: out of the page cache with several rings, from the disk, and beside the synchronous oracle."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np

from aio_kv.backends.engine_backend import EngineBackend
from aio_kv.backends.posix import PosixBackend
from aio_kv.cli.bench_gpu_desk import GpuDesk, keep_in_flight
from aio_kv.cli.bench_gpu_ram_disk import ram_disk
from aio_kv.cli.bench_gpu_report import Target, at_least, ratio_at_least
from aio_kv.cli.benches.desk import name_of
from aio_kv.cli.benches.workload import Batch, BufferedFiles, draw_batches, fill, layout_of, workload_memory
from aio_kv.cuda import DeviceBuffer
from aio_kv.errors import UnavailableError
from aio_kv.files import LayerFiles
from aio_kv.layout import GroupLayout
from aio_kv.protocols import Scatter
from aio_kv.transfer import Transfer

__all__ = ["bench_disk", "bench_memory_files"]

_KIB = 1 << 10
_SMALL, _LARGE = 4 * _KIB, 256 * _KIB
_BATCHES = {_SMALL: 256, _LARGE: 64}
_IN_FLIGHT = 8
_RINGS = (1, 2, 4, 8)
_LESS_NBYTES = 2 << 20
_MEMORY_FILES = "/dev/shm"
_ORACLE_BATCH = 64  # it answers when the last group of a call has arrived: short calls keep the clock exact
_WARM_UP_NBYTES = 8 << 20

Drive = Callable[[], Awaitable[float]]


class _Plan:
    """The batches of one layout, and where the groups in flight go: a shuffled place for each, in GPU memory or not."""

    def __init__(self, layout: GroupLayout) -> None:
        self.layout = layout
        self.nbytes = layout.stride
        size = max(1, min(_BATCHES[layout.stride], layout.groups_per_layer // 4))
        self.batches: list[Batch] = draw_batches(layout, size)
        places = np.random.default_rng(1).permutation(_IN_FLIGHT * size).reshape(_IN_FLIGHT, size)
        self.offsets = np.ascontiguousarray(places * self.nbytes)
        self.batch_size = size

    @property
    def window_nbytes(self) -> int:
        """Memory that all groups in flight need."""
        return _IN_FLIGHT * self.batch_nbytes

    @property
    def batch_nbytes(self) -> int:
        """Bytes of one transfer."""
        return self.batch_size * self.nbytes


class _Reader:
    """Batches through one backend into one window of memory, always the same ones in the same order."""

    def __init__(self, kv: EngineBackend, plan: _Plan, window: Any, streams: list[int] | None) -> None:
        self.kv = kv
        self._plan = plan
        self._scatters = [Scatter(window, lane) for lane in plan.offsets]
        self._streams = streams

    def start(self, lane: int, number: int) -> Transfer:
        """Begin batch `number` in a lane."""
        batch = self._plan.batches[number % len(self._plan.batches)]
        stream = self._streams[lane] if self._streams is not None else None
        return self.kv.read_groups(batch.ids, self._scatters[lane], stream=stream)

    async def drive(self, seconds: float) -> float:
        """GB/s over about `seconds`."""
        nbytes = self._plan.batch_nbytes
        return await keep_in_flight(self.start, nbytes=nbytes, in_flight=_IN_FLIGHT, seconds=seconds)


async def _gpu_reader(
    desk: GpuDesk, stack: AsyncExitStack, files: LayerFiles, plan: _Plan, *, rings: int = 1, **changes: Any
) -> _Reader:
    """A reader to the GPU that has brought the right bytes once."""
    window = stack.enter_context(DeviceBuffer(plan.window_nbytes, desk.device))
    kv = await stack.enter_async_context(desk.backend(files, rings=rings, **changes))
    streams = [desk.driver.new_stream() for _ in range(_IN_FLIGHT)]
    reader = _Reader(kv, plan, window, streams)
    await reader.start(0, 0)
    offsets = plan.batches[0].offsets
    rows = [np.frombuffer(os.pread(files.fd(0), plan.nbytes, offset), np.uint8) for offset in offsets]
    desk.driver.check_rows(np.stack(rows), window, plan.offsets[0])
    return reader


async def _host_reader(
    desk: GpuDesk, stack: AsyncExitStack, files: LayerFiles, plan: _Plan, *, rings: int = 1
) -> _Reader:
    """A reader to registered host memory: the same work without the copies to the GPU."""
    memory = workload_memory(plan.window_nbytes)
    kv = await stack.enter_async_context(desk.backend(files, rings=rings, has_device=False))
    await stack.enter_async_context(await kv.register_landing_region(memory))
    return _Reader(kv, plan, memory, None)


def _oracle(desk: GpuDesk, stack: AsyncExitStack, files: LayerFiles, plan: _Plan, seconds: float) -> Drive:
    """The synchronous backend on the same files and ids, one group at a time."""
    oracle = stack.enter_context(PosixBackend(files, device=desk.device))
    window = stack.enter_context(DeviceBuffer(plan.window_nbytes, desk.device))
    stream = desk.driver.new_stream()
    size = min(_ORACLE_BATCH, plan.batch_size)
    into = Scatter(window, np.ascontiguousarray(plan.offsets[0][:size]))

    async def drive() -> float:
        begin, count = time.perf_counter(), 0
        while not count or time.perf_counter() - begin < seconds:
            ids = plan.batches[count % len(plan.batches)].ids
            oracle.read_groups(ids[:size], into, stream)
            count += 1
        return count * size * plan.nbytes / (time.perf_counter() - begin) / 1e9

    return drive


async def bench_memory_files(desk: GpuDesk) -> None:
    """256 KiB groups out of files in memory: the page cache with 1, 2, 4 and 8 rings, and if asked for a RAM disk."""
    layout = layout_of(_LARGE, desk.settings.nbytes)
    with (
        _memory_directory(desk) as (directory, where),
        BufferedFiles(directory, layout, create=True) as files,
    ):
        desk.say(f"writing {name_of(layout.nbytes)} to {where}")
        await fill(files)
        _warm_up(files)
        for rings in _RINGS:
            is_most = rings == _RINGS[-1]
            target = at_least(35, design=42) if is_most else None
            await _bench_rings(desk, files, rings, "page_cache", where, target, has_lags=is_most)
    if not desk.settings.wants_ram_disk:
        desk.report.remark("no rows for a block device in memory: --ram-disk, as root, makes one")
        return
    try:
        with ram_disk(layout.nbytes) as disk, LayerFiles(disk.directory, layout, create=True) as files:
            if files.direct_alignment is None:
                raise UnavailableError(f"direct I/O does not work on it: {files.direct_refusal}")
            await fill(files)
            target = at_least(35, design=42)
            await _bench_rings(desk, files, _RINGS[-1], "ram_disk", f"O_DIRECT, {disk.kind}", target)
    except UnavailableError as error:
        desk.report.remark(f"the block device in memory: {error}")


@contextmanager
def _memory_directory(desk: GpuDesk) -> Iterator[tuple[str, str]]:
    """A directory on tmpfs where there is room in it, else below the scratch directory; and which it is in words."""
    try:
        space = os.statvfs(_MEMORY_FILES)
        has_room = space.f_bavail * space.f_frsize > 2 * desk.settings.nbytes
    except OSError:
        has_room = False
    if has_room and os.access(_MEMORY_FILES, os.W_OK):
        with tempfile.TemporaryDirectory(prefix="aio-kv-bench-", dir=_MEMORY_FILES) as path:
            yield path, "tmpfs"
    else:
        with desk.scratch_directory("memory") as path:
            yield path, "the page cache of the disk's files"


def _warm_up(files: LayerFiles) -> None:
    memory = memoryview(bytearray(_WARM_UP_NBYTES))
    for start in range(0, files.layout.nbytes_per_layer, len(memory)):
        os.preadv(files.fd(0), [memory], start)


async def _bench_rings(
    desk: GpuDesk,
    files: LayerFiles,
    rings: int,
    name: str,
    where: str,
    target: Target | None,
    *,
    has_lags: bool = False,
) -> None:
    plan, seconds = _Plan(files.layout), desk.settings.seconds
    async with AsyncExitStack() as stack:
        gpu = await _gpu_reader(desk, stack, files, plan, rings=rings)
        host = await _host_reader(desk, stack, files, plan, rings=rings)
        contenders: dict[str, Drive] = {
            "gpu": partial(gpu.drive, seconds),
            "same_to_host": partial(host.drive, seconds),
            "PosixBackend": _oracle(desk, stack, files, plan, seconds),
        }
        if rings == _RINGS[-1]:
            # Less under way: the staging memory in use stays in the processor's cache until the GPU has read it.
            less = await _gpu_reader(desk, stack, files, plan, rings=rings, bulk_nbytes=_LESS_NBYTES)
            contenders[f"gpu_bulk_{name_of(_LESS_NBYTES)}"] = partial(less.drive, seconds)
        found = await desk.run_rounds(contenders, f"{where} to GPU, {rings} rings")
        if has_lags:
            await desk.measure_lags(partial(gpu.drive, seconds), name)
        rung = gpu.kv.rung
    desk.report.add(
        f"{name}_to_gpu_{plan.nbytes}_{rings}rings",
        "GB/s",
        found["gpu"],
        baselines={other: found[other] for other in found if other != "gpu"},
        target=target,
        note=f"{where}, {rung}",
    )


async def bench_disk(desk: GpuDesk) -> None:
    """Groups from the disk: to the GPU beside the same to the host; small ones beside the oracle, cold and warm."""
    for nbytes in (_LARGE, _SMALL):
        layout = layout_of(nbytes, desk.settings.nbytes)
        with desk.scratch_directory(f"disk-{nbytes}") as path:
            with LayerFiles(path, layout, create=True) as files:
                desk.say(f"writing {name_of(layout.nbytes)} in groups of {name_of(nbytes)}")
                await fill(files)
                files.drop_page_cache()
                if files.direct_alignment is None:
                    desk.report.remark(f"nothing is read past the page cache: {files.direct_refusal}")
                else:
                    await _bench_cold(desk, files)
            if nbytes == _SMALL:
                with BufferedFiles(path, layout) as files:
                    _warm_up(files)
                    await _bench_warm(desk, files)


async def _bench_cold(desk: GpuDesk, files: LayerFiles) -> None:
    plan, seconds = _Plan(files.layout), desk.settings.seconds
    async with AsyncExitStack() as stack:
        gpu = await _gpu_reader(desk, stack, files, plan)
        host = await _host_reader(desk, stack, files, plan)
        contenders: dict[str, Drive] = {
            "gpu": partial(gpu.drive, seconds),
            "same_to_host": partial(host.drive, seconds),
        }
        if plan.nbytes == _SMALL:
            contenders["PosixBackend"] = _oracle(desk, stack, files, plan, seconds)
        title = f"disk to GPU, {name_of(plan.nbytes)}"
        found = await desk.run_rounds(contenders, title)
        if plan.nbytes == _LARGE:
            await desk.measure_lags(partial(gpu.drive, seconds), "disk")
        rung = gpu.kv.rung
    name, target = f"disk_to_gpu_{plan.nbytes}", ratio_at_least(0.95, design=0.98)
    baselines = {"same_to_host": found["same_to_host"]}
    desk.report.add(name, "GB/s", found["gpu"], baselines=baselines, target=target, note=rung)
    if "PosixBackend" in found:
        _add_oracle_row(desk, "cold", found, ratio_at_least(10), rung)


async def _bench_warm(desk: GpuDesk, files: LayerFiles) -> None:
    plan, seconds = _Plan(files.layout), desk.settings.seconds
    async with AsyncExitStack() as stack:
        gpu = await _gpu_reader(desk, stack, files, plan)
        contenders: dict[str, Drive] = {
            "gpu": partial(gpu.drive, seconds),
            "PosixBackend": _oracle(desk, stack, files, plan, seconds),
        }
        found = await desk.run_rounds(contenders, f"page cache to GPU, {name_of(plan.nbytes)}")
        rung = gpu.kv.rung
    _add_oracle_row(desk, "warm", found, ratio_at_least(10, design=30), rung)


def _add_oracle_row(
    desk: GpuDesk, state: str, found: dict[str, list[float]], target: Target, rung: str
) -> None:
    baselines = {"PosixBackend": found["PosixBackend"]}
    name = f"vs_oracle_{_SMALL}_{state}"
    desk.report.add(name, "GB/s", found["gpu"], baselines=baselines, target=target, note=rung)
