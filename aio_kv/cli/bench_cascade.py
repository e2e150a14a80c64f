"""`aio-kv bench cascade`: what a pinned-RAM tier in front of the disk gives, and which policy keeps what is needed."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from aio_kv.cli.bench_cascade_trace import TraceRow

__all__ = ["cascade", "register"]


def register(group: typer.Typer) -> None:
    """Add the command to the group `bench`."""
    group.command("cascade")(cascade)


def cascade(
    trace: str = typer.Option(
        ..., "--trace", metavar="FILE", help="Replay a KV trace (Mooncake's JSON lines)."
    ),
    as_json: bool = typer.Option(False, "--json", help="One JSON object on one line, the last of stdout."),
) -> None:
    """Hit ratios of the eviction policies on a trace, by capacity in blocks."""
    from aio_kv.cli.bench_cascade_trace import replay_trace

    with _progress() as progress:
        task = progress.add_task("reading the trace", total=None)
        rows = replay_trace(trace, lambda text: progress.update(task, description=text, refresh=True))
    if as_json:
        _print_rows(rows, Console(stderr=True))
        print(json.dumps({"rows": [asdict(row) for row in rows]}), flush=True)
    else:
        _print_rows(rows, Console())


def _progress() -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _print_rows(rows: list[TraceRow], console: Console) -> None:
    first = rows[0]
    title = (
        f"Hit ratios, leading runs only: {first.trace}, {first.requests} requests, {first.references} blocks"
    )
    table = Table(title=title, title_justify="left", title_style="bold")
    policies = list(dict.fromkeys(row.policy for row in rows))
    table.add_column("blocks", justify="right")
    for policy in policies:
        table.add_column(policy, justify="right")
    found = {(row.blocks, row.policy): row.value for row in rows}
    for blocks in dict.fromkeys(row.blocks for row in rows):
        table.add_row(f"{blocks:,}", *[f"{found[blocks, policy]:.6f}" for policy in policies])
    console.print(table)
