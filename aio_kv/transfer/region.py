"""Landing regions: callers' memory that the ring knows, so that I/O on it needs no staging and no page pinning."""

from __future__ import annotations

import errno
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from aio_kv.engine import CUDA_ERROR, Engine, Kind, Ticket
from aio_kv.errors import BusyError, ClosedError, LayoutError
from aio_kv.memory import HostMemory

if TYPE_CHECKING:
    from aio_kv.transfer.dispatcher import Dispatcher
    from aio_kv.transfer.transfer import Transfer

__all__ = ["LandingRegion", "RegionTable"]

_PAGE = 4096

# Pins of memory on which a fault of the device has left copies that may still run: never given back, nor the memory.
_leaked: list[object] = []


class Pin(Protocol):
    """The registration of host memory with a GPU."""

    def device_address(self, offset: int = 0) -> int:
        """Where the device sees the byte at `offset`."""

    def close(self) -> None:
        """Unregister."""


class LandingRegion:
    """Host memory registered with a backend. Made by `register_landing_region`; an async context manager.

    The memory stays the caller's. It must not be freed before `aclose` has returned, which waits for the transfers
    on it; the region itself keeps a reference to the memory's owner until then.
    """

    def __init__(self, memory: HostMemory, table: RegionTable) -> None:
        self._memory: HostMemory | None = memory
        self._table = table
        self._users: set[Transfer] = set()
        self._wakes: list[Callable[[], None]] = []
        self.address = memory.address
        self.nbytes = memory.nbytes
        self.is_registered = False
        self.refusal = 0
        self.pin: Pin | None = None

    @property
    def is_closed(self) -> bool:
        """Whether the region has been given back."""
        return self._memory is None

    def abandon(self) -> None:
        """Keep the pin and the memory for ever: hardware may still use them."""
        _leaked.append((self.pin, self._memory))
        self.pin = None

    def covers(self, first: int, last: int) -> bool:
        """Whether any byte of [first, last] lies in the region."""
        return first < self.address + self.nbytes and last >= self.address

    def use(self, transfer: Transfer) -> None:
        """Count a transfer whose memory lies here; it calls `release` when it is done."""
        self._users.add(transfer)

    def release(self, transfer: Transfer) -> None:
        """The transfer is done."""
        self._users.discard(transfer)
        if not self._users:
            self.wake_waiters()

    def wake_waiters(self) -> None:
        """Have everybody who waits for the region look again."""
        wakes, self._wakes = self._wakes, []
        for wake in wakes:
            wake()

    async def aclose(self) -> None:
        """Wait for the transfers on the region, then have the ring forget it; again does nothing.

        Cancelled, it finishes all the same and then raises.
        """
        await self._table.remove(self)

    async def __aenter__(self) -> LandingRegion:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class RegionTable:
    """The landing regions of one backend."""

    def __init__(self, dispatcher: Dispatcher, pin: Callable[[HostMemory], Pin] | None = None) -> None:
        self._dispatcher = dispatcher
        self._engine = dispatcher.engine
        self._binding = dispatcher.binding
        self._pin = pin  # blocking: run in a thread
        self.regions: list[LandingRegion] = []

    def covering(self, first: int, last: int) -> tuple[LandingRegion, ...]:
        """The regions that hold any byte of [first, last]."""
        return tuple(region for region in self.regions if region.covers(first, last))

    def abandon(self) -> None:
        """Have no region give back its pin any more: the device was lost, or copies have not ended."""
        for region in self.regions:
            if region.pin is not None:
                region.abandon()

    async def add(self, memory: HostMemory) -> LandingRegion:
        """Register memory with every ring. Raises `LayoutError` for misaligned or overlapping memory."""
        if memory.nbytes == 0 or memory.address % _PAGE or memory.nbytes % _PAGE:
            raise LayoutError(
                f"landing region at {memory.address:#x} of {memory.nbytes} bytes: address and length must be multiples "
                f"of {_PAGE}; aio_kv.allocate_host gives such memory"
            )
        for other in self.regions:
            if other.covers(memory.address, memory.address + memory.nbytes - 1):
                raise LayoutError(
                    f"landing region at {memory.address:#x} overlaps one that is registered already"
                )
        region = LandingRegion(memory, self)
        self.regions.append(region)  # before the first wait: a second call must see it
        try:
            cancelled = await self._pin_memory(region, memory)
            again = await self._command(region, Kind.REGION_ADD)
        except BaseException:
            self.regions.remove(region)
            await self._unpin(region)
            raise
        cancelled = cancelled or again
        if cancelled is not None:
            await self.remove(region)
            raise cancelled
        return region

    async def _pin_memory(self, region: LandingRegion, memory: HostMemory) -> BaseException | None:
        pin = self._pin
        if pin is None:
            return None
        region.pin, cancelled = await self._binding.run_in_thread(lambda: pin(memory))
        return cancelled

    async def _unpin(self, region: LandingRegion) -> BaseException | None:
        pin, region.pin = region.pin, None
        if pin is None:
            return None
        _, cancelled = await self._binding.run_in_thread(pin.close)
        return cancelled

    async def _command(self, region: LandingRegion, kind: Kind) -> BaseException | None:
        wakes: list[Callable[[], None]] = []
        rings = self._engine.options.rings if isinstance(self._engine, Engine) else 1

        tickets: list[Ticket] = []

        def on_done() -> None:
            while wakes:
                wakes.pop()()

        device_address = region.pin.device_address() if region.pin is not None else 0

        def is_accepted() -> bool:
            try:
                while len(tickets) < rings:
                    tickets.append(
                        self._engine.submit_region(
                            kind,
                            region.address,
                            region.nbytes,
                            ring=len(tickets),
                            tag=on_done,
                            device_address=device_address,
                        )
                    )
            except BusyError:  # it holds as many batches as it may: one more fits after a drain
                return False
            return True

        first = await self._binding.wait_until(is_accepted, self._dispatcher.on_drain, None)
        again = await self._binding.wait_until(
            lambda: all(ticket.is_done for ticket in tickets), wakes.append, None
        )
        cancelled = first or again
        if kind is Kind.REGION_ADD:
            region.refusal = next((-ticket.status for ticket in tickets if ticket.status), 0)
            region.is_registered = region.refusal == 0
        elif any(ticket.status <= -CUDA_ERROR for ticket in tickets):
            region.abandon()
        return cancelled

    async def remove(self, region: LandingRegion) -> None:
        """Forget a region once nothing uses it."""
        if region.is_closed:
            return
        cancelled = await self._binding.wait_until(
            lambda: not region._users, lambda wake: region._wakes.append(wake), None
        )
        if region in self.regions:
            self.regions.remove(region)
            again = await self._forget(region)
            cancelled = cancelled or again
            again = await self._unpin(region)
            region._memory = None
            region.wake_waiters()
        else:  # somebody else is about to end it: the memory is the caller's when that is over
            again = await self._binding.wait_until(
                lambda: region.is_closed, lambda wake: region._wakes.append(wake), None
            )
        cancelled = cancelled or again
        if cancelled is not None:
            raise cancelled

    async def _forget(self, region: LandingRegion) -> BaseException | None:
        if region.refusal == errno.EOPNOTSUPP and region.pin is None:
            return None  # no ring ever knew it
        try:
            return await self._command(region, Kind.REGION_REMOVE)
        except ClosedError:
            return None  # the rings end, and all that they know with them
