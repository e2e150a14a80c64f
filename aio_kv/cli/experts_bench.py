"""`aio-kv experts bench`: what reading a model's experts gives here, beside the usual ways of doing it."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Annotated

import anyio
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from aio_kv.cli.examples import epilog_of
from aio_kv.cli.experts_arguments import AsJson, Model, Prefix
from aio_kv.errors import LayoutError, UnavailableError
from aio_kv.experts import ExpertMap

__all__ = ["register"]


def register(group: typer.Typer) -> None:
    """Add the command to the group `experts`."""
    group.command("bench", epilog=epilog_of("experts bench"))(bench)


def bench(
    model: Model,
    packed: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The same experts packed, to compare with.")
    ] = None,
    prefix: Prefix = "",
    depth: Annotated[int, typer.Option(metavar="N", help="Experts at a time.")] = 8,
    seconds: Annotated[float, typer.Option(metavar="S", help="Length of one run.")] = 2.0,
    pairs: Annotated[int, typer.Option(metavar="N", help="Rounds; figures are medians over them.")] = 5,
    device: Annotated[int | None, typer.Option(metavar="INDEX", help="Read into this GPU as well.")] = None,
    as_json: AsJson = False,
) -> None:
    """Read cold random experts with aio_kv and with mmap, pread, a thread pool with O_DIRECT, and fio if installed.

    The model should be larger than what is read in one run, and its files on the disk that matters.
    """
    from aio_kv.cli.benches.experts import ExpertBenchSettings, run_expert_benchmark
    from aio_kv.cli.benches.tables import print_report

    if not sys.platform.startswith("linux"):
        raise UnavailableError("experts bench compares Linux interfaces", hint="run it on Linux")
    for name, value, most in (("--depth", depth, 256), ("--pairs", pairs, 1000)):
        if not 1 <= value <= most:
            raise LayoutError(f"{name} is {value}: must be from 1 to {most}")
    if math.isnan(seconds) or not 0.05 <= seconds <= 600:
        raise LayoutError(f"--seconds is {seconds}: must be from 0.05 to 600")
    models = {"plain": ExpertMap.open(model, prefix=prefix)}
    if packed is not None:
        models["packed"] = ExpertMap.open([packed])
    settings = ExpertBenchSettings(depth, seconds, pairs, device)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Nothing refreshes by itself: a thread that draws would take its share of two cores.
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:
        report = anyio.run(run_expert_benchmark, models, settings, progress)
    out = console if as_json else Console()
    print_report(report, out)
    out.print(_left_table(report.page_cache_left))
    if as_json:
        sys.stderr.flush()
        print(json.dumps(report.as_json()), flush=True)


def _left_table(left: dict[str, dict[str, float]]) -> Table:
    table = Table(title="Page cache left behind, MB per GB read", title_justify="left", title_style="bold")
    table.add_column("mode")
    table.add_column("engine")
    table.add_column("MB", justify="right")
    for mode, by_name in left.items():
        for name, nbytes in by_name.items():
            table.add_row(mode, name, f"{nbytes / 1e6:,.2f}")
    return table
