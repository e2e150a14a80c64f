"""The conformance kit against every backend, on every loop."""

from __future__ import annotations

import tempfile
from pathlib import Path

import anyio
import pytest
from backends import KINDS, ON_EVERY_LOOP, make_backend
from loops import every_loop, on_one_loop

from aio_kv import GroupLayout, PosixBackend
from aio_kv.testing import BACKEND_CHECKS, SYNC_BACKEND_CHECKS


@every_loop
@pytest.mark.parametrize("check", BACKEND_CHECKS)
@pytest.mark.parametrize("kind", ON_EVERY_LOOP)
async def test_backend(kind: str, check: str, tmp_path: Path) -> None:
    with anyio.fail_after(30):  # a hang becomes a failure
        await BACKEND_CHECKS[check](make_backend(kind, tmp_path))


@on_one_loop
@pytest.mark.parametrize("check", BACKEND_CHECKS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ON_EVERY_LOOP])
async def test_variant(kind: str, check: str, tmp_path: Path) -> None:
    with anyio.fail_after(30):  # a hang becomes a failure
        await BACKEND_CHECKS[check](make_backend(kind, tmp_path))


@pytest.mark.parametrize("check", SYNC_BACKEND_CHECKS)
@pytest.mark.parametrize("is_direct", [None, False], ids=["direct", "buffered"])
def test_posix_backend(check: str, is_direct: bool | None, tmp_path: Path) -> None:
    def make(layout: GroupLayout) -> PosixBackend:
        return PosixBackend(tempfile.mkdtemp(dir=tmp_path), layout, create=True, direct=is_direct)

    SYNC_BACKEND_CHECKS[check](make)
