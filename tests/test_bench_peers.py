"""`aio-kv bench disk --against`: peers read the right bytes, in the same rounds, and say why they cannot."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("resource", reason="the benchmark compares Linux interfaces")

from page_cache import resident_nbytes
from rich.progress import Progress

from aio_kv import LayerFiles, LayoutError
from aio_kv.cli.benches.desk import Desk
from aio_kv.cli.benches.fio import FioRun
from aio_kv.cli.benches.measure import ContenderFailed
from aio_kv.cli.benches.peers.deepspeed_peer import check_events
from aio_kv.cli.benches.peers.run import PEERS, PeerRun, best_run, check_bytes, why_not
from aio_kv.cli.benches.peers.setup import Reader, all_of, places_of, widths_of
from aio_kv.cli.benches.settings import PEER_NAMES, DiskSettings, parse_settings
from aio_kv.cli.benches.workload import Batch, Shape, Workload, fill, layout_of
from aio_kv.cli.benches.writes import bench_writes

ROOT = Path(__file__).resolve().parent.parent
SHAPE = Shape(batch=16, in_flight=2, depth=8)
LIGHT = ("aiofiles", "anyio", "caio")  # what `dev` brings: these must work wherever the tests run


def settings_of(**options: Any) -> DiskSettings:
    given: dict[str, Any] = {
        **dict.fromkeys(("size", "seconds", "pairs", "sizes", "modes", "against")),
        **{"directory": ".", "loop": "asyncio", "is_quick": True},
    }
    return parse_settings(**{**given, **options})


@pytest.fixture
def files(tmp_path: Path) -> Iterator[LayerFiles]:
    with LayerFiles(tmp_path / "kv", layout_of(4096, 4 << 20), create=True) as opened:
        asyncio.run(fill(opened))
        if opened.direct_refusal is not None:
            pytest.skip(f"the file system below the temporary directory: {opened.direct_refusal}")
        yield opened


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    with Progress(disable=True) as progress:
        yield Desk(settings_of(), str(tmp_path), progress)


@dataclass(frozen=True, slots=True)
class OffByOne:
    """A setup that reads the block after the one that was asked for, or fails."""

    path_to_read: Path
    problem: str = ""
    note: str = "off by one"
    is_direct: bool = False

    @asynccontextmanager
    async def opened(self, path: str, workload: Workload) -> AsyncIterator[Reader]:
        places, data = places_of(workload), self.path_to_read.read_bytes()

        async def read(lane: int, batch: Batch) -> None:
            if self.problem:
                raise ValueError(self.problem)
            for place, offset in zip(places[lane], batch.offsets, strict=True):
                place[:] = data[offset + workload.block : offset + 2 * workload.block].ljust(len(place))

        yield Reader(read, places)


@dataclass(frozen=True, slots=True)
class WrongPeer:
    """A library of which no setup works."""

    setup: OffByOne
    name: str = "wrong"
    module: str = "wrong_module_of_nobody"
    install: str = "pip install wrong"
    needs: str = "it needs more care"

    def load(self) -> None:
        importlib.import_module(self.module)

    def setups(self, workload: Workload) -> Sequence[OffByOne]:
        return [self.setup]


def test_the_option_knows_every_peer() -> None:
    assert set(PEERS) == set(PEER_NAMES)
    assert settings_of(against="torch,caio").against == ("torch", "caio")
    assert settings_of().against == ()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"against": "caio,numpy"}, "'numpy' is not one of kvikio, aiofiles, anyio, caio, deepspeed, torch"),
        ({"against": ""}, "--against"),
        ({"against": "caio", "modes": "warm"}, "--modes leaves out"),
    ],
)
def test_a_wrong_name_is_answered_with_the_names(options: dict[str, str], complaint: str) -> None:
    with pytest.raises(LayoutError, match=complaint):
        settings_of(**options)


def require_ways_to_read(name: str, files: LayerFiles) -> None:
    """Skip where a wheel without compiled parts is all that is installed."""
    if not PEERS[name].setups(Workload(files.layout, shape=SHAPE)):
        pytest.skip(f"the {name} that is installed has no compiled parts")


@pytest.mark.parametrize("name", [*LIGHT, pytest.param("torch", marks=pytest.mark.model)])
def test_a_peer_reads_the_bytes_that_the_oracle_reads(name: str, files: LayerFiles) -> None:
    """Every setup; one that this machine refuses says so, and at least one works."""
    if name not in LIGHT and importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: {PEERS[name].install}")
    assert why_not(PEERS[name]) is None
    require_ways_to_read(name, files)
    refusals = []
    setups = PEERS[name].setups(Workload(files.layout, shape=SHAPE))
    for setup in setups:
        try:
            asyncio.run(check_bytes(name, setup, files))
        except ContenderFailed as failure:
            refusals.append(str(failure))
    assert len(refusals) < len(setups), refusals
    assert not [refusal for refusal in refusals if "wrong bytes" in refusal]


@pytest.mark.parametrize("name", LIGHT)
def test_a_run_counts_what_it_read(name: str, files: LayerFiles, desk: Desk) -> None:
    require_ways_to_read(name, files)

    async def drive() -> None:
        workload = Workload(files.layout, shape=SHAPE)
        run = await best_run(desk, PEERS[name], files, workload, 0.02)
        assert run is not None, desk.report.remarks
        sample = await run.drive(0.02)
        assert sample.nbytes == sample.requests * 4096 > 0
        assert sample.requests % SHAPE.batch == 0
        assert run.note.endswith("(best of 1)")
        assert run.cache.startswith(("past it", "emptied"))

    asyncio.run(drive())


def test_a_buffered_run_starts_cold_and_leaves_nothing_in_the_page_cache(files: LayerFiles) -> None:
    seen: list[int] = []
    path = Path(files.path_of(0))

    @dataclass(frozen=True, slots=True)
    class Looking(OffByOne):
        @asynccontextmanager
        async def opened(self, path: str, workload: Workload) -> AsyncIterator[Reader]:
            seen.append(resident_nbytes(path))
            async with OffByOne.opened(self, path, workload) as reader:
                yield reader

    path.read_bytes()
    assert resident_nbytes(path) > 0
    workload = Workload(files.layout, shape=SHAPE)
    sample = asyncio.run(
        PeerRun("looking", Looking(path), str(path), workload, files.drop_page_cache).drive(5.0)
    )
    assert seen == [0]
    assert resident_nbytes(path) == 0
    # It ended long before the time was up: half of the file, with what the kernel reads around each block.
    assert sample.nbytes <= files.layout.nbytes_per_layer // 2


def test_wrong_bytes_are_not_timed(files: LayerFiles, desk: Desk) -> None:
    peer = WrongPeer(OffByOne(Path(files.path_of(0))))
    workload = Workload(files.layout, shape=SHAPE)
    assert asyncio.run(best_run(desk, peer, files, workload, 0.01)) is None
    (remark,) = desk.report.remarks
    assert remark.startswith("no wrong rows: wrong (off by one) read wrong bytes at offset ")


def test_what_a_library_raises_is_a_remark(files: LayerFiles, desk: Desk) -> None:
    peer = WrongPeer(OffByOne(Path(files.path_of(0)), problem="no\nluck"))
    workload = Workload(files.layout, shape=SHAPE)
    for _ in range(2):
        assert asyncio.run(best_run(desk, peer, files, workload, 0.01)) is None
    assert desk.report.remarks == ["no wrong rows: wrong failed: ValueError: no luck; it needs more care"]


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_an_fio_that_fails_is_left_out(
    files: LayerFiles, desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does for users with a small locked-memory limit. The others go on, reading and writing."""
    workload = Workload(files.layout, shape=SHAPE)
    failing = FioRun(str(tmp_path / "absent"), workload, depth=2)
    good = PeerRun(
        "good", OffByOne(Path(files.path_of(0))), files.path_of(0), workload, files.drop_page_cache
    )
    rounds = asyncio.run(desk.run_rounds([failing, good], "reads"))
    assert set(rounds.samples) == {"good"}
    (remark,) = desk.report.remarks
    assert remark.startswith("no fio row of reads: fio failed: fio: file creation disallowed")

    async def fail(run: FioRun) -> Any:
        return await failing.drive(0.05)

    monkeypatch.setattr(FioRun, "drive_once", fail)
    desk.has_fio = True
    asyncio.run(bench_writes(desk, 4096))
    assert desk.report.remarks[-1].startswith("no fio row of writes of 4 KiB: fio failed")
    assert {row.engine for row in desk.report.rows} == {"aio_kv", "thread-pool"}


def test_one_without_any_way_to_read_is_a_remark(
    files: LayerFiles, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As caio is where no wheel of it has compiled parts."""
    monkeypatch.setattr(WrongPeer, "setups", lambda peer, workload: ())
    peer = WrongPeer(OffByOne(Path(files.path_of(0))))
    workload = Workload(files.layout, shape=SHAPE)
    assert asyncio.run(best_run(desk, peer, files, workload, 0.01)) is None
    assert desk.report.remarks == ["no wrong rows: it offers no way to read here"]


def test_one_that_fails_in_a_round_is_left_out(files: LayerFiles, desk: Desk) -> None:
    """The others go on, and nothing of it is in the rows."""
    path, workload = files.path_of(0), Workload(files.layout, shape=SHAPE)

    def run(name: str, problem: str) -> PeerRun:
        setup = OffByOne(Path(path), problem=problem)
        return PeerRun(name, setup, path, workload, files.drop_page_cache)

    contenders = [run("good", ""), run("bad", "gone")]
    rounds = asyncio.run(desk.run_rounds(contenders, "reads", has_lags=True))
    desk.report.add_rows(contenders, rounds, mode="direct", block=4096, caches={"good": "warm"})
    assert [(row.engine, row.cache) for row in desk.report.rows] == [("good", "warm")]
    assert desk.report.remarks == ["no bad row of reads: bad failed: ValueError: gone"]


def test_one_that_is_not_installed_names_the_command(files: LayerFiles) -> None:
    reason = why_not(WrongPeer(OffByOne(Path(files.path_of(0)))))
    assert reason == "No module named 'wrong_module_of_nobody'; pip install wrong"


def test_what_a_peer_prints_while_loading_is_not_the_result(capfd: pytest.CaptureFixture[str]) -> None:
    class Loud(WrongPeer):
        def load(self) -> None:
            subprocess.run(["echo", "compiling"], check=True)
            os.write(1, b"done\n")

    assert why_not(Loud(OffByOne(Path()))) is None
    said = capfd.readouterr()
    assert (said.out, said.err.split()) == ("", ["compiling", "done"])


def test_the_rest_is_awaited_when_one_read_fails() -> None:
    ended: list[str] = []

    async def read(name: str, turns: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        ended.append(name)
        if turns == 0:
            raise ValueError(name)

    with pytest.raises(ValueError, match="first"):
        asyncio.run(all_of([read("first", 0), read("second", 5)]))
    assert ended == ["first", "second"]


def test_widths_end_at_the_depth() -> None:
    assert widths_of(256) == (8, 16, 32, 64, 256)
    assert widths_of(32) == (8, 16, 32)
    assert widths_of(2) == (2,)


@pytest.mark.slow
def test_the_command_has_them_in_the_same_rounds(tmp_path: Path, files: LayerFiles) -> None:
    require_ways_to_read("caio", files)
    tmp_path = tmp_path / "scratch"
    tmp_path.mkdir()
    command = [sys.executable, "-m", "aio_kv", "bench", "disk", "--quick", "--json", "--seconds", "0.05"]
    options = ["--sizes", "65536", "--modes", "direct", "--dir", str(tmp_path), "--against", "caio,anyio"]
    done = subprocess.run(
        [*command, *options], check=False, capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    caches = {row["engine"]: row["cache"] for row in report["rows"] if row["mode"] == "direct"}
    assert caches["anyio"] == "past it (O_DIRECT)"
    assert caches["caio"] is not None
    assert caches["aio_kv"] is None
    assert {"vs_caio", "cpu_vs_caio", "vs_anyio"} <= report["ratios"].keys()
    assert report["machine"]["caio"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/proc/sys/fs/aio-max-nr").exists(), reason="this kernel has no libaio")
def test_deepspeed_is_not_asked_for_more_than_the_kernel_grants() -> None:
    """Its native code would abort the process."""
    most = int(Path("/proc/sys/fs/aio-max-nr").read_text())
    with pytest.raises(OSError, match=r"raise sysctl fs\.aio-max-nr"):
        check_events(most + 1)
    check_events(0)
