"""An engine over files, open in one event loop: what every session has, whatever its files hold.

A session is opened whole or not at all, and closed in one order: refuse, drop, wait for the device, stop watching,
give memory back, close files. Cancellation interrupts neither.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Any, Generic, Protocol, Self, TypeVar

from aio_kv.backends.device_side import DeviceSide
from aio_kv.backends.rungs import EngineFiles, OpenedEngine, open_engine
from aio_kv.backends.statistics import Statistics
from aio_kv.cuda import Device
from aio_kv.engine import Order
from aio_kv.engine.options import EngineOptions
from aio_kv.errors import LayoutError
from aio_kv.transfer import Dispatcher, LoopBinding, Transfer
from aio_kv.transfer.binding import require_current
from aio_kv.transfer.region import RegionTable

__all__ = ["EngineSession", "OpeningPlan", "check_options"]

_log = logging.getLogger("aio_kv")
FilesT = TypeVar("FilesT", bound=EngineFiles)


class OpeningPlan(Protocol[FilesT]):
    """What a session is to be opened with."""

    @property
    def options(self) -> EngineOptions:
        """Sizes and bounds."""

    @property
    def device(self) -> int | Device | None:
        """The GPU, or None."""

    @property
    def choice(self) -> str:
        """Which rungs may be used (`CHOICES`)."""

    def open_files(self) -> FilesT:
        """Open the files, or hand out those of the caller. Blocking."""

    def close_files(self, files: FilesT) -> None:
        """Close files that are not the caller's."""


class EngineSession(Generic[FilesT]):
    """Files, engine, dispatcher, regions, and the event loop that they belong to."""

    def __init__(
        self,
        plan: OpeningPlan[FilesT],
        files: FilesT,
        opened: OpenedEngine,
        binding: LoopBinding,
        device: DeviceSide | None = None,
    ) -> None:
        self._opening = plan
        self.files = files
        self.opened = opened
        self.binding = binding
        self.device = device
        self.limits = opened.limits
        self.dispatcher = Dispatcher(opened.engine, binding, path_of=files.path_of)
        self.table = RegionTable(self.dispatcher, device.pin if device is not None else None)
        self._is_closed = False
        self._close_waiters: list[Callable[[], None]] = []
        if device is not None:
            device.attach(opened.engine)
        binding.watch(opened.engine.fileno(), self.dispatcher.drain)

    @classmethod
    async def open(cls, plan: OpeningPlan[FilesT], binding: LoopBinding) -> Self:
        """Open files and engine in a thread, since both block. Cancelled, it gives everything back and then raises."""

        def open_blocking() -> tuple[FilesT, OpenedEngine, DeviceSide | None]:
            files = plan.open_files()
            device: DeviceSide | None = None
            try:
                if plan.device is not None:
                    _check_device(plan.options)
                    device = DeviceSide(plan.device, plan.options.copies)
                fields = device.fields() if device is not None else None
                return files, open_engine(files, plan.options, plan.choice, device=fields), device
            except BaseException:
                if device is not None:
                    device.close()
                plan.close_files(files)
                raise

        (files, opened, device), cancelled = await binding.run_in_thread(open_blocking)
        session = cls(plan, files, opened, binding, device)
        if cancelled is not None:
            await session.close(type(session).__name__)
            raise cancelled
        session._announce()
        return session

    def _announce(self) -> None:
        refusals = self.opened.refusals
        why = "; ".join(f"not {refusal.rung}: {refusal.reason} ({refusal.hint})" for refusal in refusals)
        _log.info(
            "%s: rung %s%s", ", ".join(self.files.directories), self.opened.rung, f"; {why}" if why else ""
        )

    async def close(self, backend: str) -> Statistics:
        """Give everything back and return the last statistics; the device has the drain timeout to answer."""
        engine, dispatcher = self.opened.engine, self.dispatcher
        dispatcher.close()
        cancelled = await self.binding.wait_until(
            lambda: engine.is_stopped and dispatcher.is_idle,
            dispatcher.on_drain,
            self._opening.options.drain_timeout,
        )
        await self.binding.unwatch()
        dispatcher.drain()
        statistics = self.statistics(backend)
        is_closed = engine.close(timeout=0.0)
        if statistics.engine.device_error or not is_closed:
            self.table.abandon()
        if is_closed:
            self._opening.close_files(self.files)
            # After a fault what was queued may still run: then the kernels stay loaded and the context is kept.
            if self.device is not None and not statistics.engine.device_error:
                # Unloading kernels may wait for whatever else the GPU is doing: not in the event loop.
                _, again = await self.binding.run_in_thread(self.device.close)
                cancelled = cancelled or again
        self._is_closed = True
        for wake in self._close_waiters:
            wake()
        if cancelled is not None:
            raise cancelled
        return statistics

    async def wait_closed(self) -> None:
        """Wait until `close`, called by somebody else, has ended; cancelled, wait all the same and then raise."""
        if self._is_closed:
            return
        self.check_loop()
        cancelled = await self.binding.wait_until(lambda: self._is_closed, self._close_waiters.append, None)
        if cancelled is not None:
            raise cancelled

    def deadline_ns(self, deadline: float) -> int:
        """A time on the loop's clock as the engine wants it. Raises `LayoutError` for what is not a time."""
        if deadline.__class__ not in (int, float) or math.isnan(deadline):
            raise LayoutError(
                f"deadline is {deadline!r}: must be a time on the clock of anyio.current_time()"
            )
        left = min(max(deadline - self.binding.time(), -1e9), 1e9)  # infinities are deadlines too
        return max(1, time.monotonic_ns() + int(left * 1e9))

    def order(self, transfer: Transfer, stream: Any) -> None:
        """Order the copies of a transfer with device memory after all that the caller has launched on its stream.

        The last thing before the hand-over: the fence stands for what was launched before the call, and no more.
        """
        assert self.device is not None
        transfer.stream = self.device.ordered(stream)
        transfer.order = Order(0, 0) if transfer.stream is None else transfer.stream.order

    def hand_over(self, transfer: Transfer, first_address: int, last_address: int) -> None:
        """Start a transfer whose memory lies between the two addresses. Raises `BusyError`, `ClosedError`."""
        if self.table.regions:
            transfer.use_regions(self.table.covering(first_address, last_address))
        self.begin(transfer)

    def begin(self, transfer: Transfer) -> None:
        """Start a transfer whose regions are known. Raises `BusyError`, `ClosedError`."""
        try:
            self.dispatcher.start(transfer)
        except BaseException:
            transfer.release_regions()
            if transfer.stream is not None:
                transfer.stream.release()
            raise
        transfer.expect_success()

    def check_loop(self) -> None:
        """Raise `ClosedError` in any loop but the session's own."""
        require_current(self.binding)

    def statistics(self, backend: str) -> Statistics:
        """Counters of now."""
        info = self.opened.engine.ring_info()
        return Statistics(
            backend=backend,
            rung=self.opened.rung,
            refusals=tuple(f"{refusal.rung}: {refusal.reason}" for refusal in self.opened.refusals),
            staging_nbytes=info.staging_nbytes,
            registered_nbytes=info.registered_nbytes,
            landing_regions=len(self.table.regions),
            transfers=self.dispatcher.statistics(),
            engine=self.opened.engine.statistics(),
        )


def _check_device(options: EngineOptions) -> None:
    """Raise `LayoutError` for options that a device does not go with."""
    if options.staging_nbytes > 1 << 30:
        raise LayoutError(
            f"staging_nbytes is {options.staging_nbytes}: must be at most {1 << 30} (per ring) with a device"
        )


def check_options(options: EngineOptions | None) -> EngineOptions:
    """The options, or the defaults. Raises `LayoutError` for anything else."""
    if options is None:
        return EngineOptions()
    if not isinstance(options, EngineOptions):
        raise LayoutError(f"options is {options!r}: must be EngineOptions")
    return options
