"""KvikIO in its compatibility mode: a pool of threads that reads host memory, with direct I/O for reads switched on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from aio_kv.cli.benches.peers.setup import Reader, Setup, import_of, places_of, widths_of
from aio_kv.cli.benches.workload import Batch, Workload

__all__ = ["KvikioPeer"]

_SPLIT_FROM_NBYTES = 512 << 10
_SPLITS = 4


class KvikioPeer:
    """The number of its threads is tried, and tasks of a whole block; of large blocks also tasks of a quarter."""

    name = "kvikio"
    module = "kvikio"
    install = "pip install kvikio-cu13"
    needs = "it asks the CUDA driver what kind of memory it reads into, and so needs one for host memory too"

    def load(self) -> None:
        """Import it."""
        import_of("kvikio.defaults")

    def setups(self, workload: Workload) -> Sequence[Setup]:
        """Several numbers of threads and sizes of tasks."""
        block = workload.block
        task_sizes = (block, block // _SPLITS) if block >= _SPLIT_FROM_NBYTES else (block,)
        return [
            _Pool(width, task_size) for width in widths_of(workload.shape.depth) for task_size in task_sizes
        ]


@dataclass(frozen=True, slots=True)
class _Pool:
    width: int
    task_nbytes: int
    is_direct: bool = True

    @property
    def note(self) -> str:
        return f"compat_mode ON, num_threads {self.width}, task_size {self.task_nbytes}, auto_direct_io_read"

    @asynccontextmanager
    async def opened(self, path: str, workload: Workload) -> AsyncIterator[Reader]:
        kvikio = import_of("kvikio")
        loop, places = asyncio.get_running_loop(), places_of(workload)
        arrays = [[np.frombuffer(place, dtype=np.uint8) for place in lane] for lane in places]
        options = {
            "compat_mode": kvikio.CompatMode.ON,
            "num_threads": self.width,
            "task_size": self.task_nbytes,
            "auto_direct_io_read": True,
        }
        with ExitStack() as stack:
            # They are the process's, and go back to what they were; the file must be opened with them in force.
            stack.enter_context(import_of("kvikio.defaults").set(options))
            file = stack.enter_context(kvikio.CuFile(path, "r"))
            waiting = stack.enter_context(ThreadPoolExecutor(workload.shape.in_flight))

            async def read(lane: int, batch: Batch) -> None:
                await loop.run_in_executor(waiting, _read_all, file, arrays[lane], batch.offsets)

            yield Reader(read, places)


def _read_all(file: Any, arrays: Sequence[Any], offsets: Sequence[int]) -> None:
    started = [file.pread(array, file_offset=offset) for array, offset in zip(arrays, offsets, strict=True)]
    problems: list[Exception] = []
    for future, array in zip(started, arrays, strict=True):
        # All are waited for before any is complained about: they write to memory that is not theirs.
        try:
            moved = future.get()
        except RuntimeError as error:
            problems.append(error)
        else:
            if moved != array.nbytes:
                problems.append(OSError(f"{moved} bytes instead of {array.nbytes}"))
    if problems:
        raise problems[0]
