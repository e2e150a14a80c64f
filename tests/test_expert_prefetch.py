"""Prefetched experts: read when nobody waits, taken over by whoever wants them, dropped for whoever wants others."""

from __future__ import annotations

import anyio
import pytest
from expert_arenas import SIZES, SLOT, Failing, arena_on, turns, until, use
from expert_files import Model, memory_model
from loops import every_loop

from aio_kv import TransferError
from aio_kv.testing import Scheduler


@pytest.fixture
def model() -> Model:
    return memory_model(SIZES)


@every_loop
async def test_prefetched_experts_are_hits(model: Model) -> None:
    async with arena_on(model, 8) as (arena, _):
        assert arena.prefetch(0, [1, 2]) == 2
        await until(lambda: arena.statistics().resident == 2)
        before = arena.statistics()
        assert before.bytes_prefetched == 16000
        assert arena.prefetch(0, [1]) == 0
        await use(arena, model, 0, [1, 2])
        await use(arena, model, 0, [1, 2])
        found = arena.statistics()
        assert (found.hits, found.misses, found.bytes_read) == (4, 0, 0)
        assert (found.prefetches, found.prefetches_refused) == (3, 1)
        assert (found.prefetches_used, found.prefetches_wasted) == (2, 0)


@every_loop
async def test_prefetches_are_bounded_in_bytes(model: Model) -> None:
    async with arena_on(model, 8, prefetch_bytes=3 * SLOT) as (arena, _):
        assert arena.prefetch(0, range(8)) == 3
        await until(lambda: arena.statistics().resident == 3)
        assert arena.prefetch(0, range(8)) == 0
        await use(arena, model, 0, [0])
        assert arena.prefetch(0, range(8)) == 1
        await until(lambda: arena.statistics().resident == 4)
        assert arena.statistics().prefetches_refused == 5 + 8 + 7
    async with arena_on(model, 8, prefetch_bytes=0) as (arena, _):
        assert arena.prefetch(0, [0]) == 0


@every_loop
async def test_a_window_of_prefetched_bytes_is_at_the_device(model: Model) -> None:
    async with arena_on(model, 8, prefetch_bytes=8 * SLOT, prefetch_window_bytes=1) as (arena, reader):
        reader.pause()
        arena.prefetch(0, range(8))
        await turns()
        assert arena.statistics().bytes_prefetched == 8000
        reader.resume()
        await until(lambda: arena.statistics().resident == 8)


@every_loop
async def test_a_demand_drops_the_prefetches_that_it_does_not_want(model: Model) -> None:
    async with arena_on(model, 8, prefetch_bytes=8 * SLOT, prefetch_window_bytes=1) as (arena, reader):
        reader.pause()
        assert arena.prefetch(0, [0, 1, 2, 3]) == 4  # 0 is at the device, the others wait
        async with anyio.create_task_group() as group:
            group.start_soon(use, arena, model, 0, [2, 7])
            await until(lambda: arena.statistics().demands == 1)
            found = arena.statistics()
            assert found.prefetches_dropped == 4
            assert found.filling == 3
            reader.resume()
        found = arena.statistics()
        assert (found.misses, found.joined, found.prefetches_used) == (2, 0, 0)
        # The device had all of 0 already: it is kept, and counts as wasted only when it has to go unused.
        assert found.resident == 3


@every_loop
async def test_a_demand_that_finds_everything_drops_nothing(model: Model) -> None:
    async with arena_on(model, 8, prefetch_bytes=8 * SLOT, prefetch_window_bytes=1) as (arena, reader):
        await use(arena, model, 0, [7])
        reader.pause()
        arena.prefetch(0, [0, 1])
        await use(arena, model, 0, [7])
        assert arena.statistics().prefetches_dropped == 0
        reader.resume()
        await until(lambda: arena.statistics().resident == 3)


class OneByOne(Scheduler):
    """A device that never does two things in one turn of the loop: reads of one expert end one after the other."""

    def count(self, in_flight: int) -> int:
        return 1


PIECES = 4
LARGE = PIECES * (512 << 10)


@every_loop
async def test_a_demand_takes_over_the_prefetch_of_its_expert() -> None:
    """What is at the device is waited for, the rest asked for at once, and no byte read twice."""
    model = memory_model([(LARGE,)], num_experts=3)
    bounds = {"prefetch_bytes": 3 * LARGE, "prefetch_window_bytes": 1}
    async with arena_on(model, 3, alignment=1, scheduler=OneByOne(), **bounds) as (arena, reader):
        reader.pause()
        arena.prefetch(0, [0, 1])
        await turns()
        assert arena.statistics().bytes_prefetched < LARGE
        async with anyio.create_task_group() as group:
            group.start_soon(use, arena, model, 0, [0])
            await until(lambda: arena.statistics().demands == 1)
            reader.resume()
        found = arena.statistics()
        assert (found.joined, found.misses, found.prefetches_used) == (1, 0, 1)
        assert found.bytes_read + found.bytes_prefetched == LARGE
        assert reader.statistics().engine.bytes_read == LARGE
        assert found.prefetches_dropped == 1


@every_loop
async def test_a_dropped_prefetch_that_is_wanted_before_it_has_ended() -> None:
    model = memory_model([(LARGE,)], num_experts=3)
    async with arena_on(model, 3, prefetch_bytes=LARGE, prefetch_window_bytes=1) as (arena, reader):
        reader.pause()
        arena.prefetch(0, [0])
        async with anyio.create_task_group() as group:
            group.start_soon(use, arena, model, 0, [1])
            await until(lambda: arena.statistics().demands == 1)
            group.start_soon(use, arena, model, 0, [0])
            await until(lambda: arena.statistics().demands == 2)
            reader.resume()
        assert arena.statistics().resident == 2


@every_loop
async def test_nothing_is_prefetched_while_somebody_waits(model: Model) -> None:
    async with arena_on(model, 4) as (arena, reader):
        reader.pause()
        async with anyio.create_task_group() as group:
            group.start_soon(use, arena, model, 0, [0])
            await until(lambda: arena.statistics().demands == 1)
            assert arena.prefetch(0, [1]) == 1
            await turns()
            assert arena.statistics().bytes_prefetched == 0
            reader.resume()
        await until(lambda: arena.statistics().resident == 2)
        assert arena.statistics().bytes_prefetched == 8000


@every_loop
async def test_prefetched_experts_that_nobody_used_are_counted_when_they_go(model: Model) -> None:
    async with arena_on(model, 2, prefetch_bytes=SLOT) as (arena, _):
        arena.prefetch(0, [0])
        await until(lambda: arena.statistics().resident == 1)
        await use(arena, model, 0, [1, 2])
        assert arena.statistics().prefetches_wasted == 1
        assert arena.prefetch(0, [3]) == 1


@every_loop
async def test_a_prefetch_finds_no_slot_where_all_are_leased(model: Model) -> None:
    async with arena_on(model, 1, prefetch_bytes=SLOT) as (arena, _):
        async with arena.experts(0, [0]):
            assert arena.prefetch(0, [1]) == 1
            await turns()
            assert arena.statistics().prefetches_dropped == 1
        await use(arena, model, 0, [0])


@every_loop
async def test_a_prefetch_that_fails_is_met_again_by_the_demand(model: Model) -> None:
    scheduler = Failing()
    async with arena_on(model, 4, scheduler=scheduler) as (arena, _):
        scheduler.is_failing = lambda shard, file_offset: True
        arena.prefetch(0, [0])
        await until(lambda: arena.statistics().failures == 1)
        with pytest.raises(TransferError, match="expert 0 of layer 0"):
            await use(arena, model, 0, [0])
        scheduler.is_failing = lambda shard, file_offset: False
        await use(arena, model, 0, [0])
        assert arena.statistics().failures == 2
