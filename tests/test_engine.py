"""The engines by themselves, without a loop and without a backend: tickets, threads, bounds, ends, memory."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import BUFFERED, ENGINES, FILE_NBYTES, NATIVE, PAGE, Load, content_of, engine_on

import aio_kv
from aio_kv import BusyError, ClosedError, LayoutError, UnavailableError
from aio_kv.engine import Engine, Fault, FaultAction, Kind, PythonEngine, native
from aio_kv.plan import IoLimits, Placement

AnyEngine = Engine | PythonEngine
LATE = Fault(FaultAction.DELAY, 20_000)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AnyEngine]:
    with engine_on(request.param, tmp_path) as opened:
        yield opened


@pytest.fixture(params=NATIVE)
def late_engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """A native engine whose answers take 20 ms each, 4 at a time."""
    with engine_on(request.param, tmp_path, faults=(LATE,), queue_depth=4) as opened:
        assert isinstance(opened, Engine)
        yield opened


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run `work(0)` to `work(count - 1)` at once; the first exception of any of them fails the test."""
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a thread waits for ever"
    if errors:
        raise errors[0]


# Pinned memory is for loads and saves, which need a GPU.
WITH_A_FILE = (Placement.DIRECT, Placement.STAGED, Placement.VECTORED)


@pytest.mark.parametrize("placement", WITH_A_FILE)
@pytest.mark.parametrize("nbytes", [PAGE, 64 << 10])
def test_read_in_every_placement(engine: AnyEngine, placement: Placement, nbytes: int) -> None:
    load = Load(24, nbytes, placement=placement, first_offset=PAGE)
    ticket = load.run(engine)
    assert (ticket.is_done, ticket.status, ticket.failed, ticket.owners) == (True, 0, 0, ())
    assert load.results["code"].tolist() == [0] * 24
    load.check()


@pytest.mark.parametrize("placement", WITH_A_FILE)
def test_write_then_read(engine: AnyEngine, placement: Placement) -> None:
    written = Load(8, kind=Kind.WRITE, placement=placement)
    written.target[:] = np.arange(written.target.size) % 251
    assert written.run(engine).status == 0
    read = Load(8)
    assert read.run(engine).status == 0
    assert np.array_equal(read.target, written.target)
    sync = Load(1, 0, kind=Kind.SYNC)
    assert sync.run(engine).status == 0


def test_what_a_staged_write_does_not_cover_is_zero(engine: AnyEngine) -> None:
    written = Load(2, kind=Kind.WRITE, placement=Placement.STAGED)
    written.ops = written.ops[:1]
    written.ops["copy_count"] = 2
    written.copies["op_offset"], written.copies["nbytes"] = (3000, 100), (96, 300)  # the later piece first
    written.target[:] = 7
    assert engine.wait(engine.submit(written.batch(op_count=1)), 20)
    read = Load(1)
    assert read.run(engine).status == 0
    wanted = np.zeros(PAGE, np.uint8)
    wanted[3000:3096] = wanted[100:400] = 7
    assert np.array_equal(read.target, wanted)


def test_threads_wait_each_for_their_own_ticket(engine: AnyEngine) -> None:
    def work(index: int) -> None:
        for turn in range(40):
            load = Load(1 + (index + turn) % 5, first_offset=(index * 40 + turn) * PAGE, priority=turn % 3)
            assert load.run(engine).status == 0
            load.check()

    in_threads(6, work)
    assert engine.statistics().in_flight == 0


def test_a_drain_elsewhere_does_not_strand_a_waiter(engine: AnyEngine) -> None:
    """Whoever drains takes the notice that a waiter sleeps for; the waiter must hear of it all the same."""
    is_over = threading.Event()

    def work(index: int) -> None:
        if index == 0:
            while not is_over.is_set():
                engine.drain()
                engine.drain(20)
            return
        try:
            for _ in range(150):
                load = Load(1)
                assert engine.wait(engine.submit(load.batch()), 10), "stranded"
                load.check()
        finally:
            waiting.pop()
            if not waiting:
                is_over.set()

    waiting = [1, 2]
    in_threads(3, work)


def test_a_waiter_without_timeout_ends_when_the_engine_is_closed(engine: AnyEngine) -> None:
    loads = [Load(16, 64 << 10) for _ in range(4)]
    tickets = [engine.submit(load.batch()) for load in loads]

    def work(index: int) -> None:
        if index == len(tickets):
            assert engine.close(20)
        else:
            assert engine.wait(tickets[index])
            loads[index].check()

    in_threads(len(tickets) + 1, work)


def test_wait_times_out_and_can_be_repeated(late_engine: Engine) -> None:
    load = Load(1)
    ticket = late_engine.submit(load.batch())
    began = time.monotonic()
    assert not late_engine.wait(ticket, 0.005)
    assert not late_engine.wait(ticket, 0)
    assert time.monotonic() - began < 10
    assert late_engine.wait(ticket)
    assert late_engine.wait(ticket, 0)
    load.check()


def test_a_poller_that_gives_up_hands_over(late_engine: Engine) -> None:
    """The thread that polls for all has the shortest patience; another must take its place."""
    tickets = [late_engine.submit(Load(8).batch()) for _ in range(3)]

    def work(index: int) -> None:
        if index == 0:
            late_engine.wait(tickets[2], 0.004)
        else:
            assert late_engine.wait(tickets[index], 30)

    in_threads(3, work)
    assert late_engine.wait(tickets[2], 30)


def test_fileno_polls_readable_and_drain_gives_tickets_in_order(engine: AnyEngine) -> None:
    loads = [Load(3, first_offset=index * PAGE) for index in range(5)]
    tickets = [engine.submit(load.batch(), tag=index) for index, load in enumerate(loads)]
    found = []
    while len(found) < 5:
        native.wait_readable(engine.fileno(), 20)
        found += engine.drain()
    assert Counter(found) == Counter(tickets)
    assert sorted(ticket.tag for ticket in found) == list(range(5))
    assert all(ticket.is_done for ticket in found)
    for load in loads:
        load.check()


def test_cancel_drops_what_has_not_begun(late_engine: Engine) -> None:
    load = Load(40, placement=Placement.STAGED)
    ticket = late_engine.submit(load.batch())
    late_engine.cancel(ticket)
    late_engine.cancel(ticket)
    assert late_engine.wait(ticket, 20)
    codes = Counter(load.results["code"].tolist())
    assert set(codes) <= {0, -errno.ECANCELED}
    assert codes[-errno.ECANCELED] >= 36
    assert (ticket.status, ticket.failed) == (-errno.ECANCELED, codes[-errno.ECANCELED])
    load.check()
    late_engine.cancel(ticket)  # of one that is done: nothing
    assert late_engine.statistics().dropped_ops == ticket.failed


def test_python_threads_drop_too(tmp_path: Path) -> None:
    with engine_on("python", tmp_path, threads=1) as engine:
        loads = [Load(60, 64 << 10, placement=Placement.STAGED) for _ in range(2)]
        tickets = [engine.submit(load.batch()) for load in loads]
        engine.cancel(tickets[1])
        assert all(engine.wait(ticket, 20) for ticket in tickets)
        assert tickets[0].status == 0
        assert tickets[1].status in (0, -errno.ECANCELED)
        for load in loads:
            load.check()
        assert Counter(loads[1].results["code"].tolist())[-errno.ECANCELED] == tickets[1].failed


def test_deadline(late_engine: Engine, tmp_path: Path) -> None:
    load = Load(8, deadline_ns=1)
    ticket = load.run(late_engine)
    assert (ticket.status, ticket.failed) == (-errno.ETIME, 8)
    with engine_on("python", tmp_path) as engine:
        assert load.run(engine).status == -errno.ETIME


def test_stop_refuses_and_answers_everything(engine: AnyEngine) -> None:
    loads = [Load(30, 16 << 10, placement=Placement.STAGED) for _ in range(6)]
    tickets = [engine.submit(load.batch()) for load in loads]
    engine.stop()
    with pytest.raises(ClosedError, match="open a new backend"):
        engine.submit(Load(1).batch())
    with pytest.raises(ClosedError):
        engine.submit_region(Kind.REGION_ADD, PAGE, PAGE, ring=0)
    for ticket, load in zip(tickets, loads, strict=True):
        assert engine.wait(ticket, 20)
        assert set(load.results["code"].tolist()) <= {0, -errno.ECANCELED}
        load.check()
    while not engine.is_stopped:
        native.wait_readable(engine.fileno(), 20)
        engine.drain()
    assert not engine.is_closed


def test_close_ends_everything_and_may_be_repeated(engine: AnyEngine) -> None:
    loads = [Load(30, 16 << 10) for _ in range(6)]
    tickets = [engine.submit(load.batch()) for load in loads]
    assert engine.close(20)
    assert engine.close(0)
    assert engine.is_closed
    assert engine.is_stopped
    assert all(ticket.is_done for ticket in tickets)
    for load in loads:
        load.check()
    assert engine.drain() == []
    for use in (
        lambda: engine.submit(Load(1).batch()),
        lambda: engine.submit_region(Kind.REGION_ADD, 1, 1, ring=0),
    ):
        with pytest.raises(ClosedError):
            use()
    engine.stop()
    engine.cancel(tickets[0])
    assert engine.drain(10) == []
    assert engine.wait(tickets[0], 0)


def test_close_waits_only_so_long_and_leaks_then(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with engine_on("threads", tmp_path, faults=(Fault(FaultAction.DELAY, 300_000),)) as engine:
        load = Load(1)
        ticket = engine.submit(load.batch())
        while engine.statistics().in_flight == 0:
            pass
        assert not engine.close(0.001)
        assert "leaked, not freed" in caplog.text
        assert not ticket.is_done
        assert ticket.owners, "the device may still write there"
        assert not engine.is_closed
        assert engine.close(20), "a later call may find that the device has answered"
        load.check()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"op_count": 5}, "counts 5 ops"),
        ({"op_count": 0}, None),
        ({"copy_count": 5}, None),
        ({"ops": np.zeros(1, np.uint8)}, None),
        ({"results": np.zeros(0, np.uint8)}, "counts 4 ops"),
    ],
)
def test_malformed_batch(engine: AnyEngine, changes: dict[str, Any], message: str | None) -> None:
    with pytest.raises((LayoutError, ValueError), match=message):
        engine.submit(Load(4).batch(**changes))
    assert engine.statistics().batches == 0


@pytest.mark.parametrize(
    "changes", [{"op_count": 0}, {"kind": Kind.REGION_ADD}, {"priority": 3}, {"deadline_ns": -1}]
)
def test_malformed_arguments_are_layout_errors(engine: AnyEngine, changes: dict[str, Any]) -> None:
    with pytest.raises(LayoutError):
        engine.submit(Load(1).batch(**changes))


def _spoil(load: Load, **fields: int) -> None:
    for name, value in fields.items():
        (load.copies if name in ("op_offset", "copied") else load.ops)[
            "nbytes" if name == "copied" else name
        ][1] = value


@pytest.mark.parametrize(
    ("placement", "fields"),
    [
        (Placement.DIRECT, {"file": 1}),
        (Placement.DIRECT, {"nbytes": 0}),
        (Placement.DIRECT, {"nbytes": (128 << 10) + PAGE}),
        (Placement.STAGED, {"nbytes": (128 << 10) + PAGE}),
        (Placement.DIRECT, {"placement": 3}),
        (Placement.DIRECT, {"file_offset": 2**64 - PAGE}),
        (Placement.STAGED, {"copy_first": 3}),
        (Placement.STAGED, {"copy_count": 3}),
        (Placement.STAGED, {"op_offset": 1}),
        (Placement.STAGED, {"op_offset": 2**32 - 1, "copied": 2}),
        (Placement.VECTORED, {"op_offset": 512, "copied": PAGE - 512}),
        (Placement.VECTORED, {"copied": PAGE - 512}),
        (Placement.VECTORED, {"copy_count": 0}),
        (Placement.DIRECT, {"nbytes_owed": PAGE + 1}),
        (Placement.STAGED, {"nbytes_owed": PAGE - 1}),
        (Placement.VECTORED, {"nbytes_owed": PAGE}),
    ],
)
@pytest.mark.parametrize("kind", [Kind.READ, Kind.WRITE])
def test_malformed_op_fails_alone(
    engine: AnyEngine, kind: Kind, placement: Placement, fields: dict[str, int]
) -> None:
    load = Load(3, kind=kind, placement=placement)
    if kind is Kind.WRITE:
        load.target[:] = np.frombuffer(content_of(0, 3 * PAGE), np.uint8)
    _spoil(load, **fields)
    ticket = load.run(engine)
    assert (ticket.status, ticket.failed) == (-errno.EINVAL, 1)
    assert load.results["code"].tolist() == [0, -errno.EINVAL, 0]
    if kind is Kind.READ:
        load.check()
    after = Load(32, FILE_NBYTES // 32)
    assert after.run(engine).status == 0
    after.check()


@pytest.mark.parametrize("kind", ENGINES)
def test_misaligned_op_on_direct_limits(tmp_path: Path, kind: str) -> None:
    """The file itself is buffered and would take them all: the limits are the engine's own business."""
    with engine_on(kind, tmp_path, IoLimits(16, PAGE, 128 << 10)) as engine:
        load = Load(4)
        load.ops["file_offset"][1] += 512
        load.ops["nbytes"][2] -= 512
        load.ops["address"][3] += 8
        assert load.run(engine).failed == 3
        assert load.results["code"].tolist() == [0, *[-errno.EINVAL] * 3]


@pytest.mark.parametrize("kind", ENGINES)
def test_end_of_file_tells_how_much_arrived(tmp_path: Path, kind: str) -> None:
    with engine_on(kind, tmp_path) as engine:
        load = Load(2, 16 * PAGE, first_offset=FILE_NBYTES - 24 * PAGE)
        ticket = load.run(engine)
        assert (ticket.status, ticket.failed) == (-errno.ENODATA, 1)
        assert load.results.tolist() == [(0, 16 * PAGE), (-errno.ENODATA, 8 * PAGE)]


@pytest.mark.parametrize("placement", [Placement.DIRECT, Placement.STAGED])
@pytest.mark.parametrize("kind", ENGINES)
def test_a_read_may_end_with_the_file_behind_what_is_owed(
    tmp_path: Path, kind: str, placement: Placement
) -> None:
    with engine_on(kind, tmp_path) as engine:
        os.truncate(tmp_path / "content", FILE_NBYTES - PAGE + 100)
        load = Load(3, placement=placement, first_offset=FILE_NBYTES - 3 * PAGE)
        load.ops["nbytes_owed"][2] = load.copies["nbytes"][2] = 100
        ticket = load.run(engine)
        assert (ticket.status, ticket.failed) == (0, 0)
        assert load.results.tolist() == [(0, PAGE), (0, PAGE), (0, 100)]
        assert load.target[: 2 * PAGE + 100].tobytes() == content_of(FILE_NBYTES - 3 * PAGE, 2 * PAGE + 100)
        assert (load.target[2 * PAGE + 100 :] == 0xA5).all()


@pytest.mark.parametrize("placement", [Placement.DIRECT, Placement.STAGED])
@pytest.mark.parametrize("kind", ENGINES)
def test_a_byte_that_is_owed_and_not_there_is_an_error(
    tmp_path: Path, kind: str, placement: Placement
) -> None:
    with engine_on(kind, tmp_path) as engine:
        os.truncate(tmp_path / "content", FILE_NBYTES - PAGE + 100)
        load = Load(1, placement=placement, first_offset=FILE_NBYTES - PAGE)
        load.ops["nbytes_owed"] = load.copies["nbytes"] = 101
        assert load.run(engine).status == -errno.ENODATA
        assert load.results.tolist() == [(-errno.ENODATA, 100)]


@pytest.mark.parametrize("kind", NATIVE)
def test_busy_then_room_again(tmp_path: Path, kind: str) -> None:
    with engine_on(kind, tmp_path, max_requests=10, max_transfers=1, faults=(LATE,)) as engine:
        tickets = [engine.submit(Load(5).batch()) for _ in range(2)]
        with pytest.raises(BusyError, match="drain"):
            engine.submit(Load(1).batch())
        with pytest.raises(LayoutError, match="max_requests"):
            engine.submit(Load(11).batch())
        assert all(engine.wait(ticket, 20) for ticket in tickets)
        tickets = [engine.submit(Load(1).batch()) for _ in range(4)]  # four batches for each transfer
        with pytest.raises(BusyError):
            engine.submit(Load(1).batch())
        with pytest.raises(BusyError):
            engine.submit_region(Kind.REGION_ADD, PAGE, PAGE, ring=0)
        assert all(engine.wait(ticket, 20) for ticket in tickets)
        assert Load(10).run(engine).status == 0


def test_python_threads_are_bounded_too(tmp_path: Path) -> None:
    with engine_on("python", tmp_path, max_requests=10) as engine:
        with pytest.raises(LayoutError, match="max_requests"):
            engine.submit(Load(11).batch())
        ticket = engine.submit(Load(10).batch())
        with pytest.raises(BusyError):  # nothing is given back before it has been drained
            engine.submit(Load(1).batch())
        assert engine.wait(ticket, 20)
        assert Load(10).run(engine).status == 0


@pytest.mark.parametrize("kind", NATIVE)
def test_statistics(tmp_path: Path, kind: str) -> None:
    with engine_on(kind, tmp_path, rings=2) as engine:
        assert all(
            value == 0 for name, value in _counters(engine).items() if name not in ("sleeps", "submits")
        )
        loads = [Load(8, 32 << 10), Load(8, placement=Placement.STAGED), Load(4, kind=Kind.WRITE)]
        tickets = [engine.submit(load.batch()) for load in loads]
        assert all(engine.wait(ticket, 20) for ticket in tickets)
        assert {ticket.ring for ticket in tickets} == {0, 1}
        found = _counters(engine)
        assert (found["batches"], found["ops"]) == (3, 20)
        assert found["bytes_read"] == 8 * (32 << 10) + 8 * PAGE
        assert (found["bytes_written"], found["bytes_staged"]) == (4 * PAGE, 8 * PAGE)
        assert 0 < found["in_flight_max"] <= 16
        assert found["bulk_nbytes_max"] <= 1 << 20
        assert found["submits"] > 0
        assert all(
            found[name] == 0 for name in ("in_flight", "slots_leased", "overflows", "failed_ops", "faults")
        )
        info = engine.ring_info(1)
        assert info.staging_nbytes == 2 << 20
        assert info.registered_nbytes <= info.staging_nbytes
        engine.close()
        with pytest.raises(ClosedError):
            engine.statistics()
        with pytest.raises(ClosedError):
            engine.ring_info()


def _counters(engine: AnyEngine) -> dict[str, int]:
    statistics = engine.statistics()
    return {name: getattr(statistics, name) for name in statistics.__dataclass_fields__}


@pytest.mark.parametrize("kind", NATIVE)
def test_open_names_the_step_that_failed(tmp_path: Path, kind: str) -> None:
    with engine_on(kind, tmp_path) as engine, no_new_descriptors():
        with pytest.raises(UnavailableError, match="eventfd failed with EMFILE") as refused:
            Engine([0], BUFFERED, engine.options, uring=kind == "uring")
        assert (refused.value.step, refused.value.error_number) == ("eventfd", errno.EMFILE)


@contextmanager
def no_new_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("kind", NATIVE)
def test_an_engine_left_open_ends_before_its_memory_goes(tmp_path: Path, kind: str) -> None:
    """At exit the interpreter frees what batches name; whoever did not close is waited for before that."""
    program = f"""
import atexit, sys
sys.path[:0] = {[str(Path(__file__).parent), str(Path(aio_kv.__file__).parent.parent)]!r}
ends = []
atexit.register(lambda: print(ends[0].is_closed))
from pathlib import Path
from engines import Load, engine_on
from aio_kv.engine import Fault, FaultAction
opened = engine_on({kind!r}, Path({str(tmp_path)!r}), faults=(Fault(FaultAction.DELAY, 50_000),))
ends.append(opened.__enter__())
ends[0].submit(Load(4).batch())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
