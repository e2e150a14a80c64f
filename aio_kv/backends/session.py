"""What an open backend holds: files, engine, dispatcher, regions, and the event loop that they belong to.

A session is opened whole or not at all, and closed in one order: refuse, drop, wait for the device, stop watching,
give memory back, close files. Cancellation interrupts neither.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from aio_kv.backends.device_side import DeviceSide
from aio_kv.backends.rungs import OpenedEngine, open_engine
from aio_kv.backends.statistics import Statistics
from aio_kv.cuda import Device
from aio_kv.engine import Kind
from aio_kv.engine.options import EngineOptions
from aio_kv.errors import ClosedError, LayoutError, StorageError
from aio_kv.files import LayerFiles
from aio_kv.layout import GroupLayout
from aio_kv.plan import OP_DTYPE, Placement, Plan
from aio_kv.protocols import Priority
from aio_kv.transfer import Dispatcher, LoopBinding, Transfer
from aio_kv.transfer.binding import require_current
from aio_kv.transfer.region import RegionTable

__all__ = ["PathLike", "Session", "SessionPlan", "check_options"]

_log = logging.getLogger("aio_kv")
PathLike = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """What a session is to be opened with."""

    source: PathLike | Sequence[PathLike] | LayerFiles
    layout: GroupLayout
    device: int | Device | None
    create: bool
    options: EngineOptions
    choice: str

    def check_device(self) -> None:
        """Raise `LayoutError` for options that a device does not go with."""
        if self.options.staging_nbytes > 1 << 30:
            raise LayoutError(
                f"staging_nbytes is {self.options.staging_nbytes}: must be at most {1 << 30} (per ring) with a device"
            )

    def open_files(self) -> LayerFiles:
        """The caller's files, or new ones."""
        if isinstance(self.source, LayerFiles):
            if self.source.closed:
                raise ClosedError("the LayerFiles are closed: open them again")
            return self.source
        return LayerFiles(self.source, self.layout, create=self.create)

    def close_files(self, files: LayerFiles) -> None:
        """Close files that are not the caller's."""
        if not isinstance(self.source, LayerFiles):
            files.close()


class Session:
    """The open state of one backend."""

    def __init__(
        self,
        plan: SessionPlan,
        files: LayerFiles,
        opened: OpenedEngine,
        binding: LoopBinding,
        device: DeviceSide | None = None,
    ) -> None:
        self.plan = plan
        self.files = files
        self.opened = opened
        self.binding = binding
        self.device = device
        self.limits = opened.limits
        self.dispatcher = Dispatcher(opened.engine, binding, path_of=files.path_of)
        self.table = RegionTable(self.dispatcher, device.pin if device is not None else None)
        self._is_closed = False
        self._close_waiters: list[Callable[[], None]] = []
        self._writes = 0
        self._unsynced: dict[int, int] = {}  # layer: number of its last write that no sync has covered
        self._failed_write: str | None = None
        if device is not None:
            device.attach(opened.engine)
        binding.watch(opened.engine.fileno(), self.dispatcher.drain)

    @classmethod
    async def open(cls, plan: SessionPlan, binding: LoopBinding) -> Session:
        """Open files and engine in a thread, since both block. Cancelled, it gives everything back and then raises."""

        def open_blocking() -> tuple[LayerFiles, OpenedEngine, DeviceSide | None]:
            files = plan.open_files()
            device: DeviceSide | None = None
            try:
                if plan.device is not None:
                    plan.check_device()
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
            self.plan.options.drain_timeout,
        )
        await self.binding.unwatch()
        dispatcher.drain()
        statistics = self.statistics(backend)
        is_closed = engine.close(timeout=0.0)
        if statistics.engine.device_error or not is_closed:
            self.table.abandon()
        if is_closed:
            self.plan.close_files(self.files)
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

    def check_loop(self) -> None:
        """Raise `ClosedError` in any loop but the session's own."""
        require_current(self.binding)

    def note_write(self, transfer: Transfer, layers: set[int]) -> None:
        """Remember which files `flush` must sync, and, once it has ended, whether the write failed."""
        self._writes += 1
        self._unsynced.update(dict.fromkeys(layers, self._writes))
        transfer.add_waiter(lambda: self._note_written(transfer))

    def _note_written(self, transfer: Transfer) -> None:
        if transfer.worst and self._failed_write is None:
            first = self.plan.layout.key(int(transfer.group_ids[0]))
            self._failed_write = f"{transfer.request_count} groups from {first} on"

    async def flush(self) -> None:
        """See `EngineBackend.flush`."""
        covered = dict(self._unsynced)
        await self._start_sync(sorted(covered))
        # Only now: until the sync has ended, a second flush must sync these layers too, or it would return too early.
        for layer, number in covered.items():
            if self._unsynced.get(layer) == number:
                del self._unsynced[layer]
        failed, self._failed_write = self._failed_write, None
        if failed is not None:
            raise StorageError(
                f"flush: an earlier write of {failed}", hint="its own transfer says why; write it again"
            )

    def _start_sync(self, layers: list[int]) -> Transfer:
        ops = np.zeros(len(layers), OP_DTYPE)
        ops["file"] = layers
        ops["placement"] = Placement.DIRECT
        plan = Plan(ops, len(ops), None, 0, np.arange(len(ops)), 1)
        nothing = np.empty(0, np.int64)
        transfer = Transfer(self.dispatcher, Kind.SYNC, plan, nothing, len(ops), 0, Priority.DEMAND, 0, None)
        self.dispatcher.start(transfer)
        return transfer

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


def check_options(options: EngineOptions | None) -> EngineOptions:
    """The options, or the defaults. Raises `LayoutError` for anything else."""
    if options is None:
        return EngineOptions()
    if not isinstance(options, EngineOptions):
        raise LayoutError(f"options is {options!r}: must be EngineOptions")
    return options
