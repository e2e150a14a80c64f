"""aiofiles and anyio, which serve asyncio programs with files, as most programs use them: through the page cache."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio

from aio_kv.cli.benches.measure import Sample, for_seconds, keep_in_flight
from aio_kv.cli.benches.workload import Batch, Workload

__all__ = ["LibraryRun", "installed_libraries"]

_HANDLES = 16  # a handle has one position, so concurrent reads need handles of their own


def installed_libraries() -> tuple[str, ...]:
    """Which of the two are there; anyio always is."""
    return tuple(name for name in ("aiofiles", "anyio") if importlib.util.find_spec(name))


class LibraryRun:
    """Batches by seek and readinto on several open files of one library.

    With `drop_cache` each run begins with a cold page cache and ends at the latest when the file has been read once:
    after that it would be warm.
    """

    latency_of = "batch"
    is_on_loop = True

    def __init__(
        self,
        name: str,
        path: str,
        workload: Workload,
        *,
        share: float,
        drop_cache: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self.note = f"{_HANDLES} handles, buffered"
        self.share = share
        self._path = path
        self._workload = workload
        self._drop_cache = drop_cache

    async def drive(self, seconds: float) -> Sample:
        """Run for about `seconds`."""
        async with _handles(self.name, self._path) as handles:
            move = self._mover(handles)
            if self._drop_cache is None:
                return await keep_in_flight(self._workload, move, for_seconds(seconds))
            self._drop_cache()
            in_time, left = for_seconds(seconds), iter(self._workload.batches)
            return await keep_in_flight(
                self._workload, move, lambda: in_time() and next(left, None) is not None
            )

    def _mover(self, handles: list[Any]) -> Callable[[int, Batch], Any]:
        workload = self._workload
        share = max(1, len(handles) // workload.shape.in_flight)

        async def move_part(handle: Any, vectors: list[list[memoryview]], offsets: list[int]) -> None:
            for vector, offset in zip(vectors, offsets, strict=True):
                await handle.seek(offset)
                if await handle.readinto(vector[0]) != workload.block:
                    raise AssertionError("a read came back short")

        async def move(lane: int, batch: Batch) -> None:
            own = handles[lane * share : (lane + 1) * share]
            vectors = workload.vectors[lane]
            parts = (
                move_part(handle, vectors[i :: len(own)], batch.offsets[i :: len(own)])
                for i, handle in enumerate(own)
            )
            await asyncio.gather(*parts)

        return move


@asynccontextmanager
async def _handles(library: str, path: str) -> AsyncIterator[list[Any]]:
    async with AsyncExitStack() as stack:
        opened: list[Any] = []
        for _ in range(_HANDLES):
            if library == "anyio":
                handle: Any = await anyio.open_file(path, "rb", buffering=0)
            else:
                handle = importlib.import_module(library).open(path, "rb", buffering=0)
            opened.append(await stack.enter_async_context(handle))
        yield opened
