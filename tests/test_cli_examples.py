"""The examples in the help of every command: there are some, and each is a command that the program takes."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator

import click
import pytest
import typer

import aio_kv
from aio_kv.cli import app
from aio_kv.cli.examples import EXAMPLES

PROGRAM = typer.main.get_command(app)


def commands(
    command: click.Command = PROGRAM, path: tuple[str, ...] = ()
) -> Iterator[tuple[str, click.Command]]:
    """Every command and group, by the words behind the program's name."""
    yield " ".join(path), command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*path, name))


ALL = dict(commands())


def test_every_command_has_examples() -> None:
    assert set(EXAMPLES) == set(ALL)


@pytest.mark.parametrize("line", sorted({line for lines in EXAMPLES.values() for line in lines}))
def test_an_example_is_taken(line: str) -> None:
    program, *words = shlex.split(line.partition(" > ")[0])
    assert program == "aio-kv"
    name = max((path for path in ALL if words[: len(path.split())] == path.split()), key=len)
    assert EXAMPLES[name], "an example of a command without examples"
    # Options that do not exist and arguments that are missing raise; nothing is run.
    ALL[name].make_context(name, words[len(name.split()) :])


@pytest.mark.parametrize("name", EXAMPLES)
def test_they_are_the_end_of_its_help(name: str) -> None:
    epilog = ALL[name].epilog
    assert epilog is not None
    assert epilog.split("\n\n")[1:] == list(EXAMPLES[name])


def test_they_are_printed_whole() -> None:
    said = subprocess.run(
        [sys.executable, "-m", "aio_kv", "bench", "disk", "--help"],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
        env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"},
    ).stdout
    assert all(line in said for line in EXAMPLES["bench disk"])


def test_the_version_is_that_of_the_package() -> None:
    said = subprocess.run(
        [sys.executable, "-m", "aio_kv", "--version"], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    assert said == f"aio_kv {aio_kv.__version__}\n"
