"""Things that only a task can wait for, done in one, and transfers of backends that cannot tell when they end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from aio_kv.transfer import LoopBinding, TransferReport

__all__ = ["Child", "Errand", "child_of"]


class Errand:
    """`work` in a task of its own, which the one who has it must wait for with `wait` or `on_end`."""

    def __init__(self, binding: LoopBinding, work: Callable[[], Awaitable[Any]]) -> None:
        self._binding = binding
        self._work = work
        self._wakes: list[Callable[[], None]] = []
        self.is_done = False
        self.value: Any = None
        self.error: BaseException | None = None
        binding.spawn(self._run)

    async def _run(self) -> None:
        try:
            self.value = await self._work()
        except Exception as error:
            self.error = error  # raised by whoever waits for it
        except BaseException as error:  # the loop ends
            self.error = error
            raise
        finally:
            self.is_done = True
            wakes, self._wakes = self._wakes, []
            for wake in wakes:
                wake()

    def on_end(self, wake: Callable[[], None]) -> None:
        """Have `wake` called once at the end."""
        self._wakes.append(wake)

    async def wait(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end through any number of cancellations, or `timeout` seconds; returns the first of them."""
        return await self._binding.wait_until(lambda: self.is_done, self.on_end, timeout)


class Child(Protocol):
    """A transfer of a backing, as far as a cascade needs it."""

    @property
    def is_done(self) -> bool:
        """Whether nothing of it is in flight."""

    @property
    def is_enqueued(self) -> bool:
        """Whether all of its copies are on a stream."""

    @property
    def report(self) -> TransferReport:
        """What became of it, when it is done."""

    async def enqueued(self) -> None:
        """Make the caller's stream wait for the copies."""

    def cancel(self) -> None:
        """Drop what has not begun."""

    def add_waiter(self, wake: Callable[[], None]) -> None:
        """Have `wake` called at the end."""

    def add_enqueued_waiter(self, wake: Callable[[], None]) -> None:
        """Have `wake` called when `is_enqueued` turns true."""


class _Watched:
    """A transfer that can only be awaited, awaited in a task."""

    def __init__(self, transfer: Any, binding: LoopBinding) -> None:
        self._transfer = transfer
        self._errand = Errand(binding, transfer.outcome)

    @property
    def is_done(self) -> bool:
        """See `Child`."""
        return self._errand.is_done

    @property
    def is_enqueued(self) -> bool:
        """See `Child`."""
        return self._errand.is_done

    @property
    def report(self) -> TransferReport:
        """See `Child`. Raises what the transfer raised."""
        if self._errand.error is not None:
            raise self._errand.error
        report: TransferReport = self._errand.value
        return report

    async def enqueued(self) -> None:
        """See `Child`."""
        await self._transfer.enqueued()

    def cancel(self) -> None:
        """See `Child`."""
        self._transfer.cancel()

    def add_waiter(self, wake: Callable[[], None]) -> None:
        """See `Child`."""
        self._errand.on_end(wake)

    def add_enqueued_waiter(self, wake: Callable[[], None]) -> None:
        """See `Child`."""
        self._errand.on_end(wake)


def child_of(transfer: Any, binding: LoopBinding) -> Child:
    """The transfer itself if it tells when it ends, or somebody who awaits it."""
    if hasattr(transfer, "add_waiter") and hasattr(transfer, "add_enqueued_waiter"):
        child: Child = transfer
        return child
    return _Watched(transfer, binding)
