"""Ways of reading experts, each of which reads cold random ones for a while, so many at a time."""

from __future__ import annotations

import mmap
import os
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import anyio
import anyio.to_thread
import numpy as np

from aio_kv.cli.benches.fio import run_fio
from aio_kv.cli.benches.measure import ContenderFailed, Sample, cpu_seconds, percentile_us
from aio_kv.cli.benches.page_cache import drop_files, resident_nbytes
from aio_kv.cuda import DeviceBuffer, DevicePointer
from aio_kv.errors import UnavailableError
from aio_kv.experts import DirectSegment, ExpertArena, ExpertMap, ExpertReader
from aio_kv.experts.windows import window_of
from aio_kv.positional import aligned_buffer

__all__ = ["ArenaDemands", "ExpertSupply", "FioExperts", "ReaderExperts", "ThreadExperts", "WAYS"]

_BLOCK = 4096


class ExpertSupply:
    """All experts of a model in random order, over and over; no expert comes again before all others have been."""

    def __init__(self, experts: ExpertMap, seed: int = 0) -> None:
        self.experts = experts
        self.paths = [str(path) for path in experts.paths]
        self._order = [
            (layer, expert) for layer in experts.layers for expert in range(experts.num_experts(layer))
        ]
        random.Random(seed).shuffle(self._order)
        self._lock = threading.Lock()
        self._next = 0

    def take(self) -> tuple[int, int]:
        """The next (layer, expert); any thread may ask."""
        with self._lock:
            self._next += 1
            return self._order[self._next % len(self._order)]

    def nbytes(self, layer: int, expert: int) -> int:
        """Bytes of an expert."""
        return sum(segment.nbytes for segment in self.experts.segments(layer, expert))

    def cold(self) -> None:
        """Have the page cache forget all of it."""
        drop_files(self.paths)

    def resident_nbytes(self) -> int | None:
        """What the page cache holds of it; None where the system does not tell (sandboxes)."""
        try:
            return sum(resident_nbytes(path) for path in self.paths)
        except OSError:
            return None


class _Lanes:
    """Counts what lanes that run at the same time have read."""

    def __init__(self, supply: ExpertSupply, seconds: float) -> None:
        self._supply = supply
        self.latencies: list[float] = []
        self.nbytes = 0
        self._lock = threading.Lock()
        self._cpu, self._start = cpu_seconds(), time.perf_counter()
        self._end = self._start + seconds

    def goes_on(self) -> bool:
        return time.perf_counter() < self._end

    def note(self, layer: int, expert: int, latency: float) -> None:
        with self._lock:
            self.latencies.append(latency)
            self.nbytes += self._supply.nbytes(layer, expert)

    def sample(self) -> Sample:
        return Sample(
            requests=len(self.latencies),
            nbytes=self.nbytes,
            seconds=time.perf_counter() - self._start,
            cpu_seconds=cpu_seconds() - self._cpu,
            p50_us=percentile_us(self.latencies, 50),
            p99_us=percentile_us(self.latencies, 99),
        )


class ReaderExperts:
    """`ExpertReader`, open, with `depth` experts at a time into registered host memory or into a GPU's."""

    latency_of = "expert"

    def __init__(
        self, name: str, note: str, reader: ExpertReader, supply: ExpertSupply, depth: int, memory: Any
    ) -> None:
        self.name, self.note = name, note
        self._reader, self._supply, self._depth, self._memory = reader, supply, depth, memory

    async def drive(self, seconds: float) -> Sample:
        """Run for `seconds`."""
        lanes = _Lanes(self._supply, seconds)
        async with anyio.create_task_group() as group:
            for index in range(self._depth):
                group.start_soon(self._lane, lanes, index)
        sample = lanes.sample()
        await self._reader.wait_dropped()
        return sample

    async def _lane(self, lanes: _Lanes, index: int) -> None:
        experts = self._supply.experts
        slot = -(-experts.slot_nbytes_max // _BLOCK) * _BLOCK
        while lanes.goes_on():
            layer, expert = self._supply.take()
            start = time.perf_counter()
            await self._reader.read(layer, expert, self._slot(index * slot, experts.slot_nbytes(layer)))
            lanes.note(layer, expert, time.perf_counter() - start)

    def _slot(self, start: int, nbytes: int) -> Any:
        if isinstance(self._memory, DeviceBuffer):
            return DevicePointer(self._memory.data_ptr() + start, nbytes)
        return self._memory[start : start + nbytes]


ReadExpert = Callable[[tuple[DirectSegment, ...], memoryview], None]


class ThreadExperts:
    """`depth` threads, each of which reads one expert after the other in the way of `open_way`."""

    latency_of = "expert"

    def __init__(
        self,
        name: str,
        note: str,
        open_way: Callable[[list[str]], Iterator[ReadExpert]],
        supply: ExpertSupply,
        depth: int,
    ) -> None:
        self.name, self.note = name, note
        self._open_way, self._supply, self._depth = open_way, supply, depth
        self._buffers = [aligned_buffer(supply.experts.slot_nbytes_max + 8 * _BLOCK) for _ in range(depth)]
        for buffer in self._buffers:
            np.frombuffer(buffer, np.uint8)[:] = 1  # touched, as a server's memory is

    async def drive(self, seconds: float) -> Sample:
        """Run for `seconds`."""
        return await anyio.to_thread.run_sync(self._run, seconds)

    def _run(self, seconds: float) -> Sample:
        way = self._open_way(self._supply.paths)
        read = next(way)
        lanes = _Lanes(self._supply, seconds)
        threads = [
            threading.Thread(target=self._lane, args=(lanes, read, buffer)) for buffer in self._buffers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sample = lanes.sample()
        next(way, None)
        return sample

    def _lane(self, lanes: _Lanes, read: ReadExpert, buffer: memoryview) -> None:
        while lanes.goes_on():
            layer, expert = self._supply.take()
            start = time.perf_counter()
            read(self._supply.experts.segments(layer, expert), buffer)
            lanes.note(layer, expert, time.perf_counter() - start)


def _by_mmap(paths: list[str]) -> Iterator[ReadExpert]:
    maps = []
    for path in paths:
        with open(path, "rb") as file:
            maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    arrays = [np.frombuffer(one, np.uint8) for one in maps]

    def read(segments: tuple[DirectSegment, ...], buffer: memoryview) -> None:
        target = np.frombuffer(buffer, np.uint8)
        for one in segments:
            source = arrays[one.shard][one.file_offset : one.file_offset + one.nbytes]
            np.copyto(target[one.slot_offset : one.slot_offset + one.nbytes], source)  # without the GIL

    yield read
    arrays.clear()
    for one in maps:
        one.close()


def _by_pread(paths: list[str]) -> Iterator[ReadExpert]:
    fds = [os.open(path, os.O_RDONLY) for path in paths]

    def read(segments: tuple[DirectSegment, ...], buffer: memoryview) -> None:
        for one in segments:
            _fill(fds[one.shard], buffer[one.slot_offset : one.slot_offset + one.nbytes], one.file_offset)

    yield read
    for fd in fds:
        os.close(fd)


def _by_direct_pread(paths: list[str]) -> Iterator[ReadExpert]:
    fds = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in paths]

    def read(segments: tuple[DirectSegment, ...], buffer: memoryview) -> None:
        # Whole windows one behind the other: what is read too much is left there, and nothing is copied.
        place = 0
        for one in segments:
            start, end = window_of(one, _BLOCK)
            _fill(fds[one.shard], buffer[place : place + end - start], start)
            place += end - start

    yield read
    for fd in fds:
        os.close(fd)


def _fill(fd: int, view: memoryview, file_offset: int) -> None:
    done = 0
    while done < len(view):
        count = os.preadv(fd, [view[done:]], file_offset + done)
        if count == 0 or count % 512:  # the end of the file
            return
        done += count


WAYS: dict[str, tuple[str, Callable[[list[str]], Iterator[ReadExpert]]]] = {
    "mmap": ("threads copy out of a mapping", _by_mmap),
    "pread": ("threads, through the page cache", _by_pread),
    "thread pool O_DIRECT": ("threads, whole windows, nothing trimmed", _by_direct_pread),
}


class FioExperts:
    """fio with blocks as large as an expert, on the largest shard: one read each, where an expert may take several."""

    latency_of = "expert"

    def __init__(self, supply: ExpertSupply, depth: int) -> None:
        self.name = "fio"
        self._block = -(-supply.experts.slot_nbytes_max // _BLOCK) * _BLOCK
        self._path = max(supply.paths, key=os.path.getsize)
        self._depth = depth
        self.note = f"io_uring, depth {depth}, blocks of {self._block} bytes"

    async def drive(self, seconds: float) -> Sample:
        """Run for `seconds`."""
        try:
            report = await run_fio(
                "--rw=randread",
                f"--filename={self._path}",
                f"--size={os.path.getsize(self._path)}",
                f"--bs={self._block}",
                f"--iodepth={self._depth}",
                "--time_based",
                f"--runtime={max(1, round(seconds * 1000))}ms",
                "--norandommap",
            )
        except UnavailableError as failure:
            raise ContenderFailed(str(failure)) from failure
        job = report["jobs"][0]
        side = job["read"]
        percentiles = side["clat_ns"].get("percentile", {})
        return Sample(
            requests=side["total_ios"],
            nbytes=side["io_bytes"],
            seconds=side["io_bytes"] / side["bw_bytes"],
            cpu_seconds=(job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000,
            p50_us=percentiles["50.000000"] / 1e3 if "50.000000" in percentiles else None,
            p99_us=percentiles["99.000000"] / 1e3 if "99.000000" in percentiles else None,
        )


class ArenaDemands:
    """One demand at a time for an expert that is not there, with or without prefetches of others under way."""

    latency_of = "expert"

    def __init__(self, arena: ExpertArena, supply: ExpertSupply, *, has_prefetch: bool) -> None:
        self.name = "arena, prefetching" if has_prefetch else "arena"
        self.note = "one demand at a time" + (", others being prefetched" if has_prefetch else "")
        self._arena, self._supply, self._has_prefetch = arena, supply, has_prefetch

    async def drive(self, seconds: float) -> Sample:
        """Run for `seconds`. The pauses in which prefetches run are part of its time: only latencies mean something."""
        lanes = _Lanes(self._supply, seconds)
        while lanes.goes_on():
            if self._has_prefetch:
                for layer, expert in (self._supply.take() for _ in range(4)):
                    self._arena.prefetch(layer, [expert])
            await self._pause(lanes)
            layer, expert = self._supply.take()
            start = time.perf_counter()
            async with self._arena.experts(layer, [expert]):
                lanes.note(layer, expert, time.perf_counter() - start)
        return lanes.sample()

    async def _pause(self, lanes: _Lanes) -> None:
        # A random part of a read, so that the demand meets prefetches in every state.
        await anyio.sleep(random.random() * 0.002)


Drive = Callable[[float], Awaitable[Sample]]
