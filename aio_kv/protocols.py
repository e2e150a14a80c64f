"""What a backend is, in one place, and the small values that are handed to every backend.

The protocols name what callers may rely on. Types of higher layers (transfers, events, statistics) appear as
`Any` here, since imports only go down; each backend's own signatures are exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

from aio_kv.errors import LayoutError
from aio_kv.integers import INT64_MAX, Int64Array, check_integers
from aio_kv.layout import GroupKey, GroupLayout

__all__ = [
    "AsyncStorageBackend",
    "Priority",
    "Read",
    "Scatter",
    "StorageBackend",
    "Write",
    "check_count",
    "check_priority",
    "limited",
]

# How much one call may ask for: all of it is checked and planned before the call returns, in memory that grows with it.
GROUPS_PER_CALL_MAX: Final = 1 << 24
REQUESTS_PER_CALL_MAX: Final = 1 << 20

T = TypeVar("T")


class Priority(IntEnum):
    """Which work goes first: what someone waits for, what someone will want, and what can wait."""

    DEMAND = 0
    PREFETCH = 1
    BACKGROUND = 2


@dataclass(frozen=True, slots=True)
class Read:
    """One group to read. `into` is a writable buffer, device array or pointer holder of exactly one payload.

    The backend borrows `into` until the read has ended.
    """

    key: GroupKey
    into: Any


@dataclass(frozen=True, slots=True)
class Write:
    """One group to write. `source` is a buffer or pointer holder of exactly one payload.

    The backend borrows `source` until the write has ended; it must not change meanwhile.
    """

    key: GroupKey
    source: Any


@dataclass(frozen=True, slots=True, eq=False)
class Scatter:
    """One piece of memory and a byte offset in it for each group.

    `offsets` becomes a C-contiguous one-dimensional int64 array; one already in that form is not copied and
    must not change while a transfer uses it. Raises `LayoutError` for offsets that are not integers,
    negative, or not one-dimensional. Whether `offset + payload_nbytes` stays inside `memory` is checked by
    the backend.
    """

    memory: Any
    offsets: Int64Array

    def __post_init__(self) -> None:
        check_count(self.offsets, what="Scatter.offsets")
        checked = check_integers(self.offsets, what="Scatter.offsets", limit=INT64_MAX)
        object.__setattr__(self, "offsets", checked)


def check_priority(priority: object) -> None:
    """Raise `LayoutError` for what is not a `Priority`."""
    if priority.__class__ is not Priority:
        raise LayoutError(f"priority is {priority!r}: must be a Priority")


def check_count(values: object, *, what: str) -> None:
    """Raise `LayoutError` for more values than one call may have, before anything is done with them.

    A few bytes can stand for billions of values (a range, an array that repeats one element). What has no length is
    left to those who look at the values.
    """
    try:
        count = len(values)  # type: ignore[arg-type]
    except TypeError:
        return
    except OverflowError:  # a range longer than any sequence can be
        count = INT64_MAX
    if count > GROUPS_PER_CALL_MAX:
        raise LayoutError(
            f"{what} holds {count} values: at most {GROUPS_PER_CALL_MAX} in one call; split it up"
        )


def limited(requests: Iterable[T]) -> Iterator[T]:
    """Hand on what one call may have of `requests`, which need not end by themselves; then raise `LayoutError`."""
    for index, request in enumerate(requests):
        if index == REQUESTS_PER_CALL_MAX:
            raise LayoutError(
                f"requests: at most {REQUESTS_PER_CALL_MAX} in one call; read_groups and write_groups take more"
            )
        yield request


@runtime_checkable
class StorageBackend(Protocol):
    """A synchronous backend: every call returns when its bytes are where they belong."""

    @property
    def layout(self) -> GroupLayout:
        """The geometry of what is stored."""

    def read(self, requests: Iterable[Read], stream: Any = None) -> None:
        """Read groups in order; raises on the first failure."""

    def write_from_host(self, key: GroupKey, source: Any) -> None:
        """Write one group from exactly `payload_nbytes` bytes of host memory."""

    def read_block(self, layer: int, block: int, into: Any, stream: Any = None) -> None:
        """Read all groups of a block, packed in (kind, head) order without padding."""

    def write_block(self, layer: int, block: int, source: Any) -> None:
        """Write all groups of a block, packed in (kind, head) order without padding."""

    def close(self) -> None:
        """Give everything back; calling it again does nothing."""


@runtime_checkable
class AsyncStorageBackend(Protocol):
    """An asynchronous backend. The calls that return a transfer never block; awaiting the transfer waits.

    `deadline` is absolute, on the clock of `anyio.current_time()`. Memory handed over belongs to the backend
    until the transfer has ended, cancelled or not.
    """

    @property
    def layout(self) -> GroupLayout:
        """The geometry of what is stored."""

    def read(
        self,
        requests: Iterable[Read],
        *,
        stream: Any = None,
        deadline: float | None = None,
        priority: Priority = Priority.DEMAND,
    ) -> Any:
        """Start reading groups; returns a Transfer."""

    def read_groups(
        self,
        group_ids: Any,
        into: Any,
        *,
        stream: Any = None,
        deadline: float | None = None,
        priority: Priority = Priority.DEMAND,
    ) -> Any:
        """Start reading groups by number into a `Scatter` or a packed buffer; returns a Transfer."""

    def write(
        self,
        requests: Iterable[Write],
        *,
        stream: Any = None,
        deadline: float | None = None,
        priority: Priority = Priority.DEMAND,
    ) -> Any:
        """Start writing groups, none of them twice; returns a Transfer."""

    def write_groups(
        self,
        group_ids: Any,
        source: Any,
        *,
        stream: Any = None,
        deadline: float | None = None,
        priority: Priority = Priority.DEMAND,
    ) -> Any:
        """Start writing groups by number from a `Scatter` or a packed buffer; returns a Transfer."""

    def read_block(
        self,
        layer: int,
        block: int,
        into: Any,
        *,
        stream: Any = None,
        deadline: float | None = None,
        priority: Priority = Priority.DEMAND,
    ) -> Any:
        """Start reading all groups of a block, packed in (kind, head) order; returns a Transfer."""

    def write_block(
        self,
        layer: int,
        block: int,
        source: Any,
        *,
        stream: Any = None,
        deadline: float | None = None,
        priority: Priority = Priority.DEMAND,
    ) -> Any:
        """Start writing all groups of a block, packed in (kind, head) order; returns a Transfer."""

    async def register_landing_region(self, memory: Any) -> Any:
        """Register caller-owned host memory for direct transfers; returns a LandingRegion."""

    def record_event(self, stream: Any) -> Any:
        """Return an awaitable event recorded on `stream`."""

    async def wait_ready(self) -> None:
        """Wait until there is room for one more transfer."""

    async def flush(self) -> None:
        """Wait until every accepted write has landed and is durable."""

    async def aclose(self) -> None:
        """Refuse new work, wait for what is in flight, give everything back; again does nothing."""

    def statistics(self) -> Any:
        """Return counters as a Statistics value."""
