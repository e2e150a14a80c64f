"""Several transfers in flight, but not all of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

import anyio
import anyio.lowlevel

from aio_kv.backends.engine_backend import EngineBackend
from aio_kv.transfer import Transfer

__all__ = ["in_window"]

# Loads of a megabyte or two: enough of them to keep a disk busy, few enough that their buffers stay small.
_WIDTH = 8

Load = TypeVar("Load")


async def in_window(
    kv: EngineBackend,
    loads: Iterable[Load],
    start: Callable[[Load], Transfer],
    on_done: Callable[[Load], None] = lambda load: None,
) -> None:
    """Start a transfer for each load, a bounded number ahead, and await them in the order in which they started.

    Raises the `TransferError` of the first one that fails. Whatever is raised, nothing is in flight any more.
    """
    window: deque[tuple[Load, Transfer]] = deque()

    async def finish_oldest() -> None:
        load, transfer = window.popleft()
        await transfer
        on_done(load)

    try:
        for load in loads:
            if len(window) == _WIDTH:
                await finish_oldest()
            await kv.wait_ready()
            window.append((load, start(load)))
            # Awaiting what is already done does not give the loop away, and starting takes a moment, too: everyone
            # else on the loop gets a turn in between.
            await anyio.lowlevel.checkpoint()
        while window:
            await finish_oldest()
    finally:
        await _drop(transfer for _, transfer in window)


async def _drop(transfers: Iterable[Transfer]) -> None:
    with anyio.CancelScope(shield=True):
        for transfer in transfers:
            transfer.cancel()
            await transfer.outcome()
