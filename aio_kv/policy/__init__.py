"""Eviction policies by name: pure, over slot numbers and keys, used by every cache of this package.

LRU is the default: on prefix traces it wins where the cache is large, ARC where it is small, S3-FIFO seldom.
"""

from __future__ import annotations

from aio_kv.errors import LayoutError
from aio_kv.policy.arc import Arc
from aio_kv.policy.interface import Policy, SlotKeys
from aio_kv.policy.lru import Lru
from aio_kv.policy.s3fifo import S3Fifo

__all__ = ["POLICY_NAMES", "Policy", "SlotKeys", "make_policy"]

_POLICIES: dict[str, type[Lru] | type[Arc] | type[S3Fifo]] = {"lru": Lru, "arc": Arc, "s3fifo": S3Fifo}
POLICY_NAMES = tuple(_POLICIES)


def make_policy(name: object, capacity: int) -> Policy:
    """The policy of that name for `capacity` slots. Raises `LayoutError` naming those that there are."""
    if not isinstance(name, str) or name not in _POLICIES:
        raise LayoutError(f"policy is {name!r}: must be one of {', '.join(POLICY_NAMES)}")
    return _POLICIES[name](capacity)
