"""caio: io_uring, libaio or threads. It returns new `bytes`, which are copied to where the blocks are wanted.

The memory of `bytes` is aligned to 16 bytes. Direct reads into it work on devices that ask for no more, and are tried.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aio_kv.cli.benches.peers.setup import Reader, Setup, all_of, import_of, opened_fd, places_of, widths_of
from aio_kv.cli.benches.workload import Batch, Workload

__all__ = ["CaioPeer"]

_KERNEL_VARIANTS = ("linux_uring", "linux_aio")
_POOL_MAX = 64  # it takes less than 128


class CaioPeer:
    """All of its variants are tried that the machine has; `max_requests` is the depth."""

    name = "caio"
    module = "caio"
    install = "pip install caio"
    needs = ""

    def load(self) -> None:
        """Import it."""
        import_of(self.module)

    def setups(self, workload: Workload) -> Sequence[Setup]:
        """Every variant, submitting at once and in batches; threads with several sizes of their pool."""
        caio, depth = import_of(self.module), workload.shape.depth
        ways = [
            _Context(variant, depth, (("deferred", is_deferred),), is_direct)
            for is_direct in (True, False)
            for variant in _KERNEL_VARIANTS
            for is_deferred in (False, True)
        ]
        ways += [
            _Context("thread_aio", depth, (("pool_size", width),), is_direct)
            for is_direct in (True, False)
            for width in widths_of(min(depth, _POOL_MAX))
        ]
        return [way for way in ways if getattr(caio, f"{way.variant}_asyncio", None) is not None]


@dataclass(frozen=True, slots=True)
class _Context:
    variant: str
    max_requests: int
    options: tuple[tuple[str, int], ...]
    is_direct: bool

    @property
    def note(self) -> str:
        options = ", ".join(f"{name} {value}" for name, value in self.options)
        return f"{self.variant}, max_requests {self.max_requests}, {options}; copied from new bytes"

    @asynccontextmanager
    async def opened(self, path: str, workload: Workload) -> AsyncIterator[Reader]:
        module = import_of(f"caio.{self.variant}_asyncio")
        places = places_of(workload)
        with opened_fd(path, is_direct=self.is_direct) as fd:
            async with module.AsyncioContext(max_requests=self.max_requests, **dict(self.options)) as context:

                async def read_one(place: memoryview, offset: int) -> None:
                    place[:] = await context.read(len(place), fd, offset)

                async def read(lane: int, batch: Batch) -> None:
                    pairs = zip(places[lane], batch.offsets, strict=True)
                    await all_of(read_one(place, offset) for place, offset in pairs)

                yield Reader(read, places)
