"""What an open backend holds: layer files under an engine, and which of their writes are not durable yet."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from aio_kv.backends.device_side import DeviceSide
from aio_kv.backends.engine_session import EngineSession, check_options
from aio_kv.backends.rungs import OpenedEngine
from aio_kv.cuda import Device
from aio_kv.engine import Kind
from aio_kv.engine.options import EngineOptions
from aio_kv.errors import ClosedError, StorageError
from aio_kv.files import LayerFiles
from aio_kv.layout import GroupLayout
from aio_kv.plan import OP_DTYPE, Placement, Plan
from aio_kv.protocols import Priority
from aio_kv.transfer import LoopBinding, Transfer

__all__ = ["PathLike", "Session", "SessionPlan", "check_options"]

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


class Session(EngineSession[LayerFiles]):
    """The open state of one backend."""

    def __init__(
        self,
        plan: SessionPlan,
        files: LayerFiles,
        opened: OpenedEngine,
        binding: LoopBinding,
        device: DeviceSide | None = None,
    ) -> None:
        super().__init__(plan, files, opened, binding, device)
        self.plan = plan
        self._writes = 0
        self._unsynced: dict[int, int] = {}  # layer: number of its last write that no sync has covered
        self._failed_write: str | None = None

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
