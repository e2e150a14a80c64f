"""`aio-kv bench cascade`: the hit path, the miss path, mixed reads and write-back, beside the bare backing."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from aio_kv.cascade import CascadeBackend, SlotCache
from aio_kv.cli.bench_gpu_desk import keep_in_flight
from aio_kv.cli.bench_gpu_report import GpuReport, Target, at_least, ratio_at_least
from aio_kv.cli.benches.machine import machine_facts
from aio_kv.cuda import DeviceBuffer
from aio_kv.engine.extension import allocate_host
from aio_kv.errors import LayoutError
from aio_kv.integers import Int64Array
from aio_kv.layout import GroupLayout, KvKind
from aio_kv.memory import DeviceMemory
from aio_kv.open import open_backend
from aio_kv.policy import POLICY_NAMES

__all__ = ["CascadeSettings", "parse_cascade_settings", "run_cascade_benchmark"]

_MIB = 1 << 20
_BATCH = 1024
_LANES = 4
_FLAT_OUT_NBYTES = 32 * _MIB  # of one call, as `bench gpu` has it
_FLAT_OUT_SECONDS = 0.1
_DRAWS = 16
_KEYS_TARGET = {"lru": 2e6, "arc": 5e5, "s3fifo": 5e5}


@dataclass(frozen=True, slots=True)
class CascadeSettings:
    """What to measure: `nbytes` of files, half of which fit into the cascade; `rounds` of everything."""

    directory: str
    nbytes: int
    rounds: int
    device: int | None


def parse_cascade_settings(
    *, directory: str, size: str | None, pairs: str | None, device: str | None, is_quick: bool
) -> CascadeSettings:
    """Check the options; None means the default, which `--quick` makes smaller. Raises `LayoutError` naming one."""
    if not os.path.isdir(directory):
        raise LayoutError(f"--dir is {directory!r}: must be an existing directory")
    return CascadeSettings(
        os.path.abspath(directory),
        _integer("--size", size or ("64" if is_quick else "512"), 64, 1 << 20) * _MIB,
        _integer("--pairs", pairs or ("3" if is_quick else "15"), 1, 10_000),
        None if device is None else _integer("--device", device, 0, 1023),
    )


def _integer(option: str, text: str, least: int, most: int) -> int:
    value = int(text) if text.isascii() and text.isdigit() else least - 1
    if not least <= value <= most:
        raise LayoutError(f"{option} is {text!r}: must be an integer from {least} to {most}")
    return value


def run_cascade_benchmark(settings: CascadeSettings, say: Callable[[str], None]) -> GpuReport:
    """Run everything; blocks. A scratch directory is made below `settings.directory` and removed whatever happens."""
    report = GpuReport(machine=machine_facts(settings.directory, loop="asyncio", fio=None))
    for policy in POLICY_NAMES:
        say(f"the book with {policy}")
        values = [_keys_per_second(policy) for _ in range(min(settings.rounds, 9))]
        note = "plan, touch, lease, release, write and commit of 1,024 resident keys, 100,000 slots"
        report.add(f"book_{policy}", "keys/s", values, target=at_least(_KEYS_TARGET[policy]), note=note)
    for payload in (4096, 65536):
        with tempfile.TemporaryDirectory(prefix="aio-kv-bench-", dir=settings.directory) as scratch:
            asyncio.run(_Bench(settings, report, payload, say).run(scratch))
    return report


def _keys_per_second(policy: str) -> float:
    cache = SlotCache(100_000, 1_000_000, policy=policy)
    for first in range(0, 100_000, 1000):
        plan = cache.plan_write(np.arange(first, first + 1000))
        cache.commit(plan, plan.rows)
    random = np.random.default_rng(0)
    batches = [random.choice(100_000, _BATCH, replace=False) for _ in range(50)]
    began = time.perf_counter()
    for ids in batches:
        slots = cache.slots_of(cache.plan_read(ids).rows)
        cache.touch(slots)
        cache.lease(slots)
        cache.release(slots)
        plan = cache.plan_write(ids)
        cache.commit(plan, plan.rows)
    return len(batches) * _BATCH / (time.perf_counter() - began)


class _Bench:
    """All rows for one size of group."""

    def __init__(
        self, settings: CascadeSettings, report: GpuReport, payload: int, say: Callable[[str], None]
    ) -> None:
        self.settings, self.report, self.say = settings, report, say
        self.name = f"{payload >> 10}KiB"
        kinds = (KvKind.K, KvKind.V)
        blocks = settings.nbytes // (8 * payload)
        self.layout = GroupLayout(1, blocks, 4, 1, payload, 1, kinds=kinds)
        self.batch = min(_BATCH, (16 * _MIB) // payload)
        self.random = np.random.default_rng(1)
        self.memory = allocate_host(self.batch * payload)

    async def run(self, scratch: str) -> None:
        """Fill the files, then every comparison in rounds."""
        layout = self.layout
        self.say(f"{self.name}: filling files")
        async with open_backend(os.path.join(scratch, "kv"), layout, device=self.settings.device) as below:
            for first in range(0, layout.num_groups, self.batch):
                count = min(self.batch, layout.num_groups - first)
                part = memoryview(self.memory)[: count * layout.payload_nbytes]
                await below.write_groups(np.arange(first, first + count), part)
            await below.flush()
            bare: Any = _Borrowed(below)
            half = layout.num_groups // 2
            async with CascadeBackend(
                bare, capacity_bytes=half * layout.payload_nbytes, dirty_limit=1
            ) as cascade:
                for first in range(0, half, self.batch):
                    await cascade.write_groups(np.arange(first, first + self.batch), self.memory)
                await cascade.flush()
                await self._reads(below, cascade, half)
                if self.settings.device is not None:
                    await self._to_device(below, cascade, half)
            await self._writes(below)

    async def _reads(self, below: Any, cascade: Any, half: int) -> None:
        per_block = self.layout.groups_per_block
        here = partial(self._apart, 0, half)
        there = partial(self._apart, half, self.layout.num_groups)

        def mixed() -> Int64Array:
            tenth = self.batch // 10
            return np.concatenate([here()[tenth:], there()[:tenth]])

        def blocks() -> Int64Array:
            chosen = self.random.choice(half // per_block, self.batch // per_block, replace=False)
            return (chosen[:, None] * per_block + np.arange(per_block)).reshape(-1)

        target = ratio_at_least(10) if self.layout.payload_nbytes == 4096 else None
        await self._compare("hit_host", below, cascade, here, target)
        await self._compare("hit_host_blocks", below, cascade, blocks, None)
        await self._compare("miss_host", below, cascade, there, ratio_at_least(0.95))
        await self._compare("mixed_90_10_host", below, cascade, mixed, None)

    def _apart(self, first: int, last: int) -> Int64Array:
        """Groups at random, no two of them neighbours in the file."""
        return first + 2 * self.random.choice((last - first) // 2, self.batch, replace=False)

    async def _compare(
        self, what: str, below: Any, cascade: Any, draw: Callable[[], Int64Array], target: Target | None
    ) -> None:
        self.say(f"{self.name}: {what}")
        ours: list[float] = []
        theirs: list[float] = []
        for number in range(self.settings.rounds):
            ids = draw()
            order = [(cascade, ours), (below, theirs)]
            for backend, values in order if number % 2 else order[::-1]:
                values.append(await self._gb_s(partial(backend.read_groups, ids, self.memory)))
        note = f"one read_groups of {self.batch} groups, awaited"
        name = f"{what}_{self.name}"
        self.report.add(name, "GB/s", ours, baselines={"bare": theirs}, target=target, note=note)

    async def _gb_s(self, call: Callable[[], Awaitable[Any]]) -> float:
        began = time.perf_counter()
        await call()
        return self.batch * self.layout.payload_nbytes / (time.perf_counter() - began) / 1e9

    async def _to_device(self, below: Any, cascade: Any, half: int) -> None:
        """Resident groups and plain pinned memory to the GPU: one call at a time, then several large ones in flight."""
        payload, device = self.layout.payload_nbytes, below.device_side.device
        pinned = allocate_host(_LANES * _FLAT_OUT_NBYTES)
        region = await below.register_landing_region(pinned)
        with DeviceBuffer(len(pinned), device) as into:

            def contenders(count: int) -> list[Callable[[int, int], Awaitable[Any]]]:
                nbytes = count * payload
                parts = [
                    DeviceMemory(into.data_ptr() + lane * nbytes, nbytes, into) for lane in range(_LANES)
                ]
                ids = [self.random.choice(half, count, replace=False) for _ in range(_DRAWS)]
                places = [self.random.permutation(len(pinned) // payload)[:count] * payload for _ in ids]
                return [
                    lambda lane, number: cascade.read_groups(ids[number % _DRAWS], parts[lane]),
                    lambda lane, number: below.load(region, places[number % _DRAWS], parts[lane]),
                ]

            note = f"one call of {self.batch} resident groups, awaited; beside plain pinned memory"
            await self._in_turn(f"hit_gpu_{self.name}", contenders(self.batch), self.batch, 1, note, None)
            count = _FLAT_OUT_NBYTES // payload
            note = f"{_LANES} calls of {count} resident groups in flight; beside plain pinned memory"
            target = at_least(40 if payload == 4096 else 50)
            await self._in_turn(
                f"hit_gpu_flat_out_{self.name}", contenders(count), count, _LANES, note, target
            )
        await region.aclose()

    async def _in_turn(
        self,
        name: str,
        contenders: Sequence[Callable[[int, int], Awaitable[Any]]],
        count: int,
        lanes: int,
        note: str,
        target: Target | None,
    ) -> None:
        self.say(name)
        found: list[list[float]] = [[], []]
        nbytes = count * self.layout.payload_nbytes
        for number in range(self.settings.rounds + 1):
            for which in (0, 1) if number % 2 else (1, 0):
                value = await keep_in_flight(
                    contenders[which], nbytes=nbytes, in_flight=lanes, seconds=_FLAT_OUT_SECONDS
                )
                found[which].append(value)
        ours, pinned = found[0][1:], found[1][1:]  # the first is for warming up
        self.report.add(name, "GB/s", ours, baselines={"pinned": pinned}, target=target, note=note)

    async def _writes(self, below: Any) -> None:
        """Sustained writes of a quarter of the files, durable at the end: through a cascade of an eighth, and bare."""
        self.say(f"{self.name}: writes")
        count = self.layout.num_groups // 4
        found: dict[str, list[float]] = {"cascade": [], "bare": []}
        for number in range(max(1, self.settings.rounds // 5)):
            for name in ("cascade", "bare") if number % 2 else ("bare", "cascade"):
                found[name].append(await self._written(name, below, count))
        note = "write_groups in batches, awaited one by one, flush included"
        name = f"write_back_{self.name}"
        self.report.add(name, "GB/s", found["cascade"], baselines={"bare": found["bare"]}, note=note)

    async def _written(self, name: str, below: Any, count: int) -> float:
        payload = self.layout.payload_nbytes
        order: Sequence[int] = self.random.permutation(count // self.batch).tolist()
        backend: Any = below
        if name == "cascade":
            backend = await CascadeBackend(_Borrowed(below), capacity_bytes=count // 2 * payload)
        began = time.perf_counter()
        for number in order:
            ids = np.arange(number * self.batch, (number + 1) * self.batch)
            await backend.write_groups(ids, self.memory)
        await backend.flush()
        seconds = time.perf_counter() - began
        if name == "cascade":
            await backend.aclose()
        return len(order) * self.batch * payload / seconds / 1e9


class _Borrowed:
    """A backend that the cascade may use and not close: it is measured beside it."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    async def aclose(self) -> None:
        """Leave it open."""
