"""Checks of the conformance kit: transfers that nobody awaited take effect in the order of their calls."""

from __future__ import annotations

from typing import Any

import anyio
import numpy as np

from aio_kv.layout import GroupLayout
from aio_kv.protocols import AsyncStorageBackend, Priority, Write
from aio_kv.testing.model import (
    LARGE,
    PADDED,
    PLAIN,
    MakeBackend,
    empty,
    every_id,
    fill,
    opened,
    payloads,
    require,
    require_contents,
    require_same,
    shuffled,
)

_ROUNDS = 4


async def read_behind_a_write(make: MakeBackend) -> None:
    """A read called after a write of the same groups brings the new bytes, awaited or not."""
    for layout in (PLAIN, PADDED, LARGE):
        async with opened(make, layout) as backend:
            await fill(backend)
            for seed in range(_ROUNDS):
                ids = shuffled(layout, seed)
                rows = payloads(layout, len(ids), 20 + seed)
                write = backend.write_groups(ids, rows)
                found = empty(layout, len(ids))
                await backend.read_groups(ids, found)
                require_same(found, rows, f"read behind an un-awaited write, {layout}")
                await write


async def write_behind_a_read(make: MakeBackend) -> None:
    """A read called before a write of the same groups brings the old bytes."""
    for layout in (PLAIN, PADDED, LARGE):
        async with opened(make, layout) as backend:
            old = await fill(backend)
            for seed in range(_ROUNDS):
                new = payloads(layout, layout.num_groups, 30 + seed)
                found = empty(layout, layout.num_groups)
                read = backend.read_groups(every_id(layout), found)
                await backend.write_groups(shuffled(layout, seed), new[shuffled(layout, seed)])
                await read
                require_same(found, old, f"read in front of a write, {layout}")
                old = new


async def write_behind_a_write(make: MakeBackend) -> None:
    """Of several un-awaited writes of a group the last one stays, whatever their priorities."""
    for layout in (PLAIN, PADDED, LARGE):
        async with opened(make, layout) as backend:
            rows = await fill(backend)
            priorities = [Priority.BACKGROUND, Priority.DEMAND, Priority.PREFETCH]
            for seed in range(_ROUNDS):
                pending = []
                for turn, priority in enumerate(priorities):
                    ids = shuffled(layout, seed + turn)[: max(1, layout.num_groups // 2)]
                    rows[ids] = payloads(layout, len(ids), 40 + 3 * seed + turn)
                    pending.append(backend.write_groups(ids, rows[ids].copy(), priority=priority))
                await require_contents(backend, rows, f"after un-awaited writes, {layout}")
                for transfer in pending:
                    await transfer


async def blocks_and_groups_keep_their_order(make: MakeBackend) -> None:
    """The order holds between calls of different kinds that share a group."""
    layout = PLAIN
    async with opened(make, layout) as backend:
        rows = await fill(backend)
        first, count = layout.block_group_id(0, 3), layout.groups_per_block
        block = payloads(layout, count, 50)
        single = payloads(layout, 1, 51)
        found_before, found_between, found_after = (empty(layout, count) for _ in range(3))
        transfers = [
            backend.read_block(0, 3, found_before),
            backend.write_block(0, 3, block),
            backend.read_groups(range(first, first + count), found_between),
            backend.write([Write(layout.key(first + 1), single)]),
            backend.read_block(0, 3, found_after),
        ]
        for transfer in reversed(transfers):
            await transfer
        require_same(found_before, rows[first : first + count], "the block before the writes")
        require_same(found_between, block, "the groups behind the block write")
        block[1] = single
        require_same(found_after, block, "the block behind both writes")


async def many_tasks_keep_their_order(make: MakeBackend) -> None:
    """Tasks that each write and read their own groups at the same time see their own bytes."""
    layout = GroupLayout(2, 16, 2, 4, 32, 4)
    async with opened(make, layout) as backend:

        async def work(task: int) -> None:
            ids = every_id(layout)[task::8]
            for turn in range(3):
                rows = payloads(layout, len(ids), 100 * task + turn)
                write = backend.write_groups(ids, rows)
                found = empty(layout, len(ids))
                await backend.read_groups(ids[::-1], found)
                require_same(found, rows[::-1], f"task {task}, turn {turn}")
                await write

        async with anyio.create_task_group() as group:
            for task in range(8):
                group.start_soon(work, task)


async def every_priority_is_served(make: MakeBackend) -> None:
    """Transfers of each priority end, also while others are busy."""
    async with opened(make, PLAIN) as backend:
        rows = await fill(backend)
        places = [empty(PLAIN, PLAIN.num_groups) for _ in range(3 * len(Priority))]
        transfers = [
            backend.read_groups(shuffled(PLAIN, turn), place, priority=list(Priority)[turn % len(Priority)])
            for turn, place in enumerate(places)
        ]
        for turn, transfer in enumerate(transfers):
            await transfer
            require_same(places[turn], rows[shuffled(PLAIN, turn)], f"transfer {turn}")


async def awaiting_again_gives_the_same(make: MakeBackend) -> None:
    """Awaiting twice, from several tasks, and `outcome` and `enqueued` besides, all tell the same."""
    async with opened(make, PLAIN) as backend:
        rows = await fill(backend)
        found = empty(PLAIN, PLAIN.num_groups)
        transfer = backend.read_groups(every_id(PLAIN), found)
        reports: list[Any] = []

        async def wait() -> None:
            reports.append(await transfer)

        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(wait)
        await transfer.enqueued()
        reports += [await transfer, await transfer.outcome()]
        require_same(found, rows, "after several awaits")
        for report in reports:
            is_same = (
                np.array_equal(report.outcomes, reports[0].outcomes) and report.nbytes == reports[0].nbytes
            )
            require(is_same, "awaiters of one transfer were told different things")


async def wait_ready_returns_when_there_is_room(make: MakeBackend) -> None:
    """`wait_ready` returns at once on an idle backend, for every task that asks."""
    async with opened(make, PLAIN) as backend:

        async def use(backend: AsyncStorageBackend) -> None:
            for _ in range(3):
                await backend.wait_ready()
            await backend.read_groups([0], empty(PLAIN, 1))

        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(use, backend)


CHECKS = (
    read_behind_a_write,
    write_behind_a_read,
    write_behind_a_write,
    blocks_and_groups_keep_their_order,
    many_tasks_keep_their_order,
    every_priority_is_served,
    awaiting_again_gives_the_same,
    wait_ready_returns_when_there_is_room,
)
