"""What an engine can be told, and the faults a test can inject below it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from aio_kv.errors import LayoutError

if TYPE_CHECKING:
    from aio_kv.cuda import CopyOptions

__all__ = ["EngineOptions", "Fault", "FaultAction"]

_KIB = 1 << 10
_MIB = 1 << 20


class FaultAction(IntEnum):
    """What happens to an I/O that a fault meets (AKV_FAULT_* in native/akv.cdef.h)."""

    ERROR = 0
    SHORT = 1
    DELAY = 2
    REORDER = 3


@dataclass(frozen=True, slots=True)
class Fault:
    """A rule for tests: every `every`-th I/O of `kind` from `phase` on, `times` times at most, meets `action`.

    `value` is a negative errno (or 0, end of file) for ERROR, bytes asked of the device for SHORT, microseconds for
    DELAY and REORDER. `kind` None means any.
    """

    action: FaultAction
    value: int
    kind: int | None = None
    every: int = 1
    phase: int = 0
    times: int = 2**32 - 1


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Sizes and bounds of an engine; all of its memory is taken when it opens.

    Args:
        rings: shards, each with its own thread, ring and staging memory. More than one helps only warm page caches
            and very fast storage.
        queue_depth: I/Os at the device at a time, per ring.
        threads: threads per ring where io_uring is not used.
        staging_nbytes: staging memory per ring, a multiple of 2 MiB.
        max_requests: I/Os the engine holds at most; the rest waits in its transfer.
        max_transfers: transfers a backend accepts before `BusyError`.
        small_nbytes: I/Os up to this size pass the larger ones.
        bulk_nbytes: bytes that larger I/Os may have at the device at a time, per ring.
        op_nbytes_max: largest single I/O; lowered to what the block device takes.
        spin_us: how long the reactor looks for a completion before it sleeps, when little is in flight.
        await_spin_us: how long an await may look for the completion of one small read, when nothing else is in flight,
            before it gives the loop back; 0 never does. Waking an idle loop costs about as much as such a read.
        register_buffers: register staging memory and landing regions with the ring.
        sched_batch: run the reactor under SCHED_BATCH, so that waking it does not pre-empt the event loop.
        copies: how bytes go to and from a GPU; None for the measured defaults.
        drain_timeout: seconds to wait for the device after a cancellation or at close; what is still in flight then
            is leaked on purpose, never freed.
        faults: rules of `aio_kv.testing`; empty in production.
        fault_seed: seeds REORDER.
    """

    rings: int = 1
    queue_depth: int = 256
    threads: int = 8
    staging_nbytes: int = 64 * _MIB
    max_requests: int = 65536
    max_transfers: int = 1024
    small_nbytes: int = 32 * _KIB
    bulk_nbytes: int = 8 * _MIB
    op_nbytes_max: int = 512 * _KIB
    spin_us: int = 50
    await_spin_us: int = 50
    register_buffers: bool = True
    sched_batch: bool = False
    copies: CopyOptions | None = None
    drain_timeout: float = 30.0
    faults: tuple[Fault, ...] = ()
    fault_seed: int = 0

    def __post_init__(self) -> None:
        _within("rings", self.rings, 1, 64)
        _within("queue_depth", self.queue_depth, 1, 4096)
        _within("threads", self.threads, 1, 256)
        _within("staging_nbytes", self.staging_nbytes, 2 * _MIB, 1 << 40)
        _within("max_requests", self.max_requests, 1, 1 << 24)
        _within("max_transfers", self.max_transfers, 1, 1 << 16)
        _within("op_nbytes_max", self.op_nbytes_max, 4 * _KIB, 16 * _MIB)
        _within("small_nbytes", self.small_nbytes, 4 * _KIB, self.op_nbytes_max)
        _within("bulk_nbytes", self.bulk_nbytes, self.op_nbytes_max, 1 << 40)
        _within("spin_us", self.spin_us, 0, 10_000)
        _within("await_spin_us", self.await_spin_us, 0, 1000)
        if self.op_nbytes_max % 4096:
            raise LayoutError(f"op_nbytes_max is {self.op_nbytes_max}: must be a multiple of 4096")
        if self.staging_nbytes < 8 * self.op_nbytes_max:
            raise LayoutError(f"staging_nbytes is {self.staging_nbytes}: must be 8 x op_nbytes_max or more")
        if not self.drain_timeout > 0:
            raise LayoutError(f"drain_timeout is {self.drain_timeout}: must be above zero seconds")


def _within(name: str, value: int, least: int, most: int) -> None:
    if value.__class__ is not int or not least <= value <= most:
        raise LayoutError(f"{name} is {value!r}: must be an integer from {least} to {most}")
