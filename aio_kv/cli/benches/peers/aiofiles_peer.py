"""aiofiles: file objects whose calls are made by a thread pool. The caller's `opener` is what makes them direct."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aio_kv.cli.benches.peers.setup import Part, Reader, Setup, import_of, in_parts, places_of, widths_of
from aio_kv.cli.benches.workload import Batch, Workload

__all__ = ["AiofilesPeer"]


class AiofilesPeer:
    """The width of its executor is tried; there are as many file objects, since each has one position."""

    name = "aiofiles"
    module = "aiofiles"
    install = "pip install aiofiles"
    needs = ""

    def load(self) -> None:
        """Import it."""
        import_of(self.module)

    def setups(self, workload: Workload) -> Sequence[Setup]:
        """Several widths."""
        return [_Files(width) for width in widths_of(workload.shape.depth)]


@dataclass(frozen=True, slots=True)
class _Files:
    width: int
    is_direct: bool = True

    @property
    def note(self) -> str:
        return f"executor of {self.width} threads, as many files; seek, readinto"

    @asynccontextmanager
    async def opened(self, path: str, workload: Workload) -> AsyncIterator[Reader]:
        async with AsyncExitStack() as stack:
            executor = stack.enter_context(ThreadPoolExecutor(self.width))
            lanes = workload.shape.in_flight
            handles = [
                await stack.enter_async_context(
                    import_of("aiofiles").open(
                        path, "rb", buffering=0, opener=_open_direct, executor=executor
                    )
                )
                for _ in range(max(lanes, self.width))
            ]

            async def read_part(worker: int, part: Part) -> None:
                await _read_part(handles[worker], part)

            async def read(lane: int, batch: Batch) -> None:
                await in_parts(workload, lane, batch, width=self.width, read=read_part)

            yield Reader(read, places_of(workload))


async def _read_part(handle: Any, part: Part) -> None:
    for place, offset in part:
        await handle.seek(offset)
        moved = await handle.readinto(place)
        if moved != len(place):
            raise OSError(f"{moved} bytes instead of {len(place)} at offset {offset}")


def _open_direct(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_DIRECT)
