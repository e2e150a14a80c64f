"""The native engine: one cffi call to hand a batch over, one to collect what has finished.

cffi drops the GIL around every call and must win it back, which is why there is one call per batch and none per
request. Nothing of cffi leaves this file and `extension`. The memory rules are in native/akv.cdef.h: what a batch
names is the engine's until its ticket has been drained, so the ticket, kept in `_live`, keeps all of it.
"""

from __future__ import annotations

import atexit
import errno
import logging
import os
import struct
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from aio_kv.engine.batch import CUDA_ERROR, Batch, Kind, Order, Ticket
from aio_kv.engine.extension import akv, device_struct, options_struct, require_extension
from aio_kv.engine.options import EngineOptions
from aio_kv.engine.statistics import EngineStatistics, RingInfo
from aio_kv.engine.waiting import TicketWaiter, wait_readable
from aio_kv.errors import BusyError, ClosedError, DeviceError, LayoutError, UnavailableError, storage_error
from aio_kv.plan import PINNED_COPIES_MAX, IoLimits

__all__ = ["Engine"]

_log = logging.getLogger("aio_kv")
_DRAIN_MAX = 256
_WHERE = ("options", "memory", "thread", "io_uring_setup", "NOP", "eventfd", "CUDA")
_SUMMED_BY_MAX = ("in_flight_max", "bulk_nbytes_max", "cuda_call_ns_max", "device_error")

_COMPLETION = struct.Struct("=qQiIII")  # akv_completion
_completion, _COMPLETION_NBYTES = struct.Struct("=qQiII").unpack_from, _COMPLETION.size

# Engines whose device did not answer in time: their memory may still be written to, so it is never given back.
_leaked: list[object] = []


def _pointer(address: int) -> Any:
    return akv.ffi.cast("void *", address)


class Engine:
    """Reads and writes of batches on a fixed table of files, through io_uring or a pool of native threads.

    Args:
        fds: open file descriptors; op field `file` is an index into them. They stay the caller's, who keeps them
            open until the engine is closed.
        limits: alignments of the files and the largest I/O.
        options: sizes and bounds.
        uring: True for io_uring, False for native threads.
        device: for device memory, the fields of akv_device (native/akv.cdef.h) by name, addresses as integers; what
            they point to stays the caller's, who keeps it until the engine is closed.

    Any thread may call any method. Raises `UnavailableError` naming the step the system refused, with `errno` in
    its `error_number` attribute. After `fork()` every use in the child raises `ClosedError`.
    """

    def __init__(
        self,
        fds: Sequence[int],
        limits: IoLimits,
        options: EngineOptions,
        *,
        uring: bool = True,
        device: Mapping[str, int] | None = None,
    ) -> None:
        require_extension()
        self.options = options
        self.limits = limits
        self.is_uring = uring
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._waiter = TicketWaiter(self, self._poke)
        self._live: dict[int, Ticket] = {}
        self._load = [0] * options.rings
        self._lib = akv.lib
        self._submit = akv.lib.akv_engine_submit
        self._rouse = akv.lib.akv_engine_rouse
        self._read_one = akv.lib.akv_engine_read_one
        self._from_buffer = akv.ffi.from_buffer
        self._null = akv.ffi.NULL
        source = akv.lib.AKV_SOURCE_URING if uring else akv.lib.AKV_SOURCE_THREADS
        struct, *kept = options_struct(source, fds, limits, options)
        if device is not None:
            kept.append(device_struct(device))
            struct.device = kept[-1]
        code, where = akv.ffi.new("int32_t *"), akv.ffi.new("int32_t *")
        handle = akv.lib.akv_engine_open(struct, code, where)
        del kept  # open has copied both tables
        if not handle:
            raise _refusal(-code[0], _WHERE[where[0]])
        self._handle: Any = handle
        self._finished = akv.ffi.new("akv_completion[]", _DRAIN_MAX)
        self._finished_bytes = akv.ffi.buffer(self._finished)
        self._order = akv.ffi.new("akv_order *")
        self._fileno: int = self._lib.akv_engine_fileno(handle)
        _engines.add(self)

    def submit(self, batch: Batch, *, tag: object = None) -> Ticket:
        """Hand a batch over; returns at once, in tens of microseconds at most.

        From here on the engine owns everything the batch names. Raises `BusyError` when it holds as much as it may
        (nothing was taken: try again after a `drain`), `ClosedError`, `LayoutError` for malformed arguments.
        """
        kind, ops, op_count, results, copies, copy_count, priority, deadline_ns, owner, order = batch
        ops = self._from_buffer("akv_op[]", ops)
        copies = self._null if copies is None else self._from_buffer("akv_copy[]", copies)
        results = self._from_buffer("akv_result[]", results, True)
        if len(ops) < op_count or len(results) < op_count:
            raise LayoutError(f"the batch counts {op_count} ops: ops hold {len(ops)}, results {len(results)}")
        if copy_count and len(copies) < copy_count:
            raise LayoutError(f"the batch counts {copy_count} copies but holds {len(copies)}")
        ring = self._idlest()
        with self._lock:
            number = self._submit(
                self._open_handle(),
                ring,
                kind,
                priority,
                deadline_ns,
                ops,
                op_count,
                copies,
                copy_count,
                results,
                self._order_struct(order) if order is not None else self._null,
            )
            # What follows happens while the device works.
            if number >= 0:
                # The exports keep their objects alive, and Python from resizing them.
                ticket = Ticket(number, (ops, copies, results, owner), op_count, ring=ring, tag=tag)
                self._live[number] = ticket
                self._load[ring] += op_count
                return ticket
        raise _submit_error(number, op_count)

    def rouse(self) -> None:
        """A batch will be submitted within microseconds: have the thread that takes it wake up meanwhile. A hint."""
        with self._lock:
            if self._handle is not None:
                self._rouse(self._handle, 0)

    def submit_region(
        self, kind: Kind, address: int, nbytes: int, *, ring: int, tag: object = None, device_address: int = 0
    ) -> Ticket:
        """Register (REGION_ADD) or forget (REGION_REMOVE) memory with one ring; the ticket's status is the answer.

        `device_address` is where the GPU sees memory that the caller has pinned, 0 if it has not.
        The memory must stay valid until a REGION_REMOVE for it is done, which waits for the I/O on it.
        """
        with self._lock:
            number = self._lib.akv_engine_region(
                self._open_handle(), ring, kind, address, nbytes, device_address
            )
            if number >= 0:
                ticket = self._live[number] = Ticket(number, (), 0, ring=ring, tag=tag)
                return ticket
        raise _submit_error(number, 0)

    def submit_watch(self, event: int, *, owner: object, tag: object = None) -> Ticket:
        """A ticket that is done when the CUDA event with this handle is; the event stays alive with `owner`."""
        with self._lock:
            number = self._lib.akv_engine_watch(self._open_handle(), 0, _pointer(event))
            if number >= 0:
                ticket = self._live[number] = Ticket(number, (owner,), 0, ring=0, tag=tag)
                return ticket
        raise _submit_error(number, 0)

    def _order_struct(self, order: Order) -> Any:
        # One for all: the call that it is handed to copies it, under the same lock.
        struct = self._order
        struct.fence, struct.stream_key = _pointer(order.fence), order.stream_key
        return struct

    def is_device_memory(self, address: int, nbytes: int, ordinal: int) -> bool:
        """Whether memory is wholly the device's. False may have any reason: ask the driver for it."""
        return self._lib.akv_engine_is_device_memory(self._open_handle(), address, nbytes, ordinal) == 1  # type: ignore[no-any-return]

    def fence(self, stream: int, event: int) -> bool:
        """Record an event handle on a stream that is not capturing. False may have any reason, as above."""
        return self._lib.akv_engine_fence(self._open_handle(), _pointer(stream), _pointer(event)) == 1  # type: ignore[no-any-return]

    def export(self, memory: Any) -> Any:
        """The bytes of writable contiguous memory, for `read_one`, which stay valid while this is kept.

        Raises TypeError, ValueError or BufferError for anything else.
        """
        return self._from_buffer("char[]", memory, True)

    def pointer(self, address: int) -> Any:
        """The same for memory that its owner vouches for and somebody else keeps alive."""
        return akv.ffi.cast("char *", address)

    def address_of(self, memory: Any) -> int:
        """Where an `export` lies, or a `pointer` leads."""
        return int(akv.ffi.cast("uintptr_t", memory))

    def read_one(
        self,
        file: int,
        file_offset: int,
        nbytes: int,
        into: Any,
        into_nbytes: int,
        record: bytearray,
        priority: int,
        owner: object,
    ) -> Ticket | None:
        """`submit` for a read of `nbytes`, of which `into_nbytes` are owed: directly if it can, else by staging.

        `into` is an `export` or a `pointer`, and `owner` keeps what is behind it. The batch is recorded in `record`
        (`aio_kv.plan.new_record(1)`). None where `submit` would raise.
        """
        memory, ring = self._from_buffer("char[]", record, True), self._idlest()
        record_nbytes = len(record)
        with self._lock:
            number = self._read_one(
                self._open_handle(),
                ring,
                priority,
                file,
                file_offset,
                nbytes,
                into,
                into_nbytes,
                memory,
                record_nbytes,
            )
            if number < 0:
                return None
            return self._taken(number, (memory, into, owner), 1, ring)

    def copy_pinned(
        self,
        kind: Kind,
        priority: int,
        ordinal: int,
        region: tuple[int, int, Any],
        device: tuple[int, int, Any],
        nbytes: int,
        record: bytearray,
        fence: tuple[int, int],
        owner: object,
    ) -> Ticket | None:
        """`submit` for a load or save of pieces of `nbytes` between a region and device memory, checked and fenced.

        `region` and `device` are (address, nbytes, byte offsets as an int64 array; None in the device: packed). `fence`
        is the handle of a stream and of an event to be recorded on it, (0, 0) for none. `owner` keeps the device
        memory alive. The batch is recorded in `record` (`aio_kv.plan.new_record`). None where anything is wrong,
        whatever it is: then nothing was submitted.
        A region of more than 2 GiB takes offsets of whole pages only.
        """
        ring = self._idlest()
        memory = self._from_buffer("char[]", record, True)
        offsets = self._from_buffer("int64_t[]", region[2])
        places = self._null if device[2] is None else self._from_buffer("int64_t[]", device[2])
        if places is not self._null and len(places) != len(offsets):
            return None  # C is told one count for both
        ends = region[0], region[1], offsets, device[0], device[1], places
        with self._lock:
            number = self._lib.akv_engine_copy_pinned(
                self._open_handle(),
                ring,
                kind,
                priority,
                ordinal,
                *ends,
                len(offsets),
                nbytes,
                *fence,
                memory,
                len(record),
            )
            if number < 0:
                return None
            return self._taken(number, (memory, owner), -(-len(offsets) // PINNED_COPIES_MAX), ring)

    def _idlest(self) -> int:
        load = self._load
        return 0 if len(load) == 1 else load.index(min(load))

    def _taken(self, number: int, owners: tuple[object, ...], op_count: int, ring: int) -> Ticket:
        ticket = self._live[number] = Ticket(number, owners, op_count, ring=ring)
        self._load[ring] += op_count
        return ticket

    def drain(self, within_us: int = 0) -> list[Ticket]:
        """Collect the tickets that have news, in that order. Each is done, or, with device memory, enqueued.

        Waits for news, without the GIL and without sleeping, for `within_us` microseconds at most.
        """
        news: dict[Ticket, None] = {}  # a ticket that was enqueued and is done by now is told of once
        live = self._live
        with self._lock:
            if self._handle is None:
                return []
            handle = self._check_process()
            if within_us and self._lib.akv_engine_poll(handle, within_us) != 1:
                return []
            count = _DRAIN_MAX
            while count == _DRAIN_MAX:
                count = self._lib.akv_engine_drain(handle, self._finished, _DRAIN_MAX)
                for i in range(count):
                    number, event, status, failed, stage = _completion(
                        self._finished_bytes, i * _COMPLETION_NBYTES
                    )
                    ticket = live[number]
                    news[ticket] = None
                    if status:
                        ticket.status, ticket.failed = status, failed
                    if stage:
                        ticket.event = event
                        ticket.is_enqueued = True
                        continue
                    del live[number]
                    self._load[ticket.ring] -= ticket.op_count
                    if status <= -CUDA_ERROR:
                        _leaked.append(ticket.owners)  # the hardware may still read or write there
                    ticket.owners = ()
                    if ticket.event:
                        ticket.event = 0
                    ticket.is_done = True
        if self._waiter.is_polled:
            self._waiter.after_drain(bool(news))
        return list(news)

    def _poke(self) -> None:
        with self._lock:
            if self._handle is not None:
                os.eventfd_write(self._fileno, 1)

    def fileno(self) -> int:
        """A descriptor that polls readable when `drain` has something, or when the engine has stopped."""
        return self._fileno

    def wait(self, ticket: Ticket, timeout: float | None = None) -> bool:
        """Wait for a ticket without an event loop; False when `timeout` seconds pass first.

        Other tickets that finish meanwhile become done as well: threads that each wait for their own may share an
        engine, and one of them polls for all.
        """
        if ticket.is_done:
            return True
        self._open_handle()
        return self._waiter.wait(ticket, timeout)

    def cancel(self, ticket: Ticket) -> None:
        """Ask that what has not begun be dropped; what is at the device is waited for. The ticket still finishes."""
        with self._lock:
            if self._handle is not None and ticket.number in self._live:
                self._lib.akv_engine_cancel(self._check_process(), ticket.number)

    def stop(self) -> None:
        """Refuse new batches and drop what has not begun. Drain until `is_stopped`, then `close`."""
        with self._lock:
            if self._handle is not None:
                self._lib.akv_engine_stop(self._check_process())

    @property
    def is_stopped(self) -> bool:
        """Whether nothing is in flight any more and nothing will be."""
        with self._lock:
            return self._handle is None or self._lib.akv_engine_stopped(self._handle) == 1

    @property
    def is_closed(self) -> bool:
        """Whether the engine's memory has been given back."""
        return self._handle is None

    def close(self, timeout: float | None = None) -> bool:
        """Stop, wait for the device, give everything back; again does nothing.

        Returns False if the device does not answer within `timeout` seconds (default: the drain timeout). The memory
        is then leaked on purpose, and so is everything the live tickets keep: the device may still write there.
        """
        if self._handle is None or os.getpid() != self._pid:
            return True
        self.stop()
        until = time.monotonic() + (self.options.drain_timeout if timeout is None else timeout)
        while not self.is_stopped:
            left = until - time.monotonic()
            if left <= 0:
                self._leak()
                return False
            wait_readable(self._fileno, min(left, 0.1))
            self.drain()
        self.drain()
        self._waiter.dismiss()
        with self._lock:
            handle, self._handle = self._handle, None
            if handle is not None:
                self._lib.akv_engine_free(handle)
        return True

    def _leak(self) -> None:
        _leaked.append(self)
        _log.error(
            "the device did not answer within %.1f s of close: %d batches and their memory are leaked, not freed",
            self.options.drain_timeout,
            len(self._live),
        )

    def statistics(self) -> EngineStatistics:
        """Counters since the engine opened."""
        totals = dict.fromkeys(EngineStatistics.__dataclass_fields__, 0)
        one = akv.ffi.new("akv_statistics *")
        with self._lock:
            for ring in range(self.options.rings):
                self._lib.akv_engine_statistics(self._open_handle(), ring, one)
                for name in totals:
                    value = getattr(one, name)
                    totals[name] = (
                        max(totals[name], value) if name in _SUMMED_BY_MAX else totals[name] + value
                    )
        return EngineStatistics(**totals)

    def ring_info(self, ring: int = 0) -> RingInfo:
        """What ring number `ring` got from the kernel."""
        info = akv.ffi.new("akv_ring_info *")
        with self._lock:
            self._lib.akv_engine_ring_info(self._open_handle(), ring, info)
        return RingInfo(
            setup_flags=info.setup_flags,
            files_registered=bool(info.files_registered),
            sparse_buffers=bool(info.sparse_buffers),
            register_errno=-info.register_errno,
            staging_nbytes=info.staging_nbytes,
            registered_nbytes=info.registered_nbytes,
        )

    def _open_handle(self) -> Any:
        if self._handle is None:
            raise ClosedError("the engine is closed: open a new backend")
        return self._handle if _forked_from is None else self._check_process()

    def _check_process(self) -> Any:
        if _forked_from is not None and os.getpid() != self._pid:
            raise ClosedError(
                f"the engine belongs to process {self._pid} and this is its forked child {os.getpid()}: "
                "open a new backend here, or start workers with the spawn method"
            )
        return self._handle


# getpid is a system call; until somebody forks there is no need for it.
_forked_from: int | None = None


def _after_fork_in_child() -> None:
    global _forked_from
    _forked_from = os.getppid()
    for engine in list(_engines):
        engine._lock = threading.Lock()  # the parent may have held it at the moment of the fork
        engine._waiter = TicketWaiter(engine)


def _close_at_exit() -> None:
    # What batches name is freed when the interpreter ends, so those that are in flight must have ended before.
    for engine in list(_engines):
        if engine not in _leaked:
            engine.close()


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()
atexit.register(_close_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def _submit_error(number: int, op_count: int) -> Exception:
    if number == -errno.EAGAIN:
        return BusyError("the engine holds as many requests as it may: drain it, then try again")
    if number == -errno.ESHUTDOWN:
        return ClosedError("the engine is closing: open a new backend")
    if number == -errno.E2BIG:
        return LayoutError(f"a batch of {op_count} ops is larger than max_requests: hand it over in parts")
    if number == -errno.EINVAL:
        return LayoutError("the batch is malformed: its kind, priority, deadline or an op count of 0")
    if number == -errno.ECHILD:
        return ClosedError("the engine belongs to the parent process: open a new backend in this one")
    return storage_error(number, action="submit", file="batch", file_offset=None, nbytes=None)


def _refusal(number: int, where: str) -> UnavailableError | DeviceError:
    if number > CUDA_ERROR:
        code = number - CUDA_ERROR
        return DeviceError(f"the engine cannot start on the device: CUDA error {code} at open", code=code)
    name = errno.errorcode.get(number, str(number))
    return UnavailableError(
        f"the engine cannot start: {where} failed with {name} ({os.strerror(number)})",
        error_number=number,
        step=where,
    )
