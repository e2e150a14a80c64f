"""What the notebook `oracle_comparison` measures: the same groups through every backend, compared and timed.

Speeds are measured with the parts of `aio-kv bench disk`: the same workloads, batches and contenders.
"""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aio_kv import (
    CascadeBackend,
    EngineOptions,
    GroupLayout,
    LayerFiles,
    PosixBackend,
    Scatter,
    UnavailableError,
    allocate_host,
    named_layout,
    open_backend,
)
from aio_kv.cli.benches.backend_runs import BackendRun
from aio_kv.cli.benches.fio import FioRun, why_no_fio
from aio_kv.cli.benches.measure import Sample, cpu_seconds, for_batches, for_seconds, sample_of
from aio_kv.cli.benches.workload import Shape, Workload, fill, layout_of, shape_of
from aio_kv.cli.heartbeat import heartbeat
from aio_kv.cuda import Device, DeviceBuffer

__all__ = [
    "Compared",
    "Content",
    "Sizes",
    "Speeds",
    "compare_backends",
    "compare_on_first_gpu",
    "compare_on_gpu",
    "corrupted",
    "generated_content",
    "measure_depths",
    "measure_lags",
    "measure_latencies",
    "measure_sizes",
    "model_content",
]

_POISON = 0xA5  # In memory that is about to be read into, so that a byte that never arrives shows.
_SEED = 7
_THREADS_MAX = 64
Bytes = NDArray[np.uint8]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured: seconds per run, runs per point, bytes per file."""

    seconds: float
    rounds: int
    file_nbytes: int
    groups: tuple[int, ...]
    depths: tuple[int, ...]
    has_model: bool

    @classmethod
    def chosen(cls, name: str) -> Sizes:
        """`quick` shows that everything works; `full` gives figures. The latter reads a text with a real model."""
        kib = 1 << 10
        if name == "quick":
            return cls(0.05, 1, 32 << 20, (4 * kib, 64 * kib, 256 * kib), (1, 16, 256), False)
        if name == "full":
            sizes = tuple(size * kib for size in (4, 16, 64, 256, 1024))
            return cls(0.5, 3, 512 << 20, sizes, (1, 2, 4, 8, 16, 32, 64, 128, 256), True)
        raise ValueError(f"AIO_KV_NOTEBOOK is {name!r}: must be quick or full")


@dataclass(frozen=True, slots=True)
class Content:
    """Groups and where they are from; `payloads` is [group, byte], in the order of the group numbers."""

    source: str
    layout: GroupLayout
    payloads: Bytes


def generated_content() -> Content:
    """Random bytes in the shape of a small model: 30 layers, 8 blocks of 16 tokens."""
    layout = named_layout("smollm2-135m", num_blocks=8)
    shape = (layout.num_groups, layout.payload_nbytes)
    payloads = np.random.default_rng(_SEED).integers(0, 256, shape, dtype=np.uint8)
    return Content("random bytes in the shape of SmolLM2-135M, 16-bit", layout, payloads)


def model_content() -> Content:
    """The keys and values of SmolLM2-135M after it has read a text; random bytes where the model is not installed."""
    from aio_kv.cli.language_model import LanguageModel, prepare_packages

    try:
        prepare_packages()
    except UnavailableError as error:
        print(f"{error}; random bytes instead")
        return generated_content()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tqdm wants widgets for a bar that is switched off
        import torch

        from aio_kv.cli.demo_model import text

        model = LanguageModel.load()
    tokens = model.tokens_of(text())
    layout = model.layout(num_blocks=len(tokens) // 16, block_size=16)
    layers = model.layers_of(model.prefill(tokens[: layout.num_blocks * 16]))
    kept = torch.stack(
        [torch.cat([keys, values]) for keys, values in layers]
    )  # layer, kind, head, token, dim
    blocks = kept.unflatten(3, (layout.num_blocks, 16)).permute(0, 3, 1, 2, 4, 5).contiguous()
    payloads = blocks.view(torch.uint8).numpy().reshape(layout.num_groups, layout.payload_nbytes)
    return Content(f"keys and values of {model.name}, {layout.num_blocks * 16} tokens", layout, payloads)


@dataclass(frozen=True, slots=True)
class Compared:
    """What one backend read: for each [layer, group of the layer] whether all its bytes are those of the oracle."""

    name: str
    is_equal: NDArray[np.bool_]

    @property
    def differing(self) -> int:
        """How many groups differ."""
        return int((~self.is_equal).sum())


async def compare_backends(content: Content, directory: Path) -> list[Compared]:
    """Write all groups, forget them, and read them through every backend; the oracle is held against what was written.

    Each reads from the disk, in an order of its own, into scattered memory. The cascade reads twice: the second time
    out of its own memory.
    """
    layout = content.layout
    order = np.random.default_rng(_SEED).permutation(layout.num_groups)
    with LayerFiles(directory, layout, create=True) as files, PosixBackend(files) as oracle:
        async with open_backend(files) as kv:
            await kv.write_groups(np.arange(layout.num_groups), content.payloads)
            await kv.flush()
        files.drop_page_cache()
        told = _fresh(layout)
        await asyncio.to_thread(oracle.read_groups, np.arange(layout.num_groups), told)
        found = [("PosixBackend, beside what was written", told, content.payloads.reshape(-1))]
        for backend in ("uring", "threads"):
            try:
                async with open_backend(files, backend=backend) as kv:
                    found.append((type(kv).__name__, await _read_all(kv, layout, order), told))
            except UnavailableError as error:
                print(f"left out: {error}")
        below = open_backend(files)
        cascade: Any = CascadeBackend(below, capacity_bytes=content.payloads.nbytes, promote=True)
        async with cascade as kv:
            for place in ("out of the files", "out of its memory"):
                before = kv.statistics().misses
                found.append((f"CascadeBackend, {place}", await _read_all(kv, layout, order), told))
                came_up = kv.statistics().misses - before
                print(f"CascadeBackend, {place}: {came_up:,} of {layout.num_groups:,} groups came from below")
    return [_compared(layout, name, *both) for name, *both in found]


def _compared(layout: GroupLayout, name: str, found: Bytes, expected: Bytes) -> Compared:
    is_equal = (found == expected).reshape(-1, layout.payload_nbytes).all(axis=1)
    return Compared(name, is_equal.reshape(layout.num_layers, -1))


def _fresh(layout: GroupLayout) -> Bytes:
    memory = np.frombuffer(allocate_host(layout.num_groups * layout.payload_nbytes), dtype=np.uint8)
    memory.fill(_POISON)
    return memory


async def _read_all(kv: Any, layout: GroupLayout, order: NDArray[np.int64]) -> Bytes:
    """Every group, in `order`, to its place; one transfer for each 1,000."""
    found = _fresh(layout)
    for ids in np.array_split(order, -(-len(order) // 1000)):
        await kv.read_groups(ids, Scatter(found, ids * layout.payload_nbytes))
    return found


def corrupted(compared: Compared, content: Content, group: int) -> Compared:
    """The same comparison after one bit of one group was flipped, to see that the picture shows it."""
    told = content.payloads.reshape(-1)
    found = told.copy()
    found[group * content.layout.payload_nbytes + 5] ^= 1
    return _compared(content.layout, f"{compared.name}, one bit flipped", found, told)


class OracleRun:
    """The oracle as a contender: a batch is read group by group, and the event loop waits for all of it."""

    name = "PosixBackend"
    note = "one blocking read per group"
    latency_of = "batch"
    is_on_loop = False
    share = 1.0

    def __init__(self, oracle: PosixBackend, workload: Workload) -> None:
        self._oracle = oracle
        self._workload = workload

    async def drive(self, seconds: float) -> Sample:
        """Run for about `seconds`."""
        return self.drive_blocking(for_seconds(seconds))

    def drive_blocking(self, goes_on: Callable[[], bool]) -> Sample:
        """Run batches while `goes_on()`."""
        workload, clock, latencies = self._workload, time.perf_counter, list[float]()
        cpu, begin = cpu_seconds(), clock()
        while goes_on():
            start = clock()
            self._oracle.read_groups(workload.take().ids, workload.scatters[0])
            latencies.append(clock() - start)
        seconds, cpu = clock() - begin, cpu_seconds() - cpu
        requests = len(latencies) * workload.shape.batch
        return sample_of(workload, latencies, seconds=seconds, cpu=cpu, requests=requests)


class CascadeRun:
    """A cascade that holds the whole file in memory as a contender. Between two batches the loop gets a turn."""

    name = "CascadeBackend"
    note = "all of it in memory"
    latency_of = "batch"
    is_on_loop = True
    share = 1.0

    def __init__(self, kv: CascadeBackend, workload: Workload) -> None:
        self._kv = kv
        self._workload = workload

    async def warm_up(self) -> None:
        """Bring everything up."""
        layout = self._workload.layout
        memory = allocate_host(layout.groups_per_block * layout.payload_nbytes)
        for block in range(layout.num_blocks):
            await self._kv.read_block(0, block, memory)

    async def drive(self, seconds: float) -> Sample:
        """Run for about `seconds`. Raises AssertionError if anything was not in memory."""
        workload, clock, goes_on = self._workload, time.perf_counter, for_seconds(seconds)
        latencies: list[float] = []
        before = self._kv.statistics()
        cpu, begin = cpu_seconds(), clock()
        while goes_on():
            start = clock()
            await self._kv.read_groups(workload.take().ids, workload.scatters[0])
            latencies.append(clock() - start)
            await asyncio.sleep(0)
        elapsed, cpu = clock() - begin, cpu_seconds() - cpu
        after = self._kv.statistics()
        assert before is not None
        assert after is not None
        assert after.misses == before.misses, "not everything was in memory"
        requests = len(latencies) * workload.shape.batch
        return sample_of(workload, latencies, seconds=elapsed, cpu=cpu, requests=requests)


@dataclass(slots=True)
class Speeds:
    """Runs by contender and by group size or queue depth; several runs of each."""

    samples: dict[str, dict[int, list[Sample]]] = field(default_factory=dict)

    def add(self, name: str, point: int, sample: Sample) -> None:
        """Append a run."""
        self.samples.setdefault(name, {}).setdefault(point, []).append(sample)

    def medians(self, value: Callable[[Sample], float]) -> dict[str, dict[int, float]]:
        """For each contender and point the median of a value."""
        return {
            name: {point: float(np.median([value(run) for run in runs])) for point, runs in points.items()}
            for name, points in self.samples.items()
        }


async def measure_sizes(sizes: Sizes, directory: Path) -> Speeds:
    """Every contender, for each size of a group, on one file that has been written before."""
    speeds = Speeds()
    for block in sizes.groups:
        layout = layout_of(block, sizes.file_nbytes)
        with LayerFiles(directory / f"size-{block}", layout, create=True) as files:
            await fill(files)
            files.drop_page_cache()
            workload = Workload(layout)
            async with AsyncExitStack() as stack:
                contenders: list[Any] = [
                    OracleRun(stack.enter_context(PosixBackend(files)), workload),
                    *await _engines(stack, files, workload),
                    *await _fio(files, workload, workload.shape.depth),
                ]
                below = open_backend(files)
                cascade = await stack.enter_async_context(
                    CascadeBackend(below, capacity_bytes=layout.nbytes, promote=True)
                )
                contenders.append(CascadeRun(cascade, workload))
                await contenders[-1].warm_up()
                await _run(speeds, contenders, block, sizes)
        _remove(directory / f"size-{block}")
    return speeds


async def measure_depths(sizes: Sizes, directory: Path, block: int = 4096) -> Speeds:
    """Groups of `block` bytes with so many at the device at a time; the oracle always has one."""
    speeds = Speeds()
    layout = layout_of(block, sizes.file_nbytes)
    with LayerFiles(directory / "depths", layout, create=True) as files:
        await fill(files)
        files.drop_page_cache()
        for depth in sizes.depths:
            usual = shape_of(block)
            workload = Workload(layout, shape=Shape(usual.batch, usual.in_flight, depth))
            options = EngineOptions(queue_depth=depth, threads=min(depth, _THREADS_MAX))
            async with AsyncExitStack() as stack:
                contenders: list[Any] = [
                    *await _engines(stack, files, workload, options),
                    *await _fio(files, workload, depth),
                ]
                if depth == 1:
                    contenders.append(OracleRun(stack.enter_context(PosixBackend(files)), workload))
                await _run(speeds, contenders, depth, sizes)
    _remove(directory / "depths")
    return speeds


async def _engines(
    stack: AsyncExitStack, files: LayerFiles, workload: Workload, options: EngineOptions | None = None
) -> list[BackendRun]:
    found = []
    for name, backend in (("UringBackend", "uring"), ("ThreadedBackend", "threads")):
        try:
            kv = await stack.enter_async_context(open_backend(files, backend=backend, options=options))
        except UnavailableError:
            continue  # said where bytes are compared
        await stack.enter_async_context(await kv.register_landing_region(workload.memory))
        found.append(BackendRun(name, kv, workload))
    return found


async def _fio(files: LayerFiles, workload: Workload, depth: int) -> list[FioRun]:
    if files.direct_alignment is None or await why_no_fio(files.path_of(0)):
        return []
    return [FioRun(files.path_of(0), workload, depth=depth)]


async def _run(speeds: Speeds, contenders: Sequence[Any], point: int, sizes: Sizes) -> None:
    for number in range(sizes.rounds):
        for contender in contenders[::-1] if number % 2 else contenders:
            speeds.add(contender.name, point, await contender.drive(sizes.seconds))


def _remove(directory: Path) -> None:
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()


async def measure_latencies(sizes: Sizes, directory: Path, block: int = 4096) -> dict[str, Floats]:
    """Microseconds of single reads of one group, back to back, each somewhere else; by backend."""
    layout = layout_of(block, sizes.file_nbytes)
    memory = allocate_host(max(block, 4096))
    found: dict[str, Floats] = {}
    with LayerFiles(directory / "latencies", layout, create=True) as files:
        await fill(files)
        files.drop_page_cache()
        with PosixBackend(files) as oracle:

            async def blocking(group: int) -> None:
                oracle.read_groups([group], memory)

            found["PosixBackend"] = await _time_reads(blocking, layout, sizes)
        workload = Workload(layout, shape=Shape(1, 1, 1))
        async with AsyncExitStack() as stack:
            for run in await _engines(stack, files, workload):
                kv: Any = run._kv

                async def awaited(group: int, kv: Any = kv) -> None:
                    await kv.read_groups([group], workload.memory)

                found[run.name] = await _time_reads(awaited, layout, sizes)
    _remove(directory / "latencies")
    return found


async def _time_reads(read: Callable[[int], Awaitable[None]], layout: GroupLayout, sizes: Sizes) -> Floats:
    groups = np.random.default_rng(_SEED).integers(0, layout.num_groups, 1 << 16)
    latencies, goes_on = [], for_seconds(2 * sizes.seconds * sizes.rounds)
    for group in groups.tolist():
        if not goes_on():
            break
        start = time.perf_counter()
        await read(group)
        latencies.append(time.perf_counter() - start)
    return np.array(latencies) * 1e6


async def measure_lags(sizes: Sizes, directory: Path, block: int = 64 << 10) -> dict[str, Floats]:
    """Lags, in milliseconds, of a 1 ms heartbeat on the loop while each way of reading runs flat out; the idle loop."""
    layout = layout_of(block, sizes.file_nbytes)
    seconds = max(0.2, sizes.seconds)
    found: dict[str, Floats] = {}
    with LayerFiles(directory / "lags", layout, create=True) as files:
        await fill(files)
        files.drop_page_cache()
        workload = Workload(layout)
        async with AsyncExitStack() as stack:
            oracle = OracleRun(stack.enter_context(PosixBackend(files)), workload)
            ways: dict[str, Callable[[], Awaitable[Sample | None]]] = {"idle loop": lambda: _sleep(seconds)}
            ways["PosixBackend, on the loop"] = lambda: _batch_by_batch(oracle, seconds)
            ways["PosixBackend, in a thread"] = lambda: asyncio.to_thread(
                oracle.drive_blocking, for_seconds(seconds)
            )
            for run in await _engines(stack, files, workload):
                ways[run.name] = lambda run=run: run.drive(seconds)  # type: ignore[misc]
            below = open_backend(files)
            kv = await stack.enter_async_context(
                CascadeBackend(below, capacity_bytes=layout.nbytes, promote=True)
            )
            cascade = CascadeRun(kv, workload)
            await cascade.warm_up()
            ways["CascadeBackend"] = lambda: cascade.drive(seconds)
            for name, way in ways.items():
                async with heartbeat() as lags:
                    sample = await way()
                assert sample is None or sample.requests, f"{name} has read nothing"
                found[name] = np.array(lags) * 1e3
    _remove(directory / "lags")
    return found


async def _batch_by_batch(oracle: OracleRun, seconds: float) -> Sample:
    """The oracle where it should not be called: the loop gets a turn after each batch only. Gives the last batch."""
    goes_on = for_seconds(seconds)
    while True:
        sample = oracle.drive_blocking(for_batches(1))
        await asyncio.sleep(0)
        if not goes_on():
            return sample


async def _sleep(seconds: float) -> None:
    await asyncio.sleep(seconds)


async def compare_on_first_gpu(content: Content, directory: Path) -> list[Compared]:
    """What `compare_on_gpu` finds; says so where there is no GPU."""
    try:
        device = Device(0)
    except UnavailableError as error:
        print(f"no GPU here, so nothing is compared: {error}")
        return []
    with device:
        return await compare_on_gpu(content, directory, device)


async def compare_on_gpu(content: Content, directory: Path, device: Device) -> list[Compared]:
    """The same groups read into device memory, by the oracle and by the best backend, and brought back."""
    layout = content.layout
    ids = np.arange(layout.num_groups)
    compared = []
    with LayerFiles(directory / "gpu", layout, create=True) as files:
        with PosixBackend(files) as writer:
            writer.write_groups(ids, content.payloads)
        async with open_backend(files, device=device) as kv:
            with PosixBackend(files, device=device) as oracle:
                for name, read in (("PosixBackend", oracle.read_groups), (type(kv).__name__, kv.read_groups)):
                    with DeviceBuffer(content.payloads.nbytes, device) as target:
                        transfer = read(ids, target)
                        if transfer is not None:
                            await transfer
                        found = await _downloaded(kv, target, layout)
                    expected = content.payloads.reshape(-1)
                    compared.append(_compared(layout, f"{name}, to the GPU", found, expected))
    return compared


async def _downloaded(kv: Any, source: DeviceBuffer, layout: GroupLayout) -> Bytes:
    found = _fresh(layout)
    places = np.arange(layout.num_groups) * layout.payload_nbytes
    async with await kv.register_landing_region(found) as region:
        await kv.save(region, places, Scatter(source, places))
    return found
