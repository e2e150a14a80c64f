"""At open the log says, once, which rung is in force and why not a better one."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from backends import make_backend
from loops import every_loop
from slow_devices import PADDED, filled

from aio_kv import UnavailableError, UringBackend
from aio_kv.backends import rungs


@every_loop
@pytest.mark.parametrize("kind", ["uring", "uring-buffered", "uring-unregistered", "threads", "python"])
async def test_the_rung_is_said_once(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aio_kv")
    async with make_backend(kind, tmp_path)(PADDED) as backend:
        await filled(backend)
        rung, refusals, folder = backend.rung, backend.refusals, backend.files.directories[0]
    assert [(record.name, record.levelname) for record in caplog.records] == [("aio_kv", "INFO")]
    said = caplog.records[0].getMessage()
    assert said.startswith(f"{folder}: rung {rung}")
    for refusal in refusals:
        assert f"not {refusal.rung}: {refusal.reason} ({refusal.hint})" in said
    assert (said == f"{folder}: rung {rung}") == (not refusals)
    if kind == "uring-unregistered":
        assert "register_buffers is False" in said


@every_loop
async def test_nothing_is_said_of_what_does_not_open(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says it."""
    caplog.set_level(logging.INFO, "aio_kv")
    monkeypatch.setattr(rungs, "has_extension", lambda: False)
    with pytest.raises(UnavailableError, match="extension is not installed"):
        await UringBackend(tmp_path / "kv", PADDED, create=True)
    assert not caplog.records
