"""`CascadeBackend`: a bounded tier of pinned host memory with write-back, in front of any asynchronous backend.

It changes where bytes are, never what they are. Hits are copied from the slab (by the processor, or by the engine to a
device), misses go to the backing in the same call; writes go to the slab and come down later. See
`docs/explanation/cascade.md` for who owns what, and for what happens when things go wrong.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from types import TracebackType
from typing import Any, Final, Self

import numpy as np

from aio_kv.backends.call_memory import HOST_TYPES
from aio_kv.backends.device_side import DeviceSide
from aio_kv.cascade.call import Call, checked_how, groups_call, requests_call
from aio_kv.cascade.options import CascadeOptions
from aio_kv.cascade.plans import ReadPlan
from aio_kv.cascade.session import CascadeSession
from aio_kv.cascade.slab import slots_for
from aio_kv.cascade.statistics import CascadeStatistics
from aio_kv.cascade.transfer import CascadeTransfer
from aio_kv.engine import Kind
from aio_kv.errors import ClosedError, LayoutError
from aio_kv.integers import Int64Array
from aio_kv.layout import GroupLayout
from aio_kv.memory import host_view
from aio_kv.protocols import AsyncStorageBackend, Priority, Read, Write
from aio_kv.transfer.loops import current_binding

__all__ = ["CascadeBackend"]

# Looked up once: every look at a member of an enumeration is a search.
_READ: Final = Kind.READ
_WRITE: Final = Kind.WRITE


class CascadeBackend:
    """A write-back tier of host memory in front of `backing`, which it opens if need be, owns, and closes.

    Args:
        backing: any `AsyncStorageBackend`; another cascade as well.
        capacity_bytes: payload bytes that it may hold; whole slots of it are used.
        slot: "block" keeps all groups of a block of a layer together, "group" each for itself.
        policy: which slot goes first: "lru", "arc" or "s3fifo".
        promote: whether what is read from below comes up, where there is room without a flush.
        dirty_limit: the share of the slots that may be dirty before they are flushed in the background.
        flush_on_close: whether `aclose` flushes; without it what is dirty is dropped, and the log says so.
        drain_timeout: seconds without any progress after which `aclose` gives up.

    Opens with `async with cascade:` or `await cascade`; belongs to the event loop in which it was opened. Raises
    `LayoutError` for a wrong option.
    """

    def __init__(
        self,
        backing: AsyncStorageBackend,
        *,
        capacity_bytes: int,
        slot: str = "block",
        policy: str = "lru",
        promote: bool = False,
        dirty_limit: float = 0.5,
        flush_on_close: bool = True,
        drain_timeout: float = 30.0,
    ) -> None:
        self._options = CascadeOptions(
            capacity_bytes, slot, policy, promote, dirty_limit, flush_on_close, drain_timeout
        )
        self._layout = backing.layout
        slots_for(capacity_bytes, self._options.groups_per_slot(self._layout) * self._layout.payload_nbytes)
        self._backing: Any = backing
        self._session: CascadeSession | None = None
        self._closing: CascadeSession | None = None
        self._has_begun = False
        self._last_statistics: CascadeStatistics | None = None

    async def __aenter__(self) -> Self:
        if self._has_begun:
            raise ClosedError("a cascade is opened once: make a new one")
        self._has_begun = True
        binding = current_binding(self._options.drain_timeout)
        if not getattr(self._backing, "is_open", True):
            await self._backing.__aenter__()
        try:
            self._session = await CascadeSession.open(self._backing, binding, self._options)
        except BaseException:
            await self._backing.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __await__(self) -> Generator[Any, Any, Self]:
        return self.__aenter__().__await__()

    async def aclose(self) -> None:
        """Refuse new work, drop what has not begun, wait for the rest, flush, close the backing; again does nothing.

        Raises `NotDurableError` naming the groups that could not be made durable; everything is closed all the same.
        Cancelled, it finishes and then raises.
        """
        session = self._session
        if session is None:
            if self._closing is not None:
                await self._closing.wait_closed()
            return
        session.check_loop()
        self._session, self._closing = None, session
        self._last_statistics = session.statistics()
        try:
            await session.close()
        finally:
            self._last_statistics = session.statistics()
            self._closing = None

    @property
    def layout(self) -> GroupLayout:
        """The geometry of what is stored."""
        return self._layout

    @property
    def backing(self) -> Any:
        """The backend below, to be looked at: what is dirty here is old there."""
        return self._backing

    @property
    def is_open(self) -> bool:
        """Whether it has been opened and not closed."""
        return self._session is not None

    @property
    def device_side(self) -> DeviceSide | None:
        """The GPU that transfers go to, for a backend in front of this one; None without a device."""
        return self._require_session().device

    def read(
        self,
        requests: Sequence[Read] | Iterable[Read],
        *,
        stream: Any = None,
        deadline: float | None = None,
        priority: Priority = Priority.DEMAND,
    ) -> Any:
        """Start reading groups, each into its own memory; see `EngineBackend.read`. Returns a transfer."""
        if requests.__class__ is list and len(requests) == 1 and requests[0].__class__ is Read:
            (request,) = requests
            if stream is None and deadline is None and request.into.__class__ in HOST_TYPES:
                transfer = self._read_one(self._layout.group_id(request.key), request.into, priority)
                if transfer is not None:
                    return transfer
        session = self._require_session()
        how = checked_how(session.binding, stream, deadline, priority)
        return self._read(session, requests_call(self._layout, session.device, _READ, requests, how))

    def read_groups(
        self,
        group_ids: Any,
        into: Any,
        *,
        stream: Any = None,
        deadline: float | None = None,
        priority: Priority = Priority.DEMAND,
    ) -> Any:
        """Start reading groups by number into one buffer or a `Scatter`; see `EngineBackend.read_groups`."""
        is_one = group_ids.__class__ is list and len(group_ids) == 1 and group_ids[0].__class__ is int
        if is_one and stream is None and deadline is None and into.__class__ in HOST_TYPES:
            transfer = self._read_one(group_ids[0], into, priority)
            if transfer is not None:
                return transfer
        session = self._require_session()
        how = checked_how(session.binding, stream, deadline, priority)
        return self._read(session, groups_call(self._layout, session.device, _READ, group_ids, into, how))

    def write(
        self,
        requests: Iterable[Write],
        *,
        stream: Any = None,
        deadline: float | None = None,
        priority: Priority = Priority.DEMAND,
    ) -> Any:
        """Start writing groups, each from its own memory. Done means that the cascade has the bytes.

        They are read from here on, and come down later: `flush` waits for that. See `EngineBackend.write`.
        """
        session = self._require_session()
        how = checked_how(session.binding, stream, deadline, priority)
        return self._start(session, requests_call(self._layout, session.device, _WRITE, requests, how))

    def write_groups(
        self,
        group_ids: Any,
        source: Any,
        *,
        stream: Any = None,
        deadline: float | None = None,
        priority: Priority = Priority.DEMAND,
    ) -> Any:
        """Start writing groups by number from one buffer or a `Scatter`; see `write`."""
        session = self._require_session()
        how = checked_how(session.binding, stream, deadline, priority)
        return self._start(session, groups_call(self._layout, session.device, _WRITE, group_ids, source, how))

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
        """Start reading all groups of a block, packed in (kind, head) order without padding. See `read`."""
        ids = self._block_ids(layer, block)
        return self.read_groups(ids, into, stream=stream, deadline=deadline, priority=priority)

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
        """Start writing all groups of a block, packed in (kind, head) order without padding. See `write`."""
        ids = self._block_ids(layer, block)
        return self.write_groups(ids, source, stream=stream, deadline=deadline, priority=priority)

    def _block_ids(self, layer: int, block: int) -> Int64Array:
        first = self._layout.block_group_id(layer, block)
        return np.arange(first, first + self._layout.groups_per_block, dtype=np.int64)

    def _read(self, session: CascadeSession, call: Call) -> Any:
        """What is wholly below goes to the backing as it is, what is wholly here is copied at once."""
        conductor, cache, count = session.conductor, session.cache, len(call.ids)
        if not count or conductor.has_writers or call.how.is_late:
            return self._start(session, call)
        plan = cache.plan_read(call.ids)
        if plan.hits == count and not call.is_device:
            cache.touch(
                cache.slots_of(plan.rows)
            )  # first: a large copy leaves nothing of the book in any cache
            session.slab.copy_out(plan.rows, call.addresses)
            conductor.note_hits(count, call.payload)
            return CascadeTransfer.finished(conductor, call.ids, call.payload)
        if plan.hits == 0 and not session.options.promote:
            transfer = call.read_below(session.backing, np.arange(count))
            conductor.counts.misses += count
            return transfer
        return self._start(session, call, plan)

    def _read_one(self, group_id: int, into: Any, priority: Priority) -> Any:
        """The short way for one group in host memory; None where the long way must look."""
        session = self._session
        if (
            session is None
            or not session.binding.is_current()
            or session.conductor.has_writers
            or not 0 <= group_id < self._layout.num_groups
            or priority.__class__ is not Priority
        ):
            return None
        row = session.cache.row_of(group_id)
        if row < 0 and session.options.promote:
            return None
        if row < 0:
            transfer = session.backing.read_groups([group_id], into, priority=priority)
            session.conductor.counts.misses += 1
            return transfer
        place = host_view(into, writable=True, what="into")
        if place.nbytes != self._layout.payload_nbytes:
            return None
        place[:] = session.slab.row(row)
        session.cache.touch(session.cache.slots_of(np.array([row])))
        session.conductor.note_hits(1, place.nbytes)
        ids = np.array([group_id], np.int64)
        return CascadeTransfer.finished(session.conductor, ids, place.nbytes)

    def _start(self, session: CascadeSession, call: Call, plan: ReadPlan | None = None) -> CascadeTransfer:
        if call.kind is _WRITE and session.is_read_only:
            raise LayoutError("the files of the backing were opened read_only: open them without to write")
        transfer = CascadeTransfer(session.conductor, call)
        session.conductor.start(transfer, plan)
        return transfer

    async def register_landing_region(self, memory: Any) -> Any:
        """Register caller-owned host memory with the backing, for what goes past the cascade; see there."""
        return await self._require_session().backing.register_landing_region(memory)

    def load(self, region: Any, offsets: Any, into: Any, **options: Any) -> Any:
        """Start copying from pinned host memory to the device, without any group: the backing's own `load`."""
        return self._require_session().backing.load(region, offsets, into, **options)

    def save(self, region: Any, offsets: Any, source: Any, **options: Any) -> Any:
        """Start copying from the device to pinned host memory, without any group: the backing's own `save`."""
        return self._require_session().backing.save(region, offsets, source, **options)

    def record_event(self, stream: Any) -> Any:
        """Return an awaitable event recorded on `stream`; see `EngineBackend.record_event`."""
        return self._require_session().backing.record_event(stream)

    async def wait_ready(self) -> None:
        """Wait until there is room for one more transfer, here and below."""
        session = self._require_session()
        conductor = session.conductor
        await session.binding.wait_cancellably(
            lambda: conductor.has_room, conductor.on_news, conductor.off_news
        )
        self._require_session()
        await session.backing.wait_ready()

    async def flush(self) -> None:
        """Wait until all writes accepted so far have come down and are durable.

        Raises `NotDurableError` naming the groups that are not: their flush, the sync, or the write itself failed. What
        could not be flushed stays, is read from here, and is tried again by the next `flush`.
        """
        await self._require_session().flush()

    def statistics(self) -> CascadeStatistics | None:
        """Counters since the cascade opened; after it has closed, those of the end; None before."""
        session = self._session  # looked at once: a scrape may ask from another thread while this closes
        return session.statistics() if session is not None else self._last_statistics

    def _require_session(self) -> CascadeSession:
        session = self._session
        if session is None:
            state = "closed: open a new one" if self._has_begun else "not open: use `async with` or await it"
            raise ClosedError(f"the cascade is {state}")
        session.check_loop()
        return session
