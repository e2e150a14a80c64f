"""`aio-kv bench disk`: the report's shape, fair work, options, and that nothing is left behind. Not how fast it is."""

import asyncio
import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("resource", reason="the benchmark compares Linux interfaces")

from rich.console import Console

from aio_kv import GroupLayout, LayerFiles, LayoutError, UnavailableError, open_backend
from aio_kv.blockdevice import BlockDevice, block_device_of
from aio_kv.cli.benches.backend_runs import BackendRun
from aio_kv.cli.benches.desk import name_of
from aio_kv.cli.benches.fio import FioRun, run_fio, why_no_fio
from aio_kv.cli.benches.measure import Sample, alternating
from aio_kv.cli.benches.results import Report, Rounds, Row
from aio_kv.cli.benches.settings import DiskSettings, parse_settings
from aio_kv.cli.benches.tables import print_report
from aio_kv.cli.benches.thread_pool import PoolRun
from aio_kv.cli.benches.workload import (
    Batch,
    Shape,
    Workload,
    draw_batches,
    fill,
    layout_of,
    pieces_of,
    shape_of,
)

ROOT = Path(__file__).resolve().parent.parent
COMMAND = [sys.executable, "-m", "aio_kv", "bench", "disk"]
BLOCKS = ("4096", "65536")
ROW_NAMES = {
    *("engine", "mode", "block", "gb_s", "iops", "p50_us", "p99_us", "cpu_s_per_gb"),
    *("loop_lag_ms_p50", "latency_of", "process_cpu_s_per_gb", "rounds", "note", "cache"),
}
needs_fio = pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")


def run_bench(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *options], check=False, capture_output=True, text=True, timeout=120, cwd=ROOT
    )


def settings_of(**options: Any) -> DiskSettings:
    given: dict[str, Any] = {
        **dict.fromkeys(("size", "seconds", "pairs", "sizes", "modes")),
        **{"directory": ".", "loop": "asyncio", "is_quick": False},
    }
    return parse_settings(**{**given, **options})


def sample(**fields: Any) -> Sample:
    given = {
        "requests": 10,
        "nbytes": 10**9,
        "seconds": 1.0,
        "cpu_seconds": 0.5,
        "p50_us": 1.0,
        "p99_us": 2.0,
    }
    return Sample(**{**given, **fields})


@pytest.fixture
def files(tmp_path: Path) -> Iterator[LayerFiles]:
    with LayerFiles(tmp_path / "kv", layout_of(4096, 4 << 20), create=True) as opened:
        asyncio.run(fill(opened))
        yield opened


# One quick run of everything, looked at from several sides.
@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(scope="module")
def done(directory: Path) -> subprocess.CompletedProcess[str]:
    done = run_bench("--quick", "--json", "--dir", str(directory), "--sizes", ",".join(BLOCKS))
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def report(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    (line,) = done.stdout.splitlines()
    loaded: dict[str, Any] = json.loads(line)
    return loaded


@pytest.mark.slow
def test_rows_have_the_promised_columns(report: dict[str, Any]) -> None:
    assert all(set(row) == ROW_NAMES for row in report["rows"])
    assert {row["block"] for row in report["rows"] if row["mode"] == "warm"} == {4096, 65536}
    for row in report["rows"]:
        figures = [value for value in row.values() if isinstance(value, float)]
        assert all(math.isfinite(figure) and figure >= 0 for figure in figures), row


@pytest.mark.slow
def test_no_engine_is_twice_in_a_mode(report: dict[str, Any]) -> None:
    keys = [(row["engine"], row["mode"], row["block"]) for row in report["rows"]]
    assert len(keys) == len(set(keys))


@pytest.mark.slow
def test_ratios_are_keyed_by_bytes(report: dict[str, Any]) -> None:
    ratios = report["ratios"]
    if any(remark.startswith("no direct rows") for remark in report["remarks"]):
        pytest.skip(f"the file system below the temporary directory: {report['remarks']}")
    for name in ("vs_threads", "cpu_vs_threads", "lag_vs_idle", "warm_vs_preadv_loop"):
        assert tuple(ratios[name]) == BLOCKS, name
    for name in ("single_read_vs_preadv", "single_read_idle_vs_preadv", "busy_thread_vs_threads"):
        assert ratios[name] > 0, name


@needs_fio
@pytest.mark.slow
def test_fio_takes_part_where_it_can(report: dict[str, Any]) -> None:
    if any(remark.startswith("no ") for remark in report["remarks"]):
        pytest.skip(f"this machine: {report['remarks']}")
    assert tuple(report["ratios"]["vs_fio"]) == tuple(report["ratios"]["cpu_vs_fio"]) == BLOCKS
    assert report["machine"]["fio"].startswith("fio")


@pytest.mark.slow
def test_machine_says_what_figures_depend_on(report: dict[str, Any]) -> None:
    machine = report["machine"]
    for name in ("kernel", "cpu", "cpus", "memory_nbytes", "filesystem", "python", "loop"):
        assert machine[name], name


@pytest.mark.slow
def test_people_see_the_tables_on_stderr(done: subprocess.CompletedProcess[str]) -> None:
    assert "Warm reads" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_nothing_is_left_behind(directory: Path, done: subprocess.CompletedProcess[str]) -> None:
    assert list(directory.iterdir()) == []


@pytest.mark.slow
def test_an_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*COMMAND, "--dir", str(tmp_path), "--size", "64", "--sizes", "4096"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        until = time.monotonic() + 60
        # In the middle of the work: the files of the first block size are there.
        while not list(tmp_path.glob("*/blocks-4096/layout.json")):
            assert process.poll() is None
            assert time.monotonic() < until
            os.sched_yield()
        process.send_signal(signal.SIGINT)
        errors = process.communicate(timeout=60)[1]
    assert process.returncode not in (0, -signal.SIGINT)
    assert "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"directory": "/nowhere/at/all"}, "--dir"),
        ({"size": "x"}, "--size"),
        ({"size": "0"}, "--size"),
        ({"size": "63"}, "--size is 63: must be at least 64"),
        ({"seconds": "0"}, "--seconds"),
        ({"seconds": "nan"}, "--seconds"),
        ({"pairs": "0"}, "--pairs"),
        ({"pairs": "1.5"}, "--pairs"),
        ({"sizes": "4096,5000"}, "--sizes"),
        ({"sizes": "4096,4096"}, "--sizes"),
        ({"sizes": ""}, "--sizes"),
        ({"modes": "direct,cold"}, "--modes"),
        ({"loop": "trio"}, "--loop"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, str], complaint: str) -> None:
    with pytest.raises(LayoutError, match=complaint):
        settings_of(**options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--dir", ".", "--pairs", "many"), "--pairs is 'many'"),
        # Nobody can make a directory there, not even the superuser.
        (("--dir", "/proc"), "--dir takes a writable directory"),
    ],
)
def test_a_wrong_option_is_one_line_and_status_2(options: tuple[str, ...], complaint: str) -> None:
    done = run_bench(*options)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert complaint in line


def test_a_loop_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnavailableError, match="pip install uvloop"):
        settings_of(loop="uvloop")


def test_quick_is_smaller_and_gives_way() -> None:
    quick, usual = settings_of(is_quick=True), settings_of()
    assert quick.seconds < usual.seconds
    assert quick.rounds < usual.rounds
    assert settings_of(is_quick=True, pairs="3").rounds == 3
    assert usual.blocks == (4096, 65536, 262144, 1048576)


@pytest.mark.parametrize("block", [4096, 32768, 65536, 262144, 1 << 20, 4 << 20])
def test_every_block_is_drawn_once_and_never_beside_its_neighbour(block: int) -> None:
    layout = layout_of(block, 256 << 20)
    assert layout.payload_nbytes == layout.stride == block
    batches = draw_batches(layout, 16)
    ids = np.concatenate([batch.ids for batch in batches])
    assert len(ids) == len(np.unique(ids)) > layout.num_groups - 32
    for batch in batches:
        assert np.diff(np.sort(batch.ids)).min() >= 2
        assert batch.offsets == layout.offsets(batch.ids).tolist()


@pytest.mark.parametrize("block", [4096, 65536, 262144, 1 << 20])
def test_contenders_share_a_window_of_memory(block: int) -> None:
    workload = Workload(layout_of(block, 64 << 20))
    assert len(workload.memory) == shape_of(block).depth * block
    for scatter, vectors in zip(workload.scatters, workload.vectors, strict=True):
        assert scatter.offsets.max() <= len(workload.memory) - block
        assert [len(vector[0]) for vector in vectors] == [block] * shape_of(block).batch
    spread = Workload(layout_of(block, 64 << 20), is_spread=True)
    places = np.concatenate([scatter.offsets for scatter in spread.scatters])
    assert len(np.unique(places)) == len(places)


@pytest.mark.parametrize("block", [4096, 1 << 20])
def test_apart_every_request_is_its_own_io(tmp_path: Path, block: int) -> None:
    async def drive() -> Sample:
        async with open_backend(tmp_path / "kv", layout_of(block, 16 << 20)) as kv:
            device = block_device_of(tmp_path)
            workload = Workload(kv.layout, device=device, shape=Shape(batch=4, in_flight=2, depth=8))
            return await BackendRun("ours", kv, workload).drive_batches(6)

    ran = asyncio.run(drive())
    assert (ran.requests, ran.nbytes) == (24, 24 * block)


def test_a_device_that_takes_less_is_asked_for_less() -> None:
    small = BlockDevice(
        "disk", request_nbytes_max=130_000, requests_max=64, is_raid=False, is_rotational=False
    )
    silent = BlockDevice("", request_nbytes_max=None, requests_max=None, is_raid=False, is_rotational=False)
    assert (pieces_of(1 << 20), pieces_of(1 << 20, silent), pieces_of(1 << 20, small)) == (2, 2, 9)
    assert (pieces_of(4096), pieces_of(4096, small)) == (1, 1)
    depths = [shape_of(block, small).depth for block in (4096, 65536, 1 << 20)]
    assert depths == [64, 48, 8]
    assert shape_of(4096, silent) == shape_of(4096)


def test_side_by_side_the_count_of_ios_gives_it_away(files: LayerFiles) -> None:
    async def drive() -> None:
        async with open_backend(files) as kv:
            workload = Workload(kv.layout, shape=Shape(batch=4, in_flight=1, depth=4))
            ids = np.array([7, 8, 20, 30], dtype=np.int64)
            workload._supply = iter([Batch(ids, kv.layout.offsets(ids).tolist())])
            await BackendRun("ours", kv, workload).drive_batches(1)

    with pytest.raises(AssertionError, match="4 requests of 1 I/Os each became 3 I/Os"):
        asyncio.run(drive())


@pytest.mark.parametrize("is_chunked", [True, False])
def test_the_thread_pool_reads_the_same_bytes(files: LayerFiles, is_chunked: bool) -> None:
    async def drive() -> Workload:
        workload = Workload(files.layout, shape=Shape(batch=8, in_flight=1, depth=8))
        workload.batches = workload.batches[:1]
        with PoolRun(files.fd(0), workload, width=3, is_chunked=is_chunked) as pool:
            await pool.drive_batches(1)
        return workload

    workload = asyncio.run(drive())
    offsets = workload.batches[0].offsets
    wanted = [os.pread(files.fd(0), 4096, offset) for offset in offsets]
    assert [bytes(vector[0]) for vector in workload.vectors[0]] == wanted


@needs_fio
@pytest.mark.slow
def test_fio_reports_its_run(files: LayerFiles) -> None:
    async def drive() -> Sample:
        problem = await why_no_fio(files.path_of(0))
        if problem is not None:
            pytest.skip(f"fio cannot take part here: {problem}")
        return await FioRun(files.path_of(0), Workload(files.layout), depth=8).drive(0.05)

    ran = asyncio.run(drive())
    assert ran.nbytes == ran.requests * 4096 > 0
    assert 0 < (ran.p50_us or 0) <= (ran.p99_us or 0)
    assert (ran.process_cpu_seconds or 0) > 0


@needs_fio
@pytest.mark.slow
def test_a_failing_fio_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="fio failed: fio: file creation disallowed"):
        asyncio.run(run_fio("--rw=randread", "--bs=4k", f"--filename={tmp_path}/no-such-file", "--size=4k"))


def test_without_fio_there_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert asyncio.run(why_no_fio(str(tmp_path / "file"))) == "fio is not installed"


def test_ratios_are_taken_within_rounds() -> None:
    rounds = Rounds()
    for ours, other in ((1.0, 2.0), (4.0, 4.0), (9.0, 3.0)):
        rounds.add("ours", sample(seconds=1 / ours))
        rounds.add("other", sample(seconds=1 / other))
    assert rounds.ratio("ours", "other", lambda s: s.gb_s) == pytest.approx(1.0)
    assert rounds.ratio("ours", "nobody", lambda s: s.gb_s) is None
    assert rounds.ratio("ours", "other", lambda s: None) is None


def test_every_other_round_is_reversed() -> None:
    assert [list(alternating((1, 2, 3), number)) for number in range(3)] == [[1, 2, 3], [3, 2, 1], [1, 2, 3]]


def test_a_report_prints_and_dumps_what_is_missing_as_null() -> None:
    report = Report(rows=[Row("ours", "direct", 4096, gb_s=1.23456), Row("idle", "idle", 0)])
    report.add_ratio("vs_fio", 0.98765, block=4096)
    report.add_ratio("single", 1.5)
    report.add_ratio("nothing", None)
    report.remark("once")
    report.remark("once")
    dumped = report.as_json()
    assert (dumped["rows"][0]["gb_s"], dumped["rows"][0]["p50_us"]) == (1.235, None)
    assert dumped["ratios"] == {"vs_fio": {"4096": 0.9877}, "single": 1.5}
    assert dumped["remarks"] == ["once"]
    console = Console(width=40, record=True, file=io.StringIO())
    print_report(report, console)
    assert "4 KiB" in console.export_text()


@pytest.mark.parametrize(
    ("nbytes", "name"),
    [(0, "0 bytes"), (512, "512 bytes"), (4096, "4 KiB"), (1 << 20, "1 MiB"), (3 << 30, "3 GiB")],
)
def test_sizes_in_words(nbytes: int, name: str) -> None:
    assert name_of(nbytes) == name


def test_a_layout_of_any_block_fits_the_file() -> None:
    assert isinstance(layout_of(4096, 1 << 20), GroupLayout)
    assert layout_of(65536, 10 << 20).nbytes <= 10 << 20
