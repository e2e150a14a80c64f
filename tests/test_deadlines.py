"""Deadlines: what has not begun by then fails, wherever it waits; what has begun is waited for."""

from __future__ import annotations

from pathlib import Path

import anyio
import numpy as np
import pytest
from loops import every_loop
from slow_devices import PADDED, SLOW_KINDS, filled, has_begun, memory_backend, slow_backend, unaligned

from aio_kv import DeadlineError, Outcome, StorageError, TransferError
from aio_kv.engine import Kind

IDS = np.arange(0, 64, 3)
SOON = 0.01


@every_loop
@pytest.mark.parametrize("kind", SLOW_KINDS)
async def test_in_the_past(kind: str, tmp_path: Path) -> None:
    async with slow_backend(kind, tmp_path, PADDED) as backend:
        target = unaligned(PADDED, len(IDS))
        transfer = backend.read_groups(IDS, target, deadline=anyio.current_time() - 1)
        with pytest.raises(TransferError, match="ETIME") as caught:
            await transfer
        error = caught.value
        assert isinstance(error.__cause__, DeadlineError)
        assert isinstance(error.__cause__, TimeoutError)
        assert isinstance(error, StorageError)
        assert "not begun before its deadline" in str(error.__cause__)
        assert set(error.report.outcomes) == {Outcome.LATE}
        assert len(error.report.errors) == 8
        assert (target == 0xA5).all()
        assert backend.statistics().engine.ops <= 1  # the one that proved the engine at open


@every_loop
@pytest.mark.parametrize("kind", ["uring", "threads"])
async def test_while_queued_in_the_engine(kind: str, tmp_path: Path) -> None:
    """The one I/O that the device has is waited for and is good; the others of the transfer are late."""
    async with slow_backend(
        kind, tmp_path, PADDED, only=Kind.READ, queue_depth=1, delay_us=400_000
    ) as backend:
        rows = await filled(backend)
        target = unaligned(PADDED, len(IDS))
        deadline = anyio.current_time() + 10 * SOON  # the first has begun by then, also on a busy machine
        transfer = backend.read_groups(IDS, target, deadline=deadline)
        report = await transfer.outcome()
        assert anyio.current_time() > deadline
        assert report.outcomes.tolist() == [Outcome.DONE] + [Outcome.LATE] * (len(IDS) - 1)
        assert report.loaded_prefix == 1
        assert (target[0] == rows[0]).all()
        assert (target[1:] == 0xA5).all()


@every_loop
async def test_while_queued_in_the_engine_in_memory() -> None:
    async with memory_backend(PADDED, queue_depth=1) as backend:
        await filled(backend)
        backend.pause()
        deadline = anyio.current_time() + SOON
        transfer = backend.read_groups(IDS, unaligned(PADDED, len(IDS)), deadline=deadline)
        await anyio.sleep_until(deadline + 0.001)
        backend.resume()
        report = await transfer.outcome()
        assert report.outcomes.tolist() == [Outcome.DONE] + [Outcome.LATE] * (len(IDS) - 1)


@every_loop
@pytest.mark.parametrize("kind", ["uring", "memory"])
async def test_while_held_behind_another(kind: str, tmp_path: Path) -> None:
    """An awaited transfer ends at its deadline and not when the other one does, and begins nothing later."""
    async with slow_backend(kind, tmp_path, PADDED, only=Kind.WRITE, delay_us=60_000) as backend:
        if kind == "memory":
            backend.pause()  # type: ignore[attr-defined]
        write = backend.write_groups(IDS, unaligned(PADDED, len(IDS)))
        target = unaligned(PADDED, len(IDS))
        transfer = backend.read_groups(IDS, target, deadline=anyio.current_time() + SOON)
        assert transfer.is_held
        with anyio.fail_after(5):
            report = await transfer.outcome()
        assert not write.is_done
        assert set(report.outcomes) == {Outcome.LATE}
        if kind == "memory":
            backend.resume()  # type: ignore[attr-defined]
        await write
        assert (target == 0xA5).all()
        assert backend.statistics().transfers.active == 0


@every_loop
async def test_while_held_and_not_awaited() -> None:
    """Nobody watches the clock then: it is looked at when its turn comes."""
    async with memory_backend(PADDED) as backend:
        backend.pause()
        write = backend.write_groups([1], bytearray(105))
        deadline = anyio.current_time() + SOON
        transfer = backend.read_groups([1], bytearray(105), deadline=deadline)
        await anyio.sleep_until(deadline + 0.001)
        backend.resume()
        await write
        assert set((await transfer.outcome()).outcomes) == {Outcome.LATE}


@every_loop
async def test_while_the_engine_has_no_room() -> None:
    """Fed in part: what the engine has is its own affair, what it has not is late."""
    async with memory_backend(PADDED, queue_depth=2, max_requests=2) as backend:
        await filled(backend)
        backend.pause()
        deadline = anyio.current_time() + SOON
        transfer = backend.read_groups(IDS, unaligned(PADDED, len(IDS)), deadline=deadline)
        assert backend.statistics().engine.in_flight == 2

        async def resume() -> None:
            await anyio.sleep_until(deadline + 0.005)
            backend.resume()

        async with anyio.create_task_group() as group:
            group.start_soon(resume)
            report = await transfer.outcome()
        assert report.outcomes.tolist() == [Outcome.DONE] * 2 + [Outcome.LATE] * (len(IDS) - 2)


@every_loop
@pytest.mark.parametrize("kind", ["uring", "memory"])
async def test_what_has_begun_is_not_late(kind: str, tmp_path: Path) -> None:
    """A deadline is about beginning: the device cannot be told to stop, and its bytes are good."""
    async with slow_backend(kind, tmp_path, PADDED, only=Kind.READ, delay_us=30_000) as backend:
        rows = await filled(backend)
        target = unaligned(PADDED, len(IDS))
        deadline = anyio.current_time() + SOON
        transfer = backend.read_groups(IDS, target, deadline=deadline)
        await has_begun(backend, len(IDS))
        report = await transfer
        assert kind == "memory" or anyio.current_time() > deadline
        assert report.is_complete
        assert (target == rows[IDS]).all()


@every_loop
async def test_a_late_write_changes_nothing(tmp_path: Path) -> None:
    async with slow_backend("uring", tmp_path, PADDED, only=Kind.READ) as backend:
        rows = await filled(backend)
        transfer = backend.write_groups(IDS, unaligned(PADDED, len(IDS)), deadline=anyio.current_time() - 1)
        with pytest.raises(TransferError):
            await transfer
        found = np.empty_like(rows)
        await backend.read_groups(np.arange(PADDED.num_groups), found)
        assert (found == rows).all()
        with pytest.raises(StorageError, match="earlier write"):
            await backend.flush()


@every_loop
@pytest.mark.parametrize("deadline", [float("inf"), 1e300, 2**200])
async def test_never(deadline: float, tmp_path: Path) -> None:
    async with slow_backend("uring", tmp_path, PADDED, delay_us=1) as backend:
        assert (await backend.read_groups(IDS, unaligned(PADDED, len(IDS)), deadline=deadline)).is_complete


@every_loop
@pytest.mark.parametrize("deadline", [float("-inf"), -1e300, -(2**200), 0])
async def test_long_ago(deadline: float, tmp_path: Path) -> None:
    """`anyio.current_effective_deadline()` is minus infinity in a cancelled scope."""
    async with slow_backend("uring", tmp_path, PADDED, delay_us=1) as backend:
        transfer = backend.read_groups(IDS, unaligned(PADDED, len(IDS)), deadline=deadline)
        assert set((await transfer.outcome()).outcomes) == {Outcome.LATE}
