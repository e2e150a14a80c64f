"""What a cascade can be told, checked once."""

from __future__ import annotations

from dataclasses import dataclass

from aio_kv.errors import LayoutError
from aio_kv.layout import GroupLayout
from aio_kv.policy import POLICY_NAMES

__all__ = ["CascadeOptions"]

_SLOTS = ("block", "group")


@dataclass(frozen=True, slots=True)
class CascadeOptions:
    """The size and the rules of a cascade.

    Args:
        capacity_bytes: payload bytes that it may hold; whole slots of it are used.
        slot: "block", all groups of a block of a layer together, or "group".
        policy: which slot goes first: "lru", "arc" or "s3fifo".
        promote: whether what is read from below comes up, where there is room without a flush.
        dirty_limit: the share of the slots that may be dirty before they are flushed in the background, 0 to 1.
        flush_on_close: whether closing flushes. Without it what is dirty at the end is dropped, and the log says so.
        drain_timeout: seconds without any progress after which closing gives up.

    Raises `LayoutError`.
    """

    capacity_bytes: int
    slot: str = "block"
    policy: str = "lru"
    promote: bool = False
    dirty_limit: float = 0.5
    flush_on_close: bool = True
    drain_timeout: float = 30.0

    def __post_init__(self) -> None:
        if self.slot not in _SLOTS:
            raise LayoutError(f"slot is {self.slot!r}: must be one of {', '.join(_SLOTS)}")
        if self.policy not in POLICY_NAMES:
            raise LayoutError(f"policy is {self.policy!r}: must be one of {', '.join(POLICY_NAMES)}")
        if self.dirty_limit.__class__ not in (int, float) or not 0 <= self.dirty_limit <= 1:
            raise LayoutError(
                f"dirty_limit is {self.dirty_limit!r}: must be a share of the slots, from 0 to 1"
            )
        if not self.drain_timeout > 0:
            raise LayoutError(f"drain_timeout is {self.drain_timeout}: must be above zero seconds")

    def groups_per_slot(self, layout: GroupLayout) -> int:
        """How many groups share a slot."""
        return layout.groups_per_block if self.slot == "block" else 1

    def dirty_max(self, slots: int) -> int:
        """How many of `slots` may be dirty before they are flushed in the background."""
        return int(self.dirty_limit * slots)
