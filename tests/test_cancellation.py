"""Cancellation, by every means that asyncio and trio have: the caller gets its memory back, and nothing touches it.

A disk read that the device has cannot be cancelled, and will write. So a cancelled await may raise only when that has
happened. Each test fills the destination the moment the cancellation arrives, waits until the device has really done,
and looks whether a byte has changed.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
import trio
from loops import LOOP_FACTORIES, every_loop, on_asyncio, on_trio
from slow_devices import PADDED, SLOW_KINDS, WHOLE, filled, has_begun, payloads, slow_backend, unaligned

from aio_kv import LandingRegion, Outcome, TransferError
from aio_kv.backends.engine_backend import EngineBackend
from aio_kv.engine import Kind
from aio_kv.transfer import Transfer

IDS = np.arange(0, 64, 3)  # no two of them touch, so each is an I/O of its own
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
slow_kinds = pytest.mark.parametrize("kind", SLOW_KINDS)


def called(backend: EngineBackend) -> tuple[Transfer, Bytes]:
    """A read of IDS, and its destination."""
    target = unaligned(backend.layout, len(IDS))
    return backend.read_groups(IDS, target), target


async def started(backend: EngineBackend) -> tuple[Transfer, Bytes]:
    """The same, every I/O of it being at the device."""
    transfer, target = called(backend)
    await has_begun(backend, len(IDS))
    return transfer, target


async def require_untouched(transfer: Transfer, target: Bytes) -> None:
    """The caller uses its memory again at once; what the device still does must not show."""
    is_done = transfer.is_done
    target[:] = 0x77
    await (
        transfer.outcome()
    )  # returns when nothing of the transfer is in flight, whatever the cancellation did
    await anyio.lowlevel.checkpoint()
    assert (target == 0x77).all()
    assert is_done


@on_asyncio
@slow_kinds
async def test_native_cancels_in_a_row(kind: str, tmp_path: Path) -> None:
    async with slow_backend(kind, tmp_path, PADDED, only=Kind.READ) as backend:
        await filled(backend)
        transfer, target = await started(backend)

        async def wait() -> None:
            await transfer

        task = asyncio.ensure_future(wait())
        await asyncio.sleep(0)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
        assert not task.done()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()
        await require_untouched(transfer, target)


@on_asyncio
@slow_kinds
async def test_asyncio_timeout(kind: str, tmp_path: Path) -> None:
    async with slow_backend(kind, tmp_path, PADDED, only=Kind.READ) as backend:
        await filled(backend)
        transfer, target = await started(backend)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await transfer
        await require_untouched(transfer, target)
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0


@on_asyncio
@pytest.mark.parametrize("kind", ["uring", "threads"])  # whose delay is in time, as this one is
async def test_asyncio_wait_for(kind: str, tmp_path: Path) -> None:
    async with slow_backend(kind, tmp_path, PADDED, only=Kind.READ) as backend:
        await filled(backend)
        transfer, target = await started(backend)

        async def wait() -> None:
            await transfer

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(wait(), 0.001)
        await require_untouched(transfer, target)


@on_asyncio
@slow_kinds
async def test_cancel_inside_a_scope_that_is_cancelled_too(kind: str, tmp_path: Path) -> None:
    """anyio delivers its cancellation again in every turn of the loop; a native one comes on top."""
    async with slow_backend(kind, tmp_path, PADDED, only=Kind.READ) as backend:
        await filled(backend)
        transfer, target = await started(backend)
        scope = anyio.CancelScope()

        async def wait() -> None:
            with scope:
                await transfer

        task = asyncio.ensure_future(wait())
        await asyncio.sleep(0)
        scope.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        with pytest.raises(asyncio.CancelledError):
            await task
        await require_untouched(transfer, target)


@every_loop
@slow_kinds
async def test_anyio_scope(kind: str, tmp_path: Path) -> None:
    async with slow_backend(kind, tmp_path, PADDED, only=Kind.READ) as backend:
        await filled(backend)
        transfer, target = await started(backend)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await transfer
        assert scope.cancelled_caught
        await require_untouched(transfer, target)


@every_loop
@pytest.mark.parametrize("kind", ["uring", "threads"])
async def test_anyio_deadline_that_passes_while_it_waits(kind: str, tmp_path: Path) -> None:
    async with slow_backend(kind, tmp_path, PADDED, only=Kind.READ) as backend:
        await filled(backend)
        transfer, target = await started(backend)
        with anyio.move_on_after(0.001) as scope:
            await transfer.enqueued()
        assert scope.cancelled_caught
        await require_untouched(transfer, target)


@on_trio
@slow_kinds
async def test_trio_nursery(kind: str, tmp_path: Path) -> None:
    async with slow_backend(kind, tmp_path, PADDED, only=Kind.READ) as backend:
        await filled(backend)
        transfer, target = await started(backend)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(transfer.outcome)
            await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        await require_untouched(transfer, target)


@every_loop
@slow_kinds
async def test_aligned_destination(kind: str, tmp_path: Path) -> None:
    """Where the device writes to the caller's memory by itself: the await must not end before it has."""
    async with slow_backend(kind, tmp_path, WHOLE, only=Kind.READ) as backend:
        await filled(backend)
        memory = np.zeros(WHOLE.num_groups * 4096 + 4096, dtype=np.uint8)
        start = -memory.ctypes.data % 4096
        target = memory[start : start + len(IDS) * 4096].reshape(len(IDS), 4096)
        transfer = backend.read_groups(IDS, target)
        await has_begun(backend, len(IDS))
        with anyio.CancelScope() as scope:
            scope.cancel()
            await transfer
        assert scope.cancelled_caught
        await require_untouched(transfer, target)


@slow_kinds
@pytest.mark.parametrize("loop", LOOP_FACTORIES)
def test_shutdown_of_asyncio_run(kind: str, loop: str, tmp_path: Path) -> None:
    """`asyncio.run` cancels the tasks that are left when the main one returns; they drain and close."""
    targets: list[Bytes] = []
    ended: list[str] = []

    async def serve(is_in_flight: asyncio.Event) -> None:
        async with slow_backend(kind, tmp_path, PADDED, only=Kind.READ) as backend:
            await filled(backend)
            transfer, target = await started(backend)
            targets.append(target)
            is_in_flight.set()
            try:
                await transfer
            finally:
                ended.append("drained" if transfer.is_done else "early")
                target[:] = 0x77
        ended.append("closed")

    async def main() -> None:
        is_in_flight = asyncio.Event()
        task = asyncio.ensure_future(serve(is_in_flight))
        await is_in_flight.wait()
        await asyncio.sleep(0)
        assert not task.done()

    with asyncio.Runner(loop_factory=LOOP_FACTORIES[loop]) as runner:
        runner.run(main())
    assert ended == ["drained"]
    assert (targets[0] == 0x77).all()


@every_loop
@slow_kinds
async def test_second_awaiter_is_not_affected(kind: str, tmp_path: Path) -> None:
    async with slow_backend(kind, tmp_path, PADDED, only=Kind.READ) as backend:
        rows = await filled(backend)
        transfer, target = await started(backend)
        scope = anyio.CancelScope()

        async def give_up() -> None:
            with scope:
                await transfer

        async with anyio.create_task_group() as group:
            group.start_soon(give_up)
            await anyio.lowlevel.checkpoint()
            scope.cancel()
            report = await transfer
        assert report.is_complete
        assert (target == rows[IDS]).all()
        assert backend.statistics().transfers.cancelled == 0


@every_loop
async def test_what_has_not_begun_is_dropped(tmp_path: Path) -> None:
    """With one I/O at the device at a time, a transfer behind another one has begun nothing when it is cancelled."""
    async with slow_backend("uring", tmp_path, PADDED, only=Kind.READ, queue_depth=1) as backend:
        await filled(backend)
        transfer, target = called(backend)
        await has_begun(backend)
        behind, untouched = called(backend)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await behind
        report = await behind.outcome()
        assert set(report.outcomes) == {Outcome.CANCELLED}
        assert (untouched == 0xA5).all()
        assert backend.statistics().engine.dropped_ops == len(IDS)
        transfer.cancel()
        report = await transfer.outcome()
        assert (report.outcomes == Outcome.DONE).sum() < len(IDS)
        assert (target[report.outcomes == Outcome.DONE] != 0xA5).any(axis=1).all()


@every_loop
@slow_kinds
async def test_cancelled_write_gives_its_source_back(kind: str, tmp_path: Path) -> None:
    """A write is staged when it begins; what has not begun is dropped. Either way the source is free afterwards."""
    async with slow_backend(kind, tmp_path, PADDED, only=Kind.WRITE, queue_depth=2) as backend:
        old = await filled(backend)
        new = payloads(PADDED, len(IDS), 5)
        source = new.copy()
        transfer = backend.write_groups(IDS, source)
        await has_begun(backend, 2)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await transfer
        source[:] = 0x77
        report = await transfer.outcome()
        found = np.empty_like(new)
        await backend.read_groups(IDS, found)
        is_done = report.outcomes == Outcome.DONE
        assert (found[is_done] == new[is_done]).all()
        assert (found[~is_done] == old[IDS][~is_done]).all()


@every_loop
@slow_kinds
async def test_cancel_while_held_behind_another(kind: str, tmp_path: Path) -> None:
    """A held transfer ends at once when it is cancelled, and what waited behind both still waits for the first."""
    async with slow_backend(kind, tmp_path, PADDED) as backend:
        new = payloads(PADDED, len(IDS), 6)
        first = backend.write_groups(IDS, new)
        held, target = called(backend)
        last = payloads(PADDED, 2, 7)
        behind = backend.write_groups(IDS[:2], last)
        held.cancel()
        assert held.is_done
        assert not first.is_done
        assert not behind.is_done
        report = await held.outcome()
        assert set(report.outcomes) == {Outcome.CANCELLED}
        await behind
        assert first.is_done
        assert (target == 0xA5).all()
        found = np.empty_like(new)
        await backend.read_groups(IDS, found)
        assert (found[2:] == new[2:]).all()
        assert (found[:2] == last).all()


@every_loop
@slow_kinds
async def test_an_ordinary_cancellation_is_no_failure_that_nobody_saw(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests are abandoned all the time in a server: the log is for what went wrong without anybody looking."""
    async with slow_backend(kind, tmp_path, PADDED, only=Kind.READ, queue_depth=1) as backend:
        await filled(backend)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await called(backend)[0]
        transfer, _ = called(backend)
        transfer.cancel()
        with pytest.raises(TransferError):
            await transfer
        del transfer
        gc.collect()
        assert backend.statistics().transfers.unobserved_failures == 0
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@every_loop
@pytest.mark.parametrize("kind", ["uring", "memory"])
@pytest.mark.parametrize("call", ["flush", "register", "aclose"])
async def test_other_waits_finish_what_they_began(call: str, kind: str, tmp_path: Path) -> None:
    """A cancelled flush, registration or close leaves nothing half done: the backend closes cleanly afterwards."""
    async with slow_backend(kind, tmp_path, WHOLE) as backend:
        rows = payloads(WHOLE, WHOLE.num_groups, 8)
        transfer = backend.write_groups(np.arange(WHOLE.num_groups), rows)
        memory = np.zeros(3 * 4096, dtype=np.uint8)
        region = memory[-memory.ctypes.data % 4096 :][:8192]
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "flush": backend.flush,
            "register": lambda: backend.register_landing_region(region),
            "aclose": backend.aclose,
        }
        made: list[object] = []
        with anyio.CancelScope() as scope:
            scope.cancel()
            made.append(await calls[call]())
        if call == "aclose":
            assert transfer.is_done
            return
        for one in made:  # what is shielded may well succeed; the cancellation then waits for the next await
            if isinstance(one, LandingRegion):
                await one.aclose()
        assert backend.statistics().landing_regions == 0
        await transfer
        await backend.flush()
        async with await backend.register_landing_region(region):
            assert backend.statistics().landing_regions == 1
