"""No end of a batch is slept through: the notice is taken before the list that it is about.

The other way round, what ends in between is on no list that was taken and its notice is gone. For the native engine
`native/tests/wakes.c` aims at that moment; the engine of Python threads can be made to meet it every time.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from pathlib import Path

from slow_devices import PADDED

from aio_kv import EngineOptions, LayerFiles
from aio_kv.engine import Kind, PythonEngine
from aio_kv.plan import IoLimits


class Interrupted:
    """A socket that has something happen just before it is read for the first time."""

    def __init__(self, wrapped: socket.socket, interrupt: Callable[[], object]) -> None:
        self.wrapped, self.interrupt, self.has_happened = wrapped, interrupt, False

    def recv(self, nbytes: int) -> bytes:
        if not self.has_happened:
            self.has_happened = True
            self.interrupt()
        return self.wrapped.recv(nbytes)

    def fileno(self) -> int:
        return self.wrapped.fileno()

    def close(self) -> None:
        self.wrapped.close()


def test_what_ends_while_a_drain_begins_is_not_lost(tmp_path: Path) -> None:
    with LayerFiles(tmp_path / "kv", PADDED, create=True) as files:
        engine = PythonEngine(files.fds(False), IoLimits(1, 1, 512 << 10), EngineOptions(threads=1))

        def end_one() -> object:
            return engine.submit_region(Kind.REGION_ADD, 4096, 4096, ring=0)

        try:
            engine._reader = Interrupted(engine._reader, end_one)  # type: ignore[assignment]
            end_one()
            found = engine.drain()
            is_readable = bool(select.select([engine.fileno()], [], [], 0)[0])
            assert len(found) == 2 or is_readable
            assert len(found) + len(engine.drain()) == 2
        finally:
            engine.close()
