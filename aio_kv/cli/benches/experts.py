"""`aio-kv experts bench`: cold random experts of a model, read by us and by others, a round of each in turn."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rich.progress import Progress

from aio_kv.cli.benches.expert_contenders import (
    WAYS,
    ArenaDemands,
    ExpertSupply,
    FioExperts,
    ReaderExperts,
    ThreadExperts,
)
from aio_kv.cli.benches.fio import fio_version, why_no_fio
from aio_kv.cli.benches.machine import machine_facts
from aio_kv.cli.benches.measure import ContenderFailed, alternating
from aio_kv.cli.benches.results import Report, Rounds
from aio_kv.cuda import DeviceBuffer
from aio_kv.engine.extension import allocate_host
from aio_kv.experts import ExpertArena, ExpertMap, ExpertReader

__all__ = ["ExpertBenchSettings", "ExpertReport", "run_expert_benchmark"]

_OURS = "aio_kv"


@dataclass(frozen=True, slots=True)
class ExpertBenchSettings:
    """What to measure: `depth` experts at a time, `seconds` per run, `rounds` of every contender."""

    depth: int
    seconds: float
    rounds: int
    device: int | None


@dataclass(slots=True)
class ExpertReport(Report):
    """Rows are medians over rounds; `page_cache_left` has, by mode and contender, bytes per gigabyte read."""

    page_cache_left: dict[str, dict[str, float]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The report in plain values."""
        return {**Report.as_json(self), "page_cache_left_nbytes_per_gb": self.page_cache_left}


async def run_expert_benchmark(
    models: dict[str, ExpertMap], settings: ExpertBenchSettings, progress: Progress
) -> ExpertReport:
    """Measure each model ("plain", and "packed" where there is one). Raises what readers and fio raise."""
    report = ExpertReport()
    first = next(iter(models.values()))
    report.machine = machine_facts(str(first.paths[0].parent), loop="asyncio", fio=await fio_version())
    throughput: dict[str, Rounds] = {}
    for mode, experts in models.items():
        supply = ExpertSupply(experts)
        throughput[mode] = await _bench_reads(report, mode, supply, settings, progress)
        await _bench_demands(report, mode, supply, settings, progress)
    if len(models) > 1:
        plain, packed = (throughput[mode].samples[_OURS] for mode in models)
        pairs = [a.gb_s / b.gb_s for a, b in zip(packed, plain, strict=True)]
        report.add_ratio("packed / plain", median(pairs), block=first.slot_nbytes_max)
    return report


async def _bench_reads(
    report: ExpertReport, mode: str, supply: ExpertSupply, settings: ExpertBenchSettings, progress: Progress
) -> Rounds:
    depth, block = settings.depth, supply.experts.slot_nbytes_max
    async with AsyncExitStack() as stack:
        contenders: list[Any] = [
            await _reader(stack, _OURS, supply, settings),
            await _reader(stack, "aio_kv, page cache dropped", supply, settings, direct="off"),
            *(ThreadExperts(name, note, way, supply, depth) for name, (note, way) in WAYS.items()),
        ]
        if settings.device is not None:
            contenders.append(await _reader(stack, "aio_kv to GPU", supply, settings, device=settings.device))
        problem = await why_no_fio(max(supply.paths, key=len))
        if problem is None:
            contenders.append(FioExperts(supply, depth))
        else:
            report.remark(f"no fio rows: {problem}")
        rounds = await _run_rounds(report, mode, supply, contenders, settings, progress)
    report.add_rows(contenders, rounds, mode=mode, block=block)
    for other in contenders[2:]:
        pair = ("aio_kv to GPU", _OURS) if other.name == "aio_kv to GPU" else (_OURS, other.name)
        value = rounds.ratio(pair[0], pair[1], lambda sample: sample.gb_s)
        report.add_ratio(f"{mode}: GB/s, {pair[0]} / {pair[1]}", value, block=block)
    return rounds


async def _reader(
    stack: AsyncExitStack,
    name: str,
    supply: ExpertSupply,
    settings: ExpertBenchSettings,
    *,
    direct: str = "auto",
    device: int | None = None,
) -> ReaderExperts:
    reader = await stack.enter_async_context(ExpertReader(supply.experts, direct=direct, device=device))
    nbytes = settings.depth * (-(-supply.experts.slot_nbytes_max // 4096) * 4096)
    memory: Any
    side = reader.session.device
    if side is not None:
        memory = stack.enter_context(DeviceBuffer(nbytes, side.device))
    else:
        memory = allocate_host(nbytes)
        await stack.enter_async_context(await reader.register_landing_region(memory))
    return ReaderExperts(name, reader.rung, reader, supply, settings.depth, memory)


async def _bench_demands(
    report: ExpertReport, mode: str, supply: ExpertSupply, settings: ExpertBenchSettings, progress: Progress
) -> None:
    slot = -(-supply.experts.slot_nbytes_max // 4096) * 4096
    async with AsyncExitStack() as stack:
        contenders = []
        for has_prefetch in (False, True):
            reader = await stack.enter_async_context(ExpertReader(supply.experts))
            arena = ExpertArena(reader, capacity_bytes=16 * slot, prefetch_bytes=4 * slot)
            await stack.enter_async_context(arena)
            contenders.append(ArenaDemands(arena, supply, has_prefetch=has_prefetch))
        name = f"{mode}, one demand at a time"
        rounds = await _run_rounds(report, name, supply, contenders, settings, progress)
    block = supply.experts.slot_nbytes_max
    report.add_rows(contenders, rounds, mode=name, block=block, has_cpu=False)
    value = rounds.ratio("arena, prefetching", "arena", lambda sample: sample.p50_us)
    report.add_ratio(f"{mode}: p50 of a demand, prefetching / not", value, block=block)


async def _run_rounds(
    report: ExpertReport,
    mode: str,
    supply: ExpertSupply,
    contenders: list[Any],
    settings: ExpertBenchSettings,
    progress: Progress,
) -> Rounds:
    rounds = Rounds()
    left: dict[str, list[float]] = {}
    task = progress.add_task(mode, total=settings.rounds * len(contenders))
    for number in range(settings.rounds):
        for contender in alternating(tuple(contenders), number):
            supply.cold()
            try:
                sample = await contender.drive(settings.seconds)
            except ContenderFailed as failure:
                report.remark(f"no {contender.name} row of {mode}: {failure}")
                contenders.remove(contender)
                rounds.samples.pop(contender.name, None)
                left.pop(contender.name, None)
                continue
            rounds.add(contender.name, sample)
            resident = supply.resident_nbytes()
            if resident is None:
                report.remark("what is left in the page cache is not known: this system has no mincore")
            else:
                left.setdefault(contender.name, []).append(resident / (sample.nbytes / 1e9))
            progress.advance(task)
            progress.refresh()
    report.page_cache_left[mode] = {name: round(median(values)) for name, values in left.items()}
    return rounds
