"""The synchronous cascade: the same `SlotCache` in front of a synchronous backend, one group at a time.

The reference that `CascadeBackend` is compared with, plain for ever: no leases, no flush in the background, nothing
that happens later. A dirty victim is written down, then its slot is used.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import numpy as np

from aio_kv.cascade.options import CascadeOptions
from aio_kv.cascade.plans import FlushPlan
from aio_kv.cascade.slab import Slab, slots_for
from aio_kv.cascade.slot_cache import SlotCache
from aio_kv.errors import AioKvError, ClosedError, LayoutError, NotDurableError, StorageError
from aio_kv.integers import Int64Array
from aio_kv.layout import GroupKey, GroupLayout
from aio_kv.memory import host_view, is_device_memory
from aio_kv.protocols import Read, StorageBackend, limited

__all__ = ["SyncCascade"]


class SyncCascade:
    """A bounded write-back tier in host memory in front of `backing`, which it owns.

    Takes the options of `CascadeBackend`. Memory handed to a call is borrowed until the call returns. Calls are
    serialised by a lock, so any thread may make them. What goes to device memory is flushed and read from below.
    """

    def __init__(
        self,
        backing: StorageBackend,
        *,
        capacity_bytes: int,
        slot: str = "block",
        policy: str = "lru",
        promote: bool = False,
        dirty_limit: float = 0.5,
        flush_on_close: bool = True,
    ) -> None:
        options = CascadeOptions(capacity_bytes, slot, policy, promote, dirty_limit, flush_on_close)
        self._layout = backing.layout
        per_slot = options.groups_per_slot(self._layout)
        slots = slots_for(capacity_bytes, per_slot * self._layout.payload_nbytes)
        self._backing = backing
        self._options = options
        self._dirty_max = options.dirty_max(slots)
        self._cache = SlotCache(slots, self._layout.num_groups, per_slot, policy)
        self._slab = Slab(slots * per_slot, self._layout.payload_nbytes)
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def layout(self) -> GroupLayout:
        """The geometry of what is stored."""
        return self._layout

    @property
    def cache(self) -> SlotCache:
        """The book, to be looked at."""
        return self._cache

    def read(self, requests: Iterable[Read], stream: Any = None) -> None:
        """Read groups in order; see `StorageBackend.read`. All are checked before the first byte moves."""
        checked = [self._checked(request) for request in limited(requests)]
        with self._lock:
            self._require_open()
            for group_id, into in checked:
                self._read_group(group_id, into, stream)

    def _checked(self, request: object) -> tuple[int, Any]:
        if not isinstance(request, Read):
            raise LayoutError(f"request is {request!r:.80} ({type(request).__name__}): must be a Read")
        group_id = self._layout.group_id(request.key)
        if is_device_memory(request.into):
            return group_id, request.into
        view = host_view(request.into, writable=True, what="into")
        self._check_length(view, 1, "into")
        return group_id, view

    def _check_length(self, view: memoryview, groups: int, what: str) -> None:
        wanted = groups * self._layout.payload_nbytes
        if view.nbytes != wanted:
            raise LayoutError(f"{what} has {view.nbytes} bytes: must be exactly {wanted}, {groups} groups")

    def _read_group(self, group_id: int, into: Any, stream: Any) -> None:
        row = self._cache.row_of(group_id)
        if row >= 0 and isinstance(into, memoryview):
            self._cache.touch(self._cache.slots_of(np.array([row])))
            into[:] = self._slab.row(row)
            return
        if row >= 0:
            self._flush_all()  # the backing knows how to reach the device
        self._backing.read([Read(self._layout.key(group_id), into)], stream)
        if self._options.promote and row < 0 and isinstance(into, memoryview):
            self._promote(group_id, into)

    def _promote(self, group_id: int, payload: memoryview) -> None:
        plan = self._cache.plan_promote(np.array([group_id]))
        rows = plan.rows[plan.rows >= 0]
        for row in rows.tolist():
            self._slab.row(row)[:] = payload
        self._cache.commit(plan, rows, is_dirty=False)

    def read_block(self, layer: int, block: int, into: Any, stream: Any = None) -> None:
        """Read all groups of a block into host memory, packed in (kind, head) order without padding."""
        view = host_view(into, writable=True, what="into")
        self._check_length(view, self._layout.groups_per_block, "into")
        payload = self._layout.payload_nbytes
        with self._lock:
            self._require_open()
            for place, group_id in enumerate(self._block_ids(layer, block).tolist()):
                self._read_group(group_id, view[place * payload : (place + 1) * payload], stream)

    def write_from_host(self, key: GroupKey, source: Any) -> None:
        """Write one group; it comes down when its slot is needed, with `flush`, or at the end."""
        view = host_view(source, writable=False, what="source")
        group_id = self._layout.group_id(key)
        self._check_length(view, 1, "source")
        with self._lock:
            self._require_open()
            self._write_group(group_id, view)

    def write_block(self, layer: int, block: int, source: Any) -> None:
        """Write all groups of a block, packed in (kind, head) order without padding."""
        view = host_view(source, writable=False, what="source")
        ids = self._block_ids(layer, block)
        self._check_length(view, len(ids), "source")
        payload = self._layout.payload_nbytes
        with self._lock:
            self._require_open()
            for place, group_id in enumerate(ids.tolist()):
                self._write_group(group_id, view[place * payload : (place + 1) * payload])

    def _block_ids(self, layer: int, block: int) -> Int64Array:
        first = self._layout.block_group_id(layer, block)
        return np.arange(first, first + self._layout.groups_per_block, dtype=np.int64)

    def _write_group(self, group_id: int, source: memoryview) -> None:
        plan = self._cache.plan_write(np.array([group_id]))
        while plan.rows[0] < 0:
            self._flush_slot()  # raises if it cannot: then nothing has been written
            plan = self._cache.plan_write(np.array([group_id]))
        self._slab.row(int(plan.rows[0]))[:] = source
        self._cache.commit(plan, plan.rows)
        while self._cache.dirty_count > self._dirty_max:
            self._flush_slot()

    def _flush_slot(self) -> None:
        self._cache.retry()
        plan = self._cache.plan_flush(1)
        assert plan is not None, "there is no room, and nothing to flush"
        self._carry_out(plan)

    def _carry_out(self, plan: FlushPlan) -> None:
        is_landed = np.zeros(len(plan.rows), np.bool_)
        try:
            for index, (group_id, row) in enumerate(
                zip(plan.group_ids.tolist(), plan.rows.tolist(), strict=True)
            ):
                self._backing.write_from_host(self._layout.key(group_id), self._slab.row(row))
                is_landed[index] = True
        finally:
            self._cache.flushed(plan, is_landed)

    def _flush_all(self) -> None:
        """Write everything down. Raises the first failure, having tried the rest."""
        self._cache.retry()
        first: AioKvError | None = None
        while (plan := self._cache.plan_flush(1)) is not None:
            try:
                self._carry_out(plan)
            except AioKvError as error:
                first = first or error
        if first is not None:
            raise first

    def flush(self) -> None:
        """Write everything down and make it durable. Raises `NotDurableError` naming what is not."""
        with self._lock:
            self._require_open()
            self._make_durable("flush")

    def _make_durable(self, action: str) -> None:
        accepted = self._cache.dirty_groups().tolist()
        try:
            self._flush_all()
            sync = getattr(self._backing, "sync", None)
            if sync is not None:
                sync()
        except StorageError as error:
            left = self._cache.dirty_groups().tolist() or accepted
            number = error.errno or 5
            raise NotDurableError(action, group_ids=left, errno=number, hint=str(error)) from error

    def close(self) -> None:
        """Flush, then close the backing whatever came of it; again does nothing. Raises `NotDurableError`."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            try:
                if self._options.flush_on_close and self._cache.dirty_count:
                    self._make_durable("close")
            finally:
                self._backing.close()

    def _require_open(self) -> None:
        if self._is_closed:
            raise ClosedError("this cascade is closed: make a new one")

    def __enter__(self) -> SyncCascade:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
