"""`aio-kv demo`: the main job on real input, verified against the oracle."""

from __future__ import annotations

import errno
import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import anyio
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from aio_kv.cli.demo_generated import layout_within, run_generated
from aio_kv.cli.demo_report import DemoReport, table_of
from aio_kv.cli.examples import epilog_of
from aio_kv.cli.language_model import prepare_packages
from aio_kv.cli.workspace import workspace
from aio_kv.errors import LayoutError, StorageError
from aio_kv.models import NAMED_LAYOUTS

__all__ = ["register"]

_LAYOUT = "llama3-8b"
# The oracle decides how long it takes: 65,536 reads of 4 KiB, one after the other, are 3 s where one takes 50 us.
_SIZE_MIB = 256


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("demo", epilog=epilog_of("demo"))(demo)


def demo(
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            metavar="DIR",
            help="Where the temporary files go. A directory that is not there is made, and removed afterwards. "
            "Without it, the working directory or another on a disk.",
        ),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"The model whose shape the groups have: {', '.join(NAMED_LAYOUTS)}. Default: {_LAYOUT}.",
        ),
    ] = None,
    size: Annotated[
        int | None, typer.Option(metavar="MB", help=f"MiB of files, at most. Default: {_SIZE_MIB}.")
    ] = None,
    backend: Annotated[
        str, typer.Option(metavar="NAME", help="auto (the best that works), uring or threads.")
    ] = "auto",
    model: Annotated[
        bool, typer.Option("--model", help="Move the KV cache of a small language model, not generated data.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on one line, the last of stdout.")
    ] = False,
) -> None:
    """Write KV-cache groups, read them back asynchronously, and compare every byte with a synchronous oracle.

    Exit status: 0 if every byte was right, 1 if not, 2 if the demonstration could not be run.
    """
    console = Console(stderr=True)
    if model:
        if layout is not None or size is not None:
            raise LayoutError("--model decides layout and size: leave --layout and --size out")
        report = _run_model(directory, backend, console)
    else:
        size_mib = _SIZE_MIB if size is None else size
        report = _run_generated(directory, layout or _LAYOUT, size_mib, backend, console)
    _show(report, as_json=as_json)
    if not report.is_good:
        raise typer.Exit(1)


def _run_generated(
    directory: Path | None, name: str, size_mib: int, backend: str, console: Console
) -> DemoReport:
    layout = layout_within(name, size_mib << 20)
    with workspace(directory) as path:
        try:
            return anyio.run(
                partial(run_generated, path, layout, name=name, backend=backend, progress=_progress(console))
            )
        except StorageError as error:
            if error.errno != errno.ENOSPC:
                raise
            hint = "choose a smaller --size, or a --dir on another disk"
            raise StorageError(
                "create", errno=errno.ENOSPC, file=str(path), nbytes=layout.nbytes, hint=hint
            ) from error


def _run_model(directory: Path | None, backend: str, console: Console) -> DemoReport:
    prepare_packages()
    # Imported late, because it takes torch and transformers, which only this option needs.
    from aio_kv.cli.demo_model import run_model

    with workspace(directory) as path:
        return run_model(path, backend=backend, console=console)


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description:<12}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    # Drawing takes the interpreter away from the event loop that is being measured: not more often than is useful.
    return Progress(*columns, console=console, refresh_per_second=4)


def _show(report: DemoReport, *, as_json: bool) -> None:
    Console(stderr=as_json).print(table_of(report))
    if as_json:
        sys.stderr.flush()
        print(json.dumps(asdict(report)), flush=True)
