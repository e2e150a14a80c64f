"""`aio_kv.testing` itself: the kit notices what is wrong, the memory one repeats itself, the faulty one fails."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from backends import make_backend
from loops import every_loop, on_one_loop
from slow_devices import PADDED, TurnScheduler, filled, unaligned

from aio_kv import (
    AsyncStorageBackend,
    BusyError,
    GroupLayout,
    LayoutError,
    Outcome,
    PosixBackend,
    Priority,
    Read,
    Scatter,
    StorageBackend,
    StorageError,
    TransferError,
    Write,
)
from aio_kv.backends.session import Session
from aio_kv.engine import Fault, FaultAction, Kind
from aio_kv.testing import (
    BACKEND_CHECKS,
    SYNC_BACKEND_CHECKS,
    CallFault,
    ConformanceError,
    FaultyBackend,
    MemoryBackend,
    MemoryFiles,
    SeededScheduler,
    check_backend,
    check_sync_backend,
)
from aio_kv.transfer import LoopBinding, Transfer, TransferReport

# Backends that are wrong in one way each, and the checks that must say so.


class HeadsBeforeKinds(MemoryBackend):
    """Packs a block in (head, kind) order."""

    def read_block(self, layer: int, block: int, into: Any, **options: Any) -> Any:
        return self.read_groups(self._turned(layer, block), into, **options)

    def write_block(self, layer: int, block: int, source: Any, **options: Any) -> Any:
        return self.write_groups(self._turned(layer, block), source, **options)

    def _turned(self, layer: int, block: int) -> Any:
        shape = (self.layout.num_kinds, self.layout.num_kv_heads)
        return self._block_ids(layer, block).reshape(shape).T.reshape(-1)


class LastTwinWins(MemoryBackend):
    """Takes a group twice in a write and lets one of them win."""

    def write_groups(self, group_ids: Any, source: Any, **options: Any) -> Any:
        ids = self.layout.check_ids(group_ids)
        unique, places = np.unique(ids, return_index=True)
        if len(unique) == len(ids) or isinstance(source, Scatter):
            return super().write_groups(ids, source, **options)
        rows = np.frombuffer(source, np.uint8).reshape(len(ids), -1)
        return super().write_groups(unique, rows[places].copy(), **options)


class ShortReport(MemoryBackend):
    """Forgets the last request in its reports."""

    def read_groups(self, group_ids: Any, into: Any, **options: Any) -> Any:
        transfer = super().read_groups(group_ids, into, **options)
        transfer.request_count = max(0, transfer.request_count - 1)
        transfer.expect_success()
        return transfer


class WrapsNegativeNumbers(MemoryBackend):
    """Counts from the end, as Python does."""

    def read_groups(self, group_ids: Any, into: Any, **options: Any) -> Any:
        if isinstance(group_ids, list) and group_ids == [-1]:
            group_ids = [self.layout.num_groups - 1]
        return super().read_groups(group_ids, into, **options)


class NoDeadlines(MemoryBackend):
    """Does not look at deadlines."""

    def _make(self, *arguments: Any) -> Transfer:
        transfer = super()._make(*arguments)
        transfer.deadline_ns = 0
        return transfer


class OpenAfterClose(MemoryBackend):
    """Takes calls after it was closed, and does nothing."""

    async def aclose(self) -> None:
        session = self._session
        await super().aclose()
        self._session = session or self._session

    def _require_session(self) -> Session:
        assert self._session is not None
        return self._session


class Careless(MemoryBackend):
    """A base for those that are broken below: a slow device, that lands things at random."""

    def __init__(self, layout: GroupLayout) -> None:
        super().__init__(layout, scheduler=SeededScheduler(3))


class NoOrder(Careless):
    """Holds nothing behind anything."""

    async def _open_session(self, binding: LoopBinding) -> Session:
        session = await super()._open_session(binding)
        session.dispatcher._hold_behind_conflicts = lambda transfer: None  # type: ignore[method-assign]
        return session


class NoDrain(MemoryBackend):
    """Lets a cancelled await go before the device is done."""

    def __init__(self, layout: GroupLayout) -> None:
        super().__init__(layout, scheduler=TurnScheduler(5))

    async def _open_session(self, binding: LoopBinding) -> Session:
        async def wait_until(*arguments: Any) -> None:
            return None

        patient = binding.wait_until
        session = await super()._open_session(binding)
        binding.wait_until = wait_until  # type: ignore[method-assign]
        self.patient = patient
        return session

    async def aclose(self) -> None:
        if self._session is not None:
            self._session.binding.wait_until = self.patient  # type: ignore[method-assign]
        await super().aclose()


class AnyLoop(MemoryBackend):
    """Does not mind where it is called from."""

    async def _open_session(self, binding: LoopBinding) -> Session:
        session = await super()._open_session(binding)
        session.check_loop = lambda: None  # type: ignore[method-assign]
        return session


WRONG: list[tuple[type[MemoryBackend], set[str]]] = [
    (HeadsBeforeKinds, {"blocks_and_groups_are_the_same_bytes", "blocks_and_groups_keep_their_order"}),
    (LastTwinWins, {"twice_in_a_write_is_refused"}),
    (ShortReport, {"reports_count_what_moved", "twice_in_a_read"}),
    (WrapsNegativeNumbers, {"ids_are_checked"}),
    (NoDeadlines, {"deadline_in_the_past"}),
    (OpenAfterClose, {"use_after_close"}),
    (NoOrder, {"read_behind_a_write", "write_behind_a_write", "many_tasks_keep_their_order"}),
    (NoDrain, {"cancelled_read_touches_nothing_afterwards"}),
    (AnyLoop, {"another_thread_is_refused"}),
]


@on_one_loop
@pytest.mark.parametrize(("wrong", "names"), WRONG, ids=[wrong.__name__ for wrong, _ in WRONG])
async def test_the_kit_notices(wrong: type[MemoryBackend], names: set[str]) -> None:
    """A right backend passes those checks (test_conformance.py); each of the wrong ones fails every one of them."""
    for name in sorted(names):
        with pytest.raises((ConformanceError, ExceptionGroup)):
            await BACKEND_CHECKS[name](wrong)


@every_loop
@pytest.mark.slow
async def test_one_call_runs_every_check() -> None:
    passed = await check_backend(MemoryBackend)
    assert passed == tuple(BACKEND_CHECKS)
    assert len(passed) > 45


@every_loop
async def test_failures_are_collected_by_name() -> None:
    skipped = set(BACKEND_CHECKS) - {"ids_are_checked", "keys_are_checked", "twice_in_a_write_is_refused"}

    class Wrong(WrapsNegativeNumbers, LastTwinWins):
        pass

    with pytest.raises(ExceptionGroup, match="2 checks of the conformance kit failed") as caught:
        await check_backend(Wrong, skip=skipped)
    found = [error for error in caught.value.exceptions if isinstance(error, ConformanceError)]
    assert [error.check for error in found] == ["ids_are_checked", "twice_in_a_write_is_refused"]
    assert all(error.__cause__ is not None and error.check in str(error) for error in found)


@every_loop
async def test_a_hang_is_a_failure_with_a_name() -> None:
    class Deaf(MemoryBackend):
        async def flush(self) -> None:
            await anyio.sleep_forever()

    skipped = set(BACKEND_CHECKS) - {"nobody_need_await", "empty_batches"}
    with pytest.raises(ExceptionGroup) as caught:
        await check_backend(Deaf, skip=skipped, timeout=0.05)
    (failure,) = caught.value.exceptions
    assert isinstance(failure, ConformanceError)
    assert failure.check == "nobody_need_await"
    assert isinstance(failure.__cause__, TimeoutError)


@every_loop
async def test_unknown_names_are_refused() -> None:
    with pytest.raises(LayoutError, match="no_such_check"):
        await check_backend(MemoryBackend, skip=["no_such_check"])
    with pytest.raises(LayoutError, match="no_such_check"):
        check_sync_backend(lambda layout: PosixBackend("/nowhere", layout), skip=["no_such_check"])


@every_loop
async def test_make_may_be_a_coroutine_function() -> None:
    async def make(layout: GroupLayout) -> MemoryBackend:
        return await MemoryBackend(layout)

    passed = await check_backend(make, skip=set(BACKEND_CHECKS) - {"round_trip_by_groups", "use_after_close"})
    assert passed == ("round_trip_by_groups", "use_after_close")


def test_the_synchronous_kit_notices(tmp_path: Path) -> None:
    class Swapped(PosixBackend):
        def read_block(self, layer: int, block: int, into: Any, stream: Any = None) -> None:
            self.read_groups(self._block_ids(layer, block)[::-1], into, stream)

        def close(self) -> None:
            assert not self._closed
            super().close()

    counter = iter(range(100))

    def make(layout: GroupLayout) -> Swapped:
        return Swapped(tmp_path / str(next(counter)), layout, create=True)

    skipped = set(SYNC_BACKEND_CHECKS) - {
        "sync_round_trip_by_blocks",
        "sync_use_after_close",
        "sync_round_trip",
    }
    with pytest.raises(ExceptionGroup) as caught:
        check_sync_backend(make, skip=skipped)
    names = [getattr(error, "check", "") for error in caught.value.exceptions]
    assert names == ["sync_round_trip_by_blocks", "sync_use_after_close"]


def test_a_right_synchronous_backend_passes(tmp_path: Path) -> None:
    counter = iter(range(100))

    def make(layout: GroupLayout) -> PosixBackend:
        return PosixBackend(tmp_path / str(next(counter)), layout, create=True)

    assert check_sync_backend(make) == tuple(SYNC_BACKEND_CHECKS)
    with make(PADDED) as backend:
        assert isinstance(backend, StorageBackend)


# The backend in memory.


@every_loop
async def test_memory_backends_share_files() -> None:
    files = MemoryFiles(PADDED)
    async with MemoryBackend(PADDED, files=files) as first, MemoryBackend(PADDED, files=files) as second:
        rows = await filled(first)
        found = np.empty_like(rows)
        await second.read_groups(np.arange(PADDED.num_groups), found)
        assert (found == rows).all()
    stored = np.frombuffer(files.layer(1), np.uint8).reshape(PADDED.groups_per_layer, PADDED.stride)
    assert (stored[:, :105] == rows[PADDED.groups_per_layer :]).all()
    assert (stored[:, 105:] == 0).all()
    async with MemoryBackend(PADDED, files=files) as third:
        await third.read_groups(np.arange(PADDED.num_groups), found)
        assert (found == rows).all()
        assert isinstance(third, AsyncStorageBackend)


@every_loop
async def test_a_seed_repeats_itself() -> None:
    """The same seed lands the same ops in the same order; another one does not."""

    async def run(seed: int) -> list[tuple[Any, ...]]:
        landed: list[tuple[Any, ...]] = []

        class Noted(SeededScheduler):
            def fate(self, *op: Any) -> int:
                code = super().fate(*op)
                landed.append((*op, code))
                return code

        scheduler = Noted(seed, failing=0.1)
        async with MemoryBackend(PADDED, scheduler=scheduler) as backend:
            transfers = [
                backend.read_groups(np.arange(turn, 64, 3), unaligned(PADDED, len(range(turn, 64, 3))))
                for turn in range(3)
            ]
            for transfer in transfers:
                await transfer.outcome()
        return landed

    first, again, other = await run(1), await run(1), await run(2)
    assert first == again
    assert first != other
    assert {code for *_, code in first} == {0, -errno.EIO}


@every_loop
async def test_pause_and_resume() -> None:
    async with MemoryBackend(PADDED) as backend:
        backend.pause()
        target = unaligned(PADDED, 1)
        transfer = backend.read_groups([1], target)
        with anyio.move_on_after(0.01):
            await anyio.sleep_forever()
        assert not transfer.is_done
        assert (target == 0xA5).all()
        backend.resume()
        await transfer
        assert (target == 0).all()


# The faulty backend.


def make_faulty(*faults: CallFault) -> Callable[[GroupLayout], AbstractAsyncContextManager[FaultyBackend]]:
    @asynccontextmanager
    async def make(layout: GroupLayout) -> Any:
        async with FaultyBackend(await MemoryBackend(layout), faults) as backend:
            yield backend

    return make


@on_one_loop
@pytest.mark.slow
async def test_a_faulty_backend_without_faults_conforms() -> None:
    assert await check_backend(make_faulty()) == tuple(BACKEND_CHECKS)


@on_one_loop
@pytest.mark.slow
async def test_late_transfers_conform() -> None:
    """A transfer that ends late is still a transfer: the contract holds."""
    late = CallFault(delay=0.001, every=5)
    assert await check_backend(make_faulty(late)) == tuple(BACKEND_CHECKS)


@every_loop
async def test_a_call_that_raises() -> None:
    busy = BusyError("as the test wants it")
    async with make_faulty(CallFault("read_groups", error=busy, first=1, times=2))(PADDED) as backend:
        await backend.read_groups([1], bytearray(105))
        for _ in range(2):
            with pytest.raises(BusyError, match="as the test wants it"):
                backend.read_groups([1], bytearray(105))
        await backend.read_groups([1], bytearray(105))
        await backend.read([Read(PADDED.key(1), bytearray(105))])
        assert backend.injected == 2


@every_loop
async def test_a_transfer_that_fails() -> None:
    fault = CallFault(errno=errno.EIO, groups={5, 9}, every=2)
    async with make_faulty(fault)(PADDED) as backend:
        rows = np.arange(4 * 105, dtype=np.uint16).astype(np.uint8).reshape(4, 105)
        with pytest.raises(TransferError, match="EIO") as caught:
            await backend.write_groups([3, 5, 7, 9], rows)
        report = caught.value.report
        assert isinstance(report, TransferReport)
        assert report.outcomes.tolist() == [Outcome.DONE, Outcome.FAILED] * 2
        assert (report.loaded_prefix, report.nbytes) == (1, 2 * 105)
        assert isinstance(caught.value.__cause__, StorageError)
        await backend.write_groups([3, 5, 7, 9], rows)
        found = np.empty_like(rows)
        transfer = backend.read_groups([3, 7, 11, 13], found)
        assert (await transfer).is_complete
        transfer = backend.read([Read(PADDED.key(9), found[0])])
        assert (await transfer).is_complete
        transfer = backend.read_block(0, 1, found)  # groups 4 to 7
        assert (await transfer.outcome()).outcomes.tolist() == [0, 1, 0, 0]
        for _ in range(2):
            with pytest.raises(TransferError):
                await transfer
            with pytest.raises(TransferError):
                await transfer.enqueued()


@every_loop
async def test_other_calls_fail_too() -> None:
    faults = [
        CallFault("flush", errno=errno.EIO, times=1),
        CallFault("wait_ready", delay=0.001, times=1),
        CallFault("register_landing_region", error=BusyError("no"), times=1),
        CallFault("record_event", error=BusyError("no"), times=1),
    ]
    async with make_faulty(*faults)(PADDED) as backend:
        with pytest.raises(StorageError, match="EIO"):
            await backend.flush()
        await backend.flush()
        await backend.wait_ready()
        with pytest.raises(BusyError):
            await backend.register_landing_region(bytearray(4096))
        with pytest.raises(BusyError):
            backend.record_event(0)
        assert backend.injected == 4
        assert backend.statistics() is not None
        assert isinstance(backend, AsyncStorageBackend)


@every_loop
async def test_faults_of_the_device_go_through(tmp_path: Path) -> None:
    """What goes wrong below a wrapped backend is told as its own."""
    below = Fault(FaultAction.ERROR, -errno.ENOSPC, kind=Kind.WRITE)
    async with make_backend("threads", tmp_path, faults=(below,))(PADDED) as inner:
        backend = FaultyBackend(inner, [CallFault(delay=0.001)])
        transfer = backend.write([Write(PADDED.key(1), bytes(105))], priority=Priority.BACKGROUND)
        with pytest.raises(TransferError, match="ENOSPC"):
            await transfer


def test_a_fault_for_no_call_is_refused() -> None:
    with pytest.raises(LayoutError, match="aclose"):
        CallFault("aclose")


@every_loop
async def test_cancelling_a_late_transfer_leaves_its_memory_alone() -> None:
    async with make_faulty(CallFault(delay=60.0))(PADDED) as backend:
        target = unaligned(PADDED, 2)
        transfer = backend.read_groups([1, 2], target)
        with anyio.move_on_after(0.005):
            await transfer
        target[:] = 0x77
        await backend.flush()
        assert (target == 0x77).all()
        transfer.cancel()
