"""Reports of mixes, errors that say where, failures that nobody saw, and calls from where they do not belong."""

from __future__ import annotations

import asyncio
import copy
import errno
import gc
import pickle
import threading
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from backends import make_backend
from loops import LOOPS, every_loop, on_asyncio, run_on
from slow_devices import PADDED, WHOLE, filled, memory_backend, slow_backend, unaligned

from aio_kv import (
    ClosedError,
    Outcome,
    ShortReadError,
    StorageError,
    TransferError,
    TransferReport,
)
from aio_kv.engine import Fault, FaultAction, Kind
from aio_kv.testing import MemoryBackend, Scheduler

IDS = np.arange(0, 64, 3)
EIO_EACH_THIRD = Fault(FaultAction.ERROR, -errno.EIO, kind=Kind.READ, every=3, phase=1)
native_kinds = pytest.mark.parametrize("kind", ["uring", "threads"])


class FailGroups(Scheduler):
    """Fails reads of chosen groups with chosen errors."""

    def __init__(self, codes: dict[int, int]) -> None:
        self.codes = codes

    def fate(self, kind: Kind, layer: int, file_offset: int, nbytes: int) -> int:
        group = layer * PADDED.groups_per_layer + file_offset // PADDED.stride
        return -self.codes.get(group, 0) if kind is Kind.READ else 0


@every_loop
@native_kinds
async def test_a_mix(kind: str, tmp_path: Path) -> None:
    """Every third read fails: the rest is good, and the report says which is which, in the order of the call."""
    async with make_backend(kind, tmp_path, faults=(EIO_EACH_THIRD,))(PADDED) as backend:
        rows = await filled(backend)
        order = np.random.default_rng(1).permutation(IDS)
        target = unaligned(PADDED, len(IDS))
        transfer = backend.read_groups(order, target)
        report = await transfer.outcome()
        is_done = report.outcomes == Outcome.DONE
        # The engine sees the groups in file order; the first of all reads proved it when it opened.
        by_file = is_done[np.argsort(order)]
        assert by_file.tolist() == [index % 3 != 0 for index in range(len(IDS))]
        assert set(report.outcomes) == {Outcome.DONE, Outcome.FAILED}
        assert (target[is_done] == rows[order][is_done]).all()
        assert report.loaded_prefix == int(np.argmin(is_done))
        assert report.nbytes == int(is_done.sum()) * 105
        assert not report.is_complete
        assert len(report.errors) == 8
        first = int(order[~is_done][0])
        error = report.errors[0]
        assert isinstance(error, StorageError)
        assert (error.errno, error.file_offset) == (errno.EIO, PADDED.offset(PADDED.key(first)))
        assert error.file == backend.files.path_of(first // PADDED.groups_per_layer)
        with pytest.raises(
            TransferError, match=f"read of {(~is_done).sum()} of {len(IDS)} requests"
        ) as caught:
            await transfer
        assert caught.value.report is report
        assert caught.value.__cause__ is error
        assert caught.value.errno == errno.EIO


@every_loop
async def test_requests_that_share_a_group_share_its_fate() -> None:
    async with memory_backend(PADDED, FailGroups({8: errno.EIO})) as backend:
        rows = await filled(backend)
        target = unaligned(PADDED, 6)
        report = await backend.read_groups([5, 8, 5, 8, 20, 8], target).outcome()
        assert report.outcomes.tolist() == [0, 1, 0, 1, 0, 1]
        assert (report.loaded_prefix, report.nbytes) == (1, 3 * 105)
        assert (target[[0, 2, 4]] == rows[[5, 5, 20]]).all()


@every_loop
async def test_groups_of_one_op_share_its_fate() -> None:
    """Neighbours are one I/O: what fails with one of them fails with all."""
    async with memory_backend(PADDED, FailGroups({8: errno.EIO})) as backend:
        await filled(backend)
        report = await backend.read_groups([30, 8, 9, 10, 40], unaligned(PADDED, 5)).outcome()
        assert report.outcomes.tolist() == [0, 1, 1, 1, 0]


@every_loop
async def test_a_large_group_fails_with_any_of_its_pieces(tmp_path: Path) -> None:
    from aio_kv import GroupLayout

    layout = GroupLayout(1, 4, 1, 1, 40_000, 1, kinds=PADDED.kinds[:1])
    fault = Fault(FaultAction.ERROR, -errno.EIO, kind=Kind.READ, phase=7, times=1)
    async with make_backend("uring-tight", tmp_path, faults=(fault,))(layout) as backend:
        rows = await filled(backend)
        target = unaligned(layout, 4)
        report = await backend.read_groups([0, 1, 2, 3], target).outcome()
        assert report.outcomes.tolist() == [0, 1, 0, 0]
        is_done = report.outcomes == Outcome.DONE
        assert (target[is_done] == rows[is_done]).all()
        assert len(report.errors) == 1


@every_loop
@native_kinds
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EBADF])
async def test_every_errno_keeps_its_name(code: int, kind: str, tmp_path: Path) -> None:
    fault = Fault(FaultAction.ERROR, -code, kind=Kind.WRITE)
    async with make_backend(kind, tmp_path, faults=(fault,))(PADDED) as backend:
        with pytest.raises(TransferError, match=errno.errorcode[code]) as caught:
            await backend.write_groups([3], bytearray(105))
        assert caught.value.errno == code
        with pytest.raises(StorageError):
            await backend.flush()


@every_loop
@native_kinds
async def test_end_of_file_is_a_short_read(kind: str, tmp_path: Path) -> None:
    fault = Fault(FaultAction.ERROR, 0, kind=Kind.READ, phase=1)
    async with make_backend(kind, tmp_path, faults=(fault,))(PADDED) as backend:
        with pytest.raises(TransferError) as caught:
            await backend.read_groups([3], bytearray(105))
        cause = caught.value.__cause__
        assert isinstance(cause, ShortReadError)
        assert cause.arrived == 0


@every_loop
async def test_a_file_that_was_cut_while_open(tmp_path: Path) -> None:
    """Truncated behind our back: an error that names the file, and the groups before the cut still come."""
    async with make_backend("uring-buffered", tmp_path)(PADDED) as backend:
        rows = await filled(backend)
        path = backend.files.path_of(1)
        Path(path).write_bytes(Path(path).read_bytes()[: 4 * PADDED.stride + 50])
        first = PADDED.groups_per_layer
        target = unaligned(PADDED, 3)
        report = await backend.read_groups([first + 1, first + 4, first + 8], target).outcome()
        assert report.outcomes.tolist() == [0, 1, 1]
        assert (target[0] == rows[first + 1]).all()
        error = report.errors[0]
        assert isinstance(error, ShortReadError)
        assert (error.file, error.arrived) == (path, 50)


@every_loop
async def test_a_report_survives_copying_and_pickling() -> None:
    async with memory_backend(PADDED, FailGroups({3: errno.EIO})) as backend:
        with pytest.raises(TransferError) as caught:
            await backend.read_groups([1, 3], unaligned(PADDED, 2))
        for again in (pickle.loads(pickle.dumps(caught.value)), copy.copy(caught.value)):
            assert isinstance(again, TransferError)
            assert isinstance(again.report, TransferReport)
            assert again.report.outcomes.tolist() == [0, 1]
            assert again.errno == errno.EIO


@every_loop
async def test_a_failure_that_nobody_awaited_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    async with memory_backend(PADDED, FailGroups({3: errno.EIO})) as backend:
        backend.read_groups([1, 3], unaligned(PADDED, 2))
        kept = backend.read_groups([3], bytearray(105))
        seen = backend.read_groups([3], bytearray(105))
        assert not (await seen.outcome()).is_complete
        del seen
        gc.collect()
        assert backend.statistics().transfers.unobserved_failures == 1
        assert [record.getMessage() for record in caplog.records] == [
            "a read of 2 requests failed (EIO) and was never awaited"
        ]
        with pytest.raises(TransferError):
            await kept
        del kept
        gc.collect()
    assert backend.statistics().transfers.unobserved_failures == 1
    assert len(caplog.records) == 1


@every_loop
async def test_a_success_that_nobody_awaited_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    async with memory_backend(PADDED) as backend:
        backend.read_groups([1, 3], unaligned(PADDED, 2))
        await backend.read_groups([2], bytearray(105))
        gc.collect()
    assert caplog.records == []


@every_loop
async def test_awaiting_after_the_end_of_the_backend() -> None:
    """The outcome is there for as long as the transfer is."""
    async with memory_backend(PADDED) as backend:
        done = backend.read_groups([1], bytearray(105))
        await done
        backend.pause()
        dropped = backend.read_groups([1, 9], unaligned(PADDED, 2))
        backend.resume()
    assert (await done).is_complete
    assert (await done.outcome()).nbytes == 105
    assert len((await dropped.outcome()).outcomes) == 2


@every_loop
async def test_a_call_from_another_thread_names_both(tmp_path: Path) -> None:
    async with slow_backend("uring", tmp_path, PADDED, only=Kind.READ) as backend:
        transfer = backend.read_groups([1], bytearray(105))
        messages: list[str] = []

        def call() -> None:
            for work in (lambda: backend.read_groups([1], bytearray(105)), transfer.cancel):
                with pytest.raises(ClosedError, match="belongs to") as caught:
                    work()
                messages.append(str(caught.value))

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        assert len(messages) == 2
        for message in messages:
            assert ("trio run 0x" in message) or ("asyncio loop 0x" in message)
            assert "called from no event loop" in message
        await transfer


@every_loop
@pytest.mark.parametrize("other", LOOPS)
async def test_a_call_from_another_loop_names_both(other: str, tmp_path: Path) -> None:
    """Calls, awaits, closes: a loop that runs in another thread is told which loop the backend belongs to."""
    async with slow_backend("uring", tmp_path, PADDED, only=Kind.READ) as backend:
        transfer = backend.read_groups([1], bytearray(105))
        messages: list[str] = []

        async def use() -> None:
            with pytest.raises(ClosedError) as caught:
                backend.read_groups([1], bytearray(105))
            messages.append(str(caught.value))
            for wait in (backend.flush, backend.wait_ready, backend.aclose, transfer.outcome):
                with pytest.raises(ClosedError) as caught:
                    await wait()
                messages.append(str(caught.value))

        thread = threading.Thread(target=run_on, args=(other, use))
        thread.start()
        thread.join()
        assert len(messages) == 5
        library = "trio" if other == "trio" else "asyncio"
        known = f"{library} run 0x" if other == "trio" else f"{library} loop 0x"
        for message in messages:
            assert f"called from {known}" in message or f"called from a loop of {library}" in message
        assert (await transfer).is_complete


@pytest.mark.parametrize("loop", LOOPS)
def test_a_second_run_of_the_same_kind_of_loop(loop: str) -> None:
    """A backend that outlived its loop says so."""
    kept: list[MemoryBackend] = []

    async def first() -> None:
        kept.append(await MemoryBackend(PADDED))

    async def second() -> None:
        with pytest.raises(ClosedError, match="belongs to"):
            kept[0].read_groups([0], bytearray(105))
        with pytest.raises(ClosedError, match="belongs to"):
            await kept[0].aclose()

    run_on(loop, first)
    run_on(loop, second)
    assert kept[0]._engine is not None
    assert kept[0]._engine.close()


def test_a_backend_opens_in_a_loop_only() -> None:
    opening: Any = MemoryBackend(PADDED).__aenter__()
    with pytest.raises(RuntimeError, match="event loop"):
        opening.send(None)


@on_asyncio
async def test_gather_and_task_groups_of_asyncio(tmp_path: Path) -> None:
    """Transfers are awaitables like any other: gather, wait_for, TaskGroup."""
    async with make_backend("uring", tmp_path)(WHOLE) as backend:
        rows = await filled(backend)
        targets = [bytearray(4096) for _ in range(6)]

        async def read(group: int) -> TransferReport:
            return await backend.read_groups([group], targets[group])

        reports = await asyncio.gather(*(read(group) for group in range(3)))
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(read(number)) for number in (3, 4)]
        reports += [task.result() for task in tasks]
        reports.append(await asyncio.wait_for(read(5), 10))
        assert all(report.is_complete for report in reports)
        assert all(bytes(target) == rows[number].tobytes() for number, target in enumerate(targets))


@every_loop
async def test_repr_says_what_it_is() -> None:
    async with memory_backend(PADDED) as backend:
        backend.pause()
        write = backend.write_groups([1], bytearray(105))
        read = backend.read_groups([1, 2], bytearray(2 * 105))
        assert repr(write) == "<Transfer write of 1 requests, in flight>"
        assert repr(read) == "<Transfer read of 2 requests, held>"
        backend.resume()
        await read
        assert repr(read) == "<Transfer read of 2 requests, done>"
        assert read.group_ids.tolist() == [1, 2]
        with anyio.fail_after(1):
            await write
