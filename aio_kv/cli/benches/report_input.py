"""What `aio-kv bench report` reads: the JSON lines of all benches, each row checked and told apart by its fields."""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aio_kv.errors import LayoutError, StorageError

__all__ = ["BenchRun", "LeftOut", "load_runs"]

_FIGURES = ("gb_s", "iops", "p50_us", "p99_us", "cpu_s_per_gb")
_HINT = "give files with what `aio-kv bench ... --json` printed to stdout"


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A row that is not in the report, and why; `line` counts from 1."""

    file: str
    line: int
    row: str
    reason: str


@dataclass(slots=True)
class BenchRun:
    """One run of a bench, which is one line of a file.

    `engines` are rows of contenders by mode and block (disk, experts), `figures` rows of a figure beside others
    (gpu, cascade), `hits` rows of hit ratios by capacity and policy (cascade with a trace).
    """

    source: str
    engines: list[dict[str, Any]] = field(default_factory=list)
    figures: list[dict[str, Any]] = field(default_factory=list)
    hits: list[dict[str, Any]] = field(default_factory=list)
    ratios: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        """How many rows there are."""
        return len(self.engines) + len(self.figures) + len(self.hits)


def load_runs(paths: Sequence[Path]) -> tuple[list[BenchRun], list[LeftOut]]:
    """The runs in some files, in order, and the rows that cannot be shown.

    Raises `StorageError` for a file that cannot be read, `LayoutError` for a line that is not a run, and where there is
    no row at all.
    """
    runs: list[BenchRun] = []
    left: list[LeftOut] = []
    for path in paths:
        for number, line in enumerate(_text_of(path).splitlines(), start=1):
            if line.strip():
                runs.append(_run_of(_object_of(line, path, number), path, number, left))
    if not any(run.count for run in runs):
        names = ", ".join(map(str, paths))
        reason = f" ({len(left)} left out, the first because: {left[0].reason})" if left else ""
        raise LayoutError(f"{names}: no rows to show{reason}; {_HINT}")
    return runs, left


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise StorageError("read", errno=error.errno or errno.EIO, file=str(path), hint=_HINT) from error
    except UnicodeDecodeError as error:
        raise LayoutError(f"{path}: not text; {_HINT}") from error


def _object_of(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise LayoutError(f"{path}, line {number}: not JSON ({error.msg}); {_HINT}") from error
    if not isinstance(found, dict) or not isinstance(found.get("rows"), list):
        raise LayoutError(f"{path}, line {number}: not the result of a bench (no list of rows); {_HINT}")
    return found


def _run_of(found: dict[str, Any], path: Path, number: int, left: list[LeftOut]) -> BenchRun:
    run = BenchRun(
        source=path.name,
        ratios=_mapping(found.get("ratios")),
        machine=_mapping(found.get("machine")),
        remarks=[str(remark) for remark in found.get("remarks") or ()],
    )
    for row in found["rows"]:
        reason = _sort_in(row, run)
        if reason is not None:
            left.append(LeftOut(str(path), number, _name_of(row), reason))
    return run


def _sort_in(row: Any, run: BenchRun) -> str | None:
    """Append a row where it belongs; else say why it belongs nowhere."""
    if not isinstance(row, dict):
        return "it is not an object"
    if {"engine", "mode", "block"} <= row.keys():
        if not any(_is_figure(row.get(name)) for name in _FIGURES):
            return "it has no throughput, latency or CPU time"
        run.engines.append(row)
    elif {"name", "value", "unit"} <= row.keys():
        if not _is_figure(row["value"]):
            return "it has no value"
        (run.hits if {"policy", "blocks"} <= row.keys() else run.figures).append(row)
    else:
        return "no bench prints such a row: neither engine, mode, block nor name, value, unit"
    return None


def _is_figure(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _name_of(row: Any) -> str:
    if not isinstance(row, dict):
        return repr(row)[:60]
    return " ".join(str(row[name]) for name in ("name", "engine", "mode", "block") if name in row) or "a row"
