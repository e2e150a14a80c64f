"""Every kind of backend that the suite is run against, by name, each over files of its own.

`make_backend(kind, folder)` gives what the conformance kit calls `make`. The kinds differ in the engine, in the file
mode, and in sizes chosen to be inconvenient.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from aio_kv import EngineOptions, GroupLayout, LayerFiles, ThreadedBackend, UringBackend, direct
from aio_kv.backends import rungs
from aio_kv.backends.engine_backend import EngineBackend
from aio_kv.direct import DirectProbe
from aio_kv.engine import has_extension
from aio_kv.testing import MemoryBackend, SeededScheduler

SMALL = EngineOptions(
    queue_depth=32,
    threads=2,
    staging_nbytes=4 << 20,
    max_requests=4096,
    max_transfers=256,
    op_nbytes_max=256 << 10,
    bulk_nbytes=1 << 20,
    drain_timeout=20.0,
)
# The smallest of everything: queues overflow, batches are fed in parts, staging slots run out.
TIGHT = replace(
    SMALL, queue_depth=2, max_requests=5, op_nbytes_max=8192, small_nbytes=4096, staging_nbytes=2 << 20
)


@dataclass(frozen=True)
class KindOfBackend:
    """How to make one kind of backend, None being the one in memory. `rung` is how the name of its rung must begin."""

    backend: type[EngineBackend] | None
    options: EngineOptions = SMALL
    is_buffered: bool = False
    on_tmpfs: bool = False
    is_native: bool = True
    rung: str = ""


KINDS = {
    "uring": KindOfBackend(UringBackend, rung="uring-fixed-"),
    "uring-buffered": KindOfBackend(UringBackend, is_buffered=True, rung="uring-fixed-buffered"),
    "uring-2-rings": KindOfBackend(UringBackend, replace(SMALL, rings=2), on_tmpfs=True, rung="uring-fixed-"),
    "uring-unregistered": KindOfBackend(
        UringBackend, replace(SMALL, register_buffers=False), on_tmpfs=True, rung="uring-"
    ),
    "uring-tight": KindOfBackend(UringBackend, TIGHT, on_tmpfs=True, rung="uring-fixed-"),
    "threads": KindOfBackend(ThreadedBackend, rung="threads-"),
    "threads-tight": KindOfBackend(
        ThreadedBackend, TIGHT, is_buffered=True, on_tmpfs=True, rung="threads-buffered"
    ),
    "python": KindOfBackend(ThreadedBackend, is_native=False, rung="threads-python-direct"),
    "python-tight": KindOfBackend(
        ThreadedBackend,
        TIGHT,
        is_native=False,
        is_buffered=True,
        on_tmpfs=True,
        rung="threads-python-buffered",
    ),
    "memory": KindOfBackend(None, is_native=False),
    "memory-shuffled": KindOfBackend(None, TIGHT, is_native=False),
}
# These run on every loop, the rest on asyncio only: a loop and a file mode have nothing to do with each other.
ON_EVERY_LOOP = ("uring", "threads", "python", "memory-shuffled")
Make = Callable[[GroupLayout], AbstractAsyncContextManager[EngineBackend]]
TMPFS = "/dev/shm"  # Creating files there costs a tenth; it takes direct I/O from Linux 6.6 on.
_folders = itertools.count()
_CAP_IPC_LOCK = 14


def has_little_locked_memory() -> bool:
    """Whether the kernel counts what this process registers against a limit: that of an ordinary user."""
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    capabilities = re.search(r"^CapEff:\s*([0-9a-f]+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    is_exempt = capabilities is not None and bool(int(capabilities[1], 16) >> _CAP_IPC_LOCK & 1)
    return limit != resource.RLIM_INFINITY and not is_exempt


def require_kind(kind: str) -> KindOfBackend:
    """The kind, or a skip with the reason why it cannot be had here."""
    chosen = KINDS[kind]
    if chosen.is_native and not has_extension():
        pytest.skip("the compiled extension is not installed")
    return chosen


def make_backend(kind: str, folder: Path, **changes: Any) -> Make:
    """A factory for backends of one kind, each in a new directory of `folder`. `changes` are engine options."""
    chosen = require_kind(kind)

    @asynccontextmanager
    async def make(layout: GroupLayout) -> AsyncIterator[EngineBackend]:
        with open_files(chosen, folder, layout) as files, rung_of(chosen):
            async with backend_on(kind, files, layout, **changes) as backend:
                yield backend

    return make


class open_files:
    """The layer files of a kind, in a directory that is removed at the end; for MemoryBackend there are none."""

    def __init__(self, chosen: KindOfBackend, folder: Path, layout: GroupLayout) -> None:
        self.chosen, self.layout = chosen, layout
        parent = TMPFS if chosen.on_tmpfs and os.path.isdir(TMPFS) else str(folder)
        self.path = tempfile.mkdtemp(prefix=f"aio_kv-{next(_folders)}-", dir=parent)

    def __enter__(self) -> LayerFiles | None:
        if self.chosen.backend is None:
            self.files = None
            return None
        with pytest.MonkeyPatch.context() as patch:
            if self.chosen.is_buffered:
                refused = DirectProbe(None, "refused by the test")
                patch.setattr(direct, "_probe_file", lambda path: refused)
            self.files = LayerFiles(self.path, self.layout, create=True)
        return self.files

    def __exit__(self, *exception: object) -> None:
        if self.files is not None:
            self.files.close()
        shutil.rmtree(self.path)


class rung_of:
    """While it is entered, the kind's rung is the best that there is."""

    def __init__(self, chosen: KindOfBackend) -> None:
        self.chosen = chosen
        self.patch = pytest.MonkeyPatch()

    def __enter__(self) -> None:
        if self.chosen.backend is not None and not self.chosen.is_native:
            self.patch.setattr(rungs, "has_extension", lambda: False)

    def __exit__(self, *exception: object) -> None:
        self.patch.undo()


@asynccontextmanager
async def backend_on(
    kind: str, files: LayerFiles | None, layout: GroupLayout, **changes: Any
) -> AsyncIterator[EngineBackend]:
    """An open backend of one kind on open files, on the rung that the kind is for."""
    chosen = KINDS[kind]
    options = replace(chosen.options, **changes)
    if chosen.backend is None or files is None:
        scheduler = SeededScheduler(7) if kind == "memory-shuffled" else None
        alignment = 512 if kind == "memory-shuffled" else 1
        async with MemoryBackend(
            layout, scheduler=scheduler, alignment=alignment, options=options
        ) as backend:
            yield backend
        return
    async with chosen.backend(files, options=options) as backend:
        if not backend.rung.startswith(chosen.rung) and has_little_locked_memory():
            # Memory that rings of earlier tests had registered comes back late.
            pytest.skip(f"needs more locked memory (ulimit -l): {backend.refusals[0].reason}")
        assert backend.rung.startswith(chosen.rung), backend.rung
        yield backend
