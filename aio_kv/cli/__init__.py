"""The command line, `aio-kv`. One module per command; this one only gathers them.

With `--json` a command prints exactly one JSON object, on one line, as the last line of stdout; everything else goes to
stderr.
"""

from __future__ import annotations

import sys

import typer

from aio_kv.cli import bench, demo, doctor, experts
from aio_kv.errors import AioKvError

__all__ = ["app", "main"]

app = typer.Typer(
    name="aio-kv",
    help="Move KV-cache groups between files and memory.",
    no_args_is_help=True,
    add_completion=True,
)


@app.callback()
def _commands() -> None:
    """Move KV-cache groups between files and memory."""
    # Without this, typer makes an application of one command that command itself.


for command in (demo, doctor, bench, experts):
    command.register(app)


def main() -> None:
    """Run the command line; errors of ours end it with one line on stderr and status 2."""
    try:
        app()
    except AioKvError as error:
        print(f"aio-kv: {error}", file=sys.stderr)
        sys.exit(2)
