"""The order in which transfers start and take effect. On the engine in memory, where every landing can be watched.

The conformance kit checks the effect on every backend; here it is checked that nothing else is held up, and that the
order holds however the device reorders what is in flight.
"""

from __future__ import annotations

import errno
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from backends import make_backend
from loops import every_loop, on_one_loop
from slow_devices import (
    PADDED,
    Recorder,
    filled,
    has_begun,
    memory_backend,
    payloads,
    slow_backend,
    unaligned,
)

from aio_kv import BusyError, GroupLayout, Outcome, Priority, StorageError, TransferError
from aio_kv.engine import Fault, FaultAction, Kind
from aio_kv.testing import MemoryBackend, SeededScheduler

IDS = np.arange(0, 64, 3)
SEEDS = range(12)


@every_loop
async def test_only_overlapping_transfers_are_held() -> None:
    async with memory_backend(PADDED) as backend:
        backend.pause()
        row = payloads(PADDED, 1, 1)
        write = backend.write_groups([5], row)
        others = {
            "read of another group": backend.read_groups([4], bytearray(105)),
            "write of another group": backend.write_groups([6], row),
            "read of many others": backend.read_groups([0, 1, 2, 3, 6 + 1, 60], bytearray(6 * 105)),
        }
        assert not any(transfer.is_held for transfer in others.values())
        held = {
            "read of the same": backend.read_groups([5], bytearray(105)),
            "read of many with the same": backend.read_groups([63, 5, 0], bytearray(3 * 105)),
            "read of the block": backend.read_block(0, 1, bytearray(4 * 105)),
            "write of the same": backend.write_groups([5], row),
        }
        assert [name for name, transfer in held.items() if not transfer.is_held] == []
        assert backend.statistics().transfers.held == len(held)
        backend.resume()
        for transfer in (write, *others.values(), *held.values()):
            assert (await transfer).is_complete


@every_loop
async def test_the_order_is_that_of_the_numbers_at_the_call() -> None:
    """The caller's array is its own again when the call returns; what it holds then is no business of the order's."""
    async with memory_backend(PADDED) as backend:
        backend.pause()
        ids = np.array([5, 9])
        write = backend.write_groups(ids, payloads(PADDED, 2, 1))
        ids[:] = [20, 30]
        assert backend.read_groups([5, 6], bytearray(2 * 105)).is_held
        assert not backend.read_groups([20], bytearray(105)).is_held
        assert write.group_ids.tolist() == [5, 9]
        backend.resume()
        await write


@every_loop
async def test_reads_of_the_same_group_do_not_wait_for_each_other() -> None:
    async with memory_backend(PADDED) as backend:
        backend.pause()
        reads = [backend.read_groups([5, 6], bytearray(2 * 105)) for _ in range(4)]
        assert not any(read.is_held for read in reads)
        write = backend.write_groups([6], bytearray(105))
        assert write.is_held
        backend.resume()
        for transfer in (*reads, write):
            await transfer


@every_loop
async def test_a_chain_takes_effect_link_by_link() -> None:
    """Each write is held behind the one before and lands after it, although nobody awaits."""
    recorder = Recorder(PADDED)
    async with memory_backend(PADDED, recorder) as backend:
        rows = payloads(PADDED, 20, 2)
        for turn in range(20):
            backend.write_groups([turn % 2, 7], np.stack([rows[turn], rows[turn]]))
        await backend.flush()
        found = np.empty((3, 105), np.uint8)
        await backend.read_groups([0, 1, 7], found)
        assert (found == rows[[18, 19, 19]]).all()
        landed = [group for kind, group in recorder.landed if kind is Kind.WRITE and group != 7]
        assert landed == [0, 1] * 10


@on_one_loop
@pytest.mark.parametrize("seed", SEEDS)
async def test_order_holds_whatever_the_device_does(seed: int) -> None:
    """Un-awaited reads and writes on few groups, with a device that lands them at random, against a plain array."""
    layout = GroupLayout(1, 2, 2, 3, 7, 5)
    random = np.random.default_rng(seed)
    async with MemoryBackend(layout, scheduler=SeededScheduler(seed)) as backend:
        expected = np.zeros((layout.num_groups, 105), np.uint8)
        reads: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], Any]] = []
        for turn in range(60):
            ids = random.permutation(layout.num_groups)[: random.integers(1, 5)]
            priority = Priority(int(random.integers(3)))
            if random.random() < 0.5:
                expected[ids] = payloads(layout, len(ids), 100 * seed + turn)
                backend.write_groups(ids, expected[ids].copy(), priority=priority)
            else:
                found = np.full((len(ids), 105), 0xA5, np.uint8)
                transfer = backend.read_groups(ids, found, priority=priority)
                reads.append((found, expected[ids].copy(), transfer))
            if random.random() < 0.3:
                await anyio.lowlevel.checkpoint()
        for found, wanted, transfer in reads:
            await transfer
            assert (found == wanted).all()
        assert backend.statistics().transfers.held > 10


@on_one_loop
@pytest.mark.parametrize("seed", SEEDS)
async def test_order_holds_through_failures_and_cancellations(seed: int) -> None:
    """A failed or dropped write releases what waited behind it; bytes of reads that are DONE are some version's."""
    layout = GroupLayout(1, 2, 2, 3, 7, 5)
    random = np.random.default_rng(seed)
    async with MemoryBackend(layout, scheduler=SeededScheduler(seed, failing=0.2)) as backend:
        versions: list[set[bytes]] = [{bytes(105)} for _ in range(layout.num_groups)]
        transfers = []
        for turn in range(60):
            ids = random.permutation(layout.num_groups)[: random.integers(1, 5)]
            rows = payloads(layout, len(ids), 100 * seed + turn)
            found = np.full((len(ids), 105), 0xA5, np.uint8)
            if random.random() < 0.5:
                transfers.append((backend.write_groups(ids, rows), ids, None))
                for group, row in zip(ids.tolist(), rows, strict=True):
                    versions[group].add(row.tobytes())
            else:
                transfers.append((backend.read_groups(ids, found), ids, found))
            if random.random() < 0.2:
                transfers[int(random.integers(len(transfers)))][0].cancel()
            await anyio.lowlevel.checkpoint()
        for transfer, ids, place in transfers:
            report = await transfer.outcome()
            if place is not None:
                for i in np.flatnonzero(report.outcomes == Outcome.DONE).tolist():
                    assert place[i].tobytes() in versions[ids[i]]
        assert backend.statistics().transfers.active == 0


@every_loop
async def test_transfers_start_in_call_order() -> None:
    """One I/O at a time: they land in the order in which they began, which is that of the calls."""
    recorder = Recorder(PADDED)
    async with memory_backend(PADDED, recorder, queue_depth=1) as backend:
        backend.pause()
        order = np.random.default_rng(3).permutation(IDS)
        transfers = [backend.read_groups([group], bytearray(105)) for group in order.tolist()]
        backend.resume()
        for transfer in reversed(transfers):
            await transfer
        assert [group for _, group in recorder.landed] == order.tolist()


@every_loop
@pytest.mark.parametrize("kind", ["uring", "threads"])
async def test_native_transfers_start_in_call_order(kind: str, tmp_path: Path) -> None:
    """The same on the native engine: with one I/O at a time transfers end in the order in which they began."""
    ended: list[int] = []
    async with slow_backend(kind, tmp_path, PADDED, only=Kind.READ, delay_us=200, queue_depth=1) as backend:
        transfers = []
        for turn, group in enumerate(np.random.default_rng(4).permutation(IDS).tolist()):
            transfer = backend.read_groups([group], bytearray(105))
            transfer.add_waiter(partial(ended.append, turn))
            transfers.append(transfer)
        for transfer in transfers:
            await transfer
    assert ended == list(range(len(IDS)))


@every_loop
@pytest.mark.parametrize("kind", ["uring", "threads"])
async def test_demand_passes_background(kind: str, tmp_path: Path) -> None:
    """What somebody waits for goes before what was queued for later, in the native engine's lanes."""
    ended: list[str] = []
    async with slow_backend(kind, tmp_path, PADDED, only=Kind.READ, delay_us=1000, queue_depth=1) as backend:
        transfers = []
        for priority in (Priority.BACKGROUND, Priority.PREFETCH, Priority.DEMAND):
            transfer = backend.read_groups(IDS, unaligned(PADDED, len(IDS)), priority=priority)
            transfer.add_waiter(partial(ended.append, priority.name))
            transfers.append(transfer)
        for transfer in transfers:
            await transfer
    assert ended == ["DEMAND", "PREFETCH", "BACKGROUND"]


@every_loop
async def test_demand_passes_background_in_the_feed() -> None:
    """The same for what the engine has no room for yet: DEMAND is fed first."""
    recorder = Recorder(PADDED)
    async with memory_backend(PADDED, recorder, queue_depth=1, max_requests=1) as backend:
        backend.pause()
        background = [
            backend.read_groups([g], bytearray(105), priority=Priority.BACKGROUND) for g in (1, 3, 5)
        ]
        demand = [backend.read_groups([g], bytearray(105)) for g in (11, 13)]
        backend.resume()
        for transfer in (*background, *demand):
            await transfer
        assert [group for _, group in recorder.landed] == [1, 11, 13, 3, 5]


@every_loop
@pytest.mark.parametrize("max_requests", [1, 2, 7, 21, 22])
async def test_a_batch_larger_than_the_engine_is_fed_in_parts(max_requests: int) -> None:
    """In order, and what is called behind it starts behind it."""
    recorder = Recorder(PADDED)
    async with memory_backend(PADDED, recorder, queue_depth=1, max_requests=max_requests) as backend:
        rows = await filled(backend)
        recorder.landed.clear()
        first, second = unaligned(PADDED, len(IDS)), unaligned(PADDED, 2)
        transfer = backend.read_groups(IDS, first)
        behind = backend.read_groups([62, 40], second)
        await behind
        assert transfer.is_done
        await transfer
        assert [group for _, group in recorder.landed] == [*IDS.tolist(), 40, 62]
        assert (first == rows[IDS]).all()
        assert (second == rows[[62, 40]]).all()
        assert backend.statistics().engine.in_flight_max == 1


@every_loop
@pytest.mark.parametrize("kind", ["uring-tight", "threads-tight", "python-tight"])
async def test_feeding_in_parts_with_a_real_device(kind: str, tmp_path: Path) -> None:
    layout = GroupLayout(2, 40, 2, 3, 7, 5)
    async with make_backend(kind, tmp_path)(layout) as backend:
        rows = await filled(backend)
        ids = np.random.default_rng(5).permutation(layout.num_groups)
        targets = [unaligned(layout, len(ids)) for _ in range(3)]
        for transfer in [backend.read_groups(ids, target) for target in targets]:
            await transfer
        assert all((target == rows[ids]).all() for target in targets)


@every_loop
async def test_cancelling_a_transfer_that_is_fed_in_part() -> None:
    """What the engine has is waited for, what it has not is dropped, and the next in line goes on."""
    async with memory_backend(PADDED, queue_depth=2, max_requests=5) as backend:
        rows = await filled(backend)
        backend.pause()
        target, other = unaligned(PADDED, len(IDS)), unaligned(PADDED, len(IDS))
        transfer, behind = backend.read_groups(IDS, target), backend.read_groups(IDS, other)
        transfer.cancel()
        assert not transfer.is_done
        backend.resume()
        report = await transfer.outcome()
        assert report.outcomes.tolist() == [Outcome.DONE] * 2 + [Outcome.CANCELLED] * (len(IDS) - 2)
        assert (report.loaded_prefix, report.nbytes) == (2, 2 * 105)
        await behind
        assert (other == rows[IDS]).all()


@every_loop
async def test_a_small_transfer_does_not_pass_a_large_one() -> None:
    """There is room in the engine for the one behind, but not for the one in front: the line is kept."""
    recorder = Recorder(PADDED)
    async with memory_backend(PADDED, recorder, queue_depth=1, max_requests=5) as backend:
        backend.pause()
        transfers = [
            backend.read_groups(ids, bytearray(len(ids) * 105)) for ids in ([1, 3, 5], [11, 13, 15, 17], [31])
        ]
        backend.resume()
        for transfer in transfers:
            await transfer
        assert [group for _, group in recorder.landed] == [1, 3, 5, 11, 13, 15, 17, 31]


@every_loop
async def test_a_sync_is_not_given_to_the_device_before_the_writes() -> None:
    """A device that answers the last order first must have no chance to sync what has not been written."""

    class LastFirst(Recorder):
        def choose(self, in_flight: int) -> int:
            return in_flight - 1

    recorder = LastFirst(PADDED)
    async with memory_backend(PADDED, recorder) as backend:
        backend.pause()
        writes = [backend.write_groups([group], bytearray(105)) for group in (1, 3)]
        async with anyio.create_task_group() as group:
            group.start_soon(backend.flush)
            for _ in range(5):
                await anyio.lowlevel.checkpoint()
            backend.resume()
        assert [kind for kind, _ in recorder.landed] == [Kind.WRITE, Kind.WRITE, Kind.SYNC]
        for write in writes:
            await write


@every_loop
async def test_flush_waits_for_writes_and_for_nothing_else() -> None:
    async with memory_backend(PADDED) as backend:
        await filled(backend)
        backend.pause()
        read = backend.read_groups([1], bytearray(105))
        write = backend.write_groups([2], bytearray(105))
        order: list[str] = []

        async def flush(name: str) -> None:
            await backend.flush()
            order.append(name)
            assert write.is_done

        async with anyio.create_task_group() as group:
            group.start_soon(flush, "first")
            group.start_soon(flush, "second")
            for _ in range(5):
                await anyio.lowlevel.checkpoint()
            later = backend.write_groups([2, 3], bytearray(2 * 105))
            assert later.is_held
            assert order == []
            backend.resume()
        assert sorted(order) == ["first", "second"]
        await read
        await later


@every_loop
async def test_two_flushes_at_once_both_wait_for_the_sync(tmp_path: Path) -> None:
    """The second must not return because the first has taken its files: the sync has to end before."""
    fault = Fault(FaultAction.DELAY, 20_000, kind=Kind.SYNC)
    async with slow_backend("uring", tmp_path, PADDED, only=Kind.SYNC, delay_us=fault.value) as backend:
        await backend.write_groups([1], bytearray(105))
        syncs: list[int] = []

        async def flush() -> None:
            await backend.flush()
            syncs.append(backend.statistics().engine.in_flight)

        async with anyio.create_task_group() as group:
            group.start_soon(flush)
            await has_begun(backend)
            started = anyio.current_time()
            group.start_soon(flush)
            await anyio.lowlevel.checkpoint()
        assert anyio.current_time() - started > 0.015
        assert len(syncs) == 2


@every_loop
async def test_flush_tells_of_writes_that_failed(tmp_path: Path) -> None:
    """Once: a write that nobody awaited is not lost in silence, and the next flush is about later writes."""

    class FailingOnce(Recorder):
        def fate(self, kind: Kind, layer: int, file_offset: int, nbytes: int) -> int:
            super().fate(kind, layer, file_offset, nbytes)
            return -errno.EIO if self.landed == [(Kind.WRITE, 7)] else 0

    async with memory_backend(PADDED, FailingOnce(PADDED)) as backend:
        transfer = backend.write_groups([7], bytearray(105))
        with pytest.raises(StorageError, match="earlier write"):
            await backend.flush()
        await backend.flush()
        with pytest.raises(TransferError):
            await transfer
        await backend.write_groups([7], bytearray(105))
        await backend.flush()


@every_loop
async def test_a_full_backend_refuses_and_holds_nothing() -> None:
    """A refused call leaves no trace: no group stays locked behind it."""
    async with memory_backend(PADDED, max_transfers=2) as backend:
        backend.pause()
        transfers = [backend.write_groups([1], bytearray(105)), backend.write_groups([2], bytearray(105))]
        with pytest.raises(BusyError, match="wait_ready"):
            backend.write_groups([1], bytearray(105))
        backend.resume()
        for transfer in transfers:
            await transfer
        assert not backend.read_groups([1], bytearray(105)).is_held
