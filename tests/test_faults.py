"""Faults below the engine, seen from a backend: what succeeds has the right bytes, what fails says where.

Rules begin with the second I/O of their kind: the first read is the one by which a backend proves itself at open.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import SMALL
from hypothesis import example, given, settings
from hypothesis import strategies as st

from aio_kv import (
    EngineOptions,
    GroupLayout,
    LayerFiles,
    Outcome,
    PosixBackend,
    Priority,
    Read,
    ShortReadError,
    StorageError,
    ThreadedBackend,
    TransferError,
    TransferReport,
    UringBackend,
)
from aio_kv.backends.engine_backend import EngineBackend
from aio_kv.engine import Fault, FaultAction, Kind, has_extension

pytestmark = pytest.mark.skipif(not has_extension(), reason="the compiled extension is not installed")

BACKENDS = (UringBackend, ThreadedBackend)
# The first lands directly, merged and vectored; the second goes through staging; groups of the third are several I/Os.
LAYOUTS = (
    GroupLayout(2, 6, 2, 16, 64, 2, alignment=512),
    GroupLayout(2, 6, 2, 5, 70, 2),
    GroupLayout(1, 4, 1, 48, 512, 2),
)
OPTIONS = replace(SMALL, op_nbytes_max=32 << 10, small_nbytes=8 << 10)
Body = Callable[[EngineBackend], Awaitable[None]]


def content_of(layout: GroupLayout, group: int, version: int = 0) -> bytes:
    return np.random.default_rng([group, version]).bytes(layout.payload_nbytes)


@pytest.fixture(params=LAYOUTS, ids=["direct", "staged", "split"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LayerFiles]:
    """Files that hold version 0 of every group, written by the oracle."""
    with LayerFiles(tmp_path / "kv", request.param, create=True) as opened:
        write_all(opened)
        yield opened


def write_all(files: LayerFiles) -> None:
    with PosixBackend(files) as oracle:
        for group in range(files.layout.num_groups):
            oracle.write_from_host(files.layout.key(group), content_of(files.layout, group))


def run(
    backend: type[EngineBackend], files: LayerFiles, faults: tuple[Fault, ...], body: Body, **changes: Any
) -> None:
    """Run `body` on a backend whose device has these faults; at the end nothing may be lent out."""
    options: EngineOptions = replace(OPTIONS, faults=faults, **changes)

    async def main() -> None:
        async with backend(files, options=options) as kv:
            await body(kv)
        end = kv.statistics()
        assert (end.engine.in_flight, end.engine.slots_leased, end.transfers.active) == (0, 0, 0)

    asyncio.run(main())


async def read_all(kv: EngineBackend) -> tuple[TransferReport, list[bytes]]:
    layout = kv.layout
    into = bytearray(b"\xa5" * (layout.num_groups * layout.payload_nbytes))
    report = await kv.read_groups(np.arange(layout.num_groups), into).outcome()
    size = layout.payload_nbytes
    return report, [bytes(into[group * size :][:size]) for group in range(layout.num_groups)]


def check_read(
    layout: GroupLayout, report: TransferReport, found: list[bytes], uncertain: frozenset[int] = frozenset()
) -> None:
    for group, outcome in enumerate(report.outcomes.tolist()):
        if outcome == Outcome.DONE and group not in uncertain:
            assert found[group] == content_of(layout, group), group
    done = report.outcomes == Outcome.DONE
    assert report.nbytes == int(done.sum()) * layout.payload_nbytes
    assert report.loaded_prefix == (len(done) if done.all() else int(np.argmin(done)))
    assert bool(report.errors) == (not done.all())


def check_errors(kv: EngineBackend, report: TransferReport) -> None:
    """Each error names an I/O that holds the group it is told for."""
    failed = np.flatnonzero(report.outcomes != Outcome.DONE)
    assert len(report.errors) == min(len(failed), 8)
    for group, error in zip(failed.tolist(), report.errors, strict=False):
        assert isinstance(error, StorageError)
        layer, offset = divmod(group * kv.layout.stride, kv.layout.nbytes_per_layer)
        assert error.file == kv.files.path_of(layer)
        assert error.file_offset is not None
        assert error.nbytes is not None
        assert error.file_offset < offset + kv.layout.stride
        assert offset < error.file_offset + error.nbytes
        assert str(error.file_offset) in str(error)


def repeated(action: FaultAction, value: int, **changes: int | None) -> Fault:
    return Fault(action, value, **{"phase": 1, **changes})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [512, 4096, 20480])
def test_short_reads_resume(backend: type[EngineBackend], files: LayerFiles, value: int) -> None:
    async def body(kv: EngineBackend) -> None:
        report, found = await read_all(kv)
        assert report.is_complete
        check_read(kv.layout, report, found)
        assert kv.statistics().engine.resumed_ops > 0

    alignment = files.direct_alignment
    value = max(value, alignment.offset if alignment else 1)
    run(backend, files, (repeated(FaultAction.SHORT, value),), body)


@pytest.mark.parametrize("backend", BACKENDS)
def test_short_writes_resume(backend: type[EngineBackend], files: LayerFiles) -> None:
    layout = files.layout
    groups = np.arange(1, layout.num_groups, 2)

    async def body(kv: EngineBackend) -> None:
        await kv.write_groups(groups, b"".join(content_of(layout, int(group), 1) for group in groups))
        assert kv.statistics().engine.bytes_written == len(groups) * layout.stride

    run(backend, files, (Fault(FaultAction.SHORT, 4096, kind=Kind.WRITE),), body)
    with PosixBackend(files) as oracle:
        for group in range(layout.num_groups):
            into = bytearray(layout.payload_nbytes)
            oracle.read([Read(layout.key(group), into)])
            assert into == content_of(layout, group, group % 2), group


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EINTR])
def test_interruptions_are_repeated(backend: type[EngineBackend], files: LayerFiles, number: int) -> None:
    async def body(kv: EngineBackend) -> None:
        report, found = await read_all(kv)
        assert report.is_complete
        check_read(kv.layout, report, found)
        assert kv.statistics().engine.retried_ops > 0

    run(backend, files, (repeated(FaultAction.ERROR, -number, every=2),), body)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("number", [errno.EIO, errno.EAGAIN, errno.EINTR])
def test_errors_that_stay_come_through(backend: type[EngineBackend], files: LayerFiles, number: int) -> None:
    async def body(kv: EngineBackend) -> None:
        report, found = await read_all(kv)
        assert set(report.outcomes.tolist()) == {Outcome.FAILED}
        assert {error.errno for error in report.errors if isinstance(error, StorageError)} == {number}
        check_errors(kv, report)
        if kv.layout.payload_nbytes != kv.layout.stride:
            assert set(b"".join(found)) == {0xA5}, "a staged read that failed has been copied"
        with pytest.raises(TransferError) as raised:
            await kv.read_groups([1], bytearray(kv.layout.payload_nbytes))
        assert (raised.value.errno, raised.value.file) == (number, kv.files.path_of(0))
        assert raised.value.report.outcomes.tolist() == [Outcome.FAILED]

    run(backend, files, (repeated(FaultAction.ERROR, -number),), body)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_bad_place_fails_alone(backend: type[EngineBackend], files: LayerFiles) -> None:
    async def body(kv: EngineBackend) -> None:
        layout = kv.layout
        groups = np.arange(0, layout.num_groups, 2)  # apart, so that each is an I/O of its own
        into = bytearray(len(groups) * layout.payload_nbytes)
        report = await kv.read_groups(groups, into).outcome()
        failed = np.flatnonzero(report.outcomes)
        assert len(failed) == 1
        assert report.loaded_prefix == failed[0]
        for index, group in enumerate(groups.tolist()):
            if index != failed[0]:
                found = into[index * layout.payload_nbytes :][: layout.payload_nbytes]
                assert found == content_of(layout, group)
        again, found_all = await read_all(kv)
        assert again.is_complete
        check_read(layout, again, found_all)

    run(backend, files, (Fault(FaultAction.ERROR, -errno.EIO, phase=2, times=1),), body)


@pytest.mark.parametrize("backend", BACKENDS)
def test_end_of_file_is_a_short_read(backend: type[EngineBackend], files: LayerFiles) -> None:
    async def body(kv: EngineBackend) -> None:
        with pytest.raises(TransferError) as raised:
            await kv.read_groups([2], bytearray(kv.layout.payload_nbytes))
        cause = raised.value.__cause__
        assert isinstance(cause, ShortReadError)
        assert (cause.arrived, cause.file) == (0, kv.files.path_of(0))

    run(backend, files, (repeated(FaultAction.ERROR, 0),), body)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_full_disk_fails_writes_and_the_next_flush(backend: type[EngineBackend], files: LayerFiles) -> None:
    async def body(kv: EngineBackend) -> None:
        payload = kv.layout.payload_nbytes
        transfer = kv.write_groups([1, 3], bytes(2 * payload))
        with pytest.raises(TransferError) as raised:
            await transfer
        assert raised.value.errno == errno.ENOSPC
        assert raised.value.hint is not None
        with pytest.raises(StorageError, match="flush"):
            await kv.flush()
        await kv.flush()  # told once
        await kv.write_groups([1, 3], content_of(kv.layout, 1) + content_of(kv.layout, 3))
        await kv.flush()
        check_read(kv.layout, *await read_all(kv))

    per_group = -(-files.layout.stride // OPTIONS.op_nbytes_max)
    fault = Fault(FaultAction.ERROR, -errno.ENOSPC, kind=Kind.WRITE, times=2 * per_group)
    run(backend, files, (fault,), body)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_file_that_cannot_be_synced(backend: type[EngineBackend], files: LayerFiles) -> None:
    async def body(kv: EngineBackend) -> None:
        await kv.write_groups([0], content_of(kv.layout, 0))
        with pytest.raises(StorageError) as raised:
            await kv.flush()
        assert raised.value.errno == errno.EIO
        await kv.flush()

    run(backend, files, (Fault(FaultAction.ERROR, -errno.EIO, kind=Kind.SYNC, times=1),), body)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(3))
def test_reordered_answers(backend: type[EngineBackend], files: LayerFiles, seed: int) -> None:
    async def body(kv: EngineBackend) -> None:
        layout = kv.layout
        order = np.random.default_rng(seed).permutation(layout.num_groups)
        into = [bytearray(layout.payload_nbytes) for _ in order]
        transfers = [kv.read_groups([int(group)], place) for group, place in zip(order, into, strict=True)]
        for group, transfer, place in zip(order.tolist(), transfers, into, strict=True):
            await transfer
            assert place == content_of(layout, group)

    run(backend, files, (repeated(FaultAction.REORDER, 3000),), body, fault_seed=seed, max_transfers=64)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cancelled_await_returns_when_its_memory_is_free(
    backend: type[EngineBackend], files: LayerFiles
) -> None:
    """The answers, and with them the copies out of staging, come late; the memory must be quiet when the await ends."""
    late_us = 30_000

    async def body(kv: EngineBackend) -> None:
        layout = kv.layout
        into = bytearray(layout.num_groups * layout.payload_nbytes)
        transfer = kv.read_groups(np.arange(layout.num_groups), into)
        task = asyncio.ensure_future(transfer.outcome())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert transfer.is_done
        check = bytes(len(into))
        into[:] = check
        await asyncio.sleep(2 * late_us / 1e6)
        assert into == check, "written after the await had ended"

    run(backend, files, (repeated(FaultAction.DELAY, late_us),), body, queue_depth=4)


ERRORS = st.sampled_from([-errno.EIO, -errno.EAGAIN, -errno.EINTR, -errno.ENOSPC, 0])
FAULT_KINDS = st.one_of(
    st.tuples(st.just(FaultAction.ERROR), ERRORS),
    st.tuples(st.just(FaultAction.SHORT), st.sampled_from([4096, 8192, 20480])),
    st.tuples(st.sampled_from([FaultAction.DELAY, FaultAction.REORDER]), st.integers(0, 1500)),
)


@st.composite
def fault_schedules(draw: st.DrawFn) -> tuple[Fault, ...]:
    rules = draw(st.lists(FAULT_KINDS, min_size=1, max_size=4))
    return tuple(
        Fault(
            action,
            value,
            kind=draw(st.sampled_from([None, Kind.READ, Kind.WRITE])),
            every=draw(st.integers(1, 5)),
            phase=draw(st.integers(1, 8)),
            times=draw(st.integers(1, 12)),
        )
        for action, value in rules
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.mark.slow
@settings(max_examples=60)
@given(
    faults=fault_schedules(),
    seed=st.integers(0, 2**32),
    backend=st.sampled_from(BACKENDS),
    layout=st.sampled_from(LAYOUTS),
    depth=st.sampled_from([1, 3, 16]),
)
@example(
    faults=(Fault(FaultAction.SHORT, 4096, phase=1), Fault(FaultAction.REORDER, 900, phase=1)),
    seed=1,
    backend=UringBackend,
    layout=LAYOUTS[2],
    depth=3,
)
def test_any_schedule_of_faults(
    folder: Path,
    faults: tuple[Fault, ...],
    seed: int,
    backend: type[EngineBackend],
    layout: GroupLayout,
    depth: int,
) -> None:
    """Write every third group anew, read everything, thrice, at random priorities; compare with what must be there."""
    random = np.random.default_rng(seed)
    version = dict.fromkeys(range(layout.num_groups), 0)
    uncertain: set[int] = set()

    async def body(kv: EngineBackend) -> None:
        for turn in (1, 2, 3):
            await rewrite(kv, random.choice(layout.num_groups, layout.num_groups // 3, replace=False), turn)
            into = bytearray(layout.num_groups * layout.payload_nbytes)
            report = await kv.read_groups(
                np.arange(layout.num_groups), into, priority=any_priority(random)
            ).outcome()
            check_errors(kv, report)
            for group in range(layout.num_groups):
                found = into[group * layout.payload_nbytes :][: layout.payload_nbytes]
                if report.outcomes[group] == Outcome.DONE and group not in uncertain:
                    assert found == content_of(layout, group, version[group]), (group, turn)

    async def rewrite(kv: EngineBackend, groups: Any, turn: int) -> None:
        source = b"".join(content_of(layout, group, turn) for group in groups.tolist())
        report = await kv.write_groups(groups, source, priority=any_priority(random)).outcome()
        for group, outcome in zip(groups.tolist(), report.outcomes.tolist(), strict=True):
            version[group] = turn
            (uncertain.discard if outcome == Outcome.DONE else uncertain.add)(group)

    path = folder / f"kv-{LAYOUTS.index(layout)}"
    with LayerFiles(path, layout, create=True) as files:
        write_all(files)
        run(backend, files, faults, body, fault_seed=seed, queue_depth=depth)


def any_priority(random: np.random.Generator) -> Priority:
    return Priority(int(random.integers(3)))


def test_failures_that_nobody_awaited_are_logged_once(
    files: LayerFiles, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(kv: EngineBackend) -> None:
        transfer = kv.read_groups([0], bytearray(kv.layout.payload_nbytes))
        is_done = asyncio.Event()
        transfer.add_waiter(is_done.set)
        await is_done.wait()
        del transfer
        assert kv.statistics().transfers.unobserved_failures == 1

    with caplog.at_level(logging.ERROR, "aio_kv"):
        run(ThreadedBackend, files, (repeated(FaultAction.ERROR, -errno.EIO),), body)
    assert caplog.text.count("never awaited") == 1
