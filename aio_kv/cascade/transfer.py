"""`CascadeTransfer`: one call on a cascade, from the call to its outcome; the interface of `aio_kv.Transfer`.

It is made of *children*, transfers of the backing for the groups that are not resident and for copies to or from a
device, and of groups that have *not begun*: held behind an earlier transfer, or waiting for room.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import numpy as np

from aio_kv.cascade.call import Call
from aio_kv.cascade.errand import Child
from aio_kv.engine import Kind
from aio_kv.errors import AioKvError, TransferError, storage_error
from aio_kv.flags import some
from aio_kv.integers import Int64Array
from aio_kv.transfer import Outcome, TransferReport
from aio_kv.transfer.report import summary_of

if TYPE_CHECKING:
    from aio_kv.cascade.conductor import Conductor

__all__ = ["CascadeTransfer"]

_log = logging.getLogger("aio_kv")
_ERRORS_MAX = 8
_UNKNOWN = -1  # an outcome that is not there yet
# Looked up once: an attribute of an enumeration costs more than a small array operation.
_DONE = int(Outcome.DONE)
_WRITE = Kind.WRITE


class CascadeTransfer:
    """Groups on their way through a cascade. Made by its `read`, `write` and their kin; awaited like a `Transfer`.

    `await transfer` gives its `TransferReport`, or raises `TransferError` unless every request succeeded. A cancelled
    await asks that what has not begun be dropped, and raises only when the transfer's memory is no longer touched.
    """

    # Defaults of the class: an attribute that is not set costs nothing.
    blockers = 0  # earlier transfers on the same groups that have not ended
    fills = 0  # reads below that bring groups up, not ended
    short = 0  # slots that it waits for
    tried_at = -1  # what `SlotCache.openings` was when it last looked for them
    interest = 0
    is_done = False
    _sorted_ids: Int64Array | None = None
    _report: TransferReport | None = None
    _error: TransferError | None = None
    _has_observer = False

    def __init__(self, conductor: Conductor, call: Call) -> None:
        self.dispatcher = conductor
        self.call = call
        self.request_count = len(call.ids)
        self._ids = call.ids
        self.is_write = call.kind is _WRITE
        self.deadline_ns = call.how.deadline_ns
        self.outcomes = np.empty(self.request_count, np.int8)
        self.outcomes.fill(_UNKNOWN)
        self._is_pending = np.empty(self.request_count, np.bool_)
        self._is_pending.fill(True)
        self._pending_count = self.request_count
        self.children: list[Child] = []
        self.dependents: list[CascadeTransfer] = []
        self.owner: object = call.owner
        self._errors: list[AioKvError] = []
        self._waiters: list[Callable[[], None]] = []
        self._enqueued_waiters: list[Callable[[], None]] = []

    @classmethod
    def finished(cls, conductor: Conductor, ids: Int64Array, payload: int) -> CascadeTransfer:
        """A read that was done in its call."""
        transfer = cls.__new__(cls)
        transfer.dispatcher = conductor
        transfer.is_done = transfer._has_observer = True
        transfer.is_write = False
        transfer.request_count = len(ids)
        transfer._ids = ids
        transfer._report = TransferReport(np.zeros(len(ids), np.int8), len(ids), len(ids) * payload)
        return transfer

    def __await__(self) -> Generator[Any, Any, TransferReport]:
        return self._complete().__await__()

    async def _complete(self) -> TransferReport:
        self._has_observer = True
        await self.dispatcher.binding.wait_transfer(self)
        report = self.report
        if self._error is not None:
            raise self._error
        return report

    async def outcome(self) -> TransferReport:
        """Wait like `await transfer`, and return the report of a mix without raising for failed requests."""
        self._has_observer = True
        await self.dispatcher.binding.wait_transfer(self)
        return self.report

    @property
    def report(self) -> TransferReport:
        """The report of a transfer that is done, without waiting or raising."""
        assert self.is_done, "there is no report before the end"
        self._has_observer = True
        if self._report is None:
            self._report = self._conclude()
        return self._report

    async def enqueued(self) -> None:
        """Make the caller's stream wait for the copies of this transfer; see `Transfer.enqueued`."""
        has_stream = not self.is_done and self.call.how.stream is not None
        await self.dispatcher.binding.wait_transfer(self, until_enqueued=has_stream)
        if not has_stream or self.is_done:
            await self._complete()
            return
        for child in tuple(self.children):
            try:
                await child.enqueued()
            except AioKvError:
                await self._complete()  # raises with the report of the whole
                raise

    def cancel(self) -> None:
        """Drop what has not begun. What is at the device goes on; the transfer ends when that has ended."""
        self._has_observer = True
        self.dispatcher.cancel(self)

    @property
    def group_ids(self) -> Int64Array:
        """The groups, in the order of the call."""
        return self._ids

    @property
    def sorted_ids(self) -> Int64Array:
        """The groups in rising order, for comparisons with other transfers."""
        if self._sorted_ids is None:
            self._sorted_ids = self.call.ids.copy()
            self._sorted_ids.sort()
        return self._sorted_ids

    @property
    def pending(self) -> Int64Array:
        """Which requests have not begun, by number."""
        return self._is_pending.nonzero()[0]

    @property
    def has_begun(self) -> bool:
        """Whether all requests have begun."""
        return self._pending_count == 0

    @property
    def has_partly_begun(self) -> bool:
        """Whether some request has begun."""
        return self._pending_count < self.request_count

    @property
    def is_filling(self) -> bool:
        """Whether it is a read that brings groups up at the moment: their slots are being written."""
        return self.fills > 0

    @property
    def is_enqueued(self) -> bool:
        """Whether all copies are on a copy stream, or the transfer is done."""
        if self.is_done:
            return True
        return self.has_begun and not self.is_filling and all(child.is_enqueued for child in self.children)

    def add_waiter(self, wake: Callable[[], None]) -> None:
        """Have `wake` called once when the transfer is done."""
        self._waiters.append(wake)

    def add_enqueued_waiter(self, wake: Callable[[], None]) -> None:
        """Have `wake` called once when `is_enqueued` turns true."""
        self._enqueued_waiters.append(wake)

    def note_enqueued(self) -> None:
        """Called when a child is enqueued, or the rest has begun."""
        if self._enqueued_waiters and self.is_enqueued:
            waiters, self._enqueued_waiters = self._enqueued_waiters, []
            for wake in waiters:
                wake()

    def begin(self, index: Int64Array) -> None:
        """These requests, pending ones by number and in rising order, have begun."""
        self._pending_count -= len(index)
        if len(index) == self.request_count:
            self._is_pending.fill(False)
        else:
            self._is_pending[index] = False

    def begin_again(self, index: Int64Array) -> None:
        """These requests, which had begun, are pending once more: what they waited for is there."""
        self._pending_count += len(index)
        self._is_pending[index] = True

    def settle(self, index: Int64Array, outcomes: Any, errors: tuple[AioKvError, ...] = ()) -> None:
        """What became of some requests, which have begun; `index` in rising order."""
        self.outcomes[index if len(index) < self.request_count else slice(None)] = outcomes
        if len(self._errors) < _ERRORS_MAX:
            self._errors += errors[: _ERRORS_MAX - len(self._errors)]

    def drop_pending(self, outcome: Outcome, error: AioKvError) -> None:
        """Answer what has not begun."""
        if not self.has_begun:
            index = self.pending
            self.begin(index)
            self.settle(index, outcome, (error,))

    def excuse(self) -> None:
        """A failure from here on needs no mention if nobody awaits it: its cause is known."""
        self._has_observer = True

    @property
    def worst_outcome(self) -> Outcome:
        """How it ended, or of a mix the first end that was not DONE; looking at it is not awaiting it."""
        if self._report is not None and self._report.is_complete:
            return Outcome.DONE
        ended = self.outcomes[self.outcomes > _DONE]
        return Outcome(ended[0]) if len(ended) else Outcome.DONE

    @property
    def has_failed(self) -> bool:
        """Whether some request did not succeed."""
        return some(self.outcomes > _DONE)

    def finish(self) -> None:
        """Called by the conductor when nothing of the transfer is in flight: let go of memory, wake everybody."""
        self.is_done = True
        self.owner = None
        waiters = self._waiters + self._enqueued_waiters
        self._waiters, self._enqueued_waiters = [], []
        for wake in waiters:
            wake()

    def _conclude(self) -> TransferReport:
        is_failed = self.outcomes != _DONE
        failed, prefix = 0, self.request_count
        if some(is_failed):
            failed, prefix = int(np.count_nonzero(is_failed)), int(np.argmax(is_failed))
        nbytes = (self.request_count - failed) * self.call.payload
        report = TransferReport(self.outcomes, prefix, nbytes, tuple(self._errors))
        if failed:
            first = self._errors[0] if self._errors else cancelled_error(self.action)
            self._error = summary_of(report, first, failed, action=self.action)
        return report

    @property
    def action(self) -> str:
        """What it does, in a word."""
        return "write" if self.is_write else "read"

    def __repr__(self) -> str:
        state = "done" if self.is_done else "held" if self.blockers else "in flight"
        return f"<CascadeTransfer {self.action} of {self.request_count} requests, {state}>"

    def __del__(self) -> None:
        # Nothing is freed here: this only keeps a failure that nobody looked at from passing in silence.
        if getattr(self, "is_done", False) and not self._has_observer and self.has_failed:
            self.dispatcher.count_unobserved()
            _log.error(
                "a %s of %d requests failed (%s) and was never awaited",
                self.action,
                self.request_count,
                self._errors[0] if self._errors else "cancelled",
            )


def cancelled_error(action: str) -> AioKvError:
    """The error of a request that was cancelled before it had begun."""
    return storage_error(errno.ECANCELED, action=action, file="cascade", file_offset=None, nbytes=None)
