"""`aio-kv bench cascade`: what a pinned-RAM tier in front of the disk gives, and which policy keeps what is needed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from aio_kv.cli.examples import epilog_of

if TYPE_CHECKING:
    from aio_kv.cli.bench_cascade_trace import TraceRow

__all__ = ["cascade", "register"]


def register(group: typer.Typer) -> None:
    """Add the command to the group `bench`."""
    group.command("cascade", epilog=epilog_of("bench cascade"))(cascade)


# Numbers arrive as text: they are checked in one place, which answers a wrong one in one line.
def cascade(
    trace: str = typer.Option(
        None, "--trace", metavar="FILE", help="Only replay a KV trace (Mooncake's JSON lines)."
    ),
    directory: str = typer.Option(".", "--dir", metavar="DIR", help="Where the temporary files go."),
    size: str = typer.Option(
        None, metavar="MB", help="MiB of files, half of which fit into the cascade. (default 512)"
    ),
    pairs: str = typer.Option(None, metavar="N", help="Rounds; figures are medians over them. (default 15)"),
    device: str = typer.Option(None, metavar="INDEX", help="Also read hits to this GPU."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object on one line, the last of stdout."),
    quick: bool = typer.Option(False, "--quick", help="Small files, few rounds: shows that it works."),
) -> None:
    """Compare a pinned-RAM tier with the bare disk; or, with --trace, the policies on a trace.

    Figures are only comparable within one run.
    """
    with _progress() as progress:
        task = progress.add_task("looking around", total=None)

        def say(text: str) -> None:
            progress.update(task, description=text, refresh=True)

        if trace is not None:
            found = _replay(trace, say)
        else:
            found = _measure(directory, size, pairs, device, quick, say)
    show, report = found
    show(Console(stderr=True) if as_json else Console())
    if as_json:
        print(json.dumps(report), flush=True)


def _replay(trace: str, say: Callable[[str], None]) -> tuple[Callable[[Console], None], dict[str, Any]]:
    from aio_kv.cli.bench_cascade_trace import replay_trace

    rows = replay_trace(trace, say)
    return lambda console: _print_rows(rows, console), {"rows": [asdict(row) for row in rows]}


def _measure(
    directory: str,
    size: str | None,
    pairs: str | None,
    device: str | None,
    is_quick: bool,
    say: Callable[[str], None],
) -> tuple[Callable[[Console], None], dict[str, Any]]:
    from aio_kv.cli.bench_cascade_run import parse_cascade_settings, run_cascade_benchmark
    from aio_kv.cli.bench_gpu_report import print_gpu_report

    settings = parse_cascade_settings(
        directory=directory, size=size, pairs=pairs, device=device, is_quick=is_quick
    )
    report = run_cascade_benchmark(settings, say)
    return lambda console: print_gpu_report(report, console), report.as_json()


def _progress() -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    # Refreshed by hand: a thread that draws would be measured along with the rest.
    return Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False)


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
