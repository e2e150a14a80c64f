"""What a backend has done so far."""

from __future__ import annotations

from dataclasses import dataclass

from aio_kv.engine import EngineStatistics
from aio_kv.transfer.dispatcher import DispatcherStatistics

__all__ = ["Statistics"]


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counters of a backend since it opened, and how it works.

    `rung` names mechanism and file mode, "uring-fixed-direct" being the best; `refusals` says for each better rung
    why it is not in force. `registered_nbytes` of `staging_nbytes` staging memory are registered with the ring.
    """

    backend: str
    rung: str
    refusals: tuple[str, ...]
    staging_nbytes: int
    registered_nbytes: int
    landing_regions: int
    transfers: DispatcherStatistics
    engine: EngineStatistics
