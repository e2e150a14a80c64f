"""The conformance kit against the cascade over every backing, in sizes from one slot up."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from backends import Make, make_backend
from loops import every_loop, on_one_loop

from aio_kv import GroupLayout
from aio_kv.cascade import CascadeBackend
from aio_kv.testing import BACKEND_CHECKS, FaultyBackend


def make_cascade(make: Make, slots: int, slot: str, **options: Any) -> Make:
    """A factory for cascades of `slots` slots over backends of `make`."""

    @asynccontextmanager
    async def made(layout: GroupLayout) -> AsyncIterator[CascadeBackend]:
        per_slot = layout.groups_per_block if slot == "block" else 1
        capacity = slots * per_slot * layout.payload_nbytes
        async with (
            make(layout) as backing,
            CascadeBackend(backing, capacity_bytes=capacity, slot=slot, **options) as cascade,
        ):
            yield cascade
            if cascade._session is not None:
                cascade._session.cache.check_invariants()

    return made


SIZES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "1-group": (1, "group", {"dirty_limit": 1}),
    "3-blocks": (3, "block", {}),
    "5-groups-promoting": (5, "group", {"promote": True, "policy": "arc"}),
    "7-blocks-promoting": (7, "block", {"promote": True, "policy": "s3fifo", "dirty_limit": 0.2}),
    "all": (10_000, "group", {}),
}
# One of each mechanism; what a backing does within tight bounds is tested with the backing.
OVER = ("uring", "uring-buffered", "threads", "python")
PATIENCE = 120.0  # seconds, on a machine with other work: a check that hangs takes for ever


@every_loop
@pytest.mark.parametrize("check", BACKEND_CHECKS)
@pytest.mark.parametrize("size", ["5-groups-promoting"])
async def test_over_memory(size: str, check: str, tmp_path: Path) -> None:
    slots, slot, options = SIZES[size]
    with anyio.fail_after(PATIENCE):
        await BACKEND_CHECKS[check](
            make_cascade(make_backend("memory-shuffled", tmp_path), slots, slot, **options)
        )


@on_one_loop
@pytest.mark.parametrize("check", BACKEND_CHECKS)
@pytest.mark.parametrize("size", [size for size in SIZES if size != "5-groups-promoting"])
async def test_size(size: str, check: str, tmp_path: Path) -> None:
    slots, slot, options = SIZES[size]
    with anyio.fail_after(PATIENCE):
        await BACKEND_CHECKS[check](make_cascade(make_backend("memory", tmp_path), slots, slot, **options))


@on_one_loop
@pytest.mark.parametrize("check", BACKEND_CHECKS)
@pytest.mark.parametrize("kind", OVER)
async def test_over(kind: str, check: str, tmp_path: Path) -> None:
    with anyio.fail_after(PATIENCE):
        await BACKEND_CHECKS[check](make_cascade(make_backend(kind, tmp_path), 3, "block"))


@on_one_loop
@pytest.mark.parametrize("check", BACKEND_CHECKS)
async def test_over_another_cascade(check: str, tmp_path: Path) -> None:
    inner = make_cascade(make_backend("memory-shuffled", tmp_path), 4, "group", promote=True)
    with anyio.fail_after(PATIENCE):
        await BACKEND_CHECKS[check](make_cascade(inner, 2, "block"))  # type: ignore[arg-type]


@every_loop
@pytest.mark.parametrize("check", BACKEND_CHECKS)
async def test_over_a_backend_that_only_has_the_protocol(check: str, tmp_path: Path) -> None:
    """Its transfers cannot tell when they end: a task awaits each of them."""

    @asynccontextmanager
    async def make(layout: GroupLayout) -> AsyncIterator[Any]:
        async with make_backend("memory-shuffled", tmp_path)(layout) as backend:
            yield Plain(backend)

    with anyio.fail_after(PATIENCE):
        await BACKEND_CHECKS[check](make_cascade(make, 3, "block"))


class PlainTransfer:
    """What the protocol promises of a transfer, and no more."""

    def __init__(self, transfer: Any) -> None:
        self.outcome, self.enqueued, self.cancel = transfer.outcome, transfer.enqueued, transfer.cancel
        self._transfer = transfer

    def __await__(self) -> Any:
        return self._transfer.__await__()


class Plain(FaultyBackend):
    """Hands everything on, but for the transfers' other abilities."""

    def _start(self, call: str, start: Any, ids: Any) -> Any:
        return PlainTransfer(start())
