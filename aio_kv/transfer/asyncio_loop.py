"""The binding to asyncio, uvloop and every loop with their interface: one `add_reader` for all transfers.

Cancellation. A task may be cancelled natively any number of times, and no shield of a cancel scope survives
`task.cancel()`. So a wait catches every `CancelledError`, asks the transfer to drop what it can, goes on waiting until
its memory is free, and raises once. anyio scopes cancel again in every turn of the loop; the shield
around the rest of the wait keeps them from doing so in vain.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import anyio

from aio_kv.transfer.binding import Awaited, BlockingJob, foreign_loop, require_current

if TYPE_CHECKING:
    from aio_kv.transfer.dispatcher import Dispatcher

__all__ = ["AsyncioBinding"]

T = TypeVar("T")
_UNYIELDING_MAX = 8  # awaits in a row that end without giving the loop a turn: 0.4 ms of small reads at most


class AsyncioBinding:
    """asyncio and every loop with its interface."""

    def __init__(self, drain_timeout: float) -> None:
        self.loop = asyncio.get_running_loop()
        self.name = f"asyncio loop {id(self.loop):#x}"
        self.drain_timeout = drain_timeout
        self._fd = -1
        self._unyielding = 0
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself only has weak references

    def is_current(self) -> bool:
        return asyncio._get_running_loop() is self.loop

    def describe_current(self) -> str:
        loop = asyncio._get_running_loop()
        return foreign_loop() if loop is None else f"asyncio loop {id(loop):#x}"

    def time(self) -> float:
        return self.loop.time()

    def watch(self, fd: int, on_ready: Callable[[], None]) -> None:
        self._fd = fd
        self.loop.add_reader(fd, on_ready)

    async def unwatch(self) -> None:
        if self._fd >= 0:
            self.loop.remove_reader(self._fd)
            self._fd = -1

    async def wait_transfer(self, transfer: Awaited, *, until_enqueued: bool = False) -> None:
        if not transfer.is_done:
            if not self.is_current():
                require_current(self)
            transfer.dispatcher.spin(transfer)
        if transfer.is_done or (until_enqueued and transfer.is_enqueued):
            self._unyielding += 1  # as `_yield_now_and_then`, without the price of a coroutine
            if self._unyielding >= _UNYIELDING_MAX:
                self._unyielding = 0
                await asyncio.sleep(0)
            return
        self._unyielding = 0
        timer = self._deadline_timer(transfer)
        future = self.loop.create_future()
        add_waiter = transfer.add_enqueued_waiter if until_enqueued else transfer.add_waiter
        add_waiter(_waker(future))
        transfer.interest += 1
        first: BaseException | None = None
        try:
            await future
        except asyncio.CancelledError as error:
            first = error
        finally:
            if timer is not None:
                timer.cancel()
        if first is not None:
            transfer.interest -= 1
            if transfer.interest == 0:  # else somebody still wants it: only wait
                transfer.cancel()
            native = await self.wait_until(lambda: transfer.is_done, transfer.add_waiter, self.drain_timeout)
            # The first may be a cancel scope's, which would keep it, and all that is raised in its context, to itself.
            raise native or first

    async def _yield_now_and_then(self) -> None:
        # An await that has nothing to wait for must not let a loop over it starve the others; a turn of the event loop
        # costs as much as a small read, so not every one of them takes it.
        self._unyielding += 1
        if self._unyielding >= _UNYIELDING_MAX:
            self._unyielding = 0
            await asyncio.sleep(0)

    async def wait_cancellably(
        self,
        is_true: Callable[[], bool],
        subscribe: Callable[[Callable[[], None]], object],
        unsubscribe: Callable[[Callable[[], None]], object],
    ) -> None:
        if is_true():
            await self._yield_now_and_then()
        while not is_true():
            future = self.loop.create_future()
            wake = _waker(future)
            subscribe(wake)
            try:
                await future
            except asyncio.CancelledError:
                unsubscribe(wake)
                raise

    def spawn(self, work: Callable[[], Awaitable[None]]) -> None:
        async def run() -> None:
            await work()

        task = self.loop.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def wait_room(self, dispatcher: Dispatcher) -> None:
        turn = object()
        if dispatcher.may_go(turn):
            await self._yield_now_and_then()
        try:
            while not dispatcher.may_go(turn):
                future = self.loop.create_future()
                dispatcher.wait_in_line(turn, _waker(future))
                await future
        finally:
            dispatcher.leave_line(turn)

    def _deadline_timer(self, transfer: Awaited) -> asyncio.TimerHandle | None:
        # What waits for its turn outside the engine has nobody else to watch its deadline.
        dispatcher = transfer.dispatcher
        if not transfer.deadline_ns or not dispatcher.is_waiting(transfer):
            return None
        seconds = max(0.0, (transfer.deadline_ns - time.monotonic_ns()) / 1e9)
        return self.loop.call_later(seconds, dispatcher.expire, transfer)

    async def wait_until(
        self,
        is_true: Callable[[], bool],
        subscribe: Callable[[Callable[[], None]], None],
        timeout: float | None,
    ) -> BaseException | None:
        first: BaseException | None = None
        until = None if timeout is None else self.loop.time() + timeout
        while not is_true() and (until is None or self.loop.time() < until):
            future = self.loop.create_future()
            wake = _waker(future)
            subscribe(wake)
            timer = None if until is None else self.loop.call_at(until, wake)
            try:
                with anyio.CancelScope(shield=True):
                    await future
            except asyncio.CancelledError as error:
                first = first or error
            finally:
                if timer is not None:
                    timer.cancel()
        return first

    async def run_in_thread(self, work: Callable[[], T]) -> tuple[T, BaseException | None]:
        job = BlockingJob(work)

        def subscribe(wake: Callable[[], None]) -> None:
            job.on_end(lambda: self.loop.call_soon_threadsafe(wake))

        cancelled = await self.wait_until(lambda: job.is_done, subscribe, None)
        return job.result(), cancelled


def _waker(future: asyncio.Future[None]) -> Callable[[], None]:
    def wake() -> None:
        if not future.done():
            future.set_result(None)

    return wake
