"""The command line, `aio-kv`. One module per command; this one only gathers them.

With `--json` a command prints exactly one JSON object, on one line, as the last line of stdout; everything else goes to
stderr.
"""

from __future__ import annotations

import importlib.metadata
import sys

import typer

from aio_kv.cli import bench, demo, doctor, experts
from aio_kv.cli.examples import epilog_of
from aio_kv.errors import AioKvError

__all__ = ["app", "main"]

app = typer.Typer(
    name="aio-kv",
    help="Move KV-cache groups between files and memory.",
    epilog=epilog_of(""),
    no_args_is_help=True,
    add_completion=True,
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"aio_kv {importlib.metadata.version('aio_kv')}")
        raise typer.Exit


@app.callback(epilog=epilog_of(""))
def _commands(
    version: bool = typer.Option(
        False, "--version", help="Say which version this is.", callback=_print_version, is_eager=True
    ),
) -> None:
    """Move KV-cache groups between files and memory."""


for command in (demo, doctor, bench, experts):
    command.register(app)


def main() -> None:
    """Run the command line; errors of ours end it with one line on stderr and status 2."""
    try:
        app()
    except AioKvError as error:
        print(f"aio-kv: {error}", file=sys.stderr)
        sys.exit(2)
