"""Everything is bounded: transfers at a time, I/Os in the engine, requests in a call; and waiting for room is fair."""

from __future__ import annotations

import contextlib
import itertools
import resource
import time
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from backends import make_backend
from loops import every_loop, on_one_loop
from slow_devices import PADDED, WHOLE, memory_backend, slow_backend

from aio_kv import BusyError, ClosedError, EngineOptions, GroupLayout, LayoutError, Read, Scatter, protocols
from aio_kv.positional import aligned_buffer
from aio_kv.testing import MemoryBackend


def one(backend: MemoryBackend, group: int = 0) -> Any:
    return backend.read_groups([group], bytearray(105))


@every_loop
async def test_more_than_max_transfers_are_refused() -> None:
    async with memory_backend(PADDED, max_transfers=3) as backend:
        backend.pause()
        transfers = [one(backend, group) for group in range(3)]
        for _ in range(2):
            with pytest.raises(BusyError, match=r"3 transfers are in flight \(max_transfers\)"):
                one(backend)
            with pytest.raises(BusyError):
                backend.read([Read(PADDED.key(1), bytearray(105))])
        assert backend.statistics().transfers.refused == 4
        backend.resume()
        for transfer in transfers:
            await transfer
        await one(backend)


@every_loop
async def test_waiting_for_room_is_first_come_first_served() -> None:
    """Six tasks want room for one transfer each, and get it in the order in which they asked."""
    async with memory_backend(PADDED, max_transfers=1) as backend:
        order: list[int] = []

        async def work(task: int) -> None:
            await backend.wait_ready()
            transfer = one(backend)
            order.append(task)
            await transfer

        async with anyio.create_task_group() as group:
            backend.pause()
            first = one(backend)
            for task in range(6):
                group.start_soon(work, task)
                await anyio.lowlevel.checkpoint()
            assert order == []
            backend.resume()
        assert order == list(range(6))
        await first


@every_loop
async def test_room_that_a_waiter_does_not_use_goes_to_the_next() -> None:
    """Somebody who only asks, and starts nothing, must not leave the others asleep beside free room."""
    async with memory_backend(PADDED, max_transfers=1) as backend:
        backend.pause()
        transfer = one(backend)
        ended: list[int] = []

        async def ask(task: int) -> None:
            await backend.wait_ready()
            ended.append(task)

        with anyio.fail_after(5):
            async with anyio.create_task_group() as group:
                for task in range(4):
                    group.start_soon(ask, task)
                    await anyio.lowlevel.checkpoint()
                backend.resume()
        assert ended == [0, 1, 2, 3]
        await transfer


@every_loop
async def test_a_cancelled_waiter_passes_its_turn_on() -> None:
    """Also when the turn and the cancellation come at the same time."""
    async with memory_backend(PADDED, max_transfers=1) as backend:
        backend.pause()
        transfer = one(backend)
        scope = anyio.CancelScope()
        ended: list[str] = []

        async def give_up() -> None:
            with scope:
                await backend.wait_ready()
                ended.append("cancelled")

        async def go_on() -> None:
            await backend.wait_ready()
            ended.append("next")

        async def release() -> None:
            await transfer
            scope.cancel()  # its turn has been announced in this very turn of the loop

        with anyio.fail_after(5):
            async with anyio.create_task_group() as group:
                group.start_soon(release)
                await anyio.lowlevel.checkpoint()
                group.start_soon(give_up)
                await anyio.lowlevel.checkpoint()
                group.start_soon(go_on)
                await anyio.lowlevel.checkpoint()
                backend.resume()
        assert "next" in ended


@every_loop
async def test_whoever_finds_the_room_taken_keeps_its_place() -> None:
    """A call without `wait_ready` may be quicker; the queue behind it stays in order."""
    async with memory_backend(PADDED, max_transfers=1) as backend:
        backend.pause()
        first = one(backend)
        order: list[int] = []

        async def work(task: int) -> None:
            await backend.wait_ready()
            order.append(task)
            await one(backend)

        async def barge() -> None:
            await first
            with contextlib.suppress(
                BusyError
            ):  # trio wakes in any order: then the first in line was quicker
                await one(backend)

        async with anyio.create_task_group() as group:
            group.start_soon(barge)
            await anyio.lowlevel.checkpoint()
            for task in range(3):
                group.start_soon(work, task)
                await anyio.lowlevel.checkpoint()
            backend.resume()
        assert order == [0, 1, 2]


@every_loop
async def test_close_wakes_those_who_wait_for_room() -> None:
    async with memory_backend(PADDED, max_transfers=1) as backend:
        backend.pause()
        transfer = one(backend)
        refused: list[int] = []

        async def work() -> None:
            try:
                await backend.wait_ready()
            except ClosedError:
                refused.append(1)

        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(work)
            await anyio.lowlevel.checkpoint()
            await anyio.lowlevel.checkpoint()
            group.start_soon(backend.aclose)
            with anyio.fail_after(0.9):  # before the close gives the device up
                while len(refused) < 3:
                    await anyio.lowlevel.checkpoint()
            assert not transfer.is_done
            backend.resume()
        await transfer.outcome()


@every_loop
@pytest.mark.parametrize("kind", ["uring", "threads", "python", "memory"])
async def test_a_storm_of_tasks_within_tight_bounds(kind: str, tmp_path: Path) -> None:
    """Sixty tasks, four transfers at a time, two requests in the engine: everybody is served."""
    make = make_backend(kind, tmp_path, max_transfers=4, max_requests=2)
    async with make(PADDED) as backend:
        served: list[int] = []

        async def work(task: int) -> None:
            target = bytearray(3 * 105)
            await backend.wait_ready()
            await backend.read_groups([task % 60, (task + 2) % 60, (task + 4) % 60], target)
            served.append(task)

        with anyio.fail_after(30):
            async with anyio.create_task_group() as group:
                for task in range(60):
                    group.start_soon(work, task)
        assert len(served) == 60


@every_loop
async def test_regions_are_registered_and_forgotten_by_a_full_engine(tmp_path: Path) -> None:
    """The engine has no record free for the order at first: it waits for one, and nothing stays half registered."""
    memory = aligned_buffer(4096)
    async with slow_backend("uring", tmp_path, WHOLE, rings=4, max_transfers=1, delay_us=5000) as backend:
        for _ in range(2):
            transfer = backend.read_groups(np.arange(0, 64, 3), aligned_buffer(22 * 4096))
            region = await backend.register_landing_region(memory)
            assert region.is_registered
            await transfer
            transfer = backend.read_groups(np.arange(0, 64, 3), aligned_buffer(22 * 4096))
            await region.aclose()
            await transfer
        assert backend.statistics().landing_regions == 0


HUGE = 2**31


def huge_calls(backend: MemoryBackend) -> dict[str, Any]:
    """Calls that name 2**31 requests without having the memory for them."""
    ids = np.broadcast_to(np.int64(1), HUGE)
    small = np.broadcast_to(np.int8(1), HUGE)
    key = Read(backend.layout.key(1), bytearray(105))
    memory = bytearray(105)
    return {
        "an array that repeats one element": lambda: backend.read_groups(ids, memory),
        "an array of small integers": lambda: backend.read_groups(small, memory),
        "a range": lambda: backend.read_groups(range(HUGE), memory),
        "a range within the layout": lambda: backend.read_groups(range(0, backend.layout.num_groups), memory),
        "as many offsets": lambda: backend.read_groups(ids, Scatter(memory, ids)),
        "a write": lambda: backend.write_groups(ids, memory),
        "requests without end": lambda: backend.read(itertools.repeat(key)),
        "requests by the million": lambda: backend.read(itertools.repeat(key, HUGE)),
    }


@on_one_loop
@pytest.mark.parametrize("call", list(huge_calls(MemoryBackend(PADDED))))
async def test_two_billion_requests_are_refused_at_once(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clear error and within bounded time and memory, not by filling the memory of the machine."""
    monkeypatch.setattr(protocols, "REQUESTS_PER_CALL_MAX", 1000)  # a million take their second or two
    layout = GroupLayout(1, 2**32, 1, 3, 7, 5)
    async with MemoryBackend(layout, options=EngineOptions(max_requests=16)) as backend:
        with bounded_cost(), pytest.raises(LayoutError, match="at most"):
            huge_calls(backend)[call]()
        await backend.read_groups([], bytearray())


class bounded_cost:
    """Fails where the body takes more than a few seconds or a few hundred megabytes.

    The address space is bounded as well, so that a mistake costs a MemoryError and not the machine.
    """

    def __enter__(self) -> None:
        self.started, self.peak = time.monotonic(), peak_nbytes()
        self.limits = resource.getrlimit(resource.RLIMIT_AS)
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + (2 << 30), self.limits[1]))

    def __exit__(self, *exception: object) -> None:
        resource.setrlimit(resource.RLIMIT_AS, self.limits)
        assert time.monotonic() - self.started < 10
        assert peak_nbytes() - self.peak < 600 << 20


def peak_nbytes() -> int:
    """The largest resident size that this process has had."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    return 0
