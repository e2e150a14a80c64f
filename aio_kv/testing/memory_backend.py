"""`MemoryBackend`: the transfers, orders, cancellations and reports of the real backends over plain memory."""

from __future__ import annotations

from typing import Any, cast

from aio_kv.backends.engine_backend import EngineBackend
from aio_kv.backends.rungs import OpenedEngine
from aio_kv.backends.session import Session
from aio_kv.engine.options import EngineOptions
from aio_kv.errors import LayoutError
from aio_kv.layout import GroupLayout
from aio_kv.plan import IoLimits
from aio_kv.testing.memory_engine import MemoryEngine, MemoryFiles, Scheduler
from aio_kv.transfer import LoopBinding

__all__ = ["MemoryBackend"]


class MemoryBackend(EngineBackend):
    """An `AsyncStorageBackend` that keeps its groups in memory. For tests, and as a reference.

    Only the device is made up: planning, ordering, cancellation and reports are the code of the other backends. It
    runs in the event loop alone, so that a seeded scheduler gives the same run every time.

    Args:
        layout: the geometry.
        files: where the groups are kept; None for new ones, all zeros. They stay the caller's.
        scheduler: when, in which order and how ops land; None for at once, in order and well.
        alignment: what the device asks of addresses, offsets and lengths, in bytes; 1 for nothing.
        options: `queue_depth`, `max_requests`, `max_transfers`, `op_nbytes_max` and `drain_timeout` matter.
    """

    def __init__(
        self,
        layout: GroupLayout,
        *,
        files: MemoryFiles | None = None,
        scheduler: Scheduler | None = None,
        alignment: int = 1,
        options: EngineOptions | None = None,
    ) -> None:
        super().__init__("memory", layout, options=options)
        if files is not None and files.layout != layout:
            raise LayoutError(f"layout {layout} is not that of the files: {files.layout}")
        if layout.alignment % alignment:
            raise LayoutError(f"alignment is {alignment}: groups are aligned to {layout.alignment} only")
        self._memory_files = files or MemoryFiles(layout)
        self._scheduler = scheduler or Scheduler()
        self._alignment = alignment
        self._engine: MemoryEngine | None = None

    @property
    def memory_files(self) -> MemoryFiles:
        """The bytes of every layer, before, while and after the backend is open."""
        return self._memory_files

    def pause(self) -> None:
        """Have the device stop answering: what is in flight stays in flight, cancelled or not, until `resume`."""
        self._require_engine().pause()

    def resume(self) -> None:
        """End `pause`."""
        self._require_engine().resume()

    def _require_engine(self) -> MemoryEngine:
        if self._engine is None:
            self._require_session()  # says what is wrong
        assert self._engine is not None
        return self._engine

    async def _open_session(self, binding: LoopBinding) -> Session:
        options = self._plan.options
        limits = IoLimits(self._alignment, self._alignment, options.op_nbytes_max)
        self._engine = MemoryEngine(self._memory_files, limits, options, self._scheduler)
        opened = OpenedEngine(self._engine, "memory", "buffered", limits, ())
        # What a session asks of files is little, and MemoryFiles has it.
        return Session(self._plan, cast(Any, self._memory_files), opened, binding)
