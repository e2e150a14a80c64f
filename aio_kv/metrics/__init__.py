"""Statistics as Prometheus metrics: `register(backend)`; needs the extra `metrics`."""

from aio_kv.metrics.collector import Registration, register
from aio_kv.metrics.table import TABLE, Export, Family, FamilyKind, Part, families

__all__ = ["TABLE", "Export", "Family", "FamilyKind", "Part", "Registration", "families", "register"]
