"""Many tasks, one arena, a device that answers late, out of order and sometimes with an error: one run per seed.

What must hold at every moment is checked while it runs: a lease has the right bytes from its first moment to its last,
no expert is in two slots, and slots are neither lost nor handed out twice.
"""

from __future__ import annotations

import random
from dataclasses import replace

import anyio
import anyio.lowlevel
import pytest
from backends import SMALL
from expert_files import MemoryReader, Model, memory_model
from loops import on_one_loop, on_trio

from aio_kv import TransferError
from aio_kv.experts import ExpertArena
from aio_kv.experts import arena as arena_module
from aio_kv.experts.slot_table import SlotTable
from aio_kv.policy import POLICY_NAMES, make_policy
from aio_kv.testing import SeededScheduler

SIZES = [(9000, 5000), (300,), (20000,)]
SLOT = 20480
SEEDS = range(12)
# Few of everything: reads come in parts, and the engine is full again and again.
NARROW = replace(SMALL, queue_depth=3, max_requests=5, op_nbytes_max=4096, small_nbytes=4096, max_transfers=4)


@pytest.fixture(scope="module")
def model() -> Model:
    return memory_model(SIZES, num_experts=6)


@pytest.fixture(autouse=True)
def several_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have prefetches come in pieces, so that demands find them half done."""
    monkeypatch.setattr(arena_module, "_PIECE_NBYTES", 4096)


class Simulation:
    """The tasks, and what they saw."""

    def __init__(self, model: Model, arena: ExpertArena, seed: int) -> None:
        self.model, self.arena = model, arena
        self.random = random.Random(seed)
        self.served = self.failed = self.cancelled = self.strange_errors = 0

    async def task(self) -> None:
        for _ in range(12):
            layer = self.random.randrange(3)
            ids = self.random.sample(range(6), self.random.randint(1, 3))
            if self.random.random() < 0.4:
                self.arena.prefetch(self.random.randrange(3), self.random.sample(range(6), 3))
            if self.random.random() < 0.25:
                await self.cancelled_demand(layer, ids)
            else:
                await self.demand(layer, ids)
            self.arena._table.check()

    async def demand(self, layer: int, ids: list[int]) -> None:
        try:
            async with self.arena.experts(layer, ids) as slots:
                for _ in range(self.random.randint(1, 6)):
                    for view, expert in zip(slots, ids, strict=True):
                        image = self.model.image(layer, expert)
                        assert view[: len(image)] == image
                    self.arena._table.check()
                    await anyio.lowlevel.checkpoint()
            self.served += 1
        except TransferError as error:
            self.failed += 1
            self.strange_errors += f"of layer {layer}" not in str(error)

    async def cancelled_demand(self, layer: int, ids: list[int]) -> None:
        turns = self.random.randint(0, 20)
        async with anyio.create_task_group() as group:
            group.start_soon(self.demand, layer, ids)
            for _ in range(turns):
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        self.cancelled += 1


async def simulate(
    model: Model, seed: int, *, failing: float, policy: str, is_repeatable: bool = True
) -> None:
    scheduler = SeededScheduler(seed, failing=failing)
    with anyio.fail_after(60):
        async with MemoryReader(model, scheduler=scheduler, options=NARROW) as reader:
            async with ExpertArena(
                reader,
                capacity_bytes=5 * SLOT,
                policy=policy,
                prefetch_bytes=2 * SLOT,
                prefetch_window_bytes=8192,
            ) as arena:
                run = Simulation(model, arena, seed)
                async with anyio.create_task_group() as group:
                    for _ in range(6):
                        group.start_soon(run.task)
            found = arena.statistics()
            assert (found.leases, found.waiting, found.filling) == (0, 0, 0)
            arena._table.check()
            assert found.demands >= run.served > 0
            assert run.strange_errors == 0
            assert found.hits + found.joined + found.misses > 0
            if failing and is_repeatable:  # elsewhere a run may be lucky
                assert found.failures > 0
            if not failing:
                assert run.failed == found.failures == 0
            engine = reader.statistics().engine
            assert engine.in_flight == 0


@on_one_loop
@pytest.mark.parametrize("seed", SEEDS)
async def test_simulation(seed: int, model: Model) -> None:
    await simulate(model, seed, failing=0.0, policy=POLICY_NAMES[seed % 3])


@on_one_loop
@pytest.mark.parametrize("seed", SEEDS)
async def test_simulation_with_failures(seed: int, model: Model) -> None:
    await simulate(model, seed, failing=0.02, policy=POLICY_NAMES[seed % 3])


@on_trio
@pytest.mark.parametrize("seed", range(3))
async def test_simulation_where_tasks_wake_in_any_order(seed: int, model: Model) -> None:
    await simulate(model, seed, failing=0.01, policy="lru", is_repeatable=False)


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("seed", range(4))
def test_slots_alone(seed: int, policy: str) -> None:
    """The table without any reads: random grants, ends, failures and prefetches, its invariants after each."""
    pick = random.Random(seed)
    table = SlotTable(7, make_policy(policy, 7))
    held: list[list[int]] = []
    filling: set[int] = set()
    for _ in range(3000):
        step = pick.random()
        if step < 0.35:
            keys = pick.sample(range(20), pick.randint(1, 4))
            grant = table.acquire(keys)
            if grant is not None:
                assert sorted(grant.slots) == sorted(keys)
                assert len(set(grant.slots.values())) == len(keys)
                assert not {slot for slots in held for slot in slots} & {
                    grant.slots[key] for key in grant.missing
                }
                held.append(list(grant.slots.values()))
                filling |= {grant.slots[key] for key in grant.missing}
        elif step < 0.45:
            key = pick.randrange(20)
            if table.slot_of(key) is None and (found := table.admit_unproven(key)) is not None:
                filling.add(found[0])
        elif step < 0.7 and filling:
            slot = pick.choice(sorted(filling))
            filling.remove(slot)
            (table.filled if pick.random() < 0.8 else table.unfilled)(slot)
        elif held:
            for slot in held.pop(pick.randrange(len(held))):
                table.release(slot)
        table.check()
