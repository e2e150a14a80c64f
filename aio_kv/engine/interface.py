"""What the layers above ask of an engine; `Engine` documents each method."""

from __future__ import annotations

from typing import Protocol

from aio_kv.engine.batch import Batch, Kind, Ticket
from aio_kv.engine.options import EngineOptions
from aio_kv.engine.statistics import EngineStatistics, RingInfo

__all__ = ["IoEngine"]


class IoEngine(Protocol):
    """The native engine, the one of Python threads, the one of tests: batches in, finished tickets out."""

    options: EngineOptions

    def submit(self, batch: Batch, *, tag: object = None) -> Ticket:
        """Hand a batch over."""

    def rouse(self) -> None:
        """A batch will be submitted within microseconds: get ready for it."""

    def submit_region(
        self, kind: Kind, address: int, nbytes: int, *, ring: int, tag: object = None, device_address: int = 0
    ) -> Ticket:
        """Register memory with a ring, or forget it."""

    def drain(self, within_us: int = 0) -> list[Ticket]:
        """Collect the tickets that have finished, or look for some for a moment."""

    def fileno(self) -> int:
        """A descriptor that polls readable when `drain` has something, or when the engine has stopped."""

    def wait(self, ticket: Ticket, timeout: float | None = None) -> bool:
        """Wait for a ticket without an event loop."""

    def cancel(self, ticket: Ticket) -> None:
        """Drop what has not begun."""

    def stop(self) -> None:
        """Refuse new batches and drop what has not begun."""

    @property
    def is_stopped(self) -> bool:
        """Whether nothing is in flight any more and nothing will be."""

    @property
    def is_closed(self) -> bool:
        """Whether the engine's memory has been given back."""

    def close(self, timeout: float | None = None) -> bool:
        """Stop, wait for the device, give everything back; False if it does not answer in time."""

    def statistics(self) -> EngineStatistics:
        """Counters since the engine opened."""

    def ring_info(self, ring: int = 0) -> RingInfo:
        """What a ring got from the kernel."""
