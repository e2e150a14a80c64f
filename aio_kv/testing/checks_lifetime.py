"""Checks of the conformance kit: who owns memory and for how long, cancellation, closing."""

from __future__ import annotations

import gc
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np

from aio_kv.errors import AioKvError, ClosedError, LayoutError
from aio_kv.positional import aligned_buffer
from aio_kv.protocols import AsyncStorageBackend, Priority, Read, Write
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
    refuses,
    refuses_async,
    require,
    require_contents,
    require_same,
    shuffled,
)
from aio_kv.transfer import Outcome

_TURNS = 20


async def _pass_time(backend: AsyncStorageBackend) -> None:
    """Give the device and the loop every chance to do what they should not: turns, and a whole read behind it."""
    for _ in range(_TURNS):
        await anyio.lowlevel.checkpoint()
    layout = backend.layout
    await backend.read_groups(every_id(layout), empty(layout, layout.num_groups))


async def cancelled_read_touches_nothing_afterwards(make: MakeBackend) -> None:
    """When a cancelled await has raised, the destination is the caller's: nothing is written to it any more."""
    for layout in (PLAIN, PADDED, LARGE):
        async with opened(make, layout) as backend:
            rows = await fill(backend)
            targets = [empty(layout, layout.num_groups) for _ in range(4)]
            for target in targets:
                with anyio.CancelScope() as scope:
                    transfer = backend.read_groups(shuffled(layout), target)
                    scope.cancel()
                    await transfer
                target[:] = 0x77
            await _pass_time(backend)
            for target in targets:
                require((target == 0x77).all(), f"a cancelled read wrote to its destination later, {layout}")
            await require_contents(backend, rows, "after cancelled reads")


async def cancelled_write_leaves_old_or_new(make: MakeBackend) -> None:
    """After a cancelled write its source is the caller's again, and each group has its old bytes or its new ones."""
    for layout in (PLAIN, PADDED):
        async with opened(make, layout) as backend:
            old = await fill(backend)
            new = payloads(layout, layout.num_groups, 70)
            source = new.copy()
            with anyio.CancelScope() as scope:
                transfer = backend.write_groups(every_id(layout), source)
                scope.cancel()
                await transfer
            source[:] = 0x77
            found = empty(layout, layout.num_groups)
            await backend.read_groups(every_id(layout), found)
            is_new = (found == new).all(axis=1)
            require_same(found[~is_new], old[~is_new], f"groups of a cancelled write, {layout}")


async def cancel_of_a_transfer(make: MakeBackend) -> None:
    """`Transfer.cancel` drops what it can: the outcome tells which requests are done, and those are right."""
    async with opened(make, PLAIN) as backend:
        rows = await fill(backend)
        target = empty(PLAIN, PLAIN.num_groups)
        transfer = backend.read_groups(every_id(PLAIN), target)
        transfer.cancel()
        transfer.cancel()
        report = await transfer.outcome()
        is_done = report.outcomes == Outcome.DONE
        allowed = {int(Outcome.DONE), int(Outcome.CANCELLED)}
        require(set(report.outcomes.tolist()) <= allowed, f"outcomes after a cancel are {report.outcomes}")
        require_same(target[is_done], rows[is_done], "requests that are DONE after a cancel")
        transfer.cancel()
        await require_contents(backend, rows, "after a cancelled transfer")


async def second_awaiter_is_not_cancelled(make: MakeBackend) -> None:
    """Of two tasks that await one transfer, cancelling one leaves the other its whole result."""
    async with opened(make, PLAIN) as backend:
        rows = await fill(backend)
        target = empty(PLAIN, PLAIN.num_groups)
        transfer = backend.read_groups(every_id(PLAIN), target)
        scope = anyio.CancelScope()

        async def give_up() -> None:
            with scope:
                await transfer

        async with anyio.create_task_group() as group:
            group.start_soon(give_up)
            await anyio.lowlevel.checkpoint()
            scope.cancel()
            report = await transfer
            require(report.is_complete, "the second awaiter was told of a cancellation")
            require_same(target, rows, "read for the second awaiter")


async def memory_outlives_the_caller(make: MakeBackend) -> None:
    """The backend keeps memory alive that the caller has dropped, and lets go of it at the end."""
    layout = PADDED
    async with opened(make, layout) as backend:
        rows = payloads(layout, layout.num_groups, 71)
        transfers = []
        for group in range(layout.num_groups):
            transfers.append(backend.write([Write(layout.key(group), rows[group].copy())]))
            transfers.append(
                backend.read([Read(layout.key(group), np.zeros(layout.payload_nbytes, np.uint8))])
            )
            gc.collect(0)
        for transfer in transfers:
            await transfer
        await require_contents(backend, rows, "written from memory that the caller dropped")


async def nobody_need_await(make: MakeBackend) -> None:
    """A transfer that the caller forgets happens all the same."""
    async with opened(make, PLAIN) as backend:
        rows = payloads(PLAIN, PLAIN.num_groups, 72)
        for group in range(PLAIN.num_groups):
            backend.write_groups([group], rows[group])
        await backend.flush()
        await require_contents(backend, rows, "after forgotten writes and a flush")


async def flush_waits_for_all_writes(make: MakeBackend) -> None:
    """`flush` returns when the writes accepted before it have landed; with nothing to do it returns too."""
    async with opened(make, PADDED) as backend:
        await backend.flush()
        rows = payloads(PADDED, PADDED.num_groups, 73)
        order = shuffled(PADDED)
        transfers = [backend.write_groups(part, rows[part]) for part in np.array_split(order, 5)]

        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(backend.flush)
        await require_contents(backend, rows, "after flush")
        for transfer in transfers:
            await transfer
        await backend.flush()


async def landing_regions(make: MakeBackend) -> None:
    """Transfers in a landing region, before, while and after it is registered, bring the same bytes."""
    layout = PLAIN
    async with opened(make, layout) as backend:
        rows = await fill(backend)
        memory = aligned_buffer(layout.num_groups * layout.payload_nbytes)
        found = np.frombuffer(memory, np.uint8).reshape(rows.shape)
        async with await backend.register_landing_region(memory):
            await backend.read_groups(every_id(layout), memory)
            require_same(found, rows, "read into a landing region")
            found[:] = payloads(layout, layout.num_groups, 74)
            await backend.write_groups(every_id(layout), memory)
            await require_contents(backend, found, "written from a landing region")
            await refuses_async(LayoutError, "the same region twice", backend.register_landing_region, memory)
            pending = backend.read_groups(every_id(layout)[::-1], memory)
        await pending
        expected = payloads(layout, layout.num_groups, 74)[::-1]
        require_same(found, expected, "read while the region closed")
        await backend.read_groups(every_id(layout)[::-1], memory)
        require_same(found, expected, "read after the region was closed")
        odd = [memory[1:], memory[: layout.payload_nbytes - 1], bytes(4096), 3]
        for wrong in odd:
            what = f"a region of {wrong!r:.40}"
            await refuses_async(LayoutError, what, backend.register_landing_region, wrong)


async def statistics_at_any_time(make: MakeBackend) -> None:
    """`statistics` answers before, between and after transfers, and after the end."""
    async with opened(make, PLAIN) as backend:
        require(backend.statistics() is not None, "no statistics")
        await fill(backend)
        require(backend.statistics() is not None, "no statistics after a write")
    require(backend.statistics() is not None, "no statistics after the end")


def _every_call(backend: AsyncStorageBackend) -> dict[str, Callable[[], Any]]:
    payload = PLAIN.payload_nbytes
    block = PLAIN.groups_per_block * payload
    return {
        "read": lambda: backend.read([Read(PLAIN.key(0), bytearray(payload))]),
        "read of nothing": lambda: backend.read([]),
        "read_groups": lambda: backend.read_groups([0, 1], bytearray(2 * payload)),
        "write": lambda: backend.write([Write(PLAIN.key(0), bytes(payload))], priority=Priority.BACKGROUND),
        "write_groups": lambda: backend.write_groups([0], bytes(payload)),
        "read_block": lambda: backend.read_block(0, 0, bytearray(block)),
        "write_block": lambda: backend.write_block(0, 0, bytes(block)),
    }


async def use_after_close(make: MakeBackend) -> None:
    """Every call on a closed backend is a `ClosedError`; closing again is not."""
    async with opened(make, PLAIN) as backend:
        await fill(backend)
        await backend.aclose()
        for name, call in _every_call(backend).items():
            refuses(ClosedError, f"{name} on a closed backend", call)
        waits: dict[str, Callable[[], Awaitable[object]]] = {
            "wait_ready": backend.wait_ready,
            "flush": backend.flush,
            "register_landing_region": lambda: backend.register_landing_region(aligned_buffer(4096)),
        }
        for name, wait in waits.items():
            await refuses_async(ClosedError, f"{name} on a closed backend", wait)
        await backend.aclose()


async def close_with_everything_in_flight(make: MakeBackend) -> None:
    """`aclose` ends every transfer, done or cancelled, and afterwards no memory is touched."""
    for layout in (PLAIN, PADDED, LARGE):
        async with opened(make, layout) as backend:
            rows = await fill(backend)
            targets = [empty(layout, layout.num_groups) for _ in range(6)]
            transfers = [backend.read_groups(shuffled(layout, i), target) for i, target in enumerate(targets)]
            await backend.aclose()
            for turn, transfer in enumerate(transfers):
                report = await transfer.outcome()
                is_done = report.outcomes == Outcome.DONE
                require(
                    set(report.outcomes[~is_done].tolist()) <= {int(Outcome.CANCELLED)},
                    f"outcomes after aclose are {report.outcomes}",
                )
                require_same(
                    targets[turn][is_done], rows[shuffled(layout, turn)][is_done], "requests that are DONE"
                )
                targets[turn][:] = 0x77
            for _ in range(_TURNS):
                await anyio.lowlevel.checkpoint()
            require(all((target == 0x77).all() for target in targets), f"written to after aclose, {layout}")


async def closing_twice_at_once(make: MakeBackend) -> None:
    """Several tasks that close at the same time all return when it is done, and awaiters are told."""
    async with opened(make, PLAIN) as backend:
        await fill(backend)
        target = empty(PLAIN, PLAIN.num_groups)
        transfer = backend.read_groups(every_id(PLAIN), target)
        ended: list[str] = []

        async def watch() -> None:
            with suppress(AioKvError):
                await transfer
            ended.append("transfer")

        async def close() -> None:
            await backend.aclose()
            target[:] = 0x77
            ended.append("close")

        async with anyio.create_task_group() as group:
            group.start_soon(watch)
            for _ in range(3):
                group.start_soon(close)
        for _ in range(_TURNS):
            await anyio.lowlevel.checkpoint()
        require(sorted(ended) == ["close", "close", "close", "transfer"], f"only {ended} ended")
        require((target == 0x77).all(), "a destination was written to after a close had returned")


def _in_a_thread(work: Callable[[], object]) -> None:
    """Run `work`, which is short, in a thread and raise what it raises. No pool of threads is left behind."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="conformance")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


async def another_thread_is_refused(make: MakeBackend) -> None:
    """A backend belongs to the loop that opened it: a call from anywhere else is a `ClosedError`."""
    async with opened(make, PLAIN) as backend:
        rows = await fill(backend)
        for name, call in _every_call(backend).items():
            _in_a_thread(partial(refuses, ClosedError, f"{name} from another thread", call))
        await require_contents(backend, rows, "after calls from another thread")


CHECKS = (
    cancelled_read_touches_nothing_afterwards,
    cancelled_write_leaves_old_or_new,
    cancel_of_a_transfer,
    second_awaiter_is_not_cancelled,
    memory_outlives_the_caller,
    nobody_need_await,
    flush_waits_for_all_writes,
    landing_regions,
    statistics_at_any_time,
    use_after_close,
    close_with_everything_in_flight,
    closing_twice_at_once,
    another_thread_is_refused,
)
