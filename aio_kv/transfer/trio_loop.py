"""The trio binding; imported only where trio runs."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import trio

from aio_kv.transfer.binding import Awaited, BlockingJob, foreign_loop, require_current

if TYPE_CHECKING:
    from aio_kv.transfer.dispatcher import Dispatcher

__all__ = ["TrioBinding"]

T = TypeVar("T")


class TrioBinding:
    """trio: one system task waits for the engine's descriptor; awaits are shielded while memory is in use."""

    def __init__(self, drain_timeout: float) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self.name = f"trio run {id(self._token):#x}"
        self.drain_timeout = drain_timeout
        self._scope: trio.CancelScope | None = None
        self._has_ended: trio.Event | None = None

    def is_current(self) -> bool:
        try:
            return trio.lowlevel.current_trio_token() is self._token
        except RuntimeError:
            return False

    def describe_current(self) -> str:
        try:
            return f"trio run {id(trio.lowlevel.current_trio_token()):#x}"
        except RuntimeError:
            return foreign_loop()

    def time(self) -> float:
        return trio.current_time()

    def watch(self, fd: int, on_ready: Callable[[], None]) -> None:
        self._scope = trio.CancelScope()
        self._has_ended = trio.Event()
        trio.lowlevel.spawn_system_task(self._watch, fd, on_ready, self._scope, self._has_ended)

    async def _watch(
        self, fd: int, on_ready: Callable[[], None], scope: trio.CancelScope, has_ended: trio.Event
    ) -> None:
        with scope:
            while True:
                await trio.lowlevel.wait_readable(fd)
                on_ready()
        has_ended.set()

    async def unwatch(self) -> None:
        if self._scope is None or self._has_ended is None:
            return
        self._scope.cancel()
        with trio.CancelScope(shield=True):
            await self._has_ended.wait()
        self._scope = None

    async def wait_transfer(self, transfer: Awaited, *, until_enqueued: bool = False) -> None:
        if not transfer.is_done:
            require_current(self)
            transfer.dispatcher.spin(transfer)
        if transfer.is_done or (until_enqueued and transfer.is_enqueued):
            await trio.lowlevel.checkpoint()
            return
        event = trio.Event()
        add_waiter = transfer.add_enqueued_waiter if until_enqueued else transfer.add_waiter
        add_waiter(event.set)
        transfer.interest += 1
        try:
            if transfer.deadline_ns and transfer.dispatcher.is_waiting(transfer):
                # What waits for its turn outside the engine has nobody else to watch its deadline.
                with trio.move_on_after(max(0.0, (transfer.deadline_ns - time.monotonic_ns()) / 1e9)):
                    await event.wait()
                transfer.dispatcher.expire(transfer)
            await event.wait()
        except trio.Cancelled:
            transfer.interest -= 1
            if transfer.interest == 0:  # else somebody still wants it: only wait
                transfer.cancel()
            await self.wait_until(lambda: transfer.is_done, transfer.add_waiter, self.drain_timeout)
            raise

    async def wait_cancellably(
        self,
        is_true: Callable[[], bool],
        subscribe: Callable[[Callable[[], None]], object],
        unsubscribe: Callable[[Callable[[], None]], object],
    ) -> None:
        await trio.lowlevel.checkpoint()
        while not is_true():
            event = trio.Event()
            wake = event.set
            subscribe(wake)
            try:
                await event.wait()
            except trio.Cancelled:
                unsubscribe(wake)
                raise

    def spawn(self, work: Callable[[], Awaitable[None]]) -> None:
        trio.lowlevel.spawn_system_task(work)

    async def wait_room(self, dispatcher: Dispatcher) -> None:
        await trio.lowlevel.checkpoint()
        turn = object()
        try:
            while not dispatcher.may_go(turn):
                event = trio.Event()
                dispatcher.wait_in_line(turn, event.set)
                await event.wait()
        finally:
            dispatcher.leave_line(turn)

    async def wait_until(
        self,
        is_true: Callable[[], bool],
        subscribe: Callable[[Callable[[], None]], None],
        timeout: float | None,
    ) -> BaseException | None:
        with trio.CancelScope(
            shield=True, deadline=trio.current_time() + (float("inf") if timeout is None else timeout)
        ):
            while not is_true():
                event = trio.Event()
                subscribe(event.set)
                await event.wait()
        return None

    async def run_in_thread(self, work: Callable[[], T]) -> tuple[T, BaseException | None]:
        job = BlockingJob(work)

        def subscribe(wake: Callable[[], None]) -> None:
            job.on_end(lambda: self._token.run_sync_soon(wake))

        await self.wait_until(lambda: job.is_done, subscribe, None)
        return job.result(), None
