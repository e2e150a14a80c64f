"""Asynchronous I/O for KV-cache groups between files, host memory and GPUs.

The layers, lowest first; imports go down only:

    errors                           what goes wrong
    layout, plan, memory, policy     pure: geometry, planning, eviction
    protocols                        what a backend is
    files, positional                layer files and synchronous I/O
    engine                           batches through io_uring or threads
    transfer                         what a backend hands out, ordered and awaited
    backends, open                   the oracle and the asynchronous backends
    cascade                          a write-back tier of pinned memory in front of them
    testing, cli                     the conformance kit, the command line
"""

from aio_kv.backends.engine_backend import EngineBackend, ThreadedBackend, UringBackend
from aio_kv.backends.posix import PosixBackend
from aio_kv.backends.statistics import Statistics
from aio_kv.cascade import CascadeBackend, CascadeStatistics, CascadeTransfer, SyncCascade
from aio_kv.direct import DirectAlignment
from aio_kv.engine.extension import allocate_host
from aio_kv.engine.options import EngineOptions
from aio_kv.errors import (
    AioKvError,
    BusyError,
    ClosedError,
    CorruptionError,
    DeadlineError,
    DeviceError,
    LayoutError,
    NotDurableError,
    PeerError,
    ShortReadError,
    StorageError,
    TransferError,
    UnavailableError,
)
from aio_kv.files import LayerFiles
from aio_kv.layout import GroupKey, GroupLayout, KvKind
from aio_kv.models import NAMED_LAYOUTS, ModelShape, named_layout
from aio_kv.open import open_backend
from aio_kv.protocols import AsyncStorageBackend, Priority, Read, Scatter, StorageBackend, Write
from aio_kv.transfer import LandingRegion, Outcome, Transfer, TransferReport

__version__ = "0.1.0"

__all__ = [
    "NAMED_LAYOUTS",
    "AioKvError",
    "AsyncStorageBackend",
    "BusyError",
    "CascadeBackend",
    "CascadeStatistics",
    "CascadeTransfer",
    "ClosedError",
    "CorruptionError",
    "DeadlineError",
    "DeviceError",
    "DirectAlignment",
    "EngineBackend",
    "EngineOptions",
    "GroupKey",
    "GroupLayout",
    "KvKind",
    "LandingRegion",
    "LayerFiles",
    "LayoutError",
    "ModelShape",
    "NotDurableError",
    "Outcome",
    "PeerError",
    "PosixBackend",
    "Priority",
    "Read",
    "Scatter",
    "ShortReadError",
    "Statistics",
    "StorageBackend",
    "StorageError",
    "SyncCascade",
    "ThreadedBackend",
    "Transfer",
    "TransferError",
    "TransferReport",
    "UnavailableError",
    "UringBackend",
    "Write",
    "allocate_host",
    "named_layout",
    "open_backend",
]
