"""`ExpertArena`: who gets which slot, when, and what is read for it. The device is memory that answers when told to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import anyio
import pytest
from backends import SMALL
from expert_arenas import PATIENCE_SECONDS, SIZES, SLOT, Failing, arena_on, turns, until, use
from expert_files import MemoryReader, Model, make_model, memory_model
from loops import every_loop, on_one_loop

from aio_kv import ClosedError, LayoutError, TransferError, UnavailableError
from aio_kv.experts import Demand, ExpertArena, ExpertReader


@pytest.fixture
def model() -> Model:
    return memory_model(SIZES)


@every_loop
@pytest.mark.parametrize("policy", ["lru", "arc", "s3fifo"])
async def test_demands_get_their_bytes_and_hits_are_not_read_again(policy: str, model: Model) -> None:
    async with arena_on(model, 4, policy=policy) as (arena, reader):
        await use(arena, model, 0, [1, 3, 1])
        before = reader.statistics().engine.ops
        await use(arena, model, 0, [3, 1])
        assert reader.statistics().engine.ops == before
        for layer, expert in model.everything() * 2:
            await use(arena, model, layer, [expert])
        found = arena.statistics()
        assert (found.slots, found.slot_nbytes, found.resident, found.leases) == (4, SLOT, 4, 0)
        assert found.demands == 2 + 32
        assert found.hits + found.misses == 4 + 32
        assert found.hits >= 2
        assert found.evictions == found.misses - 4
        assert found.hit_ratio == found.hits / 36
        assert found.bytes_demanded == 4 * 8000 + 16 * 8000 + 16 * 2000
        assert found.bytes_read < found.bytes_demanded


@every_loop
async def test_the_least_recently_used_makes_room(model: Model) -> None:
    async with arena_on(model, 3) as (arena, _):
        for expert in (0, 1, 2, 0):
            await use(arena, model, 0, [expert])
        await use(arena, model, 0, [3])  # in the place of 1
        before = arena.statistics()
        await use(arena, model, 0, [0, 2, 3])
        assert arena.statistics().misses == before.misses


@every_loop
async def test_one_read_serves_all_that_want_it(model: Model) -> None:
    async with arena_on(model, 4) as (arena, reader):
        reader.pause()
        before = reader.statistics().engine.ops
        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(use, arena, model, 0, [2, 5])
            await until(lambda: arena.statistics().demands == 5)
            reader.resume()
        assert (arena.statistics().misses, arena.statistics().joined) == (2, 8)
        once = reader.statistics().engine.ops - before
        assert arena.statistics().bytes_read == 2 * 8000
        await use(arena, model, 0, [6])
        assert reader.statistics().engine.ops - before - once == once // 2


@every_loop
async def test_a_leased_slot_is_never_taken(model: Model) -> None:
    async with arena_on(model, 3) as (arena, _):
        async with arena.experts(0, [7]) as held:
            for expert in range(7):
                await use(arena, model, 0, [expert, (expert + 1) % 7])
            assert bytes(held[0]) == model.image(0, 7)
        before = arena.statistics().misses
        for expert in range(6):
            await use(arena, model, 0, [expert])
        await use(arena, model, 0, [7])
        assert arena.statistics().misses > before


async def hold(arena: ExpertArena, ids: list[int], log: list[str], name: str, may_end: anyio.Event) -> None:
    async with arena.experts(0, ids):
        log.append(name)
        await may_end.wait()


@every_loop
async def test_the_line_is_served_in_order_and_nobody_passes(model: Model) -> None:
    """A small demand that could be served at once waits behind a large one, or the large one would wait for ever."""
    async with arena_on(model, 3) as (arena, _), anyio.create_task_group() as group:
        log: list[str] = []
        ends = [anyio.Event() for _ in range(4)]
        group.start_soon(hold, arena, [0, 1], log, "first", ends[0])
        await until(lambda: log == ["first"])
        group.start_soon(hold, arena, [2, 3], log, "large", ends[1])
        await until(lambda: arena.statistics().waiting == 1)
        group.start_soon(hold, arena, [4], log, "small", ends[2])
        await until(lambda: arena.statistics().waiting == 2)
        group.start_soon(hold, arena, [0], log, "hit", ends[3])
        await until(lambda: arena.statistics().waiting == 3)
        await turns()
        assert log == ["first"]
        ends[0].set()
        await until(lambda: len(log) == 3)
        assert sorted(log) == ["first", "large", "small"]
        ends[1].set()
        ends[2].set()
        await until(lambda: len(log) == 4)
        ends[3].set()


@every_loop
async def test_a_demand_gets_all_of_its_slots_or_none(model: Model) -> None:
    async with arena_on(model, 3) as (arena, _), anyio.create_task_group() as group:
        log: list[str] = []
        ends = [anyio.Event(), anyio.Event()]
        group.start_soon(hold, arena, [0, 1], log, "two", ends[0])
        await until(lambda: log == ["two"])
        group.start_soon(hold, arena, [2, 3], log, "more", ends[1])
        await until(lambda: arena.statistics().waiting == 1)
        assert arena.statistics().leases == 2
        ends[0].set()
        await until(lambda: len(log) == 2)
        ends[1].set()


@every_loop
async def test_whoever_is_cancelled_in_line_leaves_it(model: Model) -> None:
    async with arena_on(model, 2) as (arena, _), anyio.create_task_group() as group:
        log: list[str] = []
        ends = [anyio.Event(), anyio.Event()]
        group.start_soon(hold, arena, [0], log, "first", ends[0])
        await until(lambda: log == ["first"])
        scope = anyio.CancelScope()

        async def give_up() -> None:
            with scope:
                await use(arena, model, 0, [1, 2])

        group.start_soon(give_up)
        await until(lambda: arena.statistics().waiting == 1)
        group.start_soon(hold, arena, [3], log, "second", ends[1])
        await until(lambda: arena.statistics().waiting == 2)
        scope.cancel()
        await until(lambda: log == ["first", "second"])
        assert arena.statistics().waiting == 0
        for end in ends:
            end.set()


@every_loop
async def test_a_cancelled_read_keeps_its_slot_until_the_device_is_done(model: Model) -> None:
    """Its bytes may still come: whoever got the slot meanwhile would find them in the place of its own."""
    async with arena_on(model, 1) as (arena, reader):
        reader.pause()
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(use, arena, model, 0, [0])
                await until(lambda: arena.statistics().filling == 1)
                group.cancel_scope.cancel()
        assert not scope.cancelled_caught
        async with anyio.create_task_group() as group:
            group.start_soon(use, arena, model, 0, [1])
            await turns()
            assert arena.statistics().filling == 1
            assert arena.statistics().waiting == 1
            reader.resume()
        assert arena.statistics().cancelled == 1


@every_loop
async def test_a_cancelled_demand_leaves_a_shared_read_to_the_others(model: Model) -> None:
    async with arena_on(model, 2) as (arena, reader):
        reader.pause()
        async with anyio.create_task_group() as group:
            scope = anyio.CancelScope()

            async def give_up() -> None:
                with scope:
                    await use(arena, model, 0, [0])

            group.start_soon(give_up)
            await until(lambda: arena.statistics().demands == 1)
            group.start_soon(use, arena, model, 0, [0])
            await until(lambda: arena.statistics().demands == 2)
            scope.cancel()
            await until(lambda: arena.statistics().leases == 1)
            reader.resume()
        assert arena.statistics().cancelled == 0
        assert arena.statistics().bytes_read == 8000


@every_loop
async def test_what_was_given_up_and_is_wanted_again_is_read_again() -> None:
    """In the same slot, once nothing of the first read is in flight: a part of it may have been dropped."""
    model = memory_model([(SMALL.queue_depth * 3 * SMALL.op_nbytes_max // 2, 100)], num_experts=2)
    async with arena_on(model, 1) as (arena, reader):
        reader.pause()
        async with anyio.create_task_group() as group:
            group.start_soon(use, arena, model, 0, [0])
            await until(lambda: arena.statistics().filling == 1)
            group.cancel_scope.cancel()
        async with anyio.create_task_group() as group:
            group.start_soon(use, arena, model, 0, [0])
            await until(lambda: arena.statistics().demands == 2)
            reader.resume()
        assert arena.statistics().joined == 1
        assert reader.statistics().engine.dropped_ops > 0


@every_loop
async def test_a_failed_read_tells_everybody_who_waits_and_the_arena_goes_on(model: Model) -> None:
    scheduler = Failing()
    async with arena_on(model, 2, scheduler=scheduler) as (arena, reader):
        bad = model.experts.segments(0, 3)[1]
        scheduler.is_failing = lambda shard, file_offset: (
            shard == bad.shard and bad.file_offset - 512 < file_offset < bad.file_offset + bad.nbytes
        )
        errors: list[TransferError] = []

        async def fail() -> None:
            with pytest.raises(TransferError) as caught:
                await use(arena, model, 0, [3, 0])
            errors.append(caught.value)

        reader.pause()
        async with anyio.create_task_group() as group:
            group.start_soon(fail)
            group.start_soon(fail)
            await until(lambda: arena.statistics().demands == 2)
            reader.resume()
        assert len(errors) == 2
        assert "expert 3 of layer 0" in str(errors[0])
        assert errors[0].file == f"memory/shard-{bad.shard}.bin"
        assert arena.statistics().failures == 1
        assert arena.statistics().leases == 0
        await use(arena, model, 0, [0])
        scheduler.is_failing = lambda shard, file_offset: False
        await use(arena, model, 0, [3, 0])


@every_loop
async def test_the_end_of_a_failed_lease_does_not_touch_a_later_read(model: Model) -> None:
    """The expert is read again, elsewhere, before those that have seen the failure have given their slots back."""
    scheduler = Failing()
    scheduler.is_failing = lambda shard, file_offset: True
    async with arena_on(model, 2, scheduler=scheduler) as (arena, reader):
        first = arena.experts(0, [0])
        arena.join_line(first)  # the demand's task, at the moment before it runs again
        await until(lambda: first.error is not None)
        scheduler.is_failing = lambda shard, file_offset: False
        reader.pause()
        async with anyio.create_task_group() as group:
            group.start_soon(use, arena, model, 0, [0])
            await until(lambda: arena.statistics().demands == 2)
            arena.leave(first)
            reader.resume()
        assert arena.statistics().cancelled == 0


@every_loop
async def test_an_engine_that_is_full_delays_and_loses_nothing(model: Model) -> None:
    options = replace(SMALL, max_transfers=1, max_requests=4)
    async with arena_on(model, 8, options=options, prefetch_bytes=4 * SLOT) as (arena, _):
        arena.prefetch(1, range(4))
        async with anyio.create_task_group() as group:
            for first in range(4):
                group.start_soon(use, arena, model, 0, [first, first + 1, first + 4])
        arena.prefetch(1, [6])
        await until(lambda: arena.statistics().bytes_prefetched > 0)


@every_loop
async def test_bad_input(model: Model) -> None:
    async with arena_on(model, 2) as (arena, reader):
        for layer in (2, -1, "0"):
            with pytest.raises(LayoutError, match="layer is"):
                arena.experts(layer, [0])  # type: ignore[arg-type]
        for ids in ([8], [-1], [True], [0.5]):
            with pytest.raises(LayoutError, match="experts of layer 0"):
                arena.experts(0, ids)
            with pytest.raises(LayoutError, match="experts of layer 0"):
                arena.prefetch(0, ids)
        with pytest.raises(LayoutError, match="3 experts were asked for at once: the arena holds 2"):
            arena.experts(0, [0, 1, 2])
        with pytest.raises(UnavailableError, match="no device"):
            arena.experts(0, [0], stream=0)
        await use(arena, model, 0, [1, 0, 1, 0])
        await use(arena, model, 0, [])
        demand = arena.experts(0, [0])
        async with demand:
            pass
        with pytest.raises(ClosedError, match="once"):
            await demand.__aenter__()
        with pytest.raises(LayoutError, match="needs a slot of 8192 bytes"):
            ExpertArena(reader, capacity_bytes=8191)
        with pytest.raises(LayoutError, match="policy"):
            ExpertArena(reader, capacity_bytes=8192, policy="best")
        with pytest.raises(LayoutError, match="memory"):
            ExpertArena(reader, capacity_bytes=8192, memory="disk")
        with pytest.raises(LayoutError, match="prefetch_bytes"):
            ExpertArena(reader, capacity_bytes=8192, prefetch_bytes=-1)
        with pytest.raises(UnavailableError, match="no device"):
            await ExpertArena(reader, capacity_bytes=8192, memory="device")


@every_loop
async def test_views_end_with_the_lease(model: Model) -> None:
    async with arena_on(model, 2) as (arena, _):
        async with arena.experts(0, [0, 1]) as slots:
            views = list(slots)
            assert len(slots) == 2
            assert slots[0].readonly
            assert len(set(slots.slot_numbers)) == 2
        with pytest.raises(ValueError, match="released"):
            bytes(views[0])


@every_loop
async def test_use_before_and_after(model: Model) -> None:
    async with MemoryReader(model) as reader:
        arena = ExpertArena(reader, capacity_bytes=SLOT)
        with pytest.raises(ClosedError, match="not open"):
            arena.experts(0, [0])
        async with arena:
            demand = arena.experts(0, [0])
        await arena.aclose()
        for call in (lambda: arena.experts(0, [0]), lambda: arena.prefetch(0, [0])):
            with pytest.raises(ClosedError, match="closed"):
                call()
        with pytest.raises(ClosedError, match="closed"):
            await demand.__aenter__()
        with pytest.raises(ClosedError, match="once"):
            await arena
        assert arena.statistics().slots == 1
        assert reader.statistics().landing_regions == 0


@every_loop
async def test_close_ends_who_waits_and_waits_for_leases_and_reads(model: Model) -> None:
    async with MemoryReader(model, options=SMALL) as reader:
        arena = await ExpertArena(reader, capacity_bytes=2 * SLOT)
        log: list[str] = []
        ends = [anyio.Event()]

        async def refused(ids: list[int]) -> None:
            with pytest.raises(ClosedError, match="closed before"):
                await use(arena, model, 0, ids)
            log.append("refused")

        async def close() -> None:
            await arena.aclose()
            log.append("closed")

        with anyio.fail_after(PATIENCE_SECONDS):
            async with anyio.create_task_group() as group:
                group.start_soon(hold, arena, [0], log, "held", ends[0])
                await until(lambda: log == ["held"])
                reader.pause()
                group.start_soon(refused, [1])
                await until(lambda: arena.statistics().filling == 1)
                group.start_soon(refused, [2, 3])
                await until(lambda: arena.statistics().waiting == 1)
                arena.prefetch(0, [5])
                group.start_soon(close)
                group.start_soon(close)
                await until(lambda: log.count("refused") == 2)
                await turns()
                assert "closed" not in log
                reader.resume()
                await turns()
                assert "closed" not in log  # a lease is held
                ends[0].set()
            assert log.count("closed") == 2
        assert reader.statistics().landing_regions == 0


@every_loop
async def test_a_reader_that_is_closed_first_fails_demands(model: Model) -> None:
    reader = await MemoryReader(model, options=SMALL)
    arena = await ExpertArena(reader, capacity_bytes=2 * SLOT)
    await use(arena, model, 0, [0])
    await reader.aclose()
    with anyio.fail_after(PATIENCE_SECONDS):
        with pytest.raises(ClosedError):
            await use(arena, model, 0, [1])
        await use(arena, model, 0, [0])  # it is there
        await arena.aclose()


@on_one_loop
async def test_another_loop_is_refused(model: Model) -> None:
    async with arena_on(model, 1) as (arena, _):

        def elsewhere() -> None:
            with pytest.raises(ClosedError):
                arena.experts(0, [0])

        await anyio.to_thread.run_sync(elsewhere)


@every_loop
async def test_on_a_real_engine(tmp_path: Path) -> None:
    model = make_model(tmp_path)
    async with ExpertReader(model.experts, options=SMALL) as reader:
        slot = -(-model.experts.slot_nbytes_max // 4096) * 4096
        async with ExpertArena(reader, capacity_bytes=5 * slot) as arena:
            async with anyio.create_task_group() as group:
                for layer, expert in model.everything() * 3:
                    group.start_soon(use, arena, model, layer, [expert, (expert + 1) % 4])
                    arena.prefetch(layer, [(expert + 2) % 4])
            arena._table.check()
            assert isinstance(arena.experts(0, [0]), Demand)
