"""Waiting for a ticket on an engine without an event loop."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from aio_kv.engine.batch import Ticket

__all__ = ["TicketWaiter", "wait_readable"]


class _Drainable(Protocol):
    def drain(self) -> list[Ticket]: ...

    def fileno(self) -> int: ...


class TicketWaiter:
    """Lets any number of threads wait, each for its own ticket: one of them polls and drains for all.

    A drain from elsewhere takes what the poller sleeps for, and the descriptor's notice with it. So an engine that is
    drained from several threads tells of each drain by `after_drain`, which makes the descriptor readable again with
    `poke` until the poller has looked. Both sides write first and look then: the drain its tickets and then whether
    there is a poller, the poller itself and then its ticket; so one of them sees the other.
    """

    def __init__(self, engine: _Drainable, poke: Callable[[], None] | None = None) -> None:
        self._engine = engine
        self._poke = poke
        self._turn = threading.Condition()
        self._poller: int | None = None
        self._has_news = False

    def wait(self, ticket: Ticket, timeout: float | None) -> bool:
        """Return True when the ticket is done, False when `timeout` seconds have passed first."""
        until = None if timeout is None else time.monotonic() + timeout
        with self._turn:
            while not ticket.is_done:
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    return False
                if self._poller is not None:
                    self._turn.wait(left)
                else:
                    self._poll(ticket, left)
        return True

    def _poll(self, ticket: Ticket, timeout: float | None) -> None:
        # Called with the condition held; it is let go while polling, and everybody looks again afterwards.
        self._poller = threading.get_ident()
        self._turn.release()
        try:
            if not ticket.is_done:
                wait_readable(self._engine.fileno(), timeout)
                self._engine.drain()
        finally:
            self._turn.acquire()
            self._poller = None
            self._has_news = False
            self._turn.notify_all()

    @property
    def is_polled(self) -> bool:
        """Whether a thread polls: only then is there anybody to tell of a drain."""
        return self._poller is not None

    def after_drain(self, has_finished: bool) -> None:
        """To be called after each drain, by the thread that drained."""
        poller = self._poller
        if poller is None or self._poke is None or poller == threading.get_ident():
            return
        self._has_news = self._has_news or has_finished
        if self._has_news:
            self._poke()

    def dismiss(self) -> None:
        """Wait until nobody polls. Every ticket must be done, and nobody may submit any more."""
        with self._turn:
            while self._poller is not None and self._poke is not None:
                self._poke()
                self._turn.wait(0.05)  # somebody's drain may have taken the notice


def wait_readable(fd: Any, timeout: float | None) -> None:
    """Block until `fd` polls readable or `timeout` seconds have passed."""
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        poll.poll(None if timeout is None else max(0.0, timeout) * 1000)
    else:
        select.select([fd], [], [], timeout)
