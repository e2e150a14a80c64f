"""anyio: `to_thread.run_sync` with a capacity limiter of its own. `anyio.open_file` would cost two hops per read."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio

from aio_kv.cli.benches.peers.setup import (
    Part,
    Reader,
    Setup,
    in_parts,
    opened_fd,
    places_of,
    widths_of,
)
from aio_kv.cli.benches.workload import Batch, Workload

__all__ = ["AnyioPeer"]


class AnyioPeer:
    """The tokens of the limiter are tried: that many threads call preadv."""

    name = "anyio"
    module = "anyio"
    install = "pip install anyio"
    needs = ""

    def load(self) -> None:
        """Nothing to do: aio_kv needs it anyway."""

    def setups(self, workload: Workload) -> Sequence[Setup]:
        """Several limits."""
        return [_Threads(width) for width in widths_of(workload.shape.depth)]


@dataclass(frozen=True, slots=True)
class _Threads:
    width: int
    is_direct: bool = True

    @property
    def note(self) -> str:
        return f"to_thread.run_sync(preadv), limiter of {self.width}"

    @asynccontextmanager
    async def opened(self, path: str, workload: Workload) -> AsyncIterator[Reader]:
        limiter = anyio.CapacityLimiter(self.width)
        with opened_fd(path, is_direct=True) as fd:

            async def read_part(worker: int, part: Part) -> None:
                for place, offset in part:
                    moved = await anyio.to_thread.run_sync(os.preadv, fd, [place], offset, limiter=limiter)
                    if moved != len(place):
                        raise OSError(f"{moved} bytes instead of {len(place)} at offset {offset}")

            async def read(lane: int, batch: Batch) -> None:
                await in_parts(workload, lane, batch, width=self.width, read=read_part)

            yield Reader(read, places_of(workload))
