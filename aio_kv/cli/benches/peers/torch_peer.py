"""torch: copies out of a mapping of the file, which is how it reads tensors lazily (as `torch.load(mmap=True)` does).

torch has no positional read: `torch.load` without mmap reads whole objects. Blocks that are needed now and then are
rows of a mapped tensor, and page faults are what reads them; several threads are several faults at a time. torch cannot
tell the kernel that the order is random, so that each fault reads around its page.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aio_kv.cli.benches.peers.setup import Reader, Setup, import_of, places_of, widths_of
from aio_kv.cli.benches.workload import Batch, Workload

__all__ = ["TorchPeer"]


class TorchPeer:
    """The number of threads that copy is tried; inside a copy, torch uses one."""

    name = "torch"
    module = "torch"
    install = "pip install torch"
    needs = ""

    def load(self) -> None:
        """Import it."""
        import_of(self.module)

    def setups(self, workload: Workload) -> Sequence[Setup]:
        """Several numbers of threads."""
        return [_Mapping(width) for width in widths_of(workload.shape.depth)]


@dataclass(frozen=True, slots=True)
class _Mapping:
    width: int
    is_direct: bool = False

    @property
    def note(self) -> str:
        return f"UntypedStorage.from_file (mmap), copy_ of rows by {self.width} threads"

    @asynccontextmanager
    async def opened(self, path: str, workload: Workload) -> AsyncIterator[Reader]:
        torch, block = import_of("torch"), workload.block
        nbytes = workload.layout.nbytes_per_layer // block * block
        storage = torch.UntypedStorage.from_file(path, False, nbytes)
        rows = torch.empty(0, dtype=torch.uint8).set_(storage).view(-1, block)
        window = torch.frombuffer(workload.memory, dtype=torch.uint8).view(-1, block)
        places = [
            [window[start // block] for start in scatter.offsets.tolist()] for scatter in workload.scatters
        ]
        loop, before = asyncio.get_running_loop(), torch.get_num_threads()
        workers = max(1, self.width // workload.shape.in_flight)
        torch.set_num_threads(1)
        try:
            with ThreadPoolExecutor(self.width) as pool:

                async def read(lane: int, batch: Batch) -> None:
                    own, numbers = places[lane], [offset // block for offset in batch.offsets]
                    jobs = (
                        loop.run_in_executor(pool, _copy_all, rows, own[i::workers], numbers[i::workers])
                        for i in range(workers)
                    )
                    await asyncio.gather(*jobs)

                yield Reader(read, places_of(workload))
        finally:
            torch.set_num_threads(before)


def _copy_all(rows: Any, places: Sequence[Any], numbers: Sequence[int]) -> None:
    for place, number in zip(places, numbers, strict=True):
        place.copy_(rows[number])
