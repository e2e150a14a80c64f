"""One transfer: a read or write of any number of groups, from the call to its outcome.

The transfer keeps the caller's memory alive until nothing touches it any more: `owner` is dropped when the last
batch is done, never earlier, and a cancelled await returns only then (or after the drain timeout, when the engine
goes on keeping it).
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from aio_kv.engine import Kind, Order, Ticket
from aio_kv.errors import AioKvError, TransferError
from aio_kv.integers import Int64Array
from aio_kv.plan import RESULT_DTYPE, Plan
from aio_kv.transfer.report import Outcome, TransferReport, error_of, outcomes_of, summary_of

if TYPE_CHECKING:
    from aio_kv.transfer.dispatcher import Dispatcher
    from aio_kv.transfer.region import LandingRegion

__all__ = ["CallerStream", "Transfer"]

_log = logging.getLogger("aio_kv")
_ERRORS_MAX = 8
_ACTIONS = {
    Kind.READ: "read",
    Kind.WRITE: "write",
    Kind.SYNC: "fdatasync",
    Kind.LOAD: "load",
    Kind.SAVE: "save",
}


class CallerStream(Protocol):
    """A caller's GPU stream, for one transfer: holds the fence that was recorded on it."""

    def wait_for(self, event: int) -> None:
        """Make the stream wait for an event handle. Raises `DeviceError` for a stream under graph capture."""

    def release(self) -> None:
        """Nothing of the transfer is in flight any more: the fence may be used again."""


class Transfer:
    """Groups on their way. Made by a backend's `read`, `write` and their kin; never by hand.

    `await transfer` gives its `TransferReport`, or raises `TransferError` (a `StorageError`, with `.report`) unless
    every request succeeded. Awaiting twice, or from several tasks, gives the same. A cancelled await asks that what
    has not begun be dropped, and raises only when the transfer's memory is no longer touched.
    """

    # Defaults of the class: a transfer is made for every small read, and an attribute that is not set costs nothing.
    owner: object = None
    regions: tuple[LandingRegion, ...] = ()
    dependents: list[Transfer] | None = None
    blockers: int = 0  # earlier transfers on the same groups that have not ended
    fed_ops: int = 0  # how many ops the engine has been given, or will never be
    interest: int = 0  # awaiters that have not been cancelled
    worst: int = 0  # the first engine code that was not 0
    is_held: bool = False
    order: Order | None = None  # with device memory: the fence and the copy stream
    stream: CallerStream | None = None  # what `enqueued` makes wait
    _enqueued_waiters: list[Callable[[], None]] | None = None
    is_done: bool = False
    _sorted_ids: Int64Array | None = None
    _waiters: list[Callable[[], None]] | None = None
    _report: TransferReport | None = None
    _error: TransferError | None = None
    _has_observer: bool = False
    _success: TransferReport | None = None

    def __init__(
        self,
        dispatcher: Dispatcher,
        kind: Kind,
        plan: Plan,
        group_ids: Int64Array | int,
        request_count: int,
        payload_nbytes: int,
        priority: int,
        deadline_ns: int,
        owner: object,
        results: Any = None,
    ) -> None:
        self.dispatcher = dispatcher
        self.kind = kind
        self.plan = plan
        self.request_count = request_count
        self.payload_nbytes = payload_nbytes
        self.priority = priority
        self.deadline_ns = deadline_ns
        self.owner = owner
        self.tickets: list[Ticket] = []  # at the engine
        self._group_ids = group_ids
        # The engine's answers, one RESULT_DTYPE record per op.
        self.results: Any = np.zeros(plan.op_count, dtype=RESULT_DTYPE) if results is None else results

    def __await__(self) -> Generator[Any, Any, TransferReport]:
        return self._complete().__await__()

    async def _complete(self) -> TransferReport:
        self._has_observer = True  # whoever has begun to wait knows, even if the wait is cancelled
        await self.dispatcher.binding.wait_transfer(self)
        report = self._observe()
        if self._error is not None:
            raise self._error
        return report

    async def outcome(self) -> TransferReport:
        """Wait like `await transfer`, and return the report of a mix without raising for failed requests."""
        self._has_observer = True
        await self.dispatcher.binding.wait_transfer(self)
        return self._observe()

    def _observe(self) -> TransferReport:
        if self._report is None:
            self._report = self._conclude()
        return self._report

    @property
    def report(self) -> TransferReport:
        """The report of a transfer that is done, without waiting or raising: for whoever `add_waiter` has told."""
        assert self.is_done, "there is no report before the end"
        self._has_observer = True
        return self._observe()

    @property
    def failure(self) -> TransferError | None:
        """What awaiting the transfer raises now that it is done; None for a success."""
        assert self.is_done
        self._observe()
        return self._error

    async def enqueued(self) -> None:
        """Make the caller's stream wait for the copies of this transfer; then work launched on it sees the bytes.

        For a read, work launched on the stream afterwards finds the bytes in place; for a write, it may overwrite the
        source. The host does not wait for the GPU. Without a stream this waits as `await transfer` does. Raises
        `TransferError`, before the stream is made to wait, if a request failed, and `DeviceError` for a stream under
        graph capture. Cancelled, it ends as `await transfer` does.
        """
        await self.dispatcher.binding.wait_transfer(self, until_enqueued=self.stream is not None)
        if self.is_done or self.worst or self.stream is None:
            await self._complete()
            return
        # No await from here on: the events are good until the tickets are drained, in this very thread.
        for ticket in self.tickets:
            if ticket.event:
                self.stream.wait_for(ticket.event)

    def cancel(self) -> None:
        """Drop what has not begun. What is at the device goes on; the transfer ends when that has ended."""
        self.excuse()
        self.dispatcher.cancel(self)

    @property
    def worst_outcome(self) -> Outcome:
        """How it ended, or of a mix the first end that was not DONE; looking at it is not awaiting it."""
        return Outcome(outcomes_of(np.array([self.worst]))[0])

    @property
    def group_ids(self) -> Int64Array:
        """The groups, in the order of the call."""
        ids = self._group_ids
        return np.array([ids], dtype=np.int64) if isinstance(ids, int) else ids

    @property
    def sorted_ids(self) -> Int64Array:
        """The groups in rising order, for comparisons with other transfers."""
        if self._sorted_ids is None:
            self._sorted_ids = self.group_ids.copy()
            self._sorted_ids.sort()
        return self._sorted_ids

    def expect_success(self) -> None:
        """Prepare the report of a success now, while the device works, instead of when everybody waits for it."""
        self._success = _success(self.request_count, self.payload_nbytes)

    def use_regions(self, regions: tuple[LandingRegion, ...]) -> None:
        """Have landing regions count this transfer until it is done."""
        self.regions = regions
        for region in regions:
            region.use(self)

    def release_regions(self) -> None:
        """Take back `use_regions`."""
        for region in self.regions:
            region.release(self)
        self.regions = ()

    @property
    def is_enqueued(self) -> bool:
        """Whether all copies are on a copy stream, or the transfer is done."""
        if self.is_done:
            return True
        return self.fed_ops == self.plan.op_count and all(ticket.is_enqueued for ticket in self.tickets)

    def note_enqueued(self) -> None:
        """Called by the dispatcher when the copies of one batch are queued."""
        for ticket in self.tickets:
            if ticket.is_enqueued and ticket.status:
                self.worst = self.worst or ticket.status
        if self._enqueued_waiters and self.is_enqueued:
            waiters, self._enqueued_waiters = self._enqueued_waiters, None
            for wake in waiters:
                wake()

    def add_enqueued_waiter(self, wake: Callable[[], None]) -> None:
        """Have `wake` called once when `is_enqueued` turns true."""
        if self._enqueued_waiters is None:
            self._enqueued_waiters = []
        self._enqueued_waiters.append(wake)

    def add_waiter(self, wake: Callable[[], None]) -> None:
        """Have `wake` called once when the transfer is done."""
        if self._waiters is None:
            self._waiters = []
        self._waiters.append(wake)

    def finish(self) -> None:
        """Called by the dispatcher when nothing of the transfer is in flight: let go of memory, wake everybody."""
        self.is_done = True
        self.owner = None
        if self.stream is not None:
            self.stream.release()
        if self._waiters is None and self._enqueued_waiters is None:
            return
        waiters = (self._waiters or []) + (self._enqueued_waiters or [])
        self._waiters = self._enqueued_waiters = None
        for wake in waiters:
            wake()

    def excuse(self) -> None:
        """A failure from here on needs no mention if nobody awaits it: its cause is known."""
        self._has_observer = True

    def drop_rest(self, code: int) -> None:
        """Answer the ops that the engine has not been given with `code`."""
        rest = self.records()[self.fed_ops :]
        if len(rest):
            rest["code"] = code
            self.worst = self.worst or code
        self.fed_ops = self.plan.op_count

    def records(self) -> NDArray[Any]:
        """The results as an array."""
        return np.frombuffer(self.results, dtype=RESULT_DTYPE)

    def _conclude(self) -> TransferReport:
        if self.worst == 0:
            return self._success or _success(self.request_count, self.payload_nbytes)
        codes, first_op = self._request_codes()
        outcomes = outcomes_of(codes)
        is_done = outcomes == Outcome.DONE
        prefix = len(outcomes) if is_done.all() else int(np.argmin(is_done))
        failed = np.flatnonzero(~is_done)
        errors = tuple(
            self._request_error(int(i), int(codes[i]), int(first_op[i])) for i in failed[:_ERRORS_MAX]
        )
        report = TransferReport(outcomes, prefix, int(is_done.sum()) * self.payload_nbytes, errors)
        if errors:
            self._error = summary_of(report, errors[0], len(failed), action=_ACTIONS[self.kind])
        return report

    def _request_codes(self) -> tuple[NDArray[Any], Int64Array]:
        """For each request its code, and the op that it comes from (the first of its ops that failed)."""
        codes = self.records()["code"]
        first = self.plan.first_ops(self.request_count)
        # The next op that failed, from a request's first op on, is that request's if it comes before the next one's.
        failed = np.append(np.flatnonzero(codes), len(codes))
        op = failed[np.searchsorted(failed, first)]
        is_done = op >= first + self.plan.ops_per_request
        return np.where(is_done, 0, np.append(codes, 0)[op]), np.where(is_done, first, op)

    def _request_error(self, index: int, code: int, op_index: int) -> AioKvError:
        op = self.dispatcher.describe_op(self.plan, op_index)
        arrived = int(self.records()[op_index]["nbytes"])
        return error_of(
            code,
            action=_ACTIONS[self.kind],
            file=op.file,
            file_offset=op.file_offset,
            nbytes=op.nbytes,
            arrived=arrived,
        )

    def __repr__(self) -> str:
        state = "done" if self.is_done else "held" if self.is_held else "in flight"
        return f"<Transfer {_ACTIONS[self.kind]} of {self.request_count} requests, {state}>"

    def __del__(self) -> None:
        # Nothing is freed here: this only keeps a failure that nobody looked at from passing in silence.
        if getattr(self, "worst", 0) and self.is_done and not self._has_observer:
            self.dispatcher.count_unobserved(self)
            name = errno.errorcode.get(-self.worst, str(self.worst))
            _log.error(
                "a %s of %d requests failed (%s) and was never awaited",
                _ACTIONS[self.kind],
                self.request_count,
                name,
            )


def _success(request_count: int, payload_nbytes: int) -> TransferReport:
    return TransferReport(
        np.zeros(request_count, dtype=np.int8), request_count, request_count * payload_nbytes
    )
