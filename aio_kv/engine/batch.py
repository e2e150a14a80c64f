"""A batch on its way through an engine, and the ticket that stands for it."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

__all__ = ["CUDA_ERROR", "Batch", "Kind", "Order", "Ticket"]

CUDA_ERROR = 10000  # AKV_CUDA_ERROR: a code of -(CUDA_ERROR + n) is CUresult n


class Kind(IntEnum):
    """What a batch does (AKV_READ ... in native/akv.cdef.h)."""

    READ = 0
    WRITE = 1
    SYNC = 2
    REGION_ADD = 3
    REGION_REMOVE = 4
    EVENT = 5
    LOAD = 6
    SAVE = 7


class Order(NamedTuple):
    """How the copies of a batch with device memory are ordered.

    `fence` is the handle of a recorded event that must have passed before any copy (0 for none); whoever made it keeps
    it until the ticket is done. `stream_key` chooses the copy stream: callers with different keys do not wait for each
    other.
    """

    fence: int
    stream_key: int


class Batch(NamedTuple):
    """I/Os handed to an engine together.

    `ops`, `copies` and `results` are buffers of OP_DTYPE, COPY_DTYPE and RESULT_DTYPE records (`aio_kv.plan`).
    From `submit` until the ticket is done the engine owns them, and all memory that they name; `owner` is whatever
    must stay alive for that (buffer exports, tensors), and the ticket keeps it. `deadline_ns` is on
    CLOCK_MONOTONIC, 0 for none.
    """

    kind: Kind
    ops: Any
    op_count: int
    results: Any
    copies: Any = None
    copy_count: int = 0
    priority: int = 0
    deadline_ns: int = 0
    owner: object = None
    order: Order | None = None


class Ticket:
    """One submitted batch. `is_done` turns true in `drain` or `wait`; then `status` is 0 or the first -errno.

    `owners` is everything the engine needs alive until then. A batch with an order is `is_enqueued` before: all of its
    copies are on a copy stream, `event` (a handle, 0 if there is nothing to wait for) is recorded behind them and valid
    until the ticket is done, and `status` tells of everything but failures of the device itself.
    """

    # Defaults of the class: a ticket is made for every small read, and an attribute that is not set costs nothing.
    is_done: bool = False
    is_enqueued: bool = False
    event: int = 0
    status: int = 0
    failed: int = 0

    def __init__(
        self, number: int, owners: tuple[object, ...], op_count: int, *, ring: int, tag: object = None
    ) -> None:
        self.number = number
        self.owners = owners
        self.op_count = op_count
        self.ring = ring
        self.tag = tag  # the submitter's own; the engine does not look at it
