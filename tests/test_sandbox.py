"""Where the kernel refuses something: the next rung is taken, works as well, and the reason is named.

The refusals are real: seccomp filters and limits that a process puts on itself, in a process of its own.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import require_locked_memory, run_program
from sandbox import OPTIONS

from aio_kv import GroupLayout, LayerFiles, PosixBackend, direct
from aio_kv.backends import rungs
from aio_kv.direct import DirectProbe
from aio_kv.engine import has_extension

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="Linux only"),
    pytest.mark.skipif(not has_extension(), reason="the compiled extension is not installed"),
]
LAYOUT = GroupLayout(2, 4, 2, 16, 64, 2)


def said_in_sandbox(
    restriction: str, folder: Path, *, backend: str = "auto", changes: str = ""
) -> list[dict[str, Any]]:
    """Restrict a new process, do round trips there, and return what the backend said of itself."""
    program = f"""
from sandbox import *
{restriction}
say_round_trips({str(folder)!r}, {backend!r}, {changes})
"""
    return [json.loads(line) for line in run_program(program).splitlines()]


def mode_of(folder: Path) -> str:
    with LayerFiles(folder / "mode", LAYOUT, create=True) as files:
        return "direct" if files.direct_alignment else "buffered"


def works_here(folder: Path) -> str:
    """The rung without any restriction; the tests below are about losing it."""
    with LayerFiles(folder / "probe", LAYOUT, create=True) as files:
        opened = rungs.open_engine(files, OPTIONS)
        opened.engine.close()
    if not opened.mechanism.startswith("uring"):
        pytest.skip(f"io_uring is refused here without any sandbox: {opened.refusals[0].reason}")
    return opened.rung


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "names"),
    [
        (errno.EPERM, ("EPERM", "seccomp filter", "security-opt")),
        (errno.ENOSYS, ("ENOSYS", "gVisor", "kernel")),
    ],
)
def test_refused_io_uring_lands_on_threads(tmp_path: Path, number: int, names: tuple[str, ...]) -> None:
    for said in said_in_sandbox(f"refuse_uring({number})", tmp_path):
        assert said["rung"] == f"threads-{mode_of(tmp_path)}"
        refused = {rung: f"{reason} {hint}" for rung, reason, hint in said["refusals"]}
        assert all(name in refused["uring"] for name in names), refused


@pytest.mark.slow
def test_refused_enter_lands_on_threads(tmp_path: Path) -> None:
    """A filter that knows only some of the calls lets a ring be set up that then does nothing."""
    works_here(tmp_path)
    for said in said_in_sandbox("refuse_uring(EPERM := 1, 'enter')", tmp_path):
        assert said["rung"] == f"threads-{mode_of(tmp_path)}"
        assert "NOP failed with EPERM" in str(said["refusals"])


@pytest.mark.slow
def test_refused_register_leaves_the_plain_ring(tmp_path: Path) -> None:
    works_here(tmp_path)
    for said in said_in_sandbox("refuse_uring(1, 'register')", tmp_path):
        assert said["rung"] == f"uring-{mode_of(tmp_path)}"
        assert (said["registered_nbytes"], said["fixed_ops"]) == (0, 0)
        assert [rung for rung, _, _ in said["refusals"]][-1] == "uring-fixed"
        assert "EPERM" in str(said["refusals"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "hint"), [(errno.EPERM, "seccomp"), (errno.ENOSYS, "kernel"), (errno.ENOMEM, "memlock")]
)
def test_a_rung_asked_for_by_name_fails_loudly(tmp_path: Path, number: int, hint: str) -> None:
    program = f"""
from sandbox import *
import aio_kv
refuse_uring({number})
try:
    asyncio.run(round_trip(Path({str(tmp_path)!r}) / "kv", LAYOUTS[0], "uring", OPTIONS))
except aio_kv.UnavailableError as refused:
    print(refused.error_number, refused.hint, refused)
"""
    said = run_program(program)
    assert hint in said
    assert "'uring' does not work here" in said


@pytest.mark.slow
def test_little_locked_memory_registers_nothing(tmp_path: Path) -> None:
    works_here(tmp_path)
    for said in said_in_sandbox("limit_locked_memory(65536)", tmp_path):
        assert said["rung"] == f"uring-{mode_of(tmp_path)}"
        assert said["registered_nbytes"] == 0
        refused = {rung: f"{reason} {hint}" for rung, reason, hint in said["refusals"]}
        assert "ENOMEM" in refused["uring-fixed"]
        assert "memlock" in refused["uring-fixed"]


@pytest.mark.slow
def test_half_the_locked_memory_registers_half(tmp_path: Path) -> None:
    """Slots in the part of the slab that the ring knows and slots beyond it serve the same transfers."""
    works_here(tmp_path)
    require_locked_memory(3 << 20)
    for said in said_in_sandbox("limit_locked_memory(3 << 20)", tmp_path, backend="uring"):
        assert said["rung"] == f"uring-fixed-{mode_of(tmp_path)}"
        assert (said["staging_nbytes"], said["registered_nbytes"]) == (4 << 20, 2 << 20)


@pytest.mark.slow
def test_locked_memory_comes_back_after_close(tmp_path: Path) -> None:
    """With room for one ring's buffers, each of many engines in a row gets them."""
    works_here(tmp_path)
    require_locked_memory(5 << 20)
    program = f"""
from sandbox import *
limit_locked_memory(5 << 20)
for _ in range(12):
    print(asyncio.run(round_trip(Path({str(tmp_path)!r}) / "kv", LAYOUTS[1], "uring", OPTIONS))["registered_nbytes"])
"""
    assert run_program(program).split() == [str(4 << 20)] * 12


@pytest.mark.slow
def test_a_landing_region_beyond_the_limit_works_unregistered(tmp_path: Path) -> None:
    works_here(tmp_path)
    require_locked_memory(5 << 20)
    program = f"""
from sandbox import *
from aio_kv import allocate_host
limit_locked_memory(5 << 20)

async def main():
    layout = LAYOUTS[0]
    async with open_backend({str(tmp_path / "kv")!r}, layout, backend="uring", options=OPTIONS) as kv:
        memory = allocate_host(8 << 20)
        async with await kv.register_landing_region(memory) as region:
            await kv.write_groups([3], content_of(layout, 3, 1))
            into = memory[4096 : 4096 + layout.payload_nbytes]
            await kv.read_groups([3], into)
            assert bytes(into) == content_of(layout, 3, 1)
            print(region.is_registered, errno.errorcode[region.refusal])

import errno
asyncio.run(main())
"""
    assert run_program(program).split() == ["False", "ENOMEM"]


@pytest.mark.slow
def test_the_conformance_kit_passes_in_a_sandbox(tmp_path: Path) -> None:
    program = f"""
from sandbox import *
from contextlib import asynccontextmanager
from aio_kv.testing import check_backend
refuse_uring(1)
folders = iter(range(10**6))

@asynccontextmanager
async def make(layout):
    async with open_backend(f"{tmp_path}/{{next(folders)}}", layout, options=OPTIONS) as kv:
        assert kv.rung.startswith("threads-"), kv.rung
        yield kv

asyncio.run(check_backend(make))
"""
    run_program(program, timeout=120)


def test_refused_direct_io_lands_on_buffered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = DirectProbe(None, "EINVAL on the first read")
    monkeypatch.setattr(direct, "_probe_file", lambda path: probe)
    with LayerFiles(tmp_path / "kv", LAYOUT, create=True) as files:
        for choice in rungs.CHOICES:
            opened = rungs.open_engine(files, OPTIONS, choice)
            try:
                assert (opened.mode, opened.limits.offset_alignment) == ("buffered", 1)
                refused = opened.refusals[0]
                assert (refused.rung, refused.reason) == ("direct", "EINVAL on the first read")
                assert "O_DIRECT" in refused.hint
            finally:
                opened.engine.close()


def test_the_file_system_of_shared_memory(tmp_path: Path) -> None:
    """Old kernels refuse O_DIRECT on tmpfs, new ones take it: the first read decides, whichever it is."""
    if not os.path.isdir("/dev/shm"):
        pytest.skip("there is no tmpfs")
    folder = Path("/dev/shm") / f"aio_kv-test-{os.getpid()}"
    try:
        with LayerFiles(folder, LAYOUT, create=True) as files, PosixBackend(files) as oracle:
            opened = rungs.open_engine(files, OPTIONS)
            opened.engine.close()
            assert opened.mode == ("direct" if oracle.is_direct else "buffered")
            assert (opened.refusals != ()) >= (opened.mode == "buffered")
    finally:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_full_disk_does_not_keep_files_from_being_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The layer files have their space; only the probe's own little file finds none."""

    def refuse(**arguments: Any) -> None:
        raise OSError(number, os.strerror(number))

    with LayerFiles(tmp_path / "kv", LAYOUT, create=True) as files:
        monkeypatch.setattr(rungs.tempfile, "TemporaryFile", refuse)
        opened = rungs.open_engine(files, OPTIONS)
        opened.engine.close()


def test_files_smaller_than_the_probe(tmp_path: Path) -> None:
    layout = GroupLayout(1, 1, 1, 4, 8, 2, alignment=512)
    assert layout.nbytes_per_layer < 4096
    LayerFiles(tmp_path / "kv", layout, create=True).close()
    with LayerFiles(tmp_path / "kv", layout, read_only=True) as files:
        opened = rungs.open_engine(files, OPTIONS)
        opened.engine.close()
