"""Engines without a backend: a file of known content, engines on it, and batches made by hand."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aio_kv import EngineOptions, UnavailableError
from aio_kv.engine import Batch, Engine, IoEngine, Kind, PythonEngine, Ticket, has_extension
from aio_kv.plan import COPY_DTYPE, OP_DTYPE, RESULT_DTYPE, IoLimits, Placement

PAGE = 4096
FILE_NBYTES = 4 << 20
BUFFERED = IoLimits(1, 1, 128 << 10)
SMALL = EngineOptions(
    queue_depth=16,
    threads=3,
    staging_nbytes=2 << 20,
    max_requests=256,
    max_transfers=16,
    op_nbytes_max=128 << 10,
    small_nbytes=16 << 10,
    bulk_nbytes=1 << 20,
    drain_timeout=20.0,
)
ENGINES = ("uring", "threads", "python")
NATIVE = ("uring", "threads")


def content_of(file_offset: int, nbytes: int) -> bytes:
    """The bytes of the test file: each page holds its own number, over and over."""
    first = file_offset // PAGE
    pages = np.repeat(np.arange(first, (file_offset + nbytes) // PAGE + 1, dtype="<u4"), PAGE // 4).tobytes()
    return pages[file_offset - first * PAGE :][:nbytes]


@contextmanager
def engine_on(
    kind: str, folder: Path, limits: IoLimits = BUFFERED, **changes: Any
) -> Iterator[Engine | PythonEngine]:
    """An engine on one file; closed at the end, and skipped where it cannot be had. `changes` are engine options."""
    if kind != "python" and not has_extension():
        pytest.skip("the compiled extension is not installed")
    path = folder / "content"
    path.write_bytes(content_of(0, FILE_NBYTES))
    options = replace(SMALL, **changes)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if kind == "python":
            engine: Engine | PythonEngine = PythonEngine([fd], limits, options)
        else:
            try:
                engine = Engine([fd], limits, options, uring=kind == "uring")
            except UnavailableError as refused:
                pytest.skip(str(refused))
        try:
            yield engine
        finally:
            assert engine.close(10.0)
    finally:
        os.close(fd)


class Load:
    """A batch with its arrays and its memory; `target` holds the ops' bytes one behind the other."""

    def __init__(
        self,
        count: int,
        nbytes: int = PAGE,
        *,
        kind: Kind = Kind.READ,
        placement: Placement = Placement.DIRECT,
        first_offset: int = 0,
        priority: int = 0,
        deadline_ns: int = 0,
    ) -> None:
        self.kind, self.count, self.nbytes, self.first_offset = kind, count, nbytes, first_offset
        self.priority, self.deadline_ns = priority, deadline_ns
        self.target = np.full(count * nbytes, 0xA5, np.uint8)
        self.ops = np.zeros(count, OP_DTYPE)
        self.copies = np.zeros(count, COPY_DTYPE)
        self.results = np.array([(1, 0)] * count, RESULT_DTYPE)
        places = self.target.ctypes.data + np.arange(count) * nbytes
        self.ops["file_offset"] = first_offset + np.arange(count) * nbytes
        self.ops["nbytes"], self.ops["placement"] = nbytes, placement
        if placement == Placement.DIRECT:
            self.ops["address"] = places
        else:
            self.ops["copy_first"], self.ops["copy_count"] = np.arange(count), 1
            self.copies["address"], self.copies["nbytes"] = places, nbytes

    def batch(self, **changes: Any) -> Batch:
        """The batch to be submitted."""
        whole = Batch(
            self.kind,
            self.ops,
            self.count,
            self.results,
            self.copies,
            self.count,
            self.priority,
            self.deadline_ns,
            self.target,
        )
        return whole._replace(**changes)

    def run(self, engine: IoEngine) -> Ticket:
        """Submit, and wait for the end."""
        ticket = engine.submit(self.batch())
        assert engine.wait(ticket, 20.0)
        return ticket

    def check(self) -> None:
        """Every op that is told to have succeeded has its bytes; no other op's memory was touched."""
        for index, code in enumerate(self.results["code"].tolist()):
            found = self.target[index * self.nbytes :][: self.nbytes].tobytes()
            wanted = content_of(self.first_offset + index * self.nbytes, self.nbytes)
            assert found == (wanted if code == 0 else b"\xa5" * self.nbytes), (index, code)
