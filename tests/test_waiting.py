"""`TicketWaiter`: many threads, one of which polls for all, and drains that happen elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import ENGINES, Load, engine_on

from aio_kv.engine import Engine, PythonEngine, Ticket, waiting
from aio_kv.engine.waiting import TicketWaiter


class Unpollable:
    """An engine with nothing to poll for: whoever sleeps on it would sleep for ever."""

    def drain(self) -> list[Ticket]:
        return []

    def fileno(self) -> int:
        raise AssertionError("nothing will ever be readable")


class DoneInBetween(Ticket):
    """A ticket that another thread's drain finishes just after somebody has looked at it."""

    looks = 0

    @property  # type: ignore[override]
    def is_done(self) -> bool:
        self.looks += 1
        return self.looks > 1


def test_the_poller_looks_again_before_it_sleeps() -> None:
    ticket = DoneInBetween(1, (), 1, ring=0)
    assert TicketWaiter(Unpollable()).wait(ticket, 60)
    assert ticket.looks > 1


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine | PythonEngine]:
    with engine_on(request.param, tmp_path) as opened:
        yield opened


def test_close_waits_until_nobody_polls(
    engine: Engine | PythonEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of a closed descriptor may be somebody else's in the next moment."""
    wait_readable, polls, may_go, seen = waiting.wait_readable, threading.Event(), threading.Event(), []

    def wait_long(fd: Any, timeout: float | None) -> None:
        polls.set()
        wait_readable(fd, timeout)
        may_go.wait(0.2)  # close has this long to be wrong
        seen.append(engine.is_closed)

    monkeypatch.setattr(waiting, "wait_readable", wait_long)
    ticket = engine.submit(Load(8).batch())
    waiter = threading.Thread(target=engine.wait, args=(ticket,))
    waiter.start()
    assert polls.wait(20)
    assert engine.close(20)
    may_go.set()
    waiter.join(20)
    assert not waiter.is_alive()
    assert seen
    assert not any(seen), "closed under a poll"


def test_every_waiter_hears_of_a_drain_elsewhere(engine: Engine | PythonEngine) -> None:
    loads = [Load(4) for _ in range(6)]
    tickets = [engine.submit(load.batch()) for load in loads]
    waiters = [threading.Thread(target=engine.wait, args=(ticket,)) for ticket in tickets]
    for waiter in waiters:
        waiter.start()
    while not all(ticket.is_done for ticket in tickets):
        engine.drain()
    for waiter in waiters:
        waiter.join(10)
    assert not any(waiter.is_alive() for waiter in waiters)
