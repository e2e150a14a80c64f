"""What a backend needs from an event loop, and blocking work beside one. Knows neither asyncio nor trio."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import sniffio

from aio_kv.errors import ClosedError

if TYPE_CHECKING:
    from aio_kv.transfer.dispatcher import Dispatcher

__all__ = ["Awaited", "BlockingJob", "Keeper", "LoopBinding", "foreign_loop", "require_current"]

T = TypeVar("T")


class Keeper(Protocol):
    """Who starts and ends transfers, as far as waiting for them goes: see `Dispatcher`."""

    def spin(self, transfer: Any) -> None:
        """Look for the end of a small transfer for a moment."""

    def is_waiting(self, transfer: Any) -> bool:
        """Whether some of it waits for its turn, where nobody watches its deadline."""

    def expire(self, transfer: Any) -> None:
        """Its deadline has passed."""


class Awaited(Protocol):
    """A transfer, as far as waiting for it goes: see `Transfer`."""

    interest: int

    @property
    def dispatcher(self) -> Keeper:
        """Who has it."""

    @property
    def is_done(self) -> bool:
        """Whether nothing of it is in flight."""

    @property
    def is_enqueued(self) -> bool:
        """Whether all of its copies are on a stream."""

    @property
    def deadline_ns(self) -> int:
        """On CLOCK_MONOTONIC, 0 for none."""

    def cancel(self) -> None:
        """Drop what has not begun."""

    def add_waiter(self, wake: Callable[[], None]) -> None:
        """Have `wake` called at the end."""

    def add_enqueued_waiter(self, wake: Callable[[], None]) -> None:
        """Have `wake` called when `is_enqueued` turns true."""


class LoopBinding(Protocol):
    """What backends need from the event loop they were opened in."""

    name: str
    drain_timeout: float

    def is_current(self) -> bool:
        """Whether the caller runs in this loop."""

    def describe_current(self) -> str:
        """Name the loop the caller runs in, for an error message."""

    def time(self) -> float:
        """The loop's clock in seconds, the clock of deadlines."""

    def watch(self, fd: int, on_ready: Callable[[], None]) -> None:
        """Call `on_ready` in the loop whenever `fd` is readable, until `unwatch`."""

    async def unwatch(self) -> None:
        """End `watch`; waits until no call is under way."""

    async def wait_transfer(self, transfer: Awaited, *, until_enqueued: bool = False) -> None:
        """Wait until a transfer is done, or enqueued; cancelled, ask it to drop what it can and still wait."""

    def spawn(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run `work`, which does not raise, as a task of its own; whoever has it spawned waits for its end."""

    async def wait_room(self, dispatcher: Dispatcher) -> None:
        """Wait until the dispatcher has room for a transfer; an ordinary, cancellable wait."""

    async def wait_cancellably(
        self,
        is_true: Callable[[], bool],
        subscribe: Callable[[Callable[[], None]], object],
        unsubscribe: Callable[[Callable[[], None]], object],
    ) -> None:
        """Wait for `is_true`, an ordinary wait: cancelled, it calls `unsubscribe(wake)` and raises at once.

        `subscribe(wake)` is called before each wait and must have `wake` called when the answer may have changed.
        """

    async def wait_until(
        self,
        is_true: Callable[[], bool],
        subscribe: Callable[[Callable[[], None]], None],
        timeout: float | None,
    ) -> BaseException | None:
        """Wait for `is_true` through any number of cancellations; returns the first one, to be raised by the caller.

        `subscribe(wake)` is called before each wait and must have `wake` called when the answer may have changed.
        Returns too when `timeout` seconds have passed.
        """

    async def run_in_thread(self, work: Callable[[], T]) -> tuple[T, BaseException | None]:
        """Run `work` in a new thread and wait for its end through any number of cancellations."""


def foreign_loop() -> str:
    """Name what runs here, for a binding that does not know it."""
    try:
        return f"a loop of {sniffio.current_async_library()}"
    except sniffio.AsyncLibraryNotFoundError:
        return "no event loop"


def require_current(binding: LoopBinding) -> None:
    """Raise `ClosedError` naming both loops unless the caller runs in the one of `binding`."""
    if not binding.is_current():
        raise ClosedError(
            f"the backend belongs to {binding.name} and was called from {binding.describe_current()}: "
            "open one backend per loop; they may share LayerFiles"
        )


class BlockingJob:
    """Blocking work in a thread of its own. Ends with the work: no pool outlives a backend."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._wakes: list[Callable[[], object]] = []
        self._value: Any = None
        self._error: BaseException | None = None
        self.is_done = False
        self._thread = threading.Thread(target=self._run, name="aio_kv-blocking")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._work()
        except BaseException as error:
            self._error = error
        with self._lock:
            self.is_done = True
            wakes, self._wakes = self._wakes, []
        for wake in wakes:
            wake()

    def on_end(self, wake: Callable[[], object]) -> None:
        """Have `wake` called, in the thread or now, when the work has ended."""
        with self._lock:
            if not self.is_done:
                self._wakes.append(wake)
                return
        wake()

    def result(self) -> Any:
        """The value of the work; raises what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._value
