"""Experts in GPU memory: the bytes, the order with callers' streams, and slots that a stream still reads."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np
import pytest
from expert_files import Model, make_model
from gpu_support import RUNGS, SMALL, Gpu, ends_within, gpu, looks, on_asyncio, on_every_loop, until

from aio_kv import DeviceError, LayoutError, UnavailableError, allocate_host
from aio_kv.cuda import DeviceBuffer, DevicePointer
from aio_kv.experts import Demand, ExpertArena, ExpertReader, PosixExpertReader
from aio_kv.experts.demand import View
from aio_kv.experts.slot_table import Grant

__all__ = ["gpu"]  # a fixture

SIZES = [(5000, 5000, 7001), (300_001,), (33,)]


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return make_model(tmp_path, sizes=SIZES)


@asynccontextmanager
async def reader_on(
    model: Model, gpu: Gpu, rung: str = "uring", **changes: Any
) -> AsyncIterator[ExpertReader]:
    reader = ExpertReader(model.experts, device=gpu.device, backend=rung, options=SMALL, **changes)
    try:
        await reader
    except UnavailableError as refused:
        pytest.skip(str(refused))
    try:
        yield reader
    finally:
        await reader.aclose()


class Seen:
    """Device memory as a buffer of the test's GPU: what a slot of an arena looks like to a kernel."""

    def __init__(self, gpu: Gpu, view: View) -> None:
        assert isinstance(view, DevicePointer)
        self._gpu, self.nbytes, self._address = gpu, view.nbytes, view.address

    def data_ptr(self) -> int:
        return self._address

    def now(self, nbytes: int) -> bytes:
        """What it holds now, whatever is queued."""
        return self._gpu.download(self, nbytes).tobytes()  # type: ignore[arg-type]

    def copy_to(self, target: DeviceBuffer, stream: int) -> None:
        """Queue a kernel that reads it."""
        self._gpu.copy(target, self, stream)  # type: ignore[arg-type]


@pytest.mark.parametrize("direct", ["on", "off"])
@pytest.mark.parametrize("rung", RUNGS)
@on_every_loop
async def test_every_expert_reaches_the_gpu(gpu: Gpu, model: Model, rung: str, direct: str) -> None:
    async with reader_on(model, gpu, rung, direct=direct) as reader:
        for layer in model.experts.layers:
            slot = model.experts.slot_nbytes(layer)
            into = gpu.buffer(4 * slot + 2, 0xA5)
            inside = DevicePointer(into.data_ptr() + 1, 4 * slot)
            stream = gpu.stream()
            transfer = reader.read(layer, [2, 0, 3, 1], inside, stream=stream)
            await transfer.enqueued()
            gpu.finish(stream)
            wanted = b"".join(model.image(layer, expert) for expert in (2, 0, 3, 1))
            assert gpu.download(into).tobytes() == b"\xa5" + wanted + b"\xa5"
            await transfer


@on_asyncio
async def test_the_oracle_reaches_it_too(gpu: Gpu, model: Model) -> None:
    with PosixExpertReader(model.experts, device=gpu.device) as oracle:
        into = gpu.buffer(300_001)
        oracle.read(1, 2, into, stream=gpu.stream())
        assert gpu.download(into).tobytes() == model.image(1, 2)
    with PosixExpertReader(model.experts) as oracle, pytest.raises(UnavailableError, match="no device"):
        oracle.read(1, 2, into)


@on_asyncio
async def test_a_read_waits_for_the_callers_stream(gpu: Gpu, model: Model) -> None:
    async with reader_on(model, gpu) as reader:
        stream = gpu.stream()
        into = gpu.buffer(17_001, 0xA5)
        with gpu.holding(stream):
            transfer = reader.read(0, 0, into, stream=stream)
            await transfer.enqueued()
            assert (gpu.download(into) == 0xA5).all()
        await ends_within(transfer)
        assert gpu.download(into).tobytes() == model.image(0, 0)


@asynccontextmanager
async def arena_on(
    model: Model, gpu: Gpu, slots: int, rung: str = "uring", *, memory: str = "device"
) -> AsyncIterator[tuple[ExpertArena, ExpertReader]]:
    nbytes = slots * (-(-model.experts.slot_nbytes_max // 4096) * 4096)
    async with reader_on(model, gpu, rung) as reader:
        async with ExpertArena(reader, capacity_bytes=nbytes, memory=memory) as arena:
            yield arena, reader
            arena._table.check()
        assert arena.statistics().leases == 0


@pytest.mark.parametrize("rung", RUNGS)
@on_every_loop
async def test_an_arena_on_the_gpu(gpu: Gpu, model: Model, rung: str) -> None:
    async with arena_on(model, gpu, 3, rung) as (arena, _reader):
        stream = gpu.stream()
        for layer, expert in model.everything() * 2:
            image = model.image(layer, expert)
            seen = gpu.buffer(len(image))
            async with arena.experts(layer, [expert], stream=stream) as slots:
                Seen(gpu, DevicePointer(slots[0].address, len(image))).copy_to(seen, stream)  # type: ignore[union-attr]
            gpu.finish(stream)
            assert gpu.download(seen).tobytes() == image
        arena.prefetch(0, [0, 1])
        await until(lambda: arena.statistics().filling == 0, "the prefetches end")
        async with arena.experts(0, [1]) as slots:  # without a stream: the bytes are there
            assert Seen(gpu, slots[0]).now(17001) == model.image(0, 1)
        assert arena.statistics().evictions > 0
        arena._table.check()


@on_asyncio
async def test_a_block_is_entered_when_the_copies_are_queued(gpu: Gpu, model: Model) -> None:
    """The host does not wait for the GPU, and work on the stream comes after the bytes all the same."""
    async with arena_on(model, gpu, 2) as (arena, _reader):
        stream, seen = gpu.stream(), gpu.buffer(300_001)
        with gpu.holding(stream):
            async with arena.experts(1, [3], stream=stream) as slots:
                Seen(gpu, slots[0]).copy_to(seen, stream)
            assert arena.statistics().leases == 1
        gpu.finish(stream)
        assert gpu.download(seen).tobytes() == model.image(1, 3)


@pytest.mark.parametrize("memory", ["device", "host"])
@on_every_loop
async def test_a_slot_that_a_stream_still_reads_is_not_filled_again(
    gpu: Gpu, model: Model, memory: str
) -> None:
    """The lease ends when the stream has reached the end of the block, not when the block has ended."""
    async with arena_on(model, gpu, 1, memory=memory) as (arena, reader):
        stream = gpu.stream()
        with gpu.holding(stream):
            async with arena.experts(1, [0], stream=stream) as slots:
                number = slots.slot_numbers
            assert arena.statistics().leases == 1
            async with anyio.create_task_group() as group:

                async def other() -> None:
                    async with arena.experts(1, [1]) as others:
                        assert others.slot_numbers == number
                        if memory == "device":
                            assert Seen(gpu, others[0]).now(300_001) == model.image(1, 1)
                        else:
                            assert bytes(others[0]) == model.image(1, 1)

                group.start_soon(other)
                await until(lambda: arena.statistics().waiting == 1, "the other stands in line")
                await looks(reader)  # type: ignore[arg-type]
                assert arena.statistics().waiting == 1
                gpu.release(stream)
        assert arena.statistics().leases == 0


def test_a_stream_waits_for_the_copies_of_every_expert_that_is_on_its_way() -> None:
    """The rule alone: on a real device the copies have mostly ended by the time that anybody looks."""
    waited: list[int] = []
    on_their_way = {5: SimpleNamespace(events=lambda: [11, 12]), 7: SimpleNamespace(events=lambda: [13])}
    arena, stream = SimpleNamespace(fill_of=on_their_way.get), SimpleNamespace(wait_handle=waited.append)
    demand = Demand(arena, 0, (5, 6, 7), stream)  # type: ignore[arg-type]
    demand._order_stream(Grant({5: 0, 6: 1, 7: 2}, hits=(6,), filling=(5,), missing=(7,)))
    assert waited == [11, 12, 13]


@on_asyncio
async def test_two_streams_wait_for_one_read(gpu: Gpu, model: Model) -> None:
    async with arena_on(model, gpu, 2) as (arena, _reader):
        seen = [gpu.buffer(300_001) for _ in range(2)]

        async def use(index: int) -> None:
            stream = gpu.stream()
            async with arena.experts(1, [2], stream=stream) as slots:
                Seen(gpu, slots[0]).copy_to(seen[index], stream)
            gpu.finish(stream)

        async with anyio.create_task_group() as group:
            for index in range(2):
                group.start_soon(use, index)
        for buffer in seen:
            assert gpu.download(buffer).tobytes() == model.image(1, 2)
        assert arena.statistics().misses == 1


@on_asyncio
async def test_what_a_stream_cannot_be_asked(gpu: Gpu, model: Model) -> None:
    async with arena_on(model, gpu, 1) as (arena, _reader):
        with pytest.raises(LayoutError, match="stream"):
            arena.experts(0, [0], stream="none")
        stream = gpu.stream()
        gpu.begin_capture(stream, 2)
        try:
            with pytest.raises(DeviceError, match="captured"):
                arena.experts(0, [0], stream=stream)
        finally:
            gpu.end_capture(stream)
        async with arena.experts(0, [0], stream=stream):
            pass
        await until(lambda: arena.statistics().leases == 0, "the stream gets there")


@on_asyncio
async def test_host_and_device_memory_are_told_apart(gpu: Gpu, model: Model) -> None:
    async with reader_on(model, gpu) as reader:
        with pytest.raises(LayoutError, match="streams order device memory only"):
            reader.read(2, 0, bytearray(33), stream=gpu.stream())
        with pytest.raises(LayoutError, match="need exactly"):
            reader.read(2, 0, gpu.buffer(34))
        memory = np.frombuffer(allocate_host(4096), np.uint8)
        await reader.read(2, 0, memory[:33])
        assert memory[:33].tobytes() == model.image(2, 0)
