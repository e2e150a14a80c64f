"""Cancellation at every stage of a transfer with device memory, and close with work under way.

The rule behind these: memory that hardware may still touch is kept, and a call that ends says that it is not.
"""

from __future__ import annotations

import logging
from pathlib import Path

import anyio
import numpy as np
import pytest
from gpu_cases import NEW, OLD, SENTINEL, apart, delayed, filled, is_all, owned
from gpu_support import (
    RUNGS,
    Gpu,
    backend_on,
    gpu,
    looks,
    on_asyncio,
    on_every_loop,
    oracle_read,
    until,
)

from aio_kv import (
    EngineBackend,
    Outcome,
    Scatter,
    Transfer,
)
from aio_kv.cuda import DeviceBuffer
from aio_kv.engine import Engine, native

__all__ = ["gpu"]  # a fixture


async def cancelled(transfer: Transfer, after: float = 0.02) -> bool:
    """Await, with a cancellation after a moment; whether it was the cancellation that ended the await."""
    with anyio.move_on_after(after) as scope:
        await transfer.outcome()
    return scope.cancelled_caught


async def nothing_touches(gpu: Gpu, kv: EngineBackend, buffer: DeviceBuffer) -> None:
    """What is written into a buffer now stays there."""
    gpu.upload(buffer, bytes([SENTINEL]) * buffer.nbytes)
    kv.record_event(gpu.stream())
    await anyio.sleep(0.05)
    if gpu.is_fake:
        gpu.needs_fake("").run_everything()
    assert is_all(gpu.download(buffer), SENTINEL)


# Cancellation


@on_every_loop
async def test_cancelled_while_held_behind_another_transfer(gpu: Gpu, tmp_path: Path) -> None:
    stream = gpu.stream()
    source, into = gpu.buffer(4096, OLD), gpu.buffer(4096, SENTINEL)
    with filled(tmp_path) as files:
        async with backend_on("uring", files, gpu.device) as kv:
            with gpu.holding(stream):
                write = kv.write_groups([0], source, stream=stream)
                read = kv.read_groups([0], into)
                with anyio.fail_after(5):
                    assert await cancelled(read)
                await nothing_touches(gpu, kv, into)
                assert not write.is_done
            await write
            report = await read.outcome()
            assert report.outcomes.tolist() == [Outcome.CANCELLED]
        assert is_all(gpu.download(into), SENTINEL)
        assert is_all(oracle_read(files, np.array([0])), OLD)


@pytest.mark.parametrize("rung", RUNGS)
@on_asyncio
async def test_cancelled_while_queued_in_the_engine(gpu: Gpu, tmp_path: Path, rung: str) -> None:
    into = gpu.buffer(32 * 4096, OLD)
    with filled(tmp_path) as files:
        async with backend_on(rung, files, gpu.device, queue_depth=2, faults=delayed(10_000)) as kv:
            transfer = kv.read_groups(apart(32), into, stream=gpu.stream())
            assert await cancelled(transfer)
            report = await transfer.outcome()
            ends = set(report.outcomes.tolist())
            assert ends == {Outcome.DONE, Outcome.CANCELLED}
            got = gpu.download(into).reshape(32, 4096)
            for row, outcome in zip(got, report.outcomes, strict=True):
                assert is_all(row, NEW if outcome == Outcome.DONE else OLD)
            await nothing_touches(gpu, kv, into)


@on_every_loop
async def test_cancelled_at_the_disk(gpu: Gpu, tmp_path: Path) -> None:
    into = gpu.buffer(8 * 4096, OLD)
    with filled(tmp_path) as files:
        async with backend_on("uring", files, gpu.device, faults=delayed(60_000)) as kv:
            transfer = kv.read_groups(apart(8), into, stream=gpu.stream())
            assert await cancelled(transfer)
            assert transfer.is_done
            assert kv.statistics().engine.slots_leased == 0
            await nothing_touches(gpu, kv, into)


@pytest.mark.parametrize("direction", ["read", "write"])
@on_every_loop
async def test_cancelled_behind_a_held_stream(gpu: Gpu, tmp_path: Path, direction: str) -> None:
    """Its copies are queued: the await outlasts the cancellation until they are done."""
    stream, memory = gpu.stream(), gpu.buffer(4 * 4096, OLD)
    with filled(tmp_path) as files:
        async with backend_on("uring", files, gpu.device) as kv:
            gpu.hold(stream)
            start = kv.read_groups if direction == "read" else kv.write_groups
            transfer = start(apart(4), memory, stream=stream)
            await transfer.enqueued()
            ended: list[bool] = []

            async def wait() -> None:
                ended.append(await cancelled(transfer))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait)
                await anyio.sleep(0.05)
                await looks(kv)
                assert not ended
                assert direction == "write" or is_all(gpu.download(memory), OLD)
                gpu.release(stream)
            assert ended == [True]
            await nothing_touches(gpu, kv, memory)
            wanted = NEW if direction == "read" else OLD
            assert is_all(oracle_read(files, apart(4)), wanted)


@on_asyncio
async def test_a_cancelled_enqueued_waits_for_the_memory_too(gpu: Gpu, tmp_path: Path) -> None:
    into = gpu.buffer(8 * 4096, OLD)
    with filled(tmp_path) as files:
        async with backend_on("uring", files, gpu.device, faults=delayed(60_000)) as kv:
            transfer = kv.read_groups(apart(8), into, stream=gpu.stream())
            with anyio.move_on_after(0.02) as scope:
                await transfer.enqueued()
            assert scope.cancelled_caught
            assert transfer.is_done
            await nothing_touches(gpu, kv, into)


@on_every_loop
async def test_after_the_drain_timeout_the_destination_is_kept(gpu: Gpu, tmp_path: Path) -> None:
    stream, buffer = gpu.stream(), gpu.buffer(4 * 4096, OLD)
    with filled(tmp_path) as files:
        async with backend_on("uring", files, gpu.device, drain_timeout=0.1) as kv:
            into, is_alive = owned(buffer)
            with gpu.holding(stream):
                transfer = kv.read_groups(apart(4), into, stream=stream)
                await transfer.enqueued()
                with anyio.fail_after(5):
                    assert await cancelled(transfer)
                assert not transfer.is_done
                del into, transfer
                assert is_alive()
            await until(lambda: kv.statistics().transfers.active == 0, "the copies end")
            assert not is_alive()
            assert is_all(gpu.download(buffer), NEW)


@on_asyncio
async def test_a_dropped_destination_lives_until_its_copies_are_done(gpu: Gpu, tmp_path: Path) -> None:
    stream, buffer = gpu.stream(), gpu.buffer(4 * 4096, OLD)
    with filled(tmp_path) as files:
        async with backend_on("uring", files, gpu.device) as kv:
            into, is_alive = owned(buffer)
            with gpu.holding(stream):
                kv.read_groups(apart(4), Scatter(into, np.arange(4) * 4096), stream=stream)
                del into
                await until(lambda: kv.statistics().engine.copy_groups > 0, "copies are queued")
                await looks(kv)
                assert is_alive()
            await until(lambda: kv.statistics().transfers.active == 0, "the copies end")
            assert not is_alive()


@pytest.mark.parametrize("rung", RUNGS)
@on_asyncio
async def test_close_with_a_held_stream_leaks_on_purpose(
    gpu: Gpu, tmp_path: Path, rung: str, caplog: pytest.LogCaptureFixture
) -> None:
    stream, buffer = gpu.stream(), gpu.buffer(4 * 4096, OLD)
    with filled(tmp_path) as files:
        into, is_alive = owned(buffer)
        # Opened before the stream is held: loading kernels waits for a GPU to have nothing else to do.
        async with backend_on(rung, files, gpu.device, drain_timeout=0.1) as kv:
            with gpu.holding(stream), caplog.at_level(logging.ERROR, "aio_kv"):
                transfer = kv.read_groups(apart(4), into, stream=stream)
                await transfer.enqueued()
                engine = kv._require_session().opened.engine
                assert isinstance(engine, Engine)
                del into, transfer
                with anyio.fail_after(5):
                    await kv.aclose()
                assert "are leaked, not freed" in caplog.text
                assert engine in native._leaked
                assert not engine.is_closed
                assert is_alive()
                if gpu.is_fake:
                    assert gpu.needs_fake("").live("registered") > 0
        # Once the copies are done the reactor ends by itself; giving back what was leaked is this test's own affair.
        await until(lambda: engine.is_stopped, "the reactor ends")
        native._leaked.remove(engine)
        assert engine.close(5.0)
        assert is_all(gpu.download(buffer), NEW)


@on_asyncio
async def test_close_waits_for_copies_that_can_end(gpu: Gpu, tmp_path: Path) -> None:
    into = gpu.buffer(8 * 4096, OLD)
    if gpu.is_fake:
        gpu.needs_fake("").set_policy(100, 100)
    with filled(tmp_path) as files:
        async with backend_on("uring", files, gpu.device) as kv:
            transfer = kv.read_groups(apart(8), into, stream=gpu.stream())
            await transfer.enqueued()
            await kv.aclose()
            assert transfer.is_done
        assert is_all(gpu.download(into), NEW)
        assert kv.statistics().engine.slots_leased == kv.statistics().engine.slots_leaked == 0
