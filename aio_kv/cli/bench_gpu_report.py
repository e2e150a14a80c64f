"""The rows of `aio-kv bench gpu`: a figure of ours, the same of others in the same rounds, and what it should be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["GpuReport", "GpuRow", "Target", "at_least", "at_most", "print_gpu_report", "ratio_at_least"]

_DIGITS = 4
_WIDTH_MIN = 160


@dataclass(frozen=True, slots=True)
class Target:
    """A bound on a figure, or on its ratio to the first baseline; `design` is what the design hopes for, if more."""

    bound: float
    sense: str  # ">=" or "<="
    of: str  # "value" or "ratio"
    design: float | None = None

    def is_met(self, value: float | None, ratio: float | None) -> bool | None:
        """Whether it holds; None where the figure is missing."""
        figure = value if self.of == "value" else ratio
        if figure is None:
            return None
        return figure >= self.bound if self.sense == ">=" else figure <= self.bound


def at_least(bound: float, *, design: float | None = None) -> Target:
    """The figure should reach `bound`."""
    return Target(bound, ">=", "value", design)


def at_most(bound: float) -> Target:
    """The figure should not pass `bound`."""
    return Target(bound, "<=", "value")


def ratio_at_least(bound: float, *, design: float | None = None) -> Target:
    """The figure divided by that of the first baseline should reach `bound`."""
    return Target(bound, ">=", "ratio", design)


@dataclass(frozen=True, slots=True)
class GpuRow:
    """One figure: the median over the rounds, as are those of the baselines; ratios are medians of a round's ratios.

    `baseline`, `baseline_name` and `ratio` are those of the first baseline; `baselines` has all of them by name, as
    {"value", "ratio"}. `target` bounds the `target_of` ("value" or "ratio"), None where there is none. A GB is 10^9
    bytes.
    """

    name: str
    value: float | None
    unit: str
    baseline: float | None = None
    baseline_name: str | None = None
    ratio: float | None = None
    target: float | None = None
    target_of: str | None = None
    target_sense: str | None = None
    design_target: float | None = None
    met: bool | None = None
    baselines: dict[str, dict[str, float | None]] = field(default_factory=dict)
    rounds: int = 0
    note: str = ""


@dataclass(slots=True)
class GpuReport:
    """Everything a benchmark found: rows, facts about the machine, remarks."""

    rows: list[GpuRow] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    def add(
        self,
        name: str,
        unit: str,
        values: Sequence[float],
        *,
        baselines: Mapping[str, Sequence[float]] | None = None,
        target: Target | None = None,
        note: str = "",
    ) -> None:
        """Append a row of figures, one per round; those of each baseline come from the same rounds, in order."""
        others = {other: _compared(values, figures) for other, figures in (baselines or {}).items()}
        first = next(iter(others), None)
        value = median(values) if values else None
        ratio = others[first]["ratio"] if first is not None else None
        self.rows.append(
            GpuRow(
                name=name,
                value=value,
                unit=unit,
                baseline=others[first]["value"] if first is not None else None,
                baseline_name=first,
                ratio=ratio,
                target=target.bound if target else None,
                target_of=target.of if target else None,
                target_sense=target.sense if target else None,
                design_target=target.design if target else None,
                met=target.is_met(value, ratio) if target else None,
                baselines=others,
                rounds=len(values),
                note=note,
            )
        )

    def remark(self, text: str) -> None:
        """Enter a remark once."""
        if text not in self.remarks:
            self.remarks.append(text)

    def as_json(self) -> dict[str, Any]:
        """The report in plain values."""
        return {
            "rows": [_rounded(asdict(row)) for row in self.rows],
            "machine": self.machine,
            "remarks": self.remarks,
        }


def _compared(values: Sequence[float], figures: Sequence[float]) -> dict[str, float | None]:
    ratios = [ours / other for ours, other in zip(values, figures, strict=True) if other]
    return {
        "value": median(figures) if figures else None,
        "ratio": median(ratios) if ratios else None,
    }


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def print_gpu_report(report: GpuReport, console: Console) -> None:
    """Print machine, rows and remarks."""
    # Folded cells cannot be read: in a narrow terminal, or in none, long lines are the lesser evil.
    console.width = max(console.width, _WIDTH_MIN)
    facts = ", ".join(f"{name} {value}" for name, value in report.machine.items() if value is not None)
    console.print(facts, highlight=False)
    console.print(_table(report.rows))
    for remark in report.remarks:
        console.print(remark, highlight=False)


def _table(rows: Sequence[GpuRow]) -> Table:
    table = Table(title="Medians over the rounds", title_justify="left", title_style="bold")
    table.add_column("figure", no_wrap=True)
    for name in ("value", "target", "met"):
        table.add_column(name, justify="right")
    table.add_column("others in the same rounds (our figure / theirs)")
    table.add_column("note")
    for row in rows:
        met = "" if row.met is None else "yes" if row.met else "NO"
        table.add_row(row.name, f"{_figure(row.value)} {row.unit}", _target(row), met, _others(row), row.note)
    return table


def _target(row: GpuRow) -> str:
    if row.target is None:
        return ""
    what = "ratio " if row.target_of == "ratio" else ""
    return f"{what}{row.target_sense} {_figure(row.target)}"


def _others(row: GpuRow) -> str:
    return "\n".join(
        f"{name} {_figure(other['value'])} ({_figure(other['ratio'])})"
        for name, other in row.baselines.items()
    )


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
