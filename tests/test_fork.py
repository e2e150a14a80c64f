"""A forked child of a process with an engine: it costs little, gets an error and no memory, and disturbs nobody."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import ENGINES, NATIVE, SMALL, Load, engine_on
from processes import (
    has_huge_pages,
    in_child,
    living_child,
    mapping_at,
    needs_fork,
    needs_proc,
    resident_nbytes,
)

from aio_kv import ClosedError, GroupLayout, LayerFiles, ThreadedBackend, UringBackend
from aio_kv.backends.engine_backend import EngineBackend
from aio_kv.engine import Engine, Fault, FaultAction, Kind, has_extension

pytestmark = [needs_fork, pytest.mark.skipif(not has_extension(), reason="no compiled extension")]

STAGING = 256 << 20
LAYOUT = GroupLayout(2, 8, 2, 16, 64, 2)


def huge_nbytes_of_slab() -> int:
    """How much of the slab is on huge pages. Of the slab alone: the rest of the process comes and goes."""
    return mapping_at(mapped_slab())["AnonHugePages"]


@pytest.fixture(params=NATIVE)
def large(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    with engine_on(request.param, tmp_path, staging_nbytes=STAGING) as engine:
        assert isinstance(engine, Engine)
        assert Load(4).run(engine).status == 0
        yield engine


@needs_proc
def test_fork_is_quick_and_the_child_small(large: Engine) -> None:
    """With the slab inherited a fork copies its page tables, or, where the ring has pinned it, all of its bytes."""
    resident, huge = resident_nbytes(), huge_nbytes_of_slab()
    assert resident > STAGING
    seconds = []

    def child() -> None:
        assert resident_nbytes() < resident - STAGING * 3 // 4

    for _ in range(5):
        began = time.monotonic()
        with living_child(child):
            seconds.append(time.monotonic() - began)
    assert min(seconds) < 0.1, seconds
    if has_huge_pages():
        assert huge > 0
    assert huge_nbytes_of_slab() >= huge, "the fork split huge pages of the parent"
    load = Load(16)
    assert load.run(large).status == 0
    load.check()


@pytest.mark.parametrize("kind", ENGINES)
def test_every_use_in_the_child_is_a_closed_error(tmp_path: Path, kind: str) -> None:
    faults = () if kind == "python" else (Fault(FaultAction.DELAY, 30_000),)
    with engine_on(kind, tmp_path, faults=faults) as engine:
        load = Load(40)
        ticket = engine.submit(load.batch())
        uses = {
            "submit": lambda: engine.submit(Load(1).batch()),
            "submit_region": lambda: engine.submit_region(Kind.REGION_ADD, 4096, 4096, ring=0),
            "drain": engine.drain,
            "wait": lambda: engine.wait(ticket),
            "cancel": lambda: engine.cancel(ticket),
            "stop": engine.stop,
            "statistics": engine.statistics,
        }
        if kind != "python":
            uses["ring_info"] = engine.ring_info

        def child() -> None:
            for name, use in uses.items():
                with pytest.raises(ClosedError, match="open a new backend"):
                    raise AssertionError(f"{name} gave {use()!r}")
            assert not engine.is_stopped
            assert engine.close()

        in_child(child)
        assert engine.wait(ticket, 20)
        assert ticket.status == 0
        load.check()


@pytest.mark.parametrize("kind", ENGINES)
def test_waiting_in_the_child_does_not_wait(tmp_path: Path, kind: str) -> None:
    """What the parent has drained nobody will ever tell the child."""
    gate, opener = os.pipe()
    with engine_on(kind, tmp_path) as engine:
        ticket = engine.submit(Load(4).batch())

        def child() -> None:
            os.close(opener)
            os.read(gate, 1)
            with pytest.raises(ClosedError):
                engine.wait(ticket)

        with living_child(child), os.fdopen(opener, "w"):
            assert engine.wait(ticket, 20)
    os.close(gate)


@pytest.mark.parametrize("kind", ENGINES)
def test_fork_while_other_threads_hold_the_engine(tmp_path: Path, kind: str) -> None:
    """The child has neither the threads nor what they hold: a lock that one of them had stays taken there."""
    with engine_on(kind, tmp_path) as engine:
        is_over = threading.Event()

        def work() -> None:
            while not is_over.is_set():
                Load(4).run(engine)

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()

        def child() -> None:
            with pytest.raises(ClosedError):
                engine.submit(Load(1).batch())
            with pytest.raises(ClosedError):
                engine.statistics()

        try:
            for _ in range(12):
                in_child(child)
        finally:
            is_over.set()
            for thread in threads:
                thread.join()
        assert Load(4).run(engine).status == 0


def test_a_child_may_open_an_engine_of_its_own(tmp_path: Path) -> None:
    with engine_on("threads", tmp_path) as engine:

        def child() -> None:
            folder = tmp_path / "child"
            folder.mkdir()
            with engine_on("uring", folder) as own:
                load = Load(8)
                assert load.run(own).status == 0
                load.check()
                with pytest.raises(ClosedError):
                    engine.drain()

        in_child(child)
        assert Load(4).run(engine).status == 0


@needs_proc
def test_close_frees_what_a_living_child_cannot_keep(tmp_path: Path) -> None:
    """A child holds a copy of every descriptor; closing gives memory and locks back nevertheless."""
    gate, opener = os.pipe()
    before = resident_nbytes()
    with engine_on("uring", tmp_path, staging_nbytes=STAGING) as engine:
        address = mapped_slab()
        with LayerFiles(tmp_path / "files", LAYOUT, create=True) as files:

            def child() -> None:
                os.close(opener)
                assert os.read(gate, 1) == b""
                files.close()

            with living_child(child), os.fdopen(opener, "w"):  # the child ends when the body has
                files.close()
                assert engine.close(10)
                assert not mapping_at(address)
                assert resident_nbytes() < before + STAGING // 2
                LayerFiles(tmp_path / "files", LAYOUT).close()  # the lock is free
    os.close(gate)


def mapped_slab() -> int:
    """Where the slab lies: a mapping of its size that children do not get ("dc": do not copy on fork)."""
    first = last = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            first, last = (int(number, 16) for number in name.split("-"))
        elif name == "VmFlags:" and "dc" in rest.split() and last - first >= STAGING:
            return first
    raise AssertionError("no slab is mapped")


def test_a_child_does_not_take_the_lock_away(tmp_path: Path) -> None:
    with LayerFiles(tmp_path / "files", LAYOUT, create=True) as files:
        in_child(files.close)
        with pytest.raises(Exception, match="open elsewhere"):
            LayerFiles(tmp_path / "files", LAYOUT)


@pytest.mark.parametrize("backend", [UringBackend, ThreadedBackend])
def test_a_backend_in_the_child(tmp_path: Path, backend: type[EngineBackend]) -> None:
    async def main() -> None:
        async with backend(tmp_path / "kv", LAYOUT, create=True, options=SMALL) as kv:
            payload = bytes(range(256)) * (LAYOUT.payload_nbytes // 256)
            await kv.write_groups([3], payload)
            into = bytearray(LAYOUT.payload_nbytes)

            def child() -> None:
                for use in (
                    lambda: kv.read_groups([3], into),
                    lambda: kv.write_groups([3, 4], payload * 2),
                    kv.statistics,
                ):
                    with pytest.raises(ClosedError):
                        use()

            in_child(child)
            await kv.read_groups([3], into)
            assert into == payload

    asyncio.run(main())


def test_errors_of_a_fork_name_both_processes(tmp_path: Path) -> None:
    with engine_on("threads", tmp_path) as engine:
        parent = os.getpid()

        def child() -> None:
            with pytest.raises(ClosedError) as refused:
                engine.submit(Load(1).batch())
            assert str(parent) in str(refused.value)
            assert str(os.getpid()) in str(refused.value)

        in_child(child)
