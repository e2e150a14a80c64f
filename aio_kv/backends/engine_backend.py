"""The asynchronous backends over layer files: `UringBackend` and `ThreadedBackend`. They differ in the I/O source only.

A call checks keys and memory, plans I/Os (`aio_kv.plan`), and hands a transfer to the dispatcher; it never waits.
Buffers handed over belong to the backend until the transfer has ended, whether it was awaited, cancelled or forgotten.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from types import TracebackType
from typing import Any, Final, Self

import numpy as np

from aio_kv.backends.call_memory import addresses_of, memory_of, pinned_plan, role_of
from aio_kv.backends.device_side import DeviceSide
from aio_kv.backends.rungs import Refusal
from aio_kv.backends.session import PathLike, Session, SessionPlan, check_options
from aio_kv.backends.short_way import copy_pinned, read_one
from aio_kv.backends.statistics import Statistics
from aio_kv.cuda import Device
from aio_kv.engine import Engine, EngineStatistics, Kind
from aio_kv.engine.options import EngineOptions
from aio_kv.errors import ClosedError, LayoutError, UnavailableError
from aio_kv.files import LayerFiles
from aio_kv.integers import Int64Array
from aio_kv.layout import GroupLayout
from aio_kv.memory import DeviceMemory, HostMemory, host_address
from aio_kv.plan import EMPTY_PLAN, Plan, plan_groups
from aio_kv.protocols import Priority, Read, Write, check_count, check_priority, limited
from aio_kv.transfer import LandingRegion, LoopBinding, Transfer, current_binding
from aio_kv.transfer.dispatcher import DispatcherStatistics

__all__ = ["AutoBackend", "EngineBackend", "ThreadedBackend", "UringBackend"]

# Looked up once: every look at a member of an enumeration is a search.
_READ: Final = Kind.READ
_WRITE: Final = Kind.WRITE
_NO_GROUP = np.empty(0, np.int64)  # of no file: there is nothing to order it against


class EngineBackend:
    """Groups between layer files and memory, awaited. Use `UringBackend`, `ThreadedBackend` or `open_backend`.

    Args:
        path_or_files: a directory, several (layer l lives in path[l % n]), or `LayerFiles` that the caller keeps open
            and may share with other backends, loops and the oracle.
        layout: the geometry; must be that of the files.
        device: for device memory, the index of the GPU or an open `aio_kv.cuda.Device`; None for host memory only.
        create: make the files if there are none.
        options: sizes and bounds.

    Opens with `async with backend:` or `await backend`; belongs to the event loop in which it was opened.
    """

    _choice = "auto"

    def __init__(
        self,
        path_or_files: PathLike | Sequence[PathLike] | LayerFiles,
        layout: GroupLayout | None = None,
        *,
        device: int | Device | None = None,
        create: bool = False,
        options: EngineOptions | None = None,
    ) -> None:
        if isinstance(path_or_files, LayerFiles):
            if layout is not None and layout != path_or_files.layout:
                raise LayoutError(f"layout {layout} is not that of the files: {path_or_files.layout}")
            layout = path_or_files.layout
        elif not isinstance(layout, GroupLayout):
            raise LayoutError(f"layout is {layout!r}: a directory is opened with a GroupLayout")
        self._plan = SessionPlan(path_or_files, layout, device, create, check_options(options), self._choice)
        self._layout = layout
        self._session: Session | None = None
        self._closing: Session | None = None
        self._has_begun = False
        self._last_statistics: Statistics | None = None

    async def __aenter__(self) -> Self:
        if self._has_begun:
            raise ClosedError("a backend is opened once: make a new one")
        self._has_begun = True
        self._session = await self._open_session(current_binding(self._plan.options.drain_timeout))
        return self

    async def _open_session(self, binding: LoopBinding) -> Session:
        # The seam at which a backend of tests puts an engine of its own underneath.
        return await Session.open(self._plan, binding)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __await__(self) -> Generator[Any, Any, Self]:
        return self.__aenter__().__await__()

    async def aclose(self) -> None:
        """Refuse new work, drop what has not begun, wait for the device, give everything back; again does nothing.

        Cancelled, it finishes all the same and then raises. If the device does not answer within the drain timeout
        its memory is leaked on purpose, and the log says so. Writes that were neither awaited nor flushed may be
        dropped.
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

    @property
    def layout(self) -> GroupLayout:
        """The geometry of what is stored."""
        return self._layout

    @property
    def is_open(self) -> bool:
        """Whether it has been opened and not closed."""
        return self._session is not None

    @property
    def device_side(self) -> DeviceSide | None:
        """The GPU that transfers go to, for a backend in front of this one; None without a device."""
        return self._require_session().device

    @property
    def files(self) -> LayerFiles:
        """The layer files."""
        return self._require_session().files

    @property
    def rung(self) -> str:
        """Mechanism and file mode in force, such as "uring-fixed-direct"."""
        return self._require_session().opened.rung

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """For each better rung why it is not in force."""
        return self._require_session().opened.refusals

    def read(
        self,
        requests: Sequence[Read] | Iterable[Read],
        *,
        stream: Any = None,
        deadline: float | None = None,
        priority: Priority = Priority.DEMAND,
    ) -> Transfer:
        """Start reading groups, each into its own memory of exactly `payload_nbytes`.

        `deadline` is on the clock of `anyio.current_time()`: what has not begun by then fails. The memory is the
        backend's until the transfer has ended. Raises `LayoutError` for a wrong key or memory, `BusyError` when
        `max_transfers` are in flight, `ClosedError`.
        """
        if (
            requests.__class__ is list
            and len(requests) == 1
            and requests[0].__class__ is Read
            and deadline is None
            and stream is None
        ):
            request = requests[0]
            group_id = self._layout.group_id(request.key)
            transfer = self._read_one(group_id, request.into, priority)
            if transfer is not None:
                return transfer
        return self._requests(_READ, requests, stream, deadline, priority)

    def write(
        self,
        requests: Iterable[Write],
        *,
        stream: Any = None,
        deadline: float | None = None,
        priority: Priority = Priority.DEMAND,
    ) -> Transfer:
        """Start writing groups, each from its own memory of exactly `payload_nbytes`, which must not change meanwhile.

        Arguments and errors are those of `read`; a group twice in one call is a `LayoutError`. Done means that the
        file has the bytes, not that they would survive a power cut: that is `flush`.
        """
        return self._requests(_WRITE, requests, stream, deadline, priority)

    def read_groups(
        self,
        group_ids: Any,
        into: Any,
        *,
        stream: Any = None,
        deadline: float | None = None,
        priority: Priority = Priority.DEMAND,
    ) -> Transfer:
        """Start reading groups by number into one buffer (packed, in the order of the call) or a `Scatter`.

        A group named twice is read once and copied twice. See `read`.
        """
        is_one = group_ids.__class__ is list and len(group_ids) == 1 and group_ids[0].__class__ is int
        if is_one and deadline is None and stream is None:
            transfer = self._read_one(group_ids[0], into, priority)
            if transfer is not None:
                return transfer
        return self._groups(_READ, group_ids, into, stream, deadline, priority)

    def write_groups(
        self,
        group_ids: Any,
        source: Any,
        *,
        stream: Any = None,
        deadline: float | None = None,
        priority: Priority = Priority.DEMAND,
    ) -> Transfer:
        """Start writing groups by number from one buffer (packed, in the order of the call) or a `Scatter`.

        See `write`.
        """
        return self._groups(_WRITE, group_ids, source, stream, deadline, priority)

    def read_block(
        self,
        layer: int,
        block: int,
        into: Any,
        *,
        stream: Any = None,
        deadline: float | None = None,
        priority: Priority = Priority.DEMAND,
    ) -> Transfer:
        """Start reading all groups of a block as one I/O, packed in (kind, head) order without padding. See `read`."""
        return self._groups(_READ, self._block_ids(layer, block), into, stream, deadline, priority)

    def write_block(
        self,
        layer: int,
        block: int,
        source: Any,
        *,
        stream: Any = None,
        deadline: float | None = None,
        priority: Priority = Priority.DEMAND,
    ) -> Transfer:
        """Start writing all groups of a block as one I/O, packed in (kind, head) order without padding. See `write`."""
        return self._groups(_WRITE, self._block_ids(layer, block), source, stream, deadline, priority)

    def _block_ids(self, layer: int, block: int) -> Int64Array:
        first = self._layout.block_group_id(layer, block)
        return np.arange(first, first + self._layout.groups_per_block, dtype=np.int64)

    def _groups(
        self, kind: Kind, group_ids: Any, place: Any, stream: Any, deadline: float | None, priority: Priority
    ) -> Transfer:
        session = self._require_session()
        layout = self._layout
        check_count(group_ids, what="group_ids")
        ids = layout.check_ids(group_ids)
        memory, addresses = addresses_of(session.device, layout.payload_nbytes, kind, place, len(ids), stream)
        # The caller may change its array at once, and the order check needs it later: a copy.
        is_device = isinstance(memory, DeviceMemory)
        owner = (memory, place)
        return self._start(
            session, kind, ids.copy(), addresses, owner, deadline, priority, stream, is_device, memory
        )

    def _requests(
        self, kind: Kind, requests: Iterable[Any], stream: Any, deadline: float | None, priority: Priority
    ) -> Transfer:
        session = self._require_session()
        wanted = Read if kind is _READ else Write
        ids: list[int] = []
        memories: list[HostMemory | DeviceMemory] = []
        for index, request in enumerate(limited(requests)):
            if not isinstance(request, wanted):
                raise LayoutError(f"requests[{index}] is {request!r}: must be a {wanted.__name__}")
            ids.append(self._layout.group_id(request.key))
            place = request.into if isinstance(request, Read) else request.source
            memory = memory_of(session.device, place, kind, stream)
            if memory.nbytes != self._layout.payload_nbytes:
                raise LayoutError(
                    f"requests[{index}]: {role_of(kind)} holds {memory.nbytes} bytes, a group has exactly "
                    f"{self._layout.payload_nbytes}"
                )
            memories.append(memory)
        addresses = np.array([memory.address for memory in memories], dtype=np.int64)
        is_device = any(isinstance(memory, DeviceMemory) for memory in memories)
        if is_device and not all(isinstance(memory, DeviceMemory) for memory in memories):
            raise LayoutError(f"{role_of(kind)}: host and device memory in one call: make two calls")
        array = np.array(ids, dtype=np.int64)
        return self._start(session, kind, array, addresses, memories, deadline, priority, stream, is_device)

    def _read_one(self, group_id: int, place: Any, priority: Priority) -> Transfer | None:
        session = self._session
        if session is None or not session.binding.is_current():
            return None
        return read_one(session, group_id, place, priority)

    def _start(
        self,
        session: Session,
        kind: Kind,
        ids: Int64Array,
        addresses: Int64Array,
        owner: object,
        deadline: float | None,
        priority: Priority,
        stream: Any,
        is_device: bool,
        within: HostMemory | DeviceMemory | None = None,
    ) -> Transfer:
        count = len(ids)
        plan, first, last = EMPTY_PLAN, 0, 0
        if count:
            is_write = kind is _WRITE
            plan = plan_groups(
                self._layout, ids, addresses, session.limits, is_write=is_write, is_device=is_device
            )
        if (
            count and session.table.regions and within is not None
        ):  # only they want to know where the memory is
            first, last = within.address, within.address + within.nbytes - self._layout.payload_nbytes
        elif count and session.table.regions:
            first, last = int(addresses.min()), int(addresses.max())
        transfer = self._make(session, kind, plan, ids, count, owner, deadline, priority)
        if is_device:
            session.order(transfer, stream)
        self._hand_over(session, transfer, first, last)
        return transfer

    def _make(
        self,
        session: Session,
        kind: Kind,
        plan: Plan,
        ids: Int64Array,
        count: int,
        owner: object,
        deadline: float | None,
        priority: Priority,
    ) -> Transfer:
        check_priority(priority)
        deadline_ns = 0 if deadline is None else session.deadline_ns(deadline)
        if kind is _WRITE and session.files.read_only:
            raise LayoutError(
                f"{session.files.directories[0]} was opened read_only: open it without to write"
            )
        payload = self._layout.payload_nbytes
        return Transfer(session.dispatcher, kind, plan, ids, count, payload, priority, deadline_ns, owner)

    def _hand_over(self, session: Session, transfer: Transfer, first_address: int, last_address: int) -> None:
        session.hand_over(transfer, first_address, last_address + self._layout.payload_nbytes - 1)
        if transfer.kind is _WRITE:
            session.note_write(transfer, self._layers_of(transfer.group_ids))

    def _layers_of(self, ids: Int64Array) -> set[int]:
        return set(np.unique(ids // self._layout.groups_per_layer).tolist())

    async def register_landing_region(self, memory: Any) -> LandingRegion:
        """Register caller-owned host memory, so that I/O in it needs no staging and no page pinning.

        `memory` is a writable buffer or pointer holder whose address and length are multiples of 4096 bytes
        (`aio_kv.allocate_host` gives such). It stays the caller's, who frees it only after the region is closed.
        Where the ring cannot register it (threads rung, locked-memory limit) the region works all the same and
        `is_registered` is False. Raises `LayoutError` for misaligned or overlapping memory.
        """
        session = self._require_session()
        return await session.table.add(host_address(memory, writable=True, what="landing region"))

    def load(
        self,
        region: LandingRegion,
        offsets: Any,
        into: Any,
        *,
        stream: Any = None,
        deadline: float | None = None,
        priority: Priority = Priority.DEMAND,
    ) -> Transfer:
        """Start copying groups from pinned host memory to the device, without any file.

        `offsets` are byte offsets in the landing region, one per group of `payload_nbytes`; `into` is device memory,
        packed or a `Scatter`. The region's bytes and the destination are the backend's until the transfer has ended.
        Errors are those of `read_groups`.
        """
        return self._copy_pinned(Kind.LOAD, region, offsets, into, (stream, deadline, priority))

    def save(
        self,
        region: LandingRegion,
        offsets: Any,
        source: Any,
        *,
        stream: Any = None,
        deadline: float | None = None,
        priority: Priority = Priority.DEMAND,
    ) -> Transfer:
        """Start copying groups from the device to pinned host memory, without any file. See `load`."""
        return self._copy_pinned(Kind.SAVE, region, offsets, source, (stream, deadline, priority))

    def _copy_pinned(
        self,
        kind: Kind,
        region: LandingRegion,
        offsets: Any,
        place: Any,
        how: tuple[Any, float | None, Priority],
    ) -> Transfer:
        session = self._require_session()
        stream, deadline, priority = how
        if region not in session.table.regions or region.pin is None:
            raise LayoutError(
                "the region is not pinned by this backend: register it with a backend that has a device"
            )
        if deadline is None:
            started = copy_pinned(session, kind, region, offsets, place, stream, priority)
            if started is not None:
                return started
        memory, plan, count = pinned_plan(session, kind, region, offsets, place, stream)
        transfer = self._make(session, kind, plan, _NO_GROUP, count, (memory, place), deadline, priority)
        session.order(transfer, stream)
        transfer.use_regions((region,))
        session.begin(transfer)
        return transfer

    def record_event(self, stream: Any) -> Any:
        """Return an `AwaitableEvent` recorded on a caller's stream; `await event` waits until the GPU has reached it.

        The engine looks for its end; no stream is synchronised and no thread blocked. Raises `UnavailableError` without
        a device, `DeviceError` for a stream under graph capture or of another device.
        """
        session = self._require_session()
        engine = session.opened.engine
        if session.device is None or not isinstance(engine, Engine):
            raise UnavailableError(
                "the backend was opened without a device", hint="open it with device=INDEX"
            )
        return session.device.record_event(stream, engine, session.binding)

    async def wait_ready(self) -> None:
        """Wait until there is room for one more transfer. Several waiters are woken one by one."""
        session = self._require_session()
        await session.binding.wait_room(session.dispatcher)
        self._require_session()

    async def flush(self) -> None:
        """Wait until all writes accepted so far have landed, and make them durable (fdatasync of the files written).

        Raises `StorageError` if a write since the last flush failed or a file cannot be synced.
        """
        await self._require_session().flush()

    def drop_page_cache(self) -> None:
        """Have the operating system forget the files' pages, so that the next reads come from the device.

        Blocking, and so the one call that may be made from any thread (`anyio.to_thread.run_sync`).
        """
        session = self._session
        if session is None:
            raise ClosedError("the backend is not open")
        session.files.drop_page_cache()

    def statistics(self) -> Statistics:
        """Counters since the backend opened; after it has closed, those of the end."""
        session = self._session  # looked at once: a scrape may ask from another thread while this closes
        if session is not None:
            return session.statistics(type(self).__name__)
        if self._last_statistics is not None:
            return self._last_statistics
        return Statistics(type(self).__name__, "", (), 0, 0, 0, DispatcherStatistics(), EngineStatistics())

    def _require_session(self) -> Session:
        session = self._session
        if session is None:
            state = (
                "closed: open a new one"
                if self._last_statistics
                else "not open: use `async with` or await it"
            )
            raise ClosedError(f"the backend is {state}")
        session.check_loop()
        return session


class UringBackend(EngineBackend):
    """The production backend: io_uring with registered files and buffers. See `EngineBackend` for its arguments.

    Raises `UnavailableError` at open where io_uring is refused, naming the cause; `open_backend` falls back instead.
    """

    _choice = "uring"


class ThreadedBackend(EngineBackend):
    """The same where io_uring is refused: native threads, or Python threads without the compiled extension."""

    _choice = "threads"


class AutoBackend(EngineBackend):
    """The best rung that works."""

    _choice = "auto"
