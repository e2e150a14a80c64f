"""A report as tables for people."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table

from aio_kv.cli.benches.desk import name_of
from aio_kv.cli.benches.results import Report, Row

__all__ = ["figure_of", "mode_title", "print_report"]

_WIDTH_MIN = 140
_WIDTH_WITH_PEERS = 200
_TITLES = {
    "direct": "Direct reads (past the page cache), flat out, into a window of as many blocks as fio uses",
    "direct-spread": "The same with a place in memory for every block that is asked for, and fio as deep as that",
    "warm": "Warm reads (out of the page cache), flat out",
    "buffered-cold": "Buffered reads of a file that is not cached, at most once through",
    "single": "One read at a time, back to back",
    "single-idle": "One read at a time, each after 1 ms of sleep",
    "mixed-small": "One small read at a time while 1 MiB reads saturate the disk",
    "mixed-bulk": "Those 1 MiB reads (CPU time is that of both)",
    "busy-thread": "Direct reads while a second Python thread computes",
    "first-write": "First writes to reserved space",
    "rewrite": "Writes to space that has been written before",
    "idle": "The event loop at rest",
}


def mode_title(mode: str) -> str:
    """What a mode is, in words."""
    return _TITLES.get(mode, mode)


def print_report(report: Report, console: Console) -> None:
    """Print machine, rows by mode, ratios and remarks."""
    # Folded cells cannot be read: in a narrow terminal, or in none, long lines are the lesser evil.
    has_peers = any(row.cache for row in report.rows)
    console.width = max(console.width, _WIDTH_WITH_PEERS if has_peers else _WIDTH_MIN)
    facts = ", ".join(f"{name} {value}" for name, value in report.machine.items() if value is not None)
    console.print(facts, highlight=False)
    modes = list(dict.fromkeys(row.mode for row in report.rows))
    for mode in modes:
        console.print(_table(mode, [row for row in report.rows if row.mode == mode]))
    console.print(_ratio_table(report.ratios))
    for remark in report.remarks:
        console.print(remark, highlight=False)


def _table(mode: str, rows: list[Row]) -> Table:
    table = Table(title=mode_title(mode), title_justify="left", title_style="bold")
    table.add_column("block")
    table.add_column("engine")
    for name in ("GB/s", "IOPS", "p50 us", "p99 us", "CPU s/GB", "loop lag ms"):
        table.add_column(name, justify="right")
    has_cache = any(row.cache for row in rows)
    table.add_column("latency of")
    if has_cache:
        table.add_column("page cache")
    table.add_column("note")
    for block, group in groupby(rows, key=lambda row: row.block):
        for index, row in enumerate(group):
            label = name_of(block) if index == 0 and block else ""
            figures = (row.gb_s, row.iops, row.p50_us, row.p99_us, row.cpu_s_per_gb, row.loop_lag_ms_p50)
            cells = [figure_of(value) for value in figures]
            caches = [row.cache or ""] if has_cache else []
            table.add_row(label, row.engine, *cells, row.latency_of or "", *caches, row.note)
        table.add_section()
    return table


def _ratio_table(ratios: dict[str, Any]) -> Table:
    blocks = list(
        dict.fromkeys(block for value in ratios.values() if isinstance(value, dict) for block in value)
    )
    table = Table(
        title="Ratios: medians over the rounds of aio_kv / other", title_justify="left", title_style="bold"
    )
    table.add_column("ratio")
    table.add_column("", justify="right")
    for block in blocks:
        table.add_column(name_of(int(block)), justify="right")
    for name, value in ratios.items():
        by_block = value if isinstance(value, dict) else {}
        alone = "" if by_block else figure_of(value)
        table.add_row(name, alone, *(figure_of(by_block.get(block)) for block in blocks))
    return table


def figure_of(value: float | None) -> str:
    """A figure with three digits, or all of them before the point; empty for None."""
    if value is None:
        return ""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"
