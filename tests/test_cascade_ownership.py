"""Who owns what in a cascade, and what happens when things go wrong: the answers of `docs/explanation/cascade.md`."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from backends import KINDS, SMALL, make_backend
from loops import every_loop, on_one_loop

from aio_kv import (
    BusyError,
    CascadeBackend,
    ClosedError,
    DeadlineError,
    EngineBackend,
    GroupLayout,
    LayerFiles,
    LayoutError,
    NotDurableError,
    Outcome,
    PosixBackend,
    Priority,
    StorageError,
    TransferError,
    open_backend,
)
from aio_kv.cascade import conductor
from aio_kv.testing import CallFault, FaultyBackend, MemoryBackend, MemoryFiles

LAYOUT = GroupLayout(1, 8, 2, 1, 512, 1, alignment=512)  # 32 groups of 512 bytes, 4 to a block
PAYLOAD = LAYOUT.payload_nbytes


def row(value: int, count: int = 1) -> bytes:
    return bytes([value]) * (PAYLOAD * count)


@asynccontextmanager
async def cascade_on(
    backing: Any, slots: int, slot: str = "group", **options: Any
) -> AsyncIterator[CascadeBackend]:
    """An open cascade; it flushes nothing before it must, unless `options` say so."""
    options = {"dirty_limit": 1, "drain_timeout": 5.0, **options}
    per_slot = LAYOUT.groups_per_block if slot == "block" else 1
    async with CascadeBackend(
        backing, capacity_bytes=slots * per_slot * PAYLOAD, slot=slot, **options
    ) as cascade:
        yield cascade


def below(files: MemoryFiles, group: int) -> int:
    """The one byte that a group is full of, below."""
    start = group * LAYOUT.stride
    values = set(files.layer(0)[start : start + PAYLOAD])
    assert len(values) == 1, "a group is torn"
    return values.pop()


async def value_of(cascade: CascadeBackend, group: int) -> int:
    found = bytearray(PAYLOAD)
    await cascade.read_groups([group], found)
    assert len(set(found)) == 1
    return found[0]


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await anyio.lowlevel.checkpoint()


# By name, on every backing.


@on_one_loop
@pytest.mark.parametrize("kind", KINDS)
async def test_two_slots_four_groups_and_evictions_while_reads_are_in_flight(
    kind: str, tmp_path: Path
) -> None:
    async with make_backend(kind, tmp_path)(LAYOUT) as backing:
        await backing.write_groups(range(4), b"".join(row(90 + group) for group in range(4)))
        async with cascade_on(backing, slots=2) as kv:
            await kv.write_groups([0, 1], row(10) + row(11))
            first, mixed = np.zeros((2, PAYLOAD), np.uint8), np.zeros((4, PAYLOAD), np.uint8)
            reads = kv.read_groups([0, 1], first)
            writes = [kv.write_groups([group], row(10 + group)) for group in (2, 3)]
            await kv.read_groups([3, 0, 2, 1], mixed)
            for transfer in (reads, *writes):
                await transfer
            assert [set(one) for one in first.tolist()] == [{10}, {11}]
            assert [set(one) for one in mixed.tolist()] == [{13}, {10}, {12}, {11}]
            assert kv.statistics().evicted_slots >= 2


# A flush is under way.


@every_loop
async def test_a_victim_is_read_until_its_flush_has_landed() -> None:
    files = MemoryFiles(LAYOUT)
    async with cascade_on(backing := MemoryBackend(LAYOUT, files=files), slots=1) as kv:
        await kv.write_groups([0], row(1))
        await kv.flush()
        await kv.write_groups([0], row(2))
        backing.pause()
        second = kv.write_groups([1], row(3))  # needs the slot
        await turns()
        assert not second.is_done
        assert await value_of(kv, 0) == 2
        assert below(files, 0) == 1
        backing.resume()
        await second
        assert below(files, 0) == 2
        assert await value_of(kv, 0) == 2
        assert await value_of(kv, 1) == 3


@every_loop
async def test_a_write_to_a_group_whose_flush_is_in_flight_is_neither_lost_nor_overtaken() -> None:
    files = MemoryFiles(LAYOUT)
    async with cascade_on(backing := MemoryBackend(LAYOUT, files=files), slots=3, dirty_limit=0) as kv:
        backing.pause()
        for value in (1, 2, 3):  # each of them is being flushed when the next one comes
            await kv.write_groups([0], row(value))
            assert await value_of(kv, 0) == value
        assert kv.statistics().superseded_slots == 2
        backing.resume()
        await kv.flush()
        assert below(files, 0) == 3
        assert kv.statistics().resident_slots == 1


@every_loop
async def test_flush_ends_although_somebody_writes_all_the_time() -> None:
    async with cascade_on(MemoryBackend(LAYOUT), slots=4) as kv:
        is_over = False

        async def write() -> None:
            value = 0
            while not is_over:
                value = value % 255 + 1
                await kv.write_groups([0], row(value))
                await anyio.lowlevel.checkpoint()

        async with anyio.create_task_group() as group:
            group.start_soon(write)
            await turns(3)
            with anyio.fail_after(10):
                for _ in range(5):
                    await kv.flush()
            is_over = True


@every_loop
async def test_a_flush_that_fails_keeps_the_bytes_and_names_the_groups() -> None:
    files = MemoryFiles(LAYOUT)
    fault = CallFault("write_groups", errno=errno.EIO, groups={1}, times=2)
    backing = FaultyBackend(await MemoryBackend(LAYOUT, files=files), [fault])
    async with cascade_on(backing, slots=4) as kv:
        await kv.write_groups([0, 1], row(1) + row(2))
        for _ in range(2):
            with pytest.raises(NotDurableError, match=r"1 groups are not durable \(1\)") as caught:
                await kv.flush()
            assert (caught.value.group_ids, caught.value.errno) == ((1,), errno.EIO)
            assert await value_of(kv, 1) == 2
        await kv.flush()
        assert (below(files, 0), below(files, 1)) == (1, 2)
        assert kv.statistics().failed_flushes == 2


@every_loop
async def test_a_sync_that_fails_names_what_has_come_down_since_the_last() -> None:
    fault = CallFault("flush", errno=errno.EIO, first=1, times=1)
    async with cascade_on(FaultyBackend(await MemoryBackend(LAYOUT), [fault]), slots=8) as kv:
        await kv.write_groups([0, 1], row(1, 2))
        await kv.flush()
        await kv.write_groups([2, 3], row(2, 2))
        with pytest.raises(NotDurableError) as caught:
            await kv.flush()
        assert caught.value.group_ids == (2, 3)
        await kv.flush()


@every_loop
async def test_a_write_that_can_have_no_room_fails_and_nothing_is_dropped() -> None:
    fault = CallFault("write_groups", errno=errno.ENOSPC, times=3)
    async with cascade_on(FaultyBackend(await MemoryBackend(LAYOUT), [fault]), slots=1) as kv:
        await kv.write_groups([0], row(1))
        with anyio.fail_after(10):
            with pytest.raises(TransferError) as caught:
                await kv.write_groups([1], row(2))
        assert caught.value.errno == errno.ENOSPC
        assert await value_of(kv, 0) == 1
        with pytest.raises(NotDurableError):
            await kv.flush()
        while kv.backing.injected < 3:
            with pytest.raises(NotDurableError):
                await kv.flush()
        await kv.write_groups([1], row(2))
        assert (await value_of(kv, 0), await value_of(kv, 1)) == (1, 2)


# Tasks.


@every_loop
async def test_two_tasks_that_write_one_group_take_turns() -> None:
    """The later call stays, whoever is awaited first."""
    files = MemoryFiles(LAYOUT)
    async with cascade_on(MemoryBackend(LAYOUT, files=files), slots=1) as kv:
        order: list[int] = []

        async def write(task: int) -> None:
            for turn in range(5):
                value = 10 * task + turn + 1
                order.append(value)
                first = kv.write_groups([0], row(value))
                second = kv.write_groups([5 + task], row(value))
                await second
                await first

        async with anyio.create_task_group() as group:
            for task in range(3):
                group.start_soon(write, task)
        assert await value_of(kv, 0) == order[-1]
        await kv.flush()
        assert below(files, 0) == order[-1]


@every_loop
async def test_a_read_during_a_write_that_waits_is_held_behind_it() -> None:
    async with cascade_on(backing := MemoryBackend(LAYOUT), slots=1) as kv:
        await kv.write_groups([0], row(1))
        backing.pause()
        write = kv.write_groups([1], row(2))
        found, other = bytearray(PAYLOAD), bytearray(PAYLOAD)
        read = kv.read_groups([1], found)
        await kv.read_groups([0], other)  # shares nothing: it is not held
        assert other[0] == 1
        await turns()
        assert not read.is_done
        backing.resume()
        await read
        assert found[0] == 2
        await write
        assert kv.statistics().waits_for_order == 1


@every_loop
async def test_a_cancelled_write_that_waits_is_dropped_whole() -> None:
    async with cascade_on(backing := MemoryBackend(LAYOUT), slots=1) as kv:
        await kv.write_groups([0], row(1))
        backing.pause()
        source = bytearray(row(2))
        with anyio.CancelScope() as scope:
            write = kv.write_groups([1], source)
            scope.cancel()
            await write
        source[:] = row(7)
        backing.resume()
        report = await write.outcome()
        assert report.outcomes.tolist() == [Outcome.CANCELLED]
        assert await value_of(kv, 1) == 0
        assert await value_of(kv, 0) == 1


@every_loop
async def test_a_write_waits_for_room_until_its_deadline() -> None:
    async with cascade_on(backing := MemoryBackend(LAYOUT), slots=1) as kv:
        await kv.write_groups([0], row(1))
        backing.pause()
        write = kv.write_groups([1], row(2), deadline=anyio.current_time() + 0.02)
        with anyio.fail_after(10), pytest.raises(TransferError) as caught:
            await write
        assert isinstance(caught.value.__cause__, DeadlineError)
        backing.resume()
        assert await value_of(kv, 1) == 0
        assert kv.statistics().waits_for_room == 1


@every_loop
async def test_a_write_larger_than_the_cascade_comes_through_in_pieces() -> None:
    files = MemoryFiles(LAYOUT)
    async with cascade_on(MemoryBackend(LAYOUT, files=files), slots=2) as kv:
        rows = np.arange(1, 33, dtype=np.uint8).repeat(PAYLOAD)
        with anyio.fail_after(10):
            report = await kv.write_groups(range(32), rows)
        assert report.loaded_prefix == 32
        await kv.flush()
        assert [below(files, group) for group in range(32)] == list(range(1, 33))


@every_loop
async def test_writers_take_turns_in_line() -> None:
    """One that needs many slots is not passed by those that need one."""
    async with cascade_on(backing := MemoryBackend(LAYOUT), slots=2) as kv:
        await kv.write_groups([0, 1], row(1, 2))
        backing.pause()
        ended: list[str] = []

        async def write(name: str, ids: list[int]) -> None:
            await kv.write_groups(ids, row(2, len(ids)))
            ended.append(name)

        large = kv.write_groups(range(8, 16), row(3, 8))
        small = [kv.write_groups([20 + index], row(4)) for index in range(3)]
        backing.resume()
        for transfer in small:
            await transfer
        assert large.is_done


# Closing.


@every_loop
async def test_closing_with_everything_in_flight_loses_nothing_that_was_accepted() -> None:
    files = MemoryFiles(LAYOUT)
    backing = MemoryBackend(LAYOUT, files=files)
    kv = await CascadeBackend(backing, capacity_bytes=2 * PAYLOAD, slot="group")
    done = kv.write_groups([0, 1], row(1, 2))
    assert done.is_done
    waiting = kv.write_groups([2, 3], row(2, 2))
    found = np.zeros((3, PAYLOAD), np.uint8)
    reads = kv.read_groups([10, 0, 1], found)
    held = kv.read_groups([3], bytearray(PAYLOAD))
    await kv.aclose()
    await kv.aclose()
    assert (below(files, 0), below(files, 1)) == (1, 1)
    outcomes = (await waiting.outcome()).outcomes.tolist()
    assert outcomes == [Outcome.CANCELLED] * 2
    assert (below(files, 2), below(files, 3)) == (0, 0)
    assert (await held.outcome()).outcomes.tolist() == [Outcome.CANCELLED]
    assert (await reads.outcome()).outcomes[1:].tolist() == [Outcome.DONE] * 2
    with pytest.raises(ClosedError, match="closed: open a new one"):
        kv.write_groups([0], row(1))
    with pytest.raises(ClosedError):
        await kv.flush()


@every_loop
async def test_closing_names_what_is_lost_and_closes_all_the_same() -> None:
    fault = CallFault("write_groups", errno=errno.EIO)
    memory = await MemoryBackend(LAYOUT)
    kv = await CascadeBackend(FaultyBackend(memory, [fault]), capacity_bytes=4 * PAYLOAD, slot="group")
    await kv.write_groups([4, 2], row(1, 2))
    with pytest.raises(NotDurableError, match=r"close: 2 groups are not durable \(2, 4\)") as caught:
        await kv.aclose()
    assert caught.value.group_ids == (2, 4)
    assert not memory.is_open
    await kv.aclose()


@every_loop
async def test_a_cancelled_close_finishes_and_then_raises() -> None:
    files = MemoryFiles(LAYOUT)
    backing = MemoryBackend(LAYOUT, files=files)
    kv = await CascadeBackend(backing, capacity_bytes=4 * PAYLOAD, slot="group")
    await kv.write_groups([0, 1], row(1, 2))
    with anyio.CancelScope() as scope:
        scope.cancel()
        await kv.aclose()
    assert (below(files, 0), below(files, 1)) == (1, 1)
    assert not backing.is_open


@every_loop
async def test_without_flush_on_close_the_log_says_what_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    files = MemoryFiles(LAYOUT)
    async with cascade_on(MemoryBackend(LAYOUT, files=files), slots=4, flush_on_close=False) as kv:
        await kv.write_groups([0], row(1))
    assert below(files, 0) == 0
    assert "1 groups are dropped" in caplog.text


@on_one_loop
async def test_a_backing_that_does_not_answer_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    from dataclasses import replace

    backing = MemoryBackend(LAYOUT, options=replace(SMALL, drain_timeout=0.05))
    kv = await CascadeBackend(backing, capacity_bytes=4 * PAYLOAD, slot="group", drain_timeout=0.05)
    await kv.write_groups([0], row(1))
    backing.pause()
    with anyio.fail_after(10):
        with pytest.raises((NotDurableError, StorageError)) as caught:
            await kv.aclose()
    assert caught.value.group_ids == (0,)  # type: ignore[union-attr]
    assert "leaked" in caplog.text
    engine = backing._engine
    assert engine is not None
    engine.resume()
    assert engine.close()


@every_loop
async def test_a_backing_that_was_closed_under_a_cascade_is_told() -> None:
    backing = MemoryBackend(LAYOUT)
    kv = await CascadeBackend(backing, capacity_bytes=1 * PAYLOAD, slot="group", dirty_limit=1)
    await kv.write_groups([0], row(1))
    await backing.aclose()
    assert await value_of(kv, 0) == 1
    with pytest.raises(ClosedError):
        kv.read_groups([5], bytearray(PAYLOAD))
    with anyio.fail_after(10):
        with pytest.raises(TransferError, match="closed"):
            await kv.write_groups([1], row(2))
        with pytest.raises(NotDurableError, match=r"close: 2 groups are not durable \(0, 1\)"):
            await kv.aclose()


# Bounds and bad input.


@on_one_loop
async def test_more_transfers_than_allowed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conductor, "_MAX_TRANSFERS", 3)
    async with cascade_on(backing := MemoryBackend(LAYOUT), slots=1) as kv:
        await kv.write_groups([0], row(1))
        backing.pause()
        waiting = [kv.write_groups([1 + index], row(2)) for index in range(3)]
        with pytest.raises(BusyError, match="wait_ready"):
            kv.write_groups([9], row(3))
        assert kv.statistics().refused == 1
        backing.resume()
        await kv.wait_ready()
        await kv.write_groups([9], row(3))
        for transfer in waiting:
            await transfer


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"capacity_bytes": PAYLOAD - 1}, "at least one slot, 512 bytes"),
        ({"capacity_bytes": 1 << 60}, "this machine has"),
        ({"policy": "mru"}, "must be one of lru, arc, s3fifo"),
        ({"slot": "layer"}, "must be one of block, group"),
        ({"dirty_limit": -0.1}, "from 0 to 1"),
        ({"drain_timeout": 0}, "above zero"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], complaint: str) -> None:
    given: dict[str, Any] = {"capacity_bytes": 6000, "slot": "group", **options}
    with pytest.raises(LayoutError, match=complaint):
        CascadeBackend(MemoryBackend(LAYOUT), **given)


@on_one_loop
async def test_a_cascade_is_opened_once_and_not_used_before() -> None:
    kv = CascadeBackend(MemoryBackend(LAYOUT), capacity_bytes=PAYLOAD, slot="group")
    with pytest.raises(ClosedError, match="not open"):
        kv.read_groups([0], bytearray(PAYLOAD))
    assert kv.statistics() is None
    async with kv:
        assert kv.is_open
        with pytest.raises(ClosedError, match="opened once"):
            await kv
    await kv.aclose()


@on_one_loop
async def test_files_that_are_read_only_are_not_written_to(tmp_path: Path) -> None:
    LayerFiles(tmp_path / "kv", LAYOUT, create=True).close()
    with LayerFiles(tmp_path / "kv", LAYOUT, read_only=True) as files:
        async with cascade_on(open_backend(files), slots=2) as kv:
            assert await value_of(kv, 0) == 0
            with pytest.raises(LayoutError, match="read_only"):
                kv.write_groups([0], row(1))


@on_one_loop
async def test_open_backend_puts_one_in_front(tmp_path: Path) -> None:
    async with open_backend(tmp_path / "kv", LAYOUT, ram_bytes=1 << 20) as kv:
        assert isinstance(kv, CascadeBackend)
        assert isinstance(kv.backing, EngineBackend)
        await kv.write_block(0, 3, row(3, 4))
        statistics = kv.statistics()
        assert statistics is not None
        assert (statistics.slots, statistics.slot_nbytes) == (512, 4 * PAYLOAD)
        assert statistics.dirty_slots == 1
    with PosixBackend(tmp_path / "kv", LAYOUT) as oracle:
        found = bytearray(4 * PAYLOAD)
        oracle.read_block(0, 3, found)
        assert set(found) == {3}
    with pytest.raises(LayoutError, match="at least one slot"):
        open_backend(tmp_path / "kv", LAYOUT, ram_bytes=-1)


@on_one_loop
async def test_what_may_be_locked_is_registered_and_told() -> None:
    """A backing that registers little or nothing is no error."""

    class Reluctant(MemoryBackend):
        async def register_landing_region(self, memory: Any) -> Any:
            region = await super().register_landing_region(memory)
            region.is_registered = region.nbytes <= 3 << 20
            region.refusal = 0 if region.is_registered else errno.ENOMEM
            return region

    layout = GroupLayout(1, 32, 1, 1, 1 << 19, 1)
    async with CascadeBackend(Reluctant(layout), capacity_bytes=10 << 20) as kv:
        statistics = kv.statistics()
        assert statistics is not None
        assert statistics.slab_nbytes == 10 << 20
        assert statistics.registered_nbytes == (5 << 20) // 2
    async with CascadeBackend(MemoryBackend(layout), capacity_bytes=10 << 20) as kv:
        statistics = kv.statistics()
        assert statistics is not None
        assert statistics.registered_nbytes == 0


@every_loop
async def test_promotion_uses_only_what_is_free_or_clean() -> None:
    files = MemoryFiles(LAYOUT)
    async with cascade_on(MemoryBackend(LAYOUT, files=files), slots=2, promote=True, dirty_limit=1) as kv:
        await kv.write_groups([0], row(1))
        for group in (4, 5, 5):
            assert await value_of(kv, group) == 0
        statistics = kv.statistics()
        assert statistics is not None
        assert (statistics.promoted_groups, statistics.hits, statistics.misses) == (2, 3, 2)
        assert statistics.flushes == 0
        assert await value_of(kv, 0) == 1


@every_loop
@pytest.mark.parametrize("priority", list(Priority))
async def test_flushes_in_the_background_keep_to_the_limit(priority: Priority) -> None:
    async with cascade_on(MemoryBackend(LAYOUT), slots=20, dirty_limit=0.25) as kv:
        for group in range(20):
            await kv.write_groups([group], row(group + 1), priority=priority)
            await turns(3)
        await turns(20)
        statistics = kv.statistics()
        assert statistics is not None
        assert statistics.dirty_slots <= 5
        assert statistics.flushed_groups >= 15
        assert statistics.waits_for_room == 0
