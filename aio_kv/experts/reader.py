"""`ExpertReader`: positional reads of experts through an engine, awaited.

Any number of reads may be under way; each either brings exactly the bytes of its segments or says which file, which
offset and how much arrived. Reads past the page cache are rounded outward to what the file asks for, and what is too
much is trimmed. Reads through the page cache give back what they took of it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeAlias

import numpy as np

from aio_kv.backends.call_memory import memory_of
from aio_kv.backends.engine_session import EngineSession, check_options
from aio_kv.backends.rungs import CHOICES, Refusal
from aio_kv.backends.statistics import Statistics
from aio_kv.cuda import Device
from aio_kv.engine import Kind
from aio_kv.engine.options import EngineOptions
from aio_kv.errors import BusyError, ClosedError, LayoutError
from aio_kv.experts.expert_map import ExpertMap
from aio_kv.experts.page_cache import PageCacheDropper
from aio_kv.experts.segments import DirectSegment
from aio_kv.experts.shards import ShardFiles, check_direct
from aio_kv.experts.windows import plan_segments
from aio_kv.integers import Int64Array, check_axis
from aio_kv.memory import DeviceMemory, HostMemory, host_address
from aio_kv.protocols import Priority, Scatter, check_priority
from aio_kv.transfer import LandingRegion, LoopBinding, Transfer, current_binding

__all__ = ["ExpertReader", "ReaderSession"]

ReaderSession: TypeAlias = EngineSession[ShardFiles]
_NO_GROUPS = np.empty(0, np.int64)  # reads of files that nobody writes are not ordered against each other
# Bytes read through the page cache and not given back yet: above this new reads are refused for the moment.
_BACKLOG_NBYTES_MAX = 256 << 20


@dataclass(frozen=True, slots=True)
class _ReaderPlan:
    """What the session of a reader is opened with."""

    experts: ExpertMap
    direct: str
    keeps_page_cache: bool
    device: int | Device | None
    options: EngineOptions
    choice: str

    def open_files(self) -> ShardFiles:
        files = ShardFiles(self.experts.paths, direct=self.direct)
        if not self.keeps_page_cache:
            files.advise_random()
        return files

    def close_files(self, files: ShardFiles) -> None:
        files.close()


class ExpertReader:
    """Reads experts from the files of a model into host or GPU memory.

    Args:
        experts: where each expert lies.
        direct: "auto" reads past the page cache where that works on every file, "on" insists, "off" does not.
        keep_page_cache: leave in the page cache what was read through it. By default it is dropped: a page cache that
            grows beside a large pinned arena makes the kernel swap in the middle of a step.
        device: for device memory, the index of the GPU or an open `aio_kv.cuda.Device`; None for host memory only.
        backend: "auto", "uring" or "threads", as for `open_backend`.
        options: sizes and bounds of the engine.

    Opens with `async with reader:` or `await reader`, raising as `ShardFiles` does and `UnavailableError` where the
    backend does not work. Belongs to the event loop in which it was opened.
    """

    def __init__(
        self,
        experts: ExpertMap,
        *,
        direct: str = "auto",
        keep_page_cache: bool = False,
        device: int | Device | None = None,
        backend: str = "auto",
        options: EngineOptions | None = None,
    ) -> None:
        check_direct(direct)
        if backend not in CHOICES:
            raise LayoutError(f"backend is {backend!r}: must be one of {', '.join(CHOICES)}")
        self.experts = experts
        self._plan = _ReaderPlan(experts, direct, keep_page_cache, device, check_options(options), backend)
        self._session: ReaderSession | None = None
        self._closing: ReaderSession | None = None
        self._dropper: PageCacheDropper | None = None
        self._has_begun = False
        self._last_statistics: Statistics | None = None

    async def __aenter__(self) -> Self:
        if self._has_begun:
            raise ClosedError("a reader is opened once: make a new one")
        self._has_begun = True
        session = await self._open_session(current_binding(self._plan.options.drain_timeout))
        if session.limits.offset_alignment == 1 and not self._plan.keeps_page_cache:
            self._dropper = PageCacheDropper(session.files)
            self._dropper.drop([DirectSegment(0, 0, 0, 1)])  # what proved the engine read it
        self._session = session
        return self

    async def _open_session(self, binding: LoopBinding) -> ReaderSession:
        # The seam at which tests put an engine of their own underneath.
        return await EngineSession.open(self._plan, binding)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __await__(self) -> Generator[Any, Any, Self]:
        return self.__aenter__().__await__()

    async def aclose(self) -> None:
        """Refuse new reads, drop what has not begun, wait for the device, give everything back; again does nothing.

        Cancelled, it finishes all the same and then raises. If the device does not answer within the drain timeout
        its memory is leaked on purpose, and the log says so.
        """
        session = self._session
        if session is None:
            if self._closing is not None:
                await self._closing.wait_closed()
            return
        session.check_loop()
        self._session, self._closing = None, session
        self._last_statistics = session.statistics(type(self).__name__)
        try:
            self._last_statistics = await session.close(type(self).__name__)
        finally:
            self._closing = None
            await self._end_dropper(session)

    async def _end_dropper(self, session: ReaderSession) -> None:
        # After the last read has ended: what it put into the page cache is dropped as well.
        dropper, self._dropper = self._dropper, None
        if dropper is not None:
            _, cancelled = await session.binding.run_in_thread(dropper.close)
            if cancelled is not None:
                raise cancelled

    @property
    def is_open(self) -> bool:
        """Whether it has been opened and not closed."""
        return self._session is not None

    @property
    def rung(self) -> str:
        """Mechanism and file mode in force, such as "uring-fixed-direct"."""
        return self.session.opened.rung

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """For each better rung why it is not in force."""
        return self.session.opened.refusals

    def read(
        self,
        layer: int,
        experts: Any,
        into: Any,
        *,
        stream: Any = None,
        deadline: float | None = None,
        priority: Priority = Priority.DEMAND,
    ) -> Transfer:
        """Start reading experts of one layer, each into a slot of `experts.slot_nbytes(layer)` bytes.

        `experts` is a number or several; `into` is host or device memory with their slots one behind the other, or a
        `Scatter` that says where each begins. Where experts of a layer differ in size, what is behind a smaller one in
        its slot is left as it was. The memory is the reader's until the transfer has ended, cancelled or not. With
        device memory the copies wait for what was launched on `stream` before the call, and `enqueued` orders `stream`
        after them. `deadline` is on the clock of `anyio.current_time()`.

        The transfer has one request per expert. Raises `LayoutError` for a layer or expert that is not there and memory
        that does not fit, `BusyError` when `max_transfers` are under way, `ClosedError`.
        """
        ids = check_axis(experts, what=f"experts of layer {layer}", limit=self.experts.num_experts(layer))
        requests = [self.experts.segments(layer, expert) for expert in ids.tolist()]
        slot_nbytes = self.experts.slot_nbytes(layer)
        session = self.session
        self._check_backlog()
        memory = memory_of(
            session.device, into.memory if isinstance(into, Scatter) else into, Kind.READ, stream
        )
        addresses = _slots_in(memory, into, len(requests), slot_nbytes)
        transfer = self._make(session, requests, addresses, memory, (memory, into), deadline, priority)
        if isinstance(memory, DeviceMemory):
            session.order(transfer, stream)
        session.hand_over(transfer, memory.address, memory.address + memory.nbytes - 1)
        self._drop_later(transfer, requests)
        return transfer

    def read_segments(
        self,
        segments: Sequence[DirectSegment],
        into: Any,
        *,
        stream: Any = None,
        deadline: float | None = None,
        priority: Priority = Priority.DEMAND,
    ) -> Transfer:
        """Start reading segments to their slot offsets in `into`, as one request; otherwise like `read`."""
        session = self.session
        self._check_backlog()
        memory = memory_of(session.device, into, Kind.READ, stream)
        transfer = self._make_slot(session, segments, memory, (memory, into), deadline, priority)
        if isinstance(memory, DeviceMemory):
            session.order(transfer, stream)
        return self._hand_over_slot(session, transfer, segments, memory)

    def read_slot(
        self, segments: Sequence[DirectSegment], memory: HostMemory | DeviceMemory, priority: Priority
    ) -> Transfer:
        """Like `read_segments` for memory of an arena, which has checked it and orders streams itself."""
        session = self.session
        transfer = self._make_slot(session, segments, memory, memory, None, priority)
        if isinstance(memory, DeviceMemory):
            session.order(transfer, None)
        return self._hand_over_slot(session, transfer, segments, memory)

    def _make_slot(
        self,
        session: ReaderSession,
        segments: Sequence[DirectSegment],
        memory: HostMemory | DeviceMemory,
        owner: object,
        deadline: float | None,
        priority: Priority,
    ) -> Transfer:
        end = max((segment.slot_offset + segment.nbytes for segment in segments), default=0)
        if end > memory.nbytes:
            raise LayoutError(f"into holds {memory.nbytes} bytes: segments that end at {end} do not fit")
        addresses = np.array([memory.address], np.int64)
        return self._make(session, [segments], addresses, memory, owner, deadline, priority)

    def _hand_over_slot(
        self,
        session: ReaderSession,
        transfer: Transfer,
        segments: Sequence[DirectSegment],
        memory: HostMemory | DeviceMemory,
    ) -> Transfer:
        session.hand_over(transfer, memory.address, memory.address + max(1, memory.nbytes) - 1)
        self._drop_later(transfer, [segments])
        return transfer

    def _make(
        self,
        session: ReaderSession,
        requests: Sequence[Sequence[DirectSegment]],
        addresses: Int64Array,
        memory: HostMemory | DeviceMemory,
        owner: object,
        deadline: float | None,
        priority: Priority,
    ) -> Transfer:
        check_priority(priority)
        is_device = isinstance(memory, DeviceMemory)
        plan = plan_segments(requests, addresses, session.limits, is_device=is_device)
        nbytes = sum(segment.nbytes for segments in requests for segment in segments)
        deadline_ns = 0 if deadline is None else session.deadline_ns(deadline)
        each = nbytes // max(1, len(requests))
        return Transfer(
            session.dispatcher,
            Kind.READ,
            plan,
            _NO_GROUPS,
            len(requests),
            each,
            priority,
            deadline_ns,
            owner,
        )

    def _check_backlog(self) -> None:
        if self._dropper is not None and self._dropper.backlog_nbytes > _BACKLOG_NBYTES_MAX:
            raise BusyError(
                f"more than {_BACKLOG_NBYTES_MAX} bytes in the page cache wait to be dropped: await wait_ready() first"
            )

    def _drop_later(self, transfer: Transfer, requests: Sequence[Sequence[DirectSegment]]) -> None:
        dropper = self._dropper
        if dropper is None:
            return
        # Failed and cancelled ones too: some of their pages may have come.
        segments = [segment for one in requests for segment in one]
        if transfer.is_done:
            dropper.drop(segments)
        else:
            transfer.add_waiter(lambda: dropper.drop(segments))

    async def register_landing_region(self, memory: Any) -> LandingRegion:
        """Register caller-owned host memory, so that reads into it need no page pinning; see `EngineBackend`."""
        session = self.session
        return await session.table.add(host_address(memory, writable=True, what="landing region"))

    async def wait_ready(self) -> None:
        """Wait until there is room for one more transfer. Several waiters are woken one by one."""
        session = self.session
        if self._dropper is not None and self._dropper.backlog_nbytes > _BACKLOG_NBYTES_MAX // 2:
            await self.wait_dropped()
        await session.binding.wait_room(session.dispatcher)
        self._require_open(session)

    async def wait_dropped(self) -> None:
        """Wait until the page cache has given back what the reads that have ended put there."""
        session, dropper = self.session, self._dropper
        if dropper is None:
            return
        _, cancelled = await session.binding.run_in_thread(dropper.wait)
        if cancelled is not None:
            raise cancelled

    def drop_page_cache(self) -> None:
        """Have the operating system forget the files' pages, whoever read them. Blocking; from any thread."""
        session = self._session
        if session is None:
            raise ClosedError("the reader is not open")
        session.files.drop_page_cache()

    def statistics(self) -> Statistics:
        """Counters since the reader opened; after it has closed, those of the end."""
        session = self._session  # looked at once: a scrape may ask from another thread while this closes
        if session is not None:
            return session.statistics(type(self).__name__)
        if self._last_statistics is None:
            raise ClosedError("the reader was never open: use `async with` or await it")
        return self._last_statistics

    @property
    def session(self) -> ReaderSession:
        """The open state, for what is built on the reader. Raises `ClosedError` if closed or in another loop."""
        session = self._session
        if session is None:
            state = "closed: open a new one" if self._has_begun else "not open: use `async with` or await it"
            raise ClosedError(f"the reader is {state}")
        session.check_loop()
        return session

    def _require_open(self, session: ReaderSession) -> None:
        if self._session is not session:
            raise ClosedError("the reader is closed: open a new one")


def _slots_in(memory: HostMemory | DeviceMemory, into: Any, count: int, slot_nbytes: int) -> Int64Array:
    """The address of each slot in the memory of a call, packed or scattered."""
    if not isinstance(into, Scatter):
        if memory.nbytes != count * slot_nbytes:
            raise LayoutError(
                f"into holds {memory.nbytes} bytes: {count} experts need exactly {count * slot_nbytes}, in slots of "
                f"{slot_nbytes} bytes; use Scatter to place them in larger memory"
            )
        return memory.address + np.arange(count, dtype=np.int64) * slot_nbytes
    if len(into.offsets) != count:
        raise LayoutError(
            f"Scatter holds {len(into.offsets)} offsets for {count} experts: one each is needed"
        )
    if count and int(into.offsets.max()) > memory.nbytes - slot_nbytes:
        index = int(np.argmax(into.offsets))
        raise LayoutError(
            f"Scatter.offsets[{index}] is {into.offsets[index]}: a slot of {slot_nbytes} bytes there would end outside "
            f"of the memory of {memory.nbytes} bytes"
        )
    return memory.address + into.offsets
