"""One expert on its way into a slot: the transfers that bring it, and who waits for them.

A fill that somebody waits for is one transfer. One that nobody waits for yet, a prefetch, goes piece by piece, few
bytes at a time and in the lowest lane: when a demand for the same expert comes, what is at the device is nearly there,
and the rest is asked for at once with the priority of the demand. Nothing is read twice.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from aio_kv.errors import TransferError
from aio_kv.experts.segments import DirectSegment
from aio_kv.protocols import Priority
from aio_kv.transfer import Transfer

if TYPE_CHECKING:
    from aio_kv.experts.demand import Demand

__all__ = ["Fill", "StartRead"]


class StartRead(Protocol):
    """Starts one read of a fill into its slot. Raises what the reader raises."""

    def __call__(self, slot: int, segments: Sequence[DirectSegment], priority: Priority) -> Transfer:
        """Return the transfer."""


class Fill:
    """The reads that bring one expert into one slot. `pieces` are what has not been asked for.

    `demands` are those that wait for it, `was_wanted` whether there ever was one. `on_end` is called whenever one of
    its transfers has ended, and when the fill has: then `is_ended` is true, and nothing touches the slot any more.
    """

    def __init__(
        self,
        key: int,
        slot: int,
        pieces: Sequence[Sequence[DirectSegment]],
        start: StartRead,
        on_end: Callable[[Fill], None],
    ) -> None:
        self.key = key
        self.slot = slot
        self.pieces = deque(pieces)
        self.demands: dict[Demand, None] = {}
        self.was_wanted = False
        self.is_ended = False
        self.is_whole = True  # all of its bytes have come or may still come
        self.was_given_up = False
        self.failure: TransferError | None = None
        self.nbytes_in_flight = 0
        self._start = start
        self._on_end = on_end
        self._transfers: list[Transfer] = []

    def want(self, demand: Demand) -> None:
        """Count somebody who waits."""
        self.demands[demand] = None
        self.was_wanted = True

    def ask_all(self) -> int:
        """Ask for all that is left, for somebody who waits; returns its bytes.

        Raises what the reader raises, having asked for nothing.
        """
        rest = [segment for piece in self.pieces for segment in piece]
        nbytes = self._ask(rest, Priority.DEMAND, len(self.pieces)) if rest else 0
        if not rest and not self._transfers:  # an expert without bytes
            self._end()
        return nbytes

    def ask_piece(self) -> int:
        """Ask for the next piece, for nobody in particular; returns its bytes. Raises what the reader raises."""
        return self._ask(self.pieces[0], Priority.BACKGROUND, 1)

    def _ask(self, segments: Sequence[DirectSegment], priority: Priority, pieces: int) -> int:
        transfer = self._start(self.slot, segments, priority)
        for _ in range(pieces):
            self.pieces.popleft()
        nbytes = sum(segment.nbytes for segment in segments)
        self._transfers.append(transfer)
        self.nbytes_in_flight += nbytes
        transfer.excuse()  # those who wait are told by the fill
        transfer.add_enqueued_waiter(self._wake)
        transfer.add_waiter(lambda: self._note_end(transfer, nbytes))
        return nbytes

    def _note_end(self, transfer: Transfer, nbytes: int) -> None:
        self._transfers.remove(transfer)
        self.nbytes_in_flight -= nbytes
        if transfer.worst:
            self.is_whole = False
            is_cancelled = self.was_given_up and transfer.worst == -errno.ECANCELED
            if self.failure is None and not is_cancelled:
                self.failure = transfer.failure
                self.give_up()  # the rest is of no use
        if not self._transfers and not self.pieces:
            self._end()
        else:
            self._on_end(self)

    def _end(self) -> None:
        if not self.is_ended:  # giving up may have ended it on the way here
            self.is_ended = True
            self._on_end(self)
            self._wake()

    def give_up(self) -> None:
        """Ask for nothing more, and drop what has not begun; the fill ends when what has begun is done."""
        self.was_given_up = True
        if self.pieces:
            self.is_whole = False
            self.pieces.clear()
        for transfer in list(self._transfers):
            transfer.cancel()
        if not self._transfers:
            self._end()

    @property
    def is_enqueued(self) -> bool:
        """Whether every copy to the device is on a copy stream, so that a stream can be made to wait for it."""
        return (
            self.is_whole
            and not self.pieces
            and all(transfer.is_enqueued and not transfer.worst for transfer in self._transfers)
        )

    def events(self) -> list[int]:
        """Handles of the events behind copies that are not known to be done; good until the next drain."""
        return [ticket.event for transfer in self._transfers for ticket in transfer.tickets if ticket.event]

    def _wake(self) -> None:
        for demand in list(self.demands):
            demand.wake()
