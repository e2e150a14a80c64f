"""Rows and ratios: medians over the rounds of what the contenders did."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from aio_kv.cli.benches.measure import Named, Sample

__all__ = ["Report", "Row", "Rounds", "row_of"]

_DIGITS = 4


@dataclass(frozen=True, slots=True)
class Row:
    """One contender in one mode at one block size, in medians over its rounds; None where a figure does not apply.

    `gb_s` counts 10^9 bytes. Latencies are of one `latency_of`. `cpu_s_per_gb` is user and system time of all threads;
    where it leaves out the start of a process, `process_cpu_s_per_gb` has it. `cache` is what a peer does
    about the page cache.
    """

    engine: str
    mode: str
    block: int
    gb_s: float | None = None
    iops: float | None = None
    p50_us: float | None = None
    p99_us: float | None = None
    cpu_s_per_gb: float | None = None
    loop_lag_ms_p50: float | None = None
    latency_of: str | None = None
    process_cpu_s_per_gb: float | None = None
    rounds: int = 0
    note: str = ""
    cache: str | None = None


@dataclass(slots=True)
class Rounds:
    """What a set of contenders did in the same rounds: samples and loop lags by name, in the order of the rounds."""

    samples: dict[str, list[Sample]] = field(default_factory=dict)
    lags_ms: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, sample: Sample) -> None:
        """Append a run."""
        self.samples.setdefault(name, []).append(sample)

    def add_lag(self, name: str, lag_ms: float) -> None:
        """Append the median lag of one run."""
        self.lags_ms.setdefault(name, []).append(lag_ms)

    def ratio(self, ours: str, other: str, value: Callable[[Sample], float | None]) -> float | None:
        """The median over rounds of our value divided by the other's in the same round; None where one has none."""
        ratios = []
        for a, b in zip(self.samples.get(ours, ()), self.samples.get(other, ()), strict=False):
            numerator, denominator = value(a), value(b)
            if numerator is not None and denominator:
                ratios.append(numerator / denominator)
        return median(ratios) if ratios else None

    def lag_ratio(self, ours: str, other: str) -> float | None:
        """The same for loop lags."""
        pairs = zip(self.lags_ms.get(ours, ()), self.lags_ms.get(other, ()), strict=False)
        ratios = [a / b for a, b in pairs if b > 0]
        return median(ratios) if ratios else None


def row_of(
    contender: Named,
    rounds: Rounds,
    *,
    mode: str,
    block: int,
    has_cpu: bool = True,
    cache: str | None = None,
) -> Row:
    """The row of one contender; `has_cpu` says whether its CPU time is its own."""
    samples = rounds.samples[contender.name]
    return Row(
        engine=contender.name,
        mode=mode,
        block=block,
        gb_s=_median(sample.gb_s for sample in samples),
        iops=_median(sample.iops for sample in samples),
        p50_us=_median(sample.p50_us for sample in samples),
        p99_us=_median(sample.p99_us for sample in samples),
        cpu_s_per_gb=_median(sample.cpu_s_per_gb for sample in samples) if has_cpu else None,
        loop_lag_ms_p50=_median(rounds.lags_ms.get(contender.name, ())),
        latency_of=contender.latency_of,
        process_cpu_s_per_gb=_median(_process_cpu(sample) for sample in samples),
        rounds=len(samples),
        note=contender.note,
        cache=cache,
    )


def _process_cpu(sample: Sample) -> float | None:
    if sample.process_cpu_seconds is None:
        return None
    return sample.process_cpu_seconds / (sample.nbytes / 1e9)


def _median(values: Any) -> float | None:
    present = [value for value in values if value is not None]
    return median(present) if present else None


@dataclass(slots=True)
class Report:
    """Everything a benchmark found: rows, ratios (a number, or numbers by block size), facts and remarks."""

    rows: list[Row] = field(default_factory=list)
    ratios: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    def add_rows(
        self,
        contenders: Sequence[Named],
        rounds: Rounds,
        *,
        mode: str,
        block: int,
        has_cpu: bool = True,
        caches: Mapping[str, str] | None = None,
    ) -> None:
        """Append the rows of contenders; `caches` is what those named do about the page cache."""
        for contender in contenders:
            if contender.name in rounds.samples:
                cache = (caches or {}).get(contender.name)
                self.rows.append(
                    row_of(contender, rounds, mode=mode, block=block, has_cpu=has_cpu, cache=cache)
                )

    def add_ratio(self, name: str, value: float | None, *, block: int | None = None) -> None:
        """Enter a ratio, under its block size if it has one; None is left out."""
        if value is None:
            return
        rounded = _rounded(value)
        if block is None:
            self.ratios[name] = rounded
        else:
            self.ratios.setdefault(name, {})[str(block)] = rounded

    def remark(self, text: str) -> None:
        """Enter a remark once."""
        if text not in self.remarks:
            self.remarks.append(text)

    def as_json(self) -> dict[str, Any]:
        """The report in plain values."""
        rows = [{name: _rounded(value) for name, value in asdict(row).items()} for row in self.rows]
        return {
            "rows": rows,
            "ratios": self.ratios,
            "machine": self.machine,
            "remarks": self.remarks,
        }


def _rounded(value: Any) -> Any:
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value
