"""Who owns memory, and until when: drops by the caller, devices that do not answer, closing with work in flight."""

from __future__ import annotations

import gc
import time
import weakref
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from backends import SMALL, make_backend
from loops import every_loop
from slow_devices import (
    PADDED,
    SLOW_KINDS,
    WHOLE,
    filled,
    has_begun,
    memory_backend,
    payloads,
    slow_backend,
    unaligned,
)

from aio_kv import BusyError, LayerFiles, Outcome, Read, Scatter, ThreadedBackend, UringBackend, Write
from aio_kv.engine import (
    Batch,
    Engine,
    Fault,
    FaultAction,
    IoEngine,
    Kind,
    PythonEngine,
    has_extension,
    native,
)
from aio_kv.plan import OP_DTYPE, RESULT_DTYPE, IoLimits
from aio_kv.testing import MemoryFiles, Scheduler
from aio_kv.testing.memory_engine import MemoryEngine

IDS = np.arange(0, 64, 3)
slow_kinds = pytest.mark.parametrize("kind", SLOW_KINDS)


class Holder:
    """A pointer holder, as a torch tensor is one, whose end can be observed."""

    def __init__(self, nbytes: int) -> None:
        self.memory = np.full(nbytes, 0xA5, dtype=np.uint8)
        self.nbytes = nbytes

    def data_ptr(self) -> int:
        return int(self.memory.ctypes.data)


@every_loop
@slow_kinds
@pytest.mark.parametrize("call", ["read", "read_groups", "scatter", "write", "write_groups"])
async def test_memory_lives_as_long_as_the_transfer(call: str, kind: str, tmp_path: Path) -> None:
    """The caller drops its last reference at once; the engine's is given up when the transfer ends, not later."""
    payload = PADDED.payload_nbytes
    async with slow_backend(kind, tmp_path, PADDED) as backend:
        holder = Holder(2 * payload if call == "scatter" else payload)
        memory = weakref.ref(holder.memory)
        if call == "read":
            transfer = backend.read([Read(PADDED.key(5), holder)])
        elif call == "read_groups":
            transfer = backend.read_groups([5], holder)
        elif call == "scatter":
            transfer = backend.read_groups([5], Scatter(holder, np.array([17])))
        elif call == "write":
            transfer = backend.write([Write(PADDED.key(5), holder)])
        else:
            transfer = backend.write_groups([5], holder)
        del holder
        gc.collect()
        assert memory() is not None
        await transfer
        gc.collect()
        assert memory() is None


@every_loop
async def test_memory_lives_before_the_engine_has_it() -> None:
    """Held behind another transfer, or waiting for room in the engine, nobody but the transfer keeps it."""
    async with memory_backend(PADDED, max_requests=1) as backend:
        backend.pause()
        backend.write_groups([1], bytes(105))
        held, queued = Holder(105), Holder(105)
        memories = [weakref.ref(holder.memory) for holder in (held, queued)]
        transfers = [backend.read_groups([1], held), backend.read_groups([2], queued)]
        assert transfers[0].is_held
        del held, queued
        gc.collect()
        assert all(memory() is not None for memory in memories)
        backend.resume()
        for transfer in transfers:
            await transfer
        gc.collect()
        assert all(memory() is None for memory in memories)


@pytest.mark.parametrize("kind", ["uring", "threads", "python", "memory"])
def test_an_engine_keeps_what_its_batch_names(kind: str, tmp_path: Path) -> None:
    """Without a transfer above it, the ticket is what keeps memory alive, until it is done and no longer."""
    engine, files = bare_engine(kind, tmp_path)
    try:
        holder = Holder(4096)
        owner, kept = weakref.ref(holder), holder.memory  # so that a failure here is no write to freed memory
        ops, results = np.zeros(1, OP_DTYPE), np.zeros(1, RESULT_DTYPE)
        ops["address"], ops["nbytes"] = holder.data_ptr(), 4096
        ticket = engine.submit(Batch(Kind.READ, ops, 1, results, owner=holder))
        del holder, ops, results
        gc.collect()
        assert owner() is not None
        assert engine.wait(ticket, 5.0)
        until = time.monotonic() + 5
        while owner() is not None and time.monotonic() < until:
            gc.collect()  # a Python thread lets go of a batch just after it has told of its end
        assert owner() is None
        assert (kept == 0).all()
    finally:
        engine.close()
        if isinstance(files, LayerFiles):
            files.close()


def bare_engine(kind: str, folder: Path) -> tuple[IoEngine, object]:
    """An engine of one kind, on files without direct I/O, that takes a moment for each read if it can."""
    if kind == "memory":
        memory_files = MemoryFiles(WHOLE)
        return MemoryEngine(
            memory_files, IoLimits(1, 1, SMALL.op_nbytes_max), SMALL, Scheduler()
        ), memory_files
    if kind != "python" and not has_extension():
        pytest.skip("the compiled extension is not installed")
    files = LayerFiles(folder / "kv", WHOLE, create=True)
    limits = IoLimits(1, 1, SMALL.op_nbytes_max)
    if kind == "python":
        return PythonEngine(files.fds(False), limits, SMALL), files
    options = replace(SMALL, faults=(Fault(FaultAction.DELAY, 20_000),))
    return Engine(files.fds(False), limits, options, uring=kind == "uring"), files


@every_loop
@slow_kinds
async def test_memory_cannot_be_resized_meanwhile(kind: str, tmp_path: Path) -> None:
    """The engine holds the buffer's export, so that Python itself refuses to move the bytes away."""
    async with slow_backend(kind, tmp_path, PADDED) as backend:
        target = bytearray(PADDED.payload_nbytes)
        transfer = backend.read_groups([5], target)
        with pytest.raises(BufferError):
            target.extend(b"more")
        await transfer
        target.extend(b"more")


@every_loop
@slow_kinds
async def test_forgotten_transfers_let_go_of_everything(kind: str, tmp_path: Path) -> None:
    """Nobody awaits, nobody keeps the transfer: it happens, and its memory and itself are given up."""
    async with slow_backend(kind, tmp_path, PADDED) as backend:
        await filled(backend)
        holder = Holder(PADDED.payload_nbytes)
        memory = weakref.ref(holder.memory)
        gone = weakref.ref(backend.read_groups([7], holder))
        del holder
        assert gone() is not None
        await backend.read_groups([8], bytearray(PADDED.payload_nbytes))
        while backend.statistics().transfers.active:
            await anyio.lowlevel.checkpoint()
        gc.collect()
        assert gone() is None
        assert memory() is None


@every_loop
@slow_kinds
async def test_drain_timeout_keeps_the_destination(kind: str, tmp_path: Path) -> None:
    """A device that does not answer in time: the caller is let go, its memory is not, and the bytes do come."""
    delay = {"delay_us": 150_000} if kind != "memory" else {}
    async with slow_backend(kind, tmp_path, PADDED, drain_timeout=0.03, only=Kind.READ, **delay) as backend:
        rows = await filled(backend)
        if kind == "memory":
            backend.pause()  # type: ignore[attr-defined]
        holder = Holder(PADDED.payload_nbytes)
        memory = weakref.ref(holder.memory)
        transfer = backend.read_groups([7], holder)
        del holder
        await has_begun(backend)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await transfer
        assert scope.cancelled_caught
        assert not transfer.is_done
        gc.collect()
        late = memory()
        assert late is not None
        if kind == "memory":
            backend.resume()  # type: ignore[attr-defined]
        assert (await transfer.outcome()).is_complete
        assert (late == rows[7]).all()
        del late
        assert memory() is None


@every_loop
async def test_a_close_that_is_not_answered_leaks_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """Past the drain timeout `aclose` returns; what the device may still write to is never given back."""
    backend = memory_backend(PADDED, drain_timeout=0.03)
    async with backend:
        await filled(backend)
        backend.pause()
        holder = Holder(PADDED.payload_nbytes)
        memory = weakref.ref(holder.memory)
        backend.read_groups([7], holder)
        del holder
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "leaked" in caplog.text
    gc.collect()
    assert memory() is not None
    backend.resume()  # the device answers after all
    assert backend._engine is not None
    assert backend._engine.close()
    gc.collect()
    assert memory() is None


@every_loop
@pytest.mark.skipif(not has_extension(), reason="the compiled extension is not installed")
async def test_the_native_engine_leaks_rather_than_free(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As above; and files of the backend's own stay open, since the device may still work on them."""
    make = make_backend(
        "uring", tmp_path, drain_timeout=0.03, faults=(Fault(FaultAction.DELAY, 120_000, kind=Kind.READ),)
    )
    async with make(PADDED) as backend:
        holder = Holder(PADDED.payload_nbytes)
        memory = weakref.ref(holder.memory)
        backend.read_groups([7], holder)
        del holder
        await has_begun(backend)
        await backend.aclose()
    assert "leaked" in caplog.text
    gc.collect()
    assert memory() is not None
    engine = native._leaked.pop()
    assert engine.close(5.0)  # waits for the device, which answers in the end
    gc.collect()
    assert memory() is None


@every_loop
@pytest.mark.skipif(not has_extension(), reason="the compiled extension is not installed")
async def test_files_stay_open_under_a_device_that_does_not_answer(tmp_path: Path) -> None:
    """The device may still work on their descriptors: they and their lock are leaked with the engine."""
    fault = Fault(FaultAction.DELAY, 120_000, kind=Kind.READ)
    options = replace(SMALL, drain_timeout=0.03, faults=(fault,))
    async with ThreadedBackend(tmp_path / "kv", PADDED, create=True, options=options) as backend:
        files = backend.files
        backend.read_groups([7], bytearray(105))
        await has_begun(backend)
    assert not files.closed
    with pytest.raises(BusyError):
        LayerFiles(tmp_path / "kv", PADDED)
    assert native._leaked.pop().close(5.0)
    files.close()


@every_loop
@slow_kinds
async def test_close_with_everything_in_flight(kind: str, tmp_path: Path) -> None:
    """In flight, in the engine's queue, unfed, held: all end, are told what became of them, and nothing is touched."""
    async with slow_backend(
        kind, tmp_path, PADDED, queue_depth=4, max_requests=30, max_transfers=40
    ) as backend:
        rows = await filled(backend)
        targets = [unaligned(PADDED, len(IDS)) for _ in range(8)]
        reads = [backend.read_groups(IDS, target) for target in targets]
        source = payloads(PADDED, len(IDS), 9)
        write = backend.write_groups(IDS, source)
        behind = backend.read_groups(IDS[:2], unaligned(PADDED, 2))
        assert write.is_held
        assert behind.is_held
        await has_begun(backend, 4)
        await backend.aclose()
        reports = [await transfer.outcome() for transfer in (*reads, write, behind)]
        for target, report in zip(targets, reports, strict=False):
            is_done = report.outcomes == Outcome.DONE
            assert (target[is_done] == rows[IDS][is_done]).all()
            assert set(report.outcomes) <= {Outcome.DONE, Outcome.CANCELLED}
            target[:] = 0x77
        assert set(reports[-1].outcomes) == set(reports[-2].outcomes) == {Outcome.CANCELLED}
        assert reports[0].outcomes[:4].tolist() == [Outcome.DONE] * 4
        await anyio.lowlevel.checkpoint()
        assert all((target == 0x77).all() for target in targets)


@every_loop
@slow_kinds
async def test_a_second_close_waits_for_the_first(kind: str, tmp_path: Path) -> None:
    """Whoever closes may free memory and files afterwards, so no close returns while anything is in flight."""
    async with slow_backend(kind, tmp_path, PADDED, only=Kind.READ) as backend:
        await filled(backend)
        target = unaligned(PADDED, len(IDS))
        transfer = backend.read_groups(IDS, target)
        await has_begun(backend, len(IDS))
        was_done: list[bool] = []

        async def close() -> None:
            await backend.aclose()
            was_done.append(transfer.is_done)

        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(close)
        assert was_done == [True, True, True]
        await transfer.outcome()


@every_loop
@slow_kinds
async def test_the_second_close_may_be_cancelled(kind: str, tmp_path: Path) -> None:
    """It waits all the same: a cancelled close is no licence to free memory."""
    async with slow_backend(kind, tmp_path, PADDED, only=Kind.READ) as backend:
        await filled(backend)
        transfer = backend.read_groups(IDS, unaligned(PADDED, len(IDS)))
        await has_begun(backend, len(IDS))
        scope = anyio.CancelScope()
        was_done: list[bool] = []

        async def close() -> None:
            with scope:
                try:
                    await backend.aclose()
                finally:
                    was_done.append(transfer.is_done)

        async with anyio.create_task_group() as group:
            group.start_soon(backend.aclose)
            await anyio.lowlevel.checkpoint()
            group.start_soon(close)
            await anyio.lowlevel.checkpoint()
            scope.cancel()
        assert was_done == [True]
        await transfer.outcome()


@every_loop
async def test_files_of_the_caller_stay_open(tmp_path: Path) -> None:
    """`LayerFiles` that were handed in outlive the backend; those that it opened itself do not."""
    if not has_extension():
        pytest.skip("the compiled extension is not installed")
    with LayerFiles(tmp_path / "kv", PADDED, create=True) as files:
        async with UringBackend(files) as first, UringBackend(files) as second:
            rows = await filled(first)
            found = np.empty_like(rows)
            await second.read_groups(np.arange(PADDED.num_groups), found)
            assert (found == rows).all()
        assert not files.closed
    async with UringBackend(tmp_path / "kv", PADDED) as backend:
        own = backend.files
    assert own.closed


@every_loop
@slow_kinds
async def test_counters_return_to_zero(kind: str, tmp_path: Path) -> None:
    """At rest nothing is in flight, no staging slot is lent out and no transfer is active, before and after the end."""
    async with slow_backend(kind, tmp_path, PADDED, max_requests=16, delay_us=2000) as backend:
        rows = await filled(backend)
        found = np.empty_like(rows)
        transfers = [backend.read_groups(np.arange(PADDED.num_groups), found) for _ in range(3)]
        assert backend.statistics().transfers.active == 3
        transfers[1].cancel()
        for transfer in transfers:
            await transfer.outcome()
        at_rest = backend.statistics()
    for statistics in (at_rest, backend.statistics()):
        counters = (statistics.engine.in_flight, statistics.engine.slots_leased, statistics.transfers.active)
        assert counters == (0, 0, 0)
        assert statistics.engine.overflows == 0
    assert backend.statistics().transfers.transfers == 4


@every_loop
@slow_kinds
async def test_statistics_after_the_end_are_those_of_the_end(kind: str, tmp_path: Path) -> None:
    """What was in flight when the close began is over when it returns, and counted so."""
    async with slow_backend(kind, tmp_path, WHOLE, only=Kind.READ) as backend:
        await filled(backend)
        backend.read_groups(IDS, unaligned(WHOLE, len(IDS)))
        await has_begun(backend, len(IDS))
        assert backend.statistics().transfers.active == 1
    statistics = backend.statistics()
    assert statistics.transfers.active == 0
    assert statistics.engine.in_flight == 0
    assert statistics.engine.bytes_read >= len(IDS) * WHOLE.payload_nbytes
    assert statistics.backend == type(backend).__name__
