"""For tests of and against aio_kv: an executable contract, a backend in memory, a backend that fails.

`check_backend` and `check_sync_backend` run the conformance kit against any implementation. `MemoryBackend` needs no
files and can be made to land its I/O late and out of order by a seed. `FaultyBackend` makes chosen calls of any backend
fail or end late. Nothing here is meant for production.
"""

from aio_kv.testing.conformance import (
    BACKEND_CHECKS,
    SYNC_BACKEND_CHECKS,
    check_backend,
    check_sync_backend,
)
from aio_kv.testing.faulty import CallFault, FaultyBackend
from aio_kv.testing.memory_backend import MemoryBackend
from aio_kv.testing.memory_engine import MemoryFiles, Scheduler, SeededScheduler
from aio_kv.testing.model import ConformanceError

__all__ = [
    "BACKEND_CHECKS",
    "SYNC_BACKEND_CHECKS",
    "CallFault",
    "ConformanceError",
    "FaultyBackend",
    "MemoryBackend",
    "MemoryFiles",
    "Scheduler",
    "SeededScheduler",
    "check_backend",
    "check_sync_backend",
]
