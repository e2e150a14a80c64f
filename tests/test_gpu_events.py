"""What the device path owes to graph captures of other code, and events that are awaited."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from fake_cuda_control import GLOBAL, LEGACY
from gpu_cases import LAYOUT, NEW, OLD, filled, is_all, some
from gpu_support import (
    RUNGS,
    Gpu,
    backend_on,
    gpu,
    looks,
    on_asyncio,
    on_every_loop,
    until,
)

from aio_kv import (
    ClosedError,
    DeviceError,
)

__all__ = ["gpu"]  # a fixture


# Captures


@on_every_loop
async def test_a_capturing_stream_is_refused(gpu: Gpu, tmp_path: Path) -> None:
    stream, other, memory = gpu.stream(), gpu.stream(), gpu.buffer(4096)
    with filled(tmp_path, LAYOUT) as files:
        async with backend_on("uring", files, gpu.device) as kv:
            lent, before = gpu.device.events.lent, kv.statistics().transfers
            gpu.stall(stream)
            pending = kv.read_groups([0], memory, stream=stream)
            gpu.begin_capture(stream, GLOBAL)
            calls = (
                lambda: kv.read_groups([0], memory, stream=stream),
                lambda: kv.write_groups([0], memory, stream=stream),
                lambda: kv.record_event(stream),
            )
            for call in calls:
                with pytest.raises(DeviceError, match="being captured into a graph"):
                    call()
            with pytest.raises(DeviceError, match="being captured into a graph"):
                await pending.enqueued()
            await kv.read_groups([2], memory, stream=other)
            assert gpu.end_capture(stream) == 0
            gpu.finish(stream)
            await pending
            assert kv.statistics().transfers.transfers == before.transfers + 2
            assert gpu.device.events.lent == lent


@on_asyncio
async def test_the_legacy_stream_is_refused_while_a_blocking_stream_captures(
    gpu: Gpu, tmp_path: Path
) -> None:
    stream, memory = gpu.stream(blocking=True), gpu.buffer(4096)
    with filled(tmp_path, LAYOUT) as files:
        async with backend_on("uring", files, gpu.device) as kv:
            gpu.begin_capture(stream, GLOBAL)
            with pytest.raises(DeviceError, match="being captured into a graph"):
                kv.read_groups([0], memory, stream=LEGACY)
            assert gpu.end_capture(stream) == 0


class Capturer:
    """Another thread that captures a graph on a stream of its own in the global mode, from `start` to `end`."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self._stream = gpu, gpu.stream()
        self._may_end, self._has_begun = threading.Event(), threading.Event()
        self.answer = -1
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        self._gpu.device.make_current()
        self._gpu.begin_capture(self._stream, GLOBAL)
        self._has_begun.set()
        self._may_end.wait(30)
        self.answer = self._gpu.end_capture(self._stream)

    def __enter__(self) -> Capturer:
        self._thread.start()
        assert self._has_begun.wait(10)
        return self

    def __exit__(self, *exception: object) -> None:
        self._may_end.set()
        self._thread.join()


@pytest.mark.parametrize("rung", RUNGS)
@on_asyncio
async def test_a_capture_by_another_thread_survives_everything(gpu: Gpu, tmp_path: Path, rung: str) -> None:
    """Opening, reads, writes, events and closing, all in the middle of it."""
    stream, memory = gpu.stream(), gpu.buffer(8 * 4096)
    with filled(tmp_path, LAYOUT) as files, Capturer(gpu) as capturer:
        async with backend_on(rung, files, gpu.device) as kv:
            transfer = kv.read_groups(some(LAYOUT, 8), memory, stream=stream)
            await transfer.enqueued()
            await kv.record_event(stream)
            await transfer
            await kv.write_groups(some(LAYOUT, 8), memory, stream=stream)
            await kv.read_groups(some(LAYOUT, 8), memory)
    assert capturer.answer == 0
    if gpu.is_fake:
        assert gpu.needs_fake("").captures_invalidated == 0


@on_asyncio
async def test_a_capture_by_the_loop_s_own_thread_survives_reads(gpu: Gpu, tmp_path: Path) -> None:
    captured, stream, memory = gpu.stream(), gpu.stream(), gpu.buffer(8 * 4096)
    with filled(tmp_path, LAYOUT) as files:
        async with backend_on("uring", files, gpu.device) as kv:
            gpu.begin_capture(captured, GLOBAL)
            transfer = kv.read_groups(some(LAYOUT, 8), memory, stream=stream)
            await transfer.enqueued()
            await kv.record_event(stream)
            await transfer
            assert gpu.end_capture(captured) == 0


# Events


@on_every_loop
async def test_an_event_is_awaited_by_several(gpu: Gpu, tmp_path: Path) -> None:
    stream, target = gpu.stream(), gpu.buffer(4096, OLD)
    ended: list[int] = []

    async def wait(event: Any, number: int) -> None:
        await event
        assert is_all(gpu.download(target), NEW)
        ended.append(number)

    with filled(tmp_path, LAYOUT) as files:
        async with backend_on("uring", files, gpu.device) as kv:
            with gpu.holding(stream):
                gpu.fill(target, NEW, stream)
                event = kv.record_event(stream)
                assert not event.is_done
                async with anyio.create_task_group() as tasks:
                    for number in range(3):
                        tasks.start_soon(wait, event, number)
                    await looks(kv)
                    assert not ended
                    gpu.release(stream)
            await event
            assert event.is_done
            assert sorted(ended) == [0, 1, 2]


@on_every_loop
async def test_a_cancelled_wait_for_an_event_ends_at_once(gpu: Gpu, tmp_path: Path) -> None:
    stream = gpu.stream()
    with filled(tmp_path, LAYOUT) as files:
        async with backend_on("uring", files, gpu.device) as kv:
            with gpu.holding(stream):
                event = kv.record_event(stream)
                with anyio.move_on_after(0.01) as scope:
                    await event
                assert scope.cancelled_caught
                assert not event.is_done
            await event


@on_every_loop
async def test_close_ends_the_wait_for_an_event(gpu: Gpu, tmp_path: Path) -> None:
    """At once. The rest of the close may last: a GPU gives registered memory back only when all streams are through."""
    stream = gpu.stream()
    with filled(tmp_path, LAYOUT) as files:
        async with backend_on("uring", files, gpu.device) as kv:
            gpu.hold(stream)
            event = kv.record_event(stream)
            refused: list[ClosedError] = []

            async def wait() -> None:
                try:
                    await event
                except ClosedError as error:
                    refused.append(error)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait)
                await looks(kv, 3)
                tasks.start_soon(kv.aclose)
                await until(lambda: bool(refused), "the wait ends")
                gpu.release(stream)
            assert "closed" in str(refused[0])
        gpu.finish(stream)
    assert event.is_done
    await event
