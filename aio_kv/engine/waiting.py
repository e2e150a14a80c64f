"""Waiting for a ticket on an engine without an event loop."""

from __future__ import annotations

import select
import threading
import time
from typing import Any, Protocol

from aio_kv.engine.batch import Ticket

__all__ = ["TicketWaiter", "wait_readable"]


class _Drainable(Protocol):
    def drain(self) -> list[Ticket]: ...

    def fileno(self) -> int: ...


class TicketWaiter:
    """Lets any number of threads wait, each for its own ticket: one of them polls and drains for all."""

    def __init__(self, engine: _Drainable) -> None:
        self._engine = engine
        self._turn = threading.Condition()
        self._has_poller = False

    def wait(self, ticket: Ticket, timeout: float | None) -> bool:
        """Return True when the ticket is done, False when `timeout` seconds have passed first."""
        until = None if timeout is None else time.monotonic() + timeout
        with self._turn:
            while not ticket.is_done:
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    return False
                if self._has_poller:
                    self._turn.wait(left)
                else:
                    self._poll(left)
        return True

    def _poll(self, timeout: float | None) -> None:
        # Called with the condition held; it is let go while polling, and everybody looks again afterwards.
        self._has_poller = True
        self._turn.release()
        try:
            wait_readable(self._engine.fileno(), timeout)
            self._engine.drain()
        finally:
            self._turn.acquire()
            self._has_poller = False
            self._turn.notify_all()


def wait_readable(fd: Any, timeout: float | None) -> None:
    """Block until `fd` polls readable or `timeout` seconds have passed."""
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        poll.poll(None if timeout is None else max(0.0, timeout) * 1000)
    else:
        select.select([fd], [], [], timeout)
