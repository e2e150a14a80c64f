"""`aio-kv doctor`: what works here, which rung is in force, why not a better one, and what would bring it about."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from aio_kv.cli.doctor_checks import Diagnosis, diagnose
from aio_kv.cli.examples import epilog_of

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("doctor", epilog=epilog_of("doctor"))(doctor)


def doctor(
    directory: Annotated[
        Path,
        typer.Option(
            "--dir",
            metavar="DIR",
            help="The directory that files would lie in; a small one is made and removed.",
        ),
    ] = Path("."),
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on one line, the last of stdout.")
    ] = False,
) -> None:
    """Try what a backend needs, in DIR and on this machine, and say how to get what does not work.

    Exit status: 0 whichever rung is in force, 2 if DIR cannot be used.
    """
    diagnosis = diagnose(directory)
    _show(diagnosis, Console(stderr=as_json))
    if as_json:
        sys.stderr.flush()
        print(json.dumps(asdict(diagnosis)), flush=True)


def _show(diagnosis: Diagnosis, console: Console) -> None:
    table = Table(show_lines=False, expand=False)
    table.add_column("check", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("finding and what to do", overflow="fold")
    for check in diagnosis.checks:
        verdict = "[green]ok[/]" if check.ok else "[yellow]no[/]"
        hint = f"\n[bold]→ {escape(check.hint)}[/]" if check.hint else ""
        table.add_row(escape(check.name), verdict, escape(check.detail) + hint)
    console.print(table)
    console.print(f"rung in force: [bold]{escape(diagnosis.rung)}[/]")
