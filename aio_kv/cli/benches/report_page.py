"""A report as one HTML page that loads nothing: plots, tables of medians, facts, ratios, remarks, rows left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from aio_kv.cli.benches.desk import name_of
from aio_kv.cli.benches.report_input import BenchRun, LeftOut
from aio_kv.cli.benches.report_panels import panels_of
from aio_kv.cli.benches.report_plots import svg_of
from aio_kv.cli.benches.tables import figure_of, mode_title

__all__ = ["facts_of", "html_of"]

_STYLE = """
:root { color-scheme: light dark; }
body { font: 14px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem;
       color: #1f2328; background: #fff; }
@media (prefers-color-scheme: dark) { body { color: #e6edf3; background: #0d1117; } }
svg { width: 100%; height: auto; display: block; margin: 1rem 0; font-family: system-ui, sans-serif; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; display: block; overflow-x: auto; }
th, td { padding: .2rem .6rem; border-bottom: 1px solid #8b949e66; text-align: left; vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
.note { color: #6e7781; } @media (prefers-color-scheme: dark) { .note { color: #9198a1; } }
"""
_ENGINE_COLUMNS = (
    ("gb_s", "GB/s"),
    ("iops", "IOPS"),
    ("p50_us", "p50, us"),
    ("p99_us", "p99, us"),
    ("cpu_s_per_gb", "CPU s/GB"),
    ("loop_lag_ms_p50", "loop lag, ms"),
    ("rounds", "rounds"),
)
_Cells = Sequence[str]


def html_of(runs: Sequence[BenchRun], left: Sequence[LeftOut], title: str) -> str:
    """The page. Whatever comes from the files is escaped."""
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{_STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        '<p class="note">Figures are medians over the rounds and comparable only within one run. '
        "1 GB is 10<sup>9</sup> bytes.</p>",
    ]
    for number, run in enumerate(runs, start=1):
        parts.extend(_section(run, number))
    if left:
        cells = [[one.file, str(one.line), one.row, one.reason] for one in left]
        parts += [
            "<h2>Rows left out</h2>",
            _table("", ("file", "line", "row", "why"), cells, numbers=range(0)),
        ]
    return "\n".join([*parts, "</body></html>\n"])


def facts_of(machine: dict[str, Any]) -> str:
    """The facts about a machine on one line; those not known are left out."""
    return ", ".join(f"{name} {value}" for name, value in machine.items() if value is not None)


def _section(run: BenchRun, number: int) -> Iterable[str]:
    yield f"<h2>Run {number}: {escape(run.source)}</h2>"
    if run.machine:
        facts = [[name, str(value)] for name, value in run.machine.items() if value is not None]
        yield f"<details><summary>The machine</summary>{_table('', ('fact', ''), facts, numbers=range(0))}</details>"
    for remark in run.remarks:
        yield f"<p>{escape(remark)}</p>"
    for index, panel in enumerate(panels_of(run)):
        yield svg_of(panel, f"{number}-{index}")
    for mode in dict.fromkeys(row["mode"] for row in run.engines):
        yield _engine_table(str(mode), [row for row in run.engines if row["mode"] == mode])
    if run.figures:
        yield _figure_table(run.figures)
    if run.hits:
        yield _hits_table(run.hits)
    if run.ratios:
        yield _ratio_table(run.ratios)


def _engine_table(mode: str, rows: Sequence[dict[str, Any]]) -> str:
    names = [
        (name, label) for name, label in _ENGINE_COLUMNS if any(row.get(name) is not None for row in rows)
    ]
    has_cache = any(row.get("cache") for row in rows)
    head = ["block", "engine", *(label for _, label in names), *(["page cache"] if has_cache else []), "note"]
    cells = [
        [
            name_of(int(row["block"])) if row["block"] else "",
            str(row["engine"]),
            *(figure_of(row.get(name)) for name, _ in names),
            *([str(row.get("cache") or "")] if has_cache else []),
            str(row.get("note", "")),
        ]
        for row in rows
    ]
    return _table(mode_title(mode), head, cells, numbers=range(2, 2 + len(names)))


def _figure_table(rows: Sequence[dict[str, Any]]) -> str:
    head = (
        "figure",
        "value",
        "unit",
        "target",
        "met",
        "others in the same rounds (our figure / theirs)",
        "note",
    )
    cells = []
    for row in rows:
        others = "; ".join(
            f"{name} {figure_of(other.get('value'))} ({figure_of(other.get('ratio'))})"
            for name, other in (row.get("baselines") or {}).items()
        )
        target = row.get("target")
        of = "ratio " if row.get("target_of") == "ratio" else ""
        wanted = "" if target is None else f"{of}{row.get('target_sense')} {figure_of(target)}"
        met = {True: "yes", False: "no"}.get(row.get("met"), "")  # type: ignore[arg-type]
        figures = [figure_of(row["value"]), str(row["unit"]), wanted, met, others]
        cells.append([str(row["name"]), *figures, str(row.get("note", ""))])
    return _table("Figures, medians over the rounds", head, cells, numbers=range(1, 2))


def _hits_table(rows: Sequence[dict[str, Any]]) -> str:
    policies = list(dict.fromkeys(str(row["policy"]) for row in rows))
    found = {(row["blocks"], str(row["policy"])): row["value"] for row in rows}
    cells = [
        [f"{blocks:,}", *(figure_of(found.get((blocks, policy))) for policy in policies)]
        for blocks in dict.fromkeys(row["blocks"] for row in rows)
    ]
    return _table("Hit ratios", ("blocks", *policies), cells, numbers=range(1 + len(policies)))


def _ratio_table(ratios: dict[str, Any]) -> str:
    blocks = list(
        dict.fromkeys(block for value in ratios.values() if isinstance(value, dict) for block in value)
    )
    cells = []
    for name, value in ratios.items():
        by_block = value if isinstance(value, dict) else {}
        alone = "" if by_block else figure_of(value)
        cells.append([name, alone, *(figure_of(by_block.get(block)) for block in blocks)])
    head = ("ratio", "", *(name_of(int(block)) for block in blocks))
    title = "Ratios: medians over the rounds of aio_kv / other"
    return _table(title, head, cells, numbers=range(1, len(head)))


def _table(title: str, head: _Cells, rows: Sequence[_Cells], *, numbers: range) -> str:
    def row_of(cells: _Cells, tag: str) -> str:
        marks = (' class="number"' if index in numbers else "" for index in range(len(cells)))
        inner = (f"<{tag}{mark}>{escape(cell)}</{tag}>" for cell, mark in zip(cells, marks, strict=True))
        return f"<tr>{''.join(inner)}</tr>"

    caption = f"<caption>{escape(title)}</caption>" if title else ""
    body = "\n".join(row_of(cells, "td") for cells in rows)
    return f"<table>{caption}<thead>{row_of(head, 'th')}</thead><tbody>{body}</tbody></table>"
