"""Which plots a run becomes, as plain values; `report_plots` draws them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aio_kv.cli.benches.desk import name_of
from aio_kv.cli.benches.report_input import BenchRun
from aio_kv.cli.benches.tables import mode_title

__all__ = ["Bar", "Bars", "Curves", "Facet", "Panel", "panels_of"]

_LATENCY_MODES = frozenset({"single", "single-idle", "mixed-small"})
_OURS = "aio_kv"


@dataclass(frozen=True, slots=True)
class Bar:
    """One figure; `is_ours` says whether it is of this library."""

    label: str
    value: float
    is_ours: bool


@dataclass(frozen=True, slots=True)
class Facet:
    """Bars that are compared with each other, and what ours should reach, if anything."""

    title: str
    bars: tuple[Bar, ...]
    target: float | None = None


@dataclass(frozen=True, slots=True)
class Bars:
    """A plot of bars, one part per block size or figure; `unit` also says which way is better."""

    title: str
    unit: str
    facets: tuple[Facet, ...]


@dataclass(frozen=True, slots=True)
class Curves:
    """A plot of curves over capacities, by name."""

    title: str
    across: str
    unit: str
    curves: dict[str, tuple[tuple[float, float], ...]]


Panel = Bars | Curves


def panels_of(run: BenchRun) -> list[Panel]:
    """The plots of one run, in the order of its rows."""
    panels: list[Panel] = []
    for mode in dict.fromkeys(str(row["mode"]) for row in run.engines):
        rows = [row for row in run.engines if row["mode"] == mode]
        if mode in _LATENCY_MODES:
            wanted = [("p50_us", "us, median; shorter is better")]
        else:
            wanted = [("gb_s", "GB/s; longer is better"), ("cpu_s_per_gb", "CPU s/GB; shorter is better")]
        for name, unit in wanted:
            facets = _facets_by_block(rows, name)
            if facets:
                panels.append(Bars(mode_title(mode), unit, facets))
    for unit in dict.fromkeys(str(row["unit"]) for row in run.figures):
        rows = [row for row in run.figures if row["unit"] == unit]
        panels.append(Bars("Figures", unit, tuple(_facet_of(row) for row in rows)))
    if run.hits:
        panels.append(_curves_of(run.hits))
    return panels


def _facets_by_block(rows: Sequence[dict[str, Any]], name: str) -> tuple[Facet, ...]:
    facets = []
    for block in dict.fromkeys(row["block"] for row in rows):
        bars = tuple(
            Bar(_label_of(row), float(row[name]), str(row["engine"]).startswith(_OURS))
            for row in rows
            if row["block"] == block and row.get(name) is not None
        )
        if bars:
            facets.append(Facet(name_of(int(block)) if block else "", bars))
    return tuple(facets)


def _label_of(row: dict[str, Any]) -> str:
    # A mode is called direct although some peers cannot read so.
    is_buffered = str(row.get("cache") or "").startswith("emptied")
    return f"{row['engine']} (buffered)" if is_buffered else str(row["engine"])


def _facet_of(row: dict[str, Any]) -> Facet:
    others = row.get("baselines") or {}
    bars = [Bar(_OURS, float(row["value"]), True)]
    bars += [
        Bar(name, float(other["value"]), False)
        for name, other in others.items()
        if other.get("value") is not None
    ]
    target = row.get("target") if row.get("target_of") == "value" else None
    return Facet(str(row["name"]), tuple(bars), target)


def _curves_of(rows: Sequence[dict[str, Any]]) -> Curves:
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        points.setdefault(str(row["policy"]), []).append((float(row["blocks"]), float(row["value"])))
    curves = {policy: tuple(sorted(some)) for policy, some in points.items()}
    return Curves("Hit ratios, leading runs only", "capacity, blocks", "hit ratio", curves)
