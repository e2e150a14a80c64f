"""`ExpertArena`: a bounded number of experts in memory, of which those asked for are read, shared, leased and evicted.

Demands stand in one line, first come first served, and each gets all of its slots at once: nobody is passed over, and
two that each held half of what they need cannot wait for each other. An expert is read once for all that want it.
Prefetched experts come when nobody waits for anything, few bytes at a time, and go when somebody does.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Generator, Sequence
from types import TracebackType
from typing import Any, Self

from aio_kv.cuda.stream import Stream, as_stream
from aio_kv.engine import Engine
from aio_kv.errors import (
    AioKvError,
    BusyError,
    ClosedError,
    DeviceError,
    LayoutError,
    TransferError,
    UnavailableError,
)
from aio_kv.experts.arena_memory import ArenaMemory, DeviceSlots, HostSlots
from aio_kv.experts.arena_statistics import ArenaStatistics
from aio_kv.experts.demand import Demand
from aio_kv.experts.expert_keys import ExpertKeys
from aio_kv.experts.fill import Fill
from aio_kv.experts.reader import ExpertReader, ReaderSession
from aio_kv.experts.segments import DirectSegment
from aio_kv.experts.slot_table import SlotTable
from aio_kv.experts.windows import cut
from aio_kv.integers import check_index
from aio_kv.policy import make_policy
from aio_kv.protocols import Priority
from aio_kv.transfer import LoopBinding, Transfer

__all__ = ["ExpertArena"]

_log = logging.getLogger("aio_kv")
_SLOT_ALIGNMENT = 4096
_PIECE_NBYTES = 512 << 10
_MEMORIES = ("host", "device")


class ExpertArena:
    """Experts in a bounded number of slots, each large enough for any expert of the model.

    Args:
        reader: reads the experts; open, and kept open by the caller until the arena is closed.
        capacity_bytes: memory for slots, rounded down to whole ones.
        memory: "host" for pinned host memory, "device" for memory of the reader's GPU.
        policy: which expert makes room, "lru", "arc" or "s3fifo".
        prefetch_bytes: what prefetched experts that nobody has used may take, waiting ones included; by default a
            quarter of the arena.
        prefetch_window_bytes: how much of them is at the device at a time. A demand waits for that at most.

    Opens with `async with arena:` or `await arena`; belongs to the reader's event loop. Any number of tasks may use it.
    A task that asks for more experts while it holds some can wait for ever for another that does the same: ask for a
    layer's experts at once, or have an arena that holds what all tasks need together.
    """

    def __init__(
        self,
        reader: ExpertReader,
        *,
        capacity_bytes: int,
        memory: str = "host",
        policy: str = "lru",
        prefetch_bytes: int | None = None,
        prefetch_window_bytes: int = 1 << 20,
    ) -> None:
        experts = reader.experts
        self.slot_nbytes = -(-max(1, experts.slot_nbytes_max) // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT
        check_index(capacity_bytes, what="capacity_bytes", limit=1 << 62)
        self.capacity = capacity_bytes // self.slot_nbytes
        if self.capacity < 1:
            raise LayoutError(
                f"capacity_bytes is {capacity_bytes}: the largest expert needs a slot of {self.slot_nbytes} bytes"
            )
        if memory not in _MEMORIES:
            raise LayoutError(f"memory is {memory!r}: must be one of {', '.join(_MEMORIES)}")
        bound = capacity_bytes // 4 if prefetch_bytes is None else prefetch_bytes
        self._unproven_max = check_index(bound, what="prefetch_bytes", limit=1 << 62) // self.slot_nbytes
        self._window_nbytes = check_index(
            prefetch_window_bytes, what="prefetch_window_bytes", limit=1 << 62, first=1
        )
        self.is_on_device = memory == "device"
        self._reader = reader
        self._table = SlotTable(self.capacity, make_policy(policy, self.capacity))
        self._keys_of = ExpertKeys(experts)
        self._memory: ArenaMemory | None = None
        self._session: ReaderSession | None = None
        self._state = "new"
        self._line: dict[Demand, None] = {}
        self._fills: dict[int, Fill] = {}
        self._unasked: dict[Fill, None] = {}  # those that found the engine full
        self._queue: dict[int, None] = {}  # keys to prefetch
        self._idle_wakes: list[Callable[[], None]] = []
        self._is_advancing = self._advances_again = self._pump_is_due = False
        self._counts = dict.fromkeys(ArenaStatistics.__dataclass_fields__, 0)

    async def __aenter__(self) -> Self:
        if self._state != "new":
            raise ClosedError("an arena is opened once: make a new one")
        self._state = "opening"
        session = self._reader.session
        if not self.is_on_device:
            self._memory = await HostSlots.open(self._reader, self.capacity, self.slot_nbytes)
        elif session.device is None:
            raise UnavailableError(
                "memory='device' and the reader has no device", hint="open it with device=INDEX"
            )
        else:
            device = session.device.device
            self._memory = await DeviceSlots.open(self._reader, device, self.capacity, self.slot_nbytes)
        self._session, self._state = session, "open"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __await__(self) -> Generator[Any, Any, Self]:
        return self.__aenter__().__await__()

    async def aclose(self) -> None:
        """Refuse new demands, end those that wait, wait for reads and leases, give the memory back.

        Again it does nothing. Cancelled, it finishes all the same and then raises. What does not end within the
        reader's drain timeout (a lease that is held for longer, a device that does not answer) keeps the memory for
        ever, and the log says so.
        """
        session, memory = self._session, self._memory
        if session is None or memory is None:
            return
        session.check_loop()
        if self._state == "open":
            self._state = "closing"
            self._drop_prefetches(())
            for demand in [*self._line, *(one for fill in self._fills.values() for one in fill.demands)]:
                self._fail(demand, ClosedError("the arena was closed before the experts were there"))
        cancelled = await session.binding.wait_until(
            lambda: self._is_idle or self._state == "closed",
            lambda wake: self._idle_wakes.append(wake),
            session.binding.drain_timeout,
        )
        if self._state == "closing":
            self._state = "closed"
            if self._is_idle:
                await memory.aclose(session)
            else:
                _log.error(
                    "an arena was closed with %d leases and %d reads under way: its memory is leaked, not freed",
                    self._table.leases,
                    len(self._fills),
                )
                memory.leak()
            self._wake_idle()
        if cancelled is not None:
            raise cancelled

    @property
    def is_open(self) -> bool:
        """Whether it has been opened and not closed."""
        return self._state == "open"

    @property
    def _is_idle(self) -> bool:
        return not self._fills and not self._line and not self._table.leases

    def experts(self, layer: int, ids: Any, *, stream: Any = None) -> Demand:
        """Experts of one layer, to be used in `async with arena.experts(layer, ids) as slots:`.

        `ids` is a number or several; `slots[i]` holds the expert `ids[i]`, its first bytes as the `ExpertMap` says. The
        block is entered when all of them are there. With a `stream`, it is entered as soon as their copies are queued,
        and what is launched on the stream then comes after them; the lease ends when the stream has reached the end of
        the block. Without one the caller sees to it that the GPU has read its experts before the block ends.

        Raises `LayoutError` for a layer or expert that is not there, and for more experts than the arena has slots;
        `UnavailableError` for a stream where the reader has no device; `ClosedError`.
        """
        keys = self._keys(layer, ids)
        needed = len(set(keys))
        if needed > self.capacity:
            raise LayoutError(
                f"{needed} experts were asked for at once: the arena holds {self.capacity}, in slots of "
                f"{self.slot_nbytes} bytes"
            )
        return Demand(self, layer, keys, None if stream is None else self._stream(stream))

    def prefetch(self, layer: int, ids: Any) -> int:
        """Have experts read ahead when nobody waits for anything; returns how many of them will be, for now.

        Not those that are there or on their way, nor those beyond `prefetch_bytes`. A demand drops what has not begun,
        and what has unless it asks for it. Errors are counted, and met again by whoever demands the expert. Raises
        `LayoutError` as `experts` does, `ClosedError`.
        """
        accepted = 0
        keys = self._keys(layer, ids)
        for key in keys:
            room = self._unproven_max - self._table.unproven - len(self._queue)
            if key not in self._queue and self._table.slot_of(key) is None and room > 0:
                self._queue[key] = None
                accepted += 1
        self._counts["prefetches"] += len(keys)
        self._counts["prefetches_refused"] += len(keys) - accepted
        self._pump()
        return accepted

    def _keys(self, layer: int, ids: Any) -> tuple[int, ...]:
        self._require_open()
        return self._keys_of.keys(layer, ids)

    def _stream(self, stream: Any) -> Stream:
        session = self._require_open()
        if session.device is None:
            raise UnavailableError(
                "a stream was given and the reader has no device", hint="open it with device=INDEX"
            )
        found = as_stream(stream, session.device.device)
        if found.is_capturing:
            raise DeviceError(
                f"stream {found.handle:#x} is being captured into a graph: experts cannot be awaited in a capture"
            )
        return found

    def _require_open(self) -> ReaderSession:
        if self._session is None or self._state != "open":
            raise ClosedError(
                f"the arena is {'not open' if self._state == 'new' else 'closed'}: open a new one"
            )
        self._session.check_loop()
        return self._session

    def statistics(self) -> ArenaStatistics:
        """Counters since the arena opened."""
        table = self._table
        now = {
            "slots": self.capacity,
            "slot_nbytes": self.slot_nbytes,
            "resident": table.resident,
            "filling": table.filling,
            "leases": table.leases,
            "waiting": len(self._line),
            "prefetches_wasted": table.wasted,
        }
        return ArenaStatistics(**{**self._counts, **now})

    # What demands ask for.

    @property
    def binding(self) -> LoopBinding:
        """The event loop."""
        return self._require_open().binding

    def fill_of(self, key: int) -> Fill | None:
        """The reads that bring an expert; None when it is there."""
        return self._fills.get(key)

    def view(self, slot: int, layer: int) -> Any:
        """What a user gets to see of a slot."""
        assert self._memory is not None
        return self._memory.view(slot, self._reader.experts.slot_nbytes(layer))

    def join_line(self, demand: Demand) -> None:
        """Put a demand at the end of the line, and serve it if it can be."""
        self._require_open()
        self._line[demand] = None
        self._advance()

    def leave(self, demand: Demand) -> None:
        """A demand has failed or was cancelled: give up its place or its leases, and reads that nobody else wants."""
        self._line.pop(demand, None)
        if demand.grant is not None:
            self._release(demand)
        self._advance()

    def finish(self, demand: Demand) -> None:
        """The block of a demand has ended: its leases end, with a stream when the stream has come that far.

        Raises `DeviceError` where the stream cannot be asked; the slots then stay leased, for it may still use them.
        """
        if demand.stream is None:
            self._release(demand)
            self._advance()
            return
        event = demand.stream.record()
        if event.is_done:
            event.release()
            self._release(demand)
            self._advance()
            return
        self._watch(demand, event)

    def _watch(self, demand: Demand, event: Any) -> None:
        assert self._session is not None
        engine = self._session.opened.engine
        assert isinstance(engine, Engine)

        def on_passed() -> None:
            if ticket.status == 0:  # else the device is lost: nobody knows whether it still reads the slots
                self._release(demand)
                self._advance()

        try:
            ticket = engine.submit_watch(event.handle, owner=event, tag=on_passed)
        except BusyError:
            self._session.dispatcher.on_drain(lambda: self._watch(demand, event))

    def _release(self, demand: Demand) -> None:
        grant, demand.grant = demand.grant, None
        assert grant is not None
        for key, slot in grant.slots.items():
            self._table.release(slot)
            fill = self._fills.get(key)
            if fill is None or fill.slot != slot:  # in another slot: a later one, of somebody else
                continue
            fill.demands.pop(demand, None)
            # One that is on a copy stream already is as good as there.
            if not self._table.is_leased(slot) and not fill.was_given_up and not fill.is_enqueued:
                self._counts["cancelled"] += 1
                fill.give_up()

    def _fail(self, demand: Demand, error: BaseException) -> None:
        demand.error = demand.error or error
        demand.wake()

    # What makes things move. Everything below runs in the loop, called by whoever changed something.

    def _advance(self) -> None:
        """Serve the line from its head, as far as there are slots."""
        if self._is_advancing:
            self._advances_again = True
            return
        self._is_advancing = True
        try:
            self._advances_again = True
            while self._advances_again:
                self._advances_again = False
                while self._line and self._state == "open" and self._serve(next(iter(self._line))):
                    pass
        finally:
            self._is_advancing = False
        self._pump()
        self._wake_idle()

    def _serve(self, demand: Demand) -> bool:
        grant = self._table.acquire(demand.keys)
        if grant is None:
            self._drop_prefetches(demand.keys)  # what they hold may be what is lacking
            return self._advances_again
        del self._line[demand]
        demand.grant = grant
        self._count_grant(demand)
        if grant.missing or grant.filling:
            self._drop_prefetches(demand.keys)
        for key in grant.missing:
            self._begin(key, grant.slots[key], [demand])
        for key in grant.filling:
            fill = self._fills[key]
            fill.want(demand)
            if not fill.was_given_up:  # one that was begins again when it has ended
                self._ask(fill)
        demand.wake()
        return True

    def _count_grant(self, demand: Demand) -> None:
        grant, counts = demand.grant, self._counts
        assert grant is not None
        counts["demands"] += 1
        counts["hits"] += len(grant.hits)
        counts["joined"] += len(grant.filling)
        counts["misses"] += len(grant.missing)
        counts["evictions"] += grant.evicted
        counts["prefetches_used"] += len(grant.prefetched)
        counts["bytes_demanded"] += sum(map(self._keys_of.nbytes, demand.keys))

    def _begin(self, key: int, slot: int, demands: Sequence[Demand]) -> None:
        fill = Fill(key, slot, [self._keys_of.segments(key)], self._start_read, self._note)
        self._fills[key] = fill
        for demand in demands:
            fill.want(demand)
        self._ask(fill)

    def _ask(self, fill: Fill) -> None:
        """Ask for the rest of a fill now, or as soon as the engine has room."""
        try:
            self._counts["bytes_read"] += fill.ask_all()
            self._unasked.pop(fill, None)
        except BusyError:
            if not self._unasked:
                assert self._session is not None
                self._session.dispatcher.on_drain(self._ask_again)
            self._unasked[fill] = None
        except AioKvError as error:
            self._unasked.pop(fill, None)
            demands, fill.demands = fill.demands, {}  # nobody is left for whom it would begin again
            for demand in demands:
                self._fail(demand, error)
            fill.give_up()

    def _ask_again(self) -> None:
        waiting, self._unasked = self._unasked, {}
        for fill in waiting:
            if not fill.is_ended:
                self._ask(fill)

    def _start_read(self, slot: int, segments: Sequence[DirectSegment], priority: Priority) -> Transfer:
        assert self._memory is not None
        return self._reader.read_slot(segments, self._memory.target(slot), priority)

    def _note(self, fill: Fill) -> None:
        """One of a fill's transfers has ended, or the fill has."""
        if fill.is_ended and self._fills.get(fill.key) is fill:
            del self._fills[fill.key]
            self._unasked.pop(fill, None)
            self._settle(fill)
        self._advance()

    def _settle(self, fill: Fill) -> None:
        if fill.is_whole:
            self._table.filled(fill.slot)
        elif fill.failure is None and fill.demands and self._state == "open":
            self._begin(fill.key, fill.slot, list(fill.demands))  # given up, and wanted since
            return
        else:
            self._table.unfilled(fill.slot)
            if fill.failure is not None:
                self._counts["failures"] += 1
                error = self._error_of(fill.key, fill.failure)
                for demand in list(fill.demands):
                    self._fail(demand, error)
        for demand in list(fill.demands):
            demand.wake()

    def _error_of(self, key: int, failure: TransferError) -> TransferError:
        layer, expert = self._keys_of.expert(key)
        error = TransferError(
            f"read of expert {expert} of layer {layer}",
            report=failure.report,
            errno=failure.errno or errno.EIO,
            file=failure.file,
            file_offset=failure.file_offset,
            nbytes=failure.nbytes,
            hint=failure.hint,
        )
        error.__cause__ = failure
        return error

    def _drop_prefetches(self, wanted: Sequence[int]) -> None:
        """Give up everything that nobody waits for, but for `wanted`."""
        self._counts["prefetches_dropped"] += len(self._queue)
        self._queue.clear()
        for fill in list(self._fills.values()):
            if not fill.was_wanted and not fill.was_given_up and fill.key not in wanted:
                self._counts["prefetches_dropped"] += 1
                fill.give_up()

    def _pump(self) -> None:
        """Ask for pieces of prefetched experts, if nobody waits for anything."""
        self._pump_is_due = False
        if self._state != "open" or self._line or any(fill.demands for fill in self._fills.values()):
            return
        in_flight = sum(fill.nbytes_in_flight for fill in self._fills.values() if not fill.was_wanted)
        while in_flight < self._window_nbytes and (fill := self._next_prefetch()) is not None:
            try:
                nbytes = fill.ask_piece()
            except BusyError:
                if not self._pump_is_due:
                    self._pump_is_due = True
                    assert self._session is not None
                    self._session.dispatcher.on_drain(self._pump)
                return
            except AioKvError:
                self._drop_prefetches(())
                return
            in_flight += nbytes
            self._counts["bytes_prefetched"] += nbytes

    def _next_prefetch(self) -> Fill | None:
        for fill in self._fills.values():
            if fill.pieces and not fill.was_wanted:
                return fill
        while self._queue:
            key = next(iter(self._queue))
            del self._queue[key]
            found = self._table.admit_unproven(key)
            if found is None:  # every slot is leased
                self._counts["prefetches_dropped"] += 1
                continue
            self._counts["evictions"] += found[1]
            pieces = cut(self._keys_of.segments(key), _PIECE_NBYTES, _SLOT_ALIGNMENT)
            self._fills[key] = Fill(key, found[0], pieces, self._start_read, self._note)
            return self._fills[key]
        return None

    def _wake_idle(self) -> None:
        if self._idle_wakes and (self._is_idle or self._state == "closed"):
            wakes, self._idle_wakes = self._idle_wakes, []
            for wake in wakes:
                wake()
