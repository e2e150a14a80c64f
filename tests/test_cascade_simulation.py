"""The seeded simulation of the cascade, some seeds of it; `.ci/run` has `tests/cascade_simulation.py` run 10,000."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from cascade_simulation import OPERATIONS, Simulation, run_seeds
from loops import on_one_loop

SEEDS = 200


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, SEEDS, 100))
@on_one_loop
async def test_seeds(first: int) -> None:
    await run_seeds(first, 100)


@on_one_loop
async def test_a_write_does_not_pass_a_read_that_brings_its_group_up_in_two_parts() -> None:
    """The end of the first part was taken for the end of both, and the second then landed on the write's bytes."""
    await run_seeds(70381, 1)


@on_one_loop
async def test_a_seed_repeats_itself() -> None:
    async def found(seed: int) -> Any:
        simulation = Simulation(seed)
        await simulation.run()
        statistics = simulation.cascade.statistics()
        assert statistics is not None
        history = [[(one.number, one.outcome) for one in group] for group in simulation.model.history]
        return history, statistics.hits, statistics.flushes, statistics.superseded_slots

    for seed in (3, 4):
        assert await found(seed) == await found(seed)
    assert OPERATIONS >= 60


@on_one_loop
async def test_the_simulation_meets_everything_that_it_is_for() -> None:
    """Over some seeds: evictions, slots that moved, waits of every kind, failures, cancellations, promotions."""
    totals = dict.fromkeys(
        (
            *("evicted_slots", "superseded_slots", "waits_for_room", "waits_for_order", "waits_for_backing"),
            *("failed_flushes", "failed", "cancelled", "promoted_groups", "hits", "misses"),
        ),
        0,
    )
    for seed in range(60):
        simulation = Simulation(seed)
        async with asyncio.timeout(20):
            await simulation.run()
        statistics = simulation.cascade.statistics()
        for name in totals:
            totals[name] += getattr(statistics, name)
    assert not [name for name, count in totals.items() if not count]
