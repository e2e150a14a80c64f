"""The open state of one cascade: slab, book, flusher, conductor, and the loop that they belong to."""

from __future__ import annotations

import errno
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from aio_kv.backends.device_side import DeviceSide
from aio_kv.cascade.conductor import Conductor
from aio_kv.cascade.errand import Errand
from aio_kv.cascade.flusher import Flusher, Unsynced
from aio_kv.cascade.movers import DeviceMover, HostMover
from aio_kv.cascade.options import CascadeOptions
from aio_kv.cascade.slab import Slab, slots_for
from aio_kv.cascade.slot_cache import SlotCache
from aio_kv.cascade.statistics import CascadeStatistics
from aio_kv.errors import AioKvError, BusyError, NotDurableError, StorageError, TransferError
from aio_kv.integers import Int64Array
from aio_kv.transfer import LoopBinding
from aio_kv.transfer.binding import require_current

__all__ = ["CascadeSession"]

_log = logging.getLogger("aio_kv")
_REGISTERED_MIN = 2 << 20
_AT_ONCE_NBYTES = 2 << 20  # one huge page: no work for a thread

# Slabs that something may still read or write after a device did not answer: never given back.
_leaked: list[object] = []


class CascadeSession:
    """What an open cascade holds."""

    def __init__(
        self, backing: Any, binding: LoopBinding, options: CascadeOptions, slab: Slab, region: Any
    ) -> None:
        layout = backing.layout
        self.backing = backing
        self.binding = binding
        self.options = options
        self.slab = slab
        self.region = region
        self.per_slot = options.groups_per_slot(layout)
        self.slots = slots_for(options.capacity_bytes, self.per_slot * layout.payload_nbytes)
        self.cache = SlotCache(self.slots, layout.num_groups, self.per_slot, options.policy)
        self.device: DeviceSide | None = getattr(backing, "device_side", None)
        self.is_read_only = bool(getattr(getattr(backing, "files", None), "read_only", False))
        self.flusher = Flusher(self.cache, slab, backing, binding, options.dirty_max(self.slots))
        self.host_mover = HostMover(slab)
        device_mover = DeviceMover(slab, backing, region) if self.device is not None else None
        self.conductor = Conductor(
            self.cache,
            slab,
            backing,
            binding,
            self.flusher,
            (self.host_mover, device_mover),
            promote=options.promote,
        )
        self._syncs = self._forgiven = 0  # under way; failed flushes that the backing has complained of
        self._is_closed = False
        self._close_waiters: list[Callable[[], None]] = []

    @classmethod
    async def open(cls, backing: Any, binding: LoopBinding, options: CascadeOptions) -> CascadeSession:
        """Take memory, much of it in a thread, and register it. Cancelled, it gives everything back and then raises."""
        layout = backing.layout
        per_slot = options.groups_per_slot(layout)
        slots = slots_for(options.capacity_bytes, per_slot * layout.payload_nbytes)
        count, payload = slots * per_slot, layout.payload_nbytes
        if count * payload <= _AT_ONCE_NBYTES:
            slab = Slab(count, payload)
        else:
            slab, cancelled = await binding.run_in_thread(lambda: Slab(count, payload))
            if cancelled is not None:
                raise cancelled
        return cls(backing, binding, options, slab, await _register(backing, slab))

    def check_loop(self) -> None:
        """Raise `ClosedError` in any loop but the session's own."""
        require_current(self.binding)

    # Flushing.

    async def flush(self) -> None:
        """See `CascadeBackend.flush`."""
        conductor, binding = self.conductor, self.binding
        accepted = conductor.writers
        await binding.wait_cancellably(
            lambda: all(transfer.is_done for transfer in accepted), conductor.on_news, conductor.off_news
        )
        mark = self._begin_drain()
        try:
            await binding.wait_cancellably(
                lambda: not self.cache.is_dirty_before(mark), conductor.on_news, conductor.off_news
            )
        finally:
            self.flusher.drains -= 1
        failed = (
            self.cache.failed_groups()
        )  # now: another flush may have them tried again while this one syncs
        covered, self.flusher.unsynced = self.flusher.unsynced, Unsynced()
        try:
            await self._sync()
        except BaseException as error:
            self.flusher.unsynced.add(covered.all())
            if isinstance(error, StorageError):
                self._raise_not_durable("flush", np.concatenate([failed, covered.all()]), error)
            raise
        self._raise_not_durable("flush", failed, self.flusher.last_error)

    def _begin_drain(self) -> int:
        mark = self.cache.dirt
        self.cache.retry()
        self.flusher.drains += 1
        self.conductor.pump()
        return mark

    async def _sync(self) -> None:
        """Make what came down durable. A backing remembers failed writes; those that were repeated are our affair."""
        failures = self.flusher.counts.failed_flushes
        self._syncs += 1
        try:
            await self._flush_below()
        except TransferError:
            raise  # the sync itself: a second one would succeed and mean nothing
        except StorageError:
            if failures == self._forgiven:
                raise
            self._forgiven = failures
            await self._flush_below()
        else:
            if self._syncs == 1:  # else the complaint may be on its way to another
                self._forgiven = failures
        finally:
            self._syncs -= 1

    async def _flush_below(self) -> None:
        while True:
            try:
                await self.backing.flush()
                return
            except BusyError:
                await self.backing.wait_ready()

    def _raise_not_durable(self, action: str, groups: Int64Array, cause: AioKvError | None) -> None:
        failed = self.conductor.failed_writes
        self.conductor.failed_writes = []
        left = np.unique(np.concatenate([groups, *failed]))
        if len(left):
            raise NotDurableError(
                action,
                group_ids=left.tolist(),
                errno=getattr(cause, "errno", None) or errno.EIO,
                hint=str(cause) if cause is not None else "a write of them failed; its transfer says why",
            ) from cause

    # Closing.

    async def close(self) -> None:
        """See `CascadeBackend.aclose`."""
        conductor = self.conductor
        dropped = conductor.close()
        if dropped:
            _log.warning("closed with %d writes that had not begun: they are dropped", dropped)
        first: list[BaseException | None] = []
        errors: list[AioKvError] = []
        first.append(await self._wait_while_busy(lambda: conductor.is_idle))
        if self.options.flush_on_close:
            first.append(await self._flush_all(errors))
        else:
            first.append(await self._wait_while_busy(lambda: self.flusher.is_idle))
        left = self.cache.dirty_groups()
        if self.flusher.is_idle and conductor.is_idle:
            first.append(await self._carry_out(self.region.aclose, errors))
        else:
            _log.error("the backing did not answer: %d bytes of memory are leaked", self.slab.nbytes)
            _leaked.append((self.slab, self.region))
        first.append(await self._carry_out(self.backing.aclose, errors))
        if conductor.errand is not None:  # it waited for room below, and is told now that there will be none
            first.append(await conductor.errand.wait(self.options.drain_timeout))
        self._is_closed = True
        for wake in self._close_waiters:
            wake()
        self._end(left, errors)
        for cancelled in first:
            if cancelled is not None:
                raise cancelled

    def _end(self, left: Int64Array, errors: list[AioKvError]) -> None:
        if len(left) and not self.options.flush_on_close:
            _log.warning("closed without a flush: %d groups are dropped", len(left))
            left = left[:0]
        cause = errors[0] if errors else self.flusher.last_error
        unsynced = self.flusher.unsynced.all() if errors and self.options.flush_on_close else left[:0]
        self._raise_not_durable("close", np.concatenate([left, unsynced]), cause)
        if errors:
            raise errors[0]

    async def _flush_all(self, errors: list[AioKvError]) -> BaseException | None:
        mark = self._begin_drain()
        cancelled = await self._wait_while_busy(lambda: not self.cache.is_dirty_before(mark))
        if self.cache.is_dirty_before(mark):  # the backing does not answer: it would not answer a sync either
            return cancelled
        again = await self._carry_out(self._sync, errors, self.options.drain_timeout)
        if not errors:
            self.flusher.unsynced = Unsynced()
        return cancelled or again

    async def _wait_while_busy(self, is_true: Callable[[], bool]) -> BaseException | None:
        """Wait for `is_true` through any number of cancellations, as long as something happens now and then."""
        first: BaseException | None = None
        while not is_true():
            ends = [0]

            def note(ends: list[int] = ends) -> None:
                ends[0] += 1

            self.conductor.on_news(note)
            cancelled = await self.binding.wait_until(
                lambda ends=ends: ends[0] > 0 or is_true(),  # type: ignore[misc]
                self.conductor.on_news,
                self.options.drain_timeout,
            )
            first = first or cancelled
            self.conductor.off_news(note)
            if not ends[0] and not is_true():
                break  # nothing has ended for as long as one may wait
        return first

    async def _carry_out(
        self, work: Callable[[], Awaitable[Any]], errors: list[AioKvError], timeout: float | None = None
    ) -> BaseException | None:
        """Have `work` done in a task that the cancellation of this one does not reach, waiting up to `timeout`."""
        errand = Errand(self.binding, work)
        cancelled = await errand.wait(timeout)
        if not errand.is_done:
            hint = f"the backing did not answer within {timeout} s"
            errors.append(StorageError("close", errno=errno.ETIMEDOUT, hint=hint))
        elif isinstance(errand.error, AioKvError):
            errors.append(errand.error)
        elif errand.error is not None:
            raise errand.error
        return cancelled

    async def wait_closed(self) -> None:
        """Wait until `close`, called by somebody else, has ended; cancelled, wait all the same and then raise."""
        if self._is_closed:
            return
        self.check_loop()
        cancelled = await self.binding.wait_until(lambda: self._is_closed, self._close_waiters.append, None)
        if cancelled is not None:
            raise cancelled

    def statistics(self) -> CascadeStatistics:
        """Counters of now."""
        counts, cache, flusher = self.conductor.counts, self.cache.counts(), self.flusher.counts
        is_registered = bool(getattr(self.region, "is_registered", False))
        return CascadeStatistics(
            policy=self.options.policy,
            slots=self.slots,
            slot_nbytes=self.per_slot * self.slab.payload,
            slab_nbytes=self.slab.nbytes,
            registered_nbytes=getattr(self.region, "nbytes", self.slab.nbytes) if is_registered else 0,
            is_pinned=getattr(self.region, "pin", None) is not None,
            hits=counts.hits,
            misses=counts.misses,
            hit_nbytes=counts.hit_nbytes,
            written_groups=counts.written_groups,
            written_nbytes=counts.written_nbytes,
            promoted_groups=counts.promoted_groups,
            flushes=flusher.flushes,
            failed_flushes=flusher.failed_flushes,
            flushed_groups=flusher.flushed_groups,
            evicted_slots=cache.evicted_slots,
            superseded_slots=cache.superseded_slots,
            resident_slots=cache.resident_slots,
            dirty_slots=cache.dirty_slots,
            leases=cache.leases,
            quarantined_slots=counts.quarantined_slots,
            waits_for_room=counts.waits_for_room,
            waits_for_order=counts.waits_for_order,
            waits_for_backing=counts.waits_for_backing,
            transfers=counts.transfers,
            failed=counts.failed,
            cancelled=counts.cancelled,
            refused=counts.refused,
            unobserved_failures=counts.unobserved_failures,
            backing=self.backing.statistics(),
        )


async def _register(backing: Any, slab: Slab) -> Any:
    """Make the slab a landing region: all of it, or as much as may be locked; it works the same either way."""
    region = await backing.register_landing_region(slab.memory)
    nbytes = slab.nbytes
    while not getattr(region, "is_registered", True) and getattr(region, "pin", None) is None:
        nbytes = nbytes // 2 // 4096 * 4096
        if nbytes < _REGISTERED_MIN or region.refusal != errno.ENOMEM:  # over the locked-memory limit
            break
        await region.aclose()
        region = await backing.register_landing_region(slab.memory[:nbytes])
    return region
