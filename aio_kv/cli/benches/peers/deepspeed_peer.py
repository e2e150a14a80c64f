"""DeepSpeed's asynchronous I/O handle (DeepNVMe): libaio and O_DIRECT, compiled by torch when it is first used."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from aio_kv.cli.benches.peers.setup import Reader, Setup, import_of, widths_of
from aio_kv.cli.benches.workload import Batch, Workload

__all__ = ["DeepspeedPeer", "check_events"]

_SPLIT_FROM_NBYTES = 256 << 10
_SPLITS = 4
_WIDTH_MAX = 64  # above that handles only cost threads
_CONTEXTS = 2  # a handle has one of its own and one for its thread


class DeepspeedPeer:
    """A handle works off one read at a time, so depth comes from several: their number is tried.

    For large blocks, reads of a quarter each are tried too, which a handle has in flight together.
    """

    name = "deepspeed"
    module = "deepspeed"
    install = "pip install torch ninja deepspeed"
    needs = "its extension is compiled on first use, with a C++ compiler, ninja and libaio (libaio-dev)"

    def load(self) -> None:
        """Import it and load its extension; the first time ever this compiles for minutes."""
        _extension()

    def setups(self, workload: Workload) -> Sequence[Setup]:
        """Several numbers of handles and sizes of the requests below them."""
        block, depth, lanes = workload.block, workload.shape.depth, workload.shape.in_flight
        widths = widths_of(min(depth, _WIDTH_MAX))
        whole = [_Handles(max(width, lanes), block, 1) for width in widths]
        if block < _SPLIT_FROM_NBYTES:
            return whole
        split = [
            _Handles(one.width, block // _SPLITS, _SPLITS) for one in whole if one.width * _SPLITS <= depth
        ]
        return whole + split


_kept: dict[tuple[int, int], list[Any]] = {}


@cache
def _extension() -> Any:
    return import_of("deepspeed.ops.op_builder").AsyncIOBuilder().load(verbose=False)


@dataclass(frozen=True, slots=True)
class _Handles:
    width: int
    block_nbytes: int
    queue_depth: int
    is_direct: bool = True

    @property
    def note(self) -> str:
        return (
            f"{self.width} handles of 1 thread: block_size {self.block_nbytes}, queue_depth {self.queue_depth}, "
            "single_submit False, overlap_events True; into its page-locked tensor"
        )

    @asynccontextmanager
    async def opened(self, path: str, workload: Workload) -> AsyncIterator[Reader]:
        torch, lanes = import_of("torch"), workload.shape.in_flight
        handles = _handles(self.block_nbytes, self.queue_depth, self.width // lanes * lanes)
        # Into any other memory it would copy, with a buffer that it allocates for every read.
        window = handles[0].new_cpu_locked_tensor(len(workload.memory), torch.empty(0, dtype=torch.uint8))
        tensors = [
            [window[start : start + workload.block] for start in scatter.offsets.tolist()]
            for scatter in workload.scatters
        ]
        loop = asyncio.get_running_loop()
        try:
            with ThreadPoolExecutor(lanes) as waiting:

                async def read(lane: int, batch: Batch) -> None:
                    own = handles[lane::lanes]
                    await loop.run_in_executor(waiting, _read_all, own, tensors[lane], path, batch.offsets)

                yield Reader(read, [[memoryview(tensor.numpy()) for tensor in lane] for lane in tensors])
        finally:
            tensors.clear()
            handles[0].free_cpu_locked_tensor(window)


def _handles(block_nbytes: int, queue_depth: int, count: int) -> list[Any]:
    """So many handles with one thread each; kept for the next run, since the kernel takes long to end one."""
    kept = _kept.setdefault((block_nbytes, queue_depth), [])
    missing = max(0, count - len(kept))
    check_events(missing * _CONTEXTS * queue_depth)
    make = _extension().aio_handle
    kept += [make(block_nbytes, queue_depth, False, True, 1) for _ in range(missing)]
    return kept[:count]


def check_events(needed: int) -> None:
    """Raise `OSError` where libaio has too few events left: DeepSpeed would abort the process."""
    used, most = (int(Path(f"/proc/sys/fs/{name}").read_text()) for name in ("aio-nr", "aio-max-nr"))
    if used + needed > most:
        raise OSError(
            f"{needed} events of libaio are needed and {most - used} left: raise sysctl fs.aio-max-nr"
        )


def _read_all(handles: Sequence[Any], tensors: Sequence[Any], path: str, offsets: Sequence[int]) -> None:
    started = [0] * len(handles)
    refused = 0
    for number, (tensor, offset) in enumerate(zip(tensors, offsets, strict=True)):
        index = number % len(handles)
        if handles[index].async_pread(tensor, path, offset):
            refused += 1
        else:
            started[index] += 1
    ended = [handle.wait() if count else 0 for handle, count in zip(handles, started, strict=True)]
    if refused or ended != started:
        raise OSError(f"{refused} reads were refused, and {sum(ended)} of {sum(started)} ended")
