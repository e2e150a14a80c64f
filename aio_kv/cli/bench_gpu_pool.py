"""Pinned memory full of random bytes, GPU memory as large, and shuffled copies from one to the other."""

from __future__ import annotations

from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from aio_kv.cli.bench_gpu_driver import LIST_ENTRY_NBYTES, CopyJob, Driver, list_entries
from aio_kv.cuda import DeviceBuffer, PinnedBuffer
from aio_kv.engine.extension import allocate_host
from aio_kv.integers import Int64Array
from aio_kv.protocols import Scatter

__all__ = ["PinnedPool"]

_SEED = 20240229  # the same draws in every run
_PAGE = 4096


class PinnedPool:
    """`nbytes` of pinned memory (`memory`, registered as `pin`) and of GPU memory (`target`). A context manager.

    Close it when no copy uses it any more.
    """

    def __init__(self, nbytes: int, driver: Driver) -> None:
        self.nbytes = nbytes
        self.driver = driver
        self.memory = allocate_host(nbytes)
        self.bytes: NDArray[np.uint8] = np.frombuffer(self.memory, np.uint8)
        words = self.bytes.view(np.uint64)
        words[:] = np.random.default_rng(_SEED).integers(0, 1 << 64, len(words), dtype=np.uint64)
        self.pin = PinnedBuffer(self.memory, driver.device)
        self.target = DeviceBuffer(nbytes, driver.device)
        self._lists: list[PinnedBuffer] = []

    def jobs(self, nbytes: int, batch: int, *, count: int | None = None) -> list[CopyJob]:
        """Jobs of `batch` copies of `nbytes` each, from random places to random places, none of them used twice.

        As many as the pool has room for, or `count`.
        """
        places = self.nbytes // nbytes
        random = np.random.default_rng(_SEED)
        sources, targets = random.permutation(places) * nbytes, random.permutation(places) * nbytes
        fitting = places // batch
        number = fitting if count is None else min(count, fitting)
        assert number, f"{batch} groups of {nbytes} bytes do not fit into {self.nbytes}"
        lists = self._room_for_lists(number * batch)
        jobs = []
        for start in range(0, number * batch, batch):
            part = slice(start, start + batch)
            at = start * LIST_ENTRY_NBYTES
            jobs.append(self._job(nbytes, sources[part], targets[part], lists, at))
        return jobs

    def _room_for_lists(self, entries: int) -> PinnedBuffer:
        nbytes = -(-entries * LIST_ENTRY_NBYTES // _PAGE) * _PAGE
        self._lists.append(PinnedBuffer(allocate_host(nbytes), self.driver.device))
        return self._lists[-1]

    def _job(
        self, nbytes: int, offsets: Int64Array, places: Int64Array, lists: PinnedBuffer, at: int
    ) -> CopyJob:
        targets = (self.target.data_ptr() + places).astype(np.uint64)
        sources = (self.pin.address + offsets).astype(np.uint64)
        as_device_sees = (self.pin.device_address() + offsets).astype(np.uint64)
        entries = list_entries(targets, as_device_sees, nbytes)
        lists.view[at : at + len(entries)] = entries
        return CopyJob(
            nbytes=nbytes,
            offsets=np.ascontiguousarray(offsets),
            scatter=Scatter(self.target, np.ascontiguousarray(places)),
            targets=targets,
            sources=sources,
            sizes=np.full(len(targets), nbytes, np.uint64),
            calls=list(zip(targets.tolist(), sources.tolist(), strict=True)),
            list_address=lists.device_address(at),
        )

    def clear_target(self) -> None:
        """Overwrite the GPU memory, so that what is found there afterwards has just been copied."""
        self.driver.upload(self.target, np.zeros(self.nbytes, np.uint8))

    def close(self) -> None:
        """Give everything back."""
        self.target.close()
        while self._lists:
            self._lists.pop().close()
        self.pin.close()

    def __enter__(self) -> PinnedPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
