"""`aio-kv experts` for tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from demo_command import Ran, run_command

Run = Callable[..., Ran]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs the command with these arguments, on a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    return partial(run_command, monkeypatch, capfd, "experts")
