"""The cascade: a bounded tier of pinned host memory with write-back, in front of any backend.

`SlotCache` decides (pure), `Slab` holds the bytes, `CascadeBackend` and `SyncCascade` carry the plans out.
"""

from aio_kv.cascade.backend import CascadeBackend
from aio_kv.cascade.plans import CacheCounts
from aio_kv.cascade.slot_cache import SlotCache
from aio_kv.cascade.states import SlotEvent, SlotState
from aio_kv.cascade.statistics import CascadeStatistics
from aio_kv.cascade.sync import SyncCascade
from aio_kv.cascade.transfer import CascadeTransfer

__all__ = [
    "CacheCounts",
    "CascadeBackend",
    "CascadeStatistics",
    "CascadeTransfer",
    "SlotCache",
    "SlotEvent",
    "SlotState",
    "SyncCascade",
]
