"""Who copies between the slab and callers: the processor for host memory, the backing's engine for device memory."""

from __future__ import annotations

from typing import Any, Protocol

from aio_kv.cascade.call import Call
from aio_kv.cascade.slab import Slab
from aio_kv.integers import Int64Array

__all__ = ["DeviceMover", "HostMover", "Mover"]


class Mover(Protocol):
    """Copies groups number `index` of a call (a part of it, see `Call.parts`) from or to rows of the slab.

    `is_late` says whether a copy may end after its call, or fail. Returns None if it is done, or the transfer that does
    it. Raises what the backing raises; then nothing is under way.
    """

    is_late: bool

    def load(self, call: Call, index: Int64Array, rows: Int64Array) -> Any:
        """Slab to caller."""

    def save(self, call: Call, index: Int64Array, rows: Int64Array) -> Any:
        """Caller to slab."""


class HostMover:
    """Copies at once: at memory speed that takes less time than to hand the copy to somebody else."""

    is_late = False

    def __init__(self, slab: Slab) -> None:
        self._slab = slab

    def load(self, call: Call, index: Int64Array, rows: Int64Array) -> Any:
        """See `Mover`."""
        self._slab.copy_out(rows, call.places(index))

    def save(self, call: Call, index: Int64Array, rows: Int64Array) -> Any:
        """See `Mover`."""
        self._slab.copy_in(rows, call.places(index))


class DeviceMover:
    """Has the engine copy straight between the pinned slab and the device, ordered on the caller's stream."""

    is_late = True

    def __init__(self, slab: Slab, backing: Any, region: Any) -> None:
        self._slab = slab
        self._backing = backing
        self._region = region

    def load(self, call: Call, index: Int64Array, rows: Int64Array) -> Any:
        """See `Mover`."""
        offsets = self._slab.offsets(rows)
        return self._backing.load(self._region, offsets, call.device_place(index), **call.how.options())

    def save(self, call: Call, index: Int64Array, rows: Int64Array) -> Any:
        """See `Mover`."""
        offsets = self._slab.offsets(rows)
        return self._backing.save(self._region, offsets, call.device_place(index), **call.how.options())
