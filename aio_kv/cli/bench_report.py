"""`aio-kv bench report`: results of the benches as one page or picture."""

from __future__ import annotations

import errno
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from aio_kv.cli.examples import epilog_of
from aio_kv.errors import LayoutError, StorageError

__all__ = ["register", "report"]

_SUFFIXES = (".html", ".png")


def register(group: typer.Typer) -> None:
    """Add the command to the group `bench`."""
    group.command("report", epilog=epilog_of("bench report"))(report)


def report(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE", help="What benches printed with --json: one run a line."),
    ],
    output: Annotated[
        Path, typer.Option("--output", metavar="FILE", help="Where the report goes: .html or .png.")
    ] = Path("report.html"),
    title: Annotated[str, typer.Option("--title", metavar="TEXT", help="Its heading.")] = "aio_kv bench",
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on one line, the last of stdout.")
    ] = False,
) -> None:
    """Make one report with plots, tables and facts out of results of bench disk, gpu, cascade and experts bench.

    HTML has everything and loads nothing from elsewhere; PNG has the plots. Rows that cannot be shown are listed.
    Needs matplotlib.
    """
    from aio_kv.cli.benches.report_input import load_runs
    from aio_kv.cli.benches.report_page import facts_of, html_of
    from aio_kv.cli.benches.report_panels import panels_of
    from aio_kv.cli.benches.report_plots import check_plots, png_of

    suffix = output.suffix.lower()
    if suffix not in _SUFFIXES:
        raise LayoutError(f"--output is {str(output)!r}: must end in {' or '.join(_SUFFIXES)}")
    runs, left = load_runs(files)
    check_plots()
    if suffix == ".html":
        data = html_of(runs, left, title).encode()
    else:
        panels = [panel for run in runs for panel in panels_of(run)]
        data = png_of(panels, title, facts_of(runs[0].machine))
    _write(output, data)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    for one in left:
        console.print(f"left out: {one.file}, line {one.line}, {one.row}: {one.reason}", markup=False)
    rows = sum(run.count for run in runs)
    if as_json:
        result = {"output": str(output), "runs": len(runs), "rows": rows}
        print(json.dumps({**result, "left_out": [asdict(one) for one in left]}), flush=True)
    else:
        print(f"{output}: {rows} rows of {len(runs)} runs, {len(data):,} bytes")


def _write(output: Path, data: bytes) -> None:
    try:
        output.write_bytes(data)
    except OSError as error:
        hint = "--output takes a file in a writable directory"
        raise StorageError("write", errno=error.errno or errno.EIO, file=str(output), hint=hint) from error
