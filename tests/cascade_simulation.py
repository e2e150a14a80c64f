"""A cascade on the memory backend, driven by a seed: tasks, completion orders, late copies, failures, cancellations.

Everything random comes from the seed, and everything runs in one event loop without threads or clocks, so a seed that
fails fails again:

    python tests/cascade_simulation.py --first 4711 --seeds 1

Each group holds a number, and every write writes a new one. What a read may bring follows from the order of the calls:
the number of the last write before it that succeeded, or of one behind that whose outcome was anything else. What must
be below at the end follows in the same way, except for groups that flush or close have named.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from aio_kv import (
    AioKvError,
    CascadeBackend,
    EngineOptions,
    GroupLayout,
    NotDurableError,
    Outcome,
    Priority,
    StorageError,
    TransferReport,
)
from aio_kv.cascade import slab
from aio_kv.cascade.call import Call
from aio_kv.cascade.movers import HostMover
from aio_kv.errors import storage_error
from aio_kv.policy import POLICY_NAMES
from aio_kv.positional import aligned_buffer
from aio_kv.testing import MemoryBackend, SeededScheduler

LAYOUT = GroupLayout(1, 6, 2, 1, 8, 1, alignment=512)  # 24 groups of 8 bytes, 4 to a block
OPERATIONS = 60
TASKS = 4
SHARE = 100  # seeds that a process takes at a time
T = TypeVar("T")
PRIORITIES = tuple(Priority)
TIGHT = EngineOptions(queue_depth=3, max_requests=8, max_transfers=6, drain_timeout=5.0)


class Landing(SeededScheduler):
    """Lands something in every drain: one in which nothing happens only costs time."""

    def count(self, in_flight: int) -> int:
        return max(1, super().count(in_flight))


class LateCopy:
    """A copy between slab and caller that happens as late as it likes, or, cancelled, perhaps never; a child."""

    def __init__(self, copies: LateCopies, work: Callable[[], None], count: int) -> None:
        self._copies, self._work, self._count = copies, work, count
        self._wakes: list[Callable[[], None]] = []
        self.is_done = self._is_cancelled = False
        self.outcome_of_all = Outcome.DONE

    @property
    def is_enqueued(self) -> bool:
        return self.is_done

    @property
    def report(self) -> TransferReport:
        outcomes = np.empty(self._count, np.int8)
        outcomes.fill(int(self.outcome_of_all))
        errors = ()
        if self.outcome_of_all is not Outcome.DONE:
            errors = (storage_error(125, action="copy", file="late", file_offset=None, nbytes=None),)
        return TransferReport(outcomes, 0, 0, errors)

    async def enqueued(self) -> None:
        assert self.is_done

    def cancel(self) -> None:
        self._is_cancelled = True

    def add_waiter(self, wake: Callable[[], None]) -> None:
        self._wakes.append(wake)

    def add_enqueued_waiter(self, wake: Callable[[], None]) -> None:
        self._wakes.append(wake)

    def step(self) -> None:
        if self._copies.random.random() < 0.5:
            self._copies.soon(self)
            return
        if self._is_cancelled and self._copies.random.random() < 0.7:
            self.outcome_of_all = Outcome.CANCELLED
        else:
            self._work()
        self.is_done = True
        for wake in self._wakes:
            wake()


class LateCopies:
    """Moves as a device does: not in the call, and in any order. `HostMover` says how; this says when."""

    is_late = True

    def __init__(self, inner: HostMover, seed: int) -> None:
        self._inner = inner
        self.random = random.Random(seed)

    def soon(self, copy: LateCopy) -> None:
        asyncio.get_running_loop().call_soon(copy.step)

    def load(self, call: Call, index: Any, rows: Any) -> Any:
        return self._later(lambda: self._inner.load(call, index, rows), len(index))

    def save(self, call: Call, index: Any, rows: Any) -> Any:
        return self._later(lambda: self._inner.save(call, index, rows), len(index))

    def _later(self, work: Callable[[], None], count: int) -> LateCopy:
        copy = LateCopy(self, work, count)
        self.soon(copy)
        return copy


class LateCascade(CascadeBackend):
    """A cascade whose copies are late."""

    seed = 0

    async def __aenter__(self) -> Any:
        await super().__aenter__()
        assert self._session is not None
        self._session.conductor._host_mover = LateCopies(self._session.host_mover, self.seed)
        return self

    def _read(self, session: Any, call: Call) -> Any:
        return self._start(session, call)

    def _read_one(self, group_id: int, into: Any, priority: Priority) -> Any:
        return None


@dataclass(eq=False)
class Written:
    """One write of one group; `outcome` is None until it is known."""

    number: int
    outcome: Outcome | None = None


@dataclass
class Model:
    """The writes of every group in the order of their calls."""

    history: list[list[Written]] = field(default_factory=lambda: [[] for _ in range(LAYOUT.num_groups)])
    numbers: int = 0

    def write(self, ids: Iterable[int]) -> list[Written]:
        written = []
        for group in ids:
            self.numbers += 1
            written.append(Written(self.numbers))
            self.history[group].append(written[-1])
        return written

    def before(self, ids: Iterable[int]) -> list[list[Written]]:
        return [self.history[group][:] for group in ids]

    @staticmethod
    def allowed(history: list[Written]) -> set[int]:
        numbers: set[int] = set()
        for written in reversed(history):
            numbers.add(written.number)
            if written.outcome is Outcome.DONE:
                return numbers
        return numbers | {0}


class Simulation:
    """One seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.model = Model()
        self.endings: list[asyncio.Future[None]] = []
        self.not_durable: set[int] = set()

    def make(self) -> CascadeBackend:
        choose = self.pick
        failing = choose([0.0, 0.0, 0.05, 0.3])
        self.backing = MemoryBackend(
            LAYOUT,
            scheduler=Landing(self.seed, failing=failing),
            options=choose([None, TIGHT]),
        )
        slot = choose(["block", "group"])
        kind = choose([CascadeBackend, LateCascade, LateCascade])
        per_slot = LAYOUT.groups_per_block if slot == "block" else 1
        cascade: CascadeBackend = kind(
            self.backing,
            capacity_bytes=choose([1, 2, 3, 5, 8, 12, 20]) * per_slot * LAYOUT.payload_nbytes,
            slot=slot,
            policy=choose(POLICY_NAMES),
            promote=choose([False, True]),
            dirty_limit=choose([0, 0.5, 1]),
        )
        if isinstance(cascade, LateCascade):
            cascade.seed = self.seed
        return cascade

    async def run(self) -> None:
        cascade = self.make()
        await cascade
        self.cascade = cascade
        try:
            tasks = [asyncio.ensure_future(self.work()) for _ in range(TASKS)]
            await asyncio.gather(*tasks)
            if self.random.random() < 0.5:  # else closed with whatever is in flight
                await asyncio.gather(*self.endings)
                await self.flush()
                assert cascade._session is not None
                assert cascade._session.cache.counts().leases == 0
        finally:
            session = cascade._session
            await self.close()
            await asyncio.gather(*self.endings)
        assert session is not None
        session.cache.check_invariants()
        assert session.cache.counts().leases == 0, "a lease was left"
        self.check_below()

    def pick(self, choices: Sequence[T]) -> T:
        """One of several; `random.choice` takes care of more than is needed here."""
        return choices[int(self.random.random() * len(choices))]

    async def work(self) -> None:
        for _ in range(OPERATIONS // TASKS):
            await self.step()

    async def step(self) -> None:
        kind = self.random.random()
        if kind < 0.45:
            await self.write()
        elif kind < 0.93:
            await self.read()
        elif kind < 0.95:
            await self.flush()
        elif kind < 0.97:
            await self.cascade.wait_ready()
        for _ in range(self.pick([0, 0, 0, 1, 2])):
            await asyncio.sleep(0)

    def some_groups(self) -> list[int]:
        if self.random.random() < 0.2:
            first = self.random.randrange(LAYOUT.num_blocks) * LAYOUT.groups_per_block
            return list(range(first, first + LAYOUT.groups_per_block))
        hot = self.pick([4, 8, LAYOUT.num_groups])
        count = self.pick([1, 1, 1, 2, 4])
        return [self.pick(range(hot))] if count == 1 else self.random.sample(range(hot), count)

    async def write(self) -> None:
        ids = self.some_groups()
        numbers = np.arange(self.model.numbers + 1, self.model.numbers + 1 + len(ids))
        try:
            transfer = self.cascade.write_groups(ids, numbers, priority=self.pick(PRIORITIES))
        except AioKvError:
            return  # refused: nothing of it happens
        written = self.model.write(ids)

        def note(report: TransferReport) -> None:
            for one, outcome in zip(written, report.outcomes.tolist(), strict=True):
                one.outcome = Outcome(outcome)

        await self.finish(transfer, note)

    async def read(self) -> None:
        ids = self.some_groups()
        ids += ids[: self.pick([0, 0, 1])]
        found = np.empty(len(ids), np.int64)
        try:
            transfer = self.cascade.read_groups(ids, found, priority=self.pick(PRIORITIES))
        except AioKvError:
            return
        before = self.model.before(ids)

        def check(report: TransferReport) -> None:
            for index, outcome in enumerate(report.outcomes.tolist()):
                if outcome == Outcome.DONE:
                    allowed = Model.allowed(before[index])
                    assert int(found[index]) in allowed, (ids[index], int(found[index]), allowed)
            found[:] = -7  # a copy that came now would be seen by nobody, but it would crash or corrupt

        await self.finish(transfer, check)

    async def finish(self, transfer: Any, note: Callable[[TransferReport], None]) -> None:
        """Await a transfer now, or later, or cancel it, or its awaiter."""
        how = self.random.random()

        async def end() -> None:
            note(await transfer.outcome())

        if how < 0.4:
            await end()
            return
        if how >= 0.65:
            self.tell(transfer, note)
            return
        self.endings.append(asyncio.ensure_future(end()))
        if how < 0.55:
            for _ in range(self.pick([0, 1, 4])):
                await asyncio.sleep(0)
            transfer.cancel()
        else:
            awaiter = asyncio.ensure_future(transfer.outcome())
            await asyncio.sleep(0)
            awaiter.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await awaiter

    def tell(self, transfer: Any, note: Callable[[TransferReport], None]) -> None:
        """Have a transfer that nobody awaits noted at its end."""
        told = asyncio.get_running_loop().create_future()
        self.endings.append(told)

        def ended() -> None:
            try:
                note(transfer.report)
            except AssertionError as error:  # not into the backend, which has called this
                told.set_exception(error)
            else:
                told.set_result(None)

        if transfer.is_done:
            ended()
        else:
            transfer.add_waiter(ended)

    async def flush(self) -> None:
        due = [
            (group, one.number)
            for group, history in enumerate(self.model.history)
            if history and (one := history[-1]).outcome is Outcome.DONE
        ]
        try:
            await self.cascade.flush()
        except NotDurableError as error:
            named = set(error.group_ids)
        except StorageError:
            named = set()  # as in `close`
        else:
            named = set()
        for group, number in due:
            if group not in named:
                below = self.below(group)
                later = {one.number for one in self.model.history[group] if one.number >= number}
                assert below in later, (group, below, number, "flush returned without it")

    async def close(self) -> None:
        try:
            await self.cascade.aclose()
        except NotDurableError as error:
            self.not_durable = set(error.group_ids)
        except StorageError:
            pass  # the sync of a file to which nothing came down failed: there is no group to name

    def below(self, group: int) -> int:
        start = group * LAYOUT.stride
        return int.from_bytes(self.backing.memory_files.layer(0)[start : start + 8], "little")

    def check_below(self) -> None:
        for group, history in enumerate(self.model.history):
            if group not in self.not_durable:
                assert self.below(group) in Model.allowed(history), (group, self.below(group))


async def run_seeds(first: int, count: int) -> None:
    """Run seeds one after the other; a failure names its seed."""
    logging.getLogger("aio_kv").setLevel(logging.CRITICAL)  # failures and drops are what it is about
    gc.disable()  # half of the time would go into looking for cycles
    try:
        for seed in range(first, first + count):
            if seed % 25 == 24:  # what is left of each seed, its slab included, would not fit into any cache
                gc.collect(0)
            try:
                async with asyncio.timeout(20):
                    await Simulation(seed).run()
            except BaseException as error:
                error.add_note(f"python tests/cascade_simulation.py --first {seed} --seeds 1")
                raise
    finally:
        gc.enable()
        logging.getLogger("aio_kv").setLevel(logging.NOTSET)


def run_seeds_alone(first: int, count: int) -> None:
    """The same in an event loop, and a process, of its own."""
    slab.allocate_host = (
        aligned_buffer  # a huge page for each seed's few slots would be zeroed through the whole cache
    )
    asyncio.run(run_seeds(first, count))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    given = parser.parse_args()
    began = time.perf_counter()
    end = given.first + given.seeds
    # Small shares, so that nobody waits long for the last one.
    shares = [(first, min(SHARE, end - first)) for first in range(given.first, end, SHARE)]
    workers = max(1, min(given.processes, len(shares)))
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        pool.starmap(run_seeds_alone, shares, chunksize=1)
    print(f"{given.seeds} seeds of {OPERATIONS} operations: {time.perf_counter() - began:.1f} s")
