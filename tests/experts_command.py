"""`aio-kv experts` for tests: run in this process, as the console script does."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
from demo_command import Ran

from aio_kv.cli import main

Run = Callable[..., Ran]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs the command with these arguments, on a terminal of 80 columns."""

    def run_command(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["aio-kv", "experts", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "80")
        capfd.readouterr()
        status = 0
        try:
            main()
        except SystemExit as ended:
            status = int(ended.code or 0)
        caught = capfd.readouterr()
        return Ran(status, caught.out, caught.err)

    return run_command
