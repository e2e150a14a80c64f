"""`aio-kv bench gpu`: the report's shape, right bytes, options, and that nothing is left behind. Not how fast it is.

Everything runs on the fake CUDA driver, where the figures mean nothing; one test runs on a GPU where there is one.
"""

from __future__ import annotations

import asyncio
import io
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from fake_cuda_build import build, skip_reason
from fake_cuda_control import FakeCuda
from rich.console import Console

pytest.importorskip("resource", reason="the benchmark compares Linux interfaces")

from aio_kv import LayoutError, UnavailableError, cli
from aio_kv.cli import bench_gpu, bench_gpu_run
from aio_kv.cli.bench_gpu_desk import keep_in_flight, latency_of
from aio_kv.cli.bench_gpu_driver import Driver
from aio_kv.cli.bench_gpu_pool import PinnedPool
from aio_kv.cli.bench_gpu_ram_disk import ram_disk
from aio_kv.cli.bench_gpu_report import GpuReport, at_least, at_most, print_gpu_report, ratio_at_least
from aio_kv.cli.bench_gpu_run import run_gpu_benchmark
from aio_kv.cli.bench_gpu_settings import GpuSettings, parse_gpu_settings
from aio_kv.cuda import Device, DevicePath
from aio_kv.cuda.table import DriverTable, Entry
from aio_kv.engine import has_extension

needs_fake = pytest.mark.skipif(
    skip_reason() is not None or not has_extension(),
    reason=skip_reason() or "the compiled extension is not installed",
)
NOT_SUPPORTED = 801
ROW_NAMES = {
    *("name", "value", "unit", "baseline", "baseline_name", "ratio", "target", "target_of", "target_sense"),
    *("design_target", "met", "baselines", "rounds", "note"),
}
PINNED = tuple(f"pinned_to_gpu_{nbytes}" for nbytes in (4096, 65536, 262144, 1048576))
RINGS = tuple(f"page_cache_to_gpu_262144_{rings}rings" for rings in (1, 2, 4, 8))
TARGETS = {
    "pinned_to_gpu_4096": (40, "value", ">="),
    "pinned_to_gpu_65536": (50, "value", ">="),
    "pinned_to_gpu_262144": (50, "value", ">="),
    "pinned_to_gpu_1048576": (50, "value", ">="),
    "restore_64x4096_event_p50": (30, "value", "<="),
    "restore_64x4096_await_p50": (60, "value", "<="),
    "page_cache_to_gpu_262144_8rings": (35, "value", ">="),
    "disk_to_gpu_262144": (0.95, "ratio", ">="),
    "disk_to_gpu_4096": (0.95, "ratio", ">="),
    "vs_oracle_4096_cold": (10, "ratio", ">="),
    "vs_oracle_4096_warm": (10, "ratio", ">="),
    "cuda_calls_above_50us": (0.001, "value", "<="),
}
UNBOUND = {
    *("restore_64x4096_hand_over_p50", "restore_64x4096_await_p99", "restore_64x4096_enqueued_p50"),
    "cuda_call_longest",
    *(f"event_{name}" for name in ("idle_p50", "idle_p99")),
    *(f"event_after_100us_{name}" for name in ("p50", "p99", "wakeup_p50")),
    *(f"loop_lag_{source}_{p}" for source in ("pinned", "page_cache", "disk") for p in ("p50", "p99")),
    *RINGS[:-1],
}
NEEDS_DIRECT = {
    *("disk_to_gpu_262144", "disk_to_gpu_4096", "vs_oracle_4096_cold"),
    *("loop_lag_disk_p50", "loop_lag_disk_p99"),
}


def settings_of(directory: Path | str, **options: Any) -> GpuSettings:
    return parse_gpu_settings(directory=str(directory), is_quick=True, **options)


def quietly() -> Console:
    return Console(file=io.StringIO())


class Machine:
    """A fake machine with one GPU, whose driver may lack some functions."""

    def __init__(self, *, lacking: tuple[str, ...] = ()) -> None:
        path = build()
        self.fake = FakeCuda(path, seed=3)

        def lookup(name: str, entry: Entry) -> int:
            return 0 if name in lacking else self.fake.address(name)

        table = DriverTable(lookup, is_fake=True) if lacking else DriverTable.from_library(str(path))
        self.device = Device(0, table=table)

    def close(self) -> None:
        """Close the device, and see that nothing of the machine is left and nothing met memory that was gone."""
        self.device.close()
        count, last = self.fake.violations()
        kinds = ("streams", "events", "device", "pinned", "registered", "modules", "contexts")
        left = {kind: number for kind in kinds if (number := self.fake.live(kind))}
        self.fake.reset()
        assert count == 0, last
        assert left == {}


@pytest.fixture
def machine() -> Iterator[Machine]:
    made = Machine()
    yield made
    made.close()


# One quick run of everything, looked at from several sides.
@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench-gpu")


@pytest.fixture(scope="module")
def found(directory: Path) -> GpuReport:
    made = Machine()
    try:
        return run_gpu_benchmark(settings_of(directory, pairs="2"), quietly(), device=made.device)
    finally:
        made.close()


@pytest.fixture(scope="module")
def report(found: GpuReport) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(json.dumps(found.as_json()))
    return loaded


def rows_of(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    rows = {row["name"]: row for row in report["rows"]}
    assert len(rows) == len(report["rows"]), "a name twice"
    return rows


@needs_fake
@pytest.mark.slow
def test_every_promised_row_is_there(report: dict[str, Any]) -> None:
    rows = rows_of(report)
    has_direct = not any("page cache:" in remark for remark in report["remarks"])
    wanted = {*TARGETS, *UNBOUND} - (set() if has_direct else NEEDS_DIRECT)
    assert set(rows) == wanted
    assert all(set(row) == ROW_NAMES for row in rows.values())


@needs_fake
@pytest.mark.slow
def test_targets_are_judged(report: dict[str, Any]) -> None:
    for name, row in rows_of(report).items():
        bound, of, sense = TARGETS.get(name, (None, None, None))
        assert (row["target"], row["target_of"], row["target_sense"]) == (bound, of, sense)
        if bound is None:
            assert row["met"] is None
            continue
        figure = row["value"] if of == "value" else row["ratio"]
        assert row["met"] is (figure >= bound if sense == ">=" else figure <= bound)


@needs_fake
@pytest.mark.slow
def test_figures_stand_beside_those_of_others(report: dict[str, Any]) -> None:
    rows = rows_of(report)
    alone = {"cuda_calls_above_50us", "cuda_call_longest", "event_after_100us_wakeup_p50"}
    for name, row in rows.items():
        assert math.isfinite(row["value"])
        assert row["rounds"] == (1 if name.startswith("cuda_call") else 2)
        assert bool(row["baselines"]) is (name not in alone), name
        if row["baselines"]:
            first = row["baselines"][row["baseline_name"]]
            assert (row["baseline"], row["ratio"]) == (first["value"], first["ratio"])
            assert all(other["value"] >= 0 for other in row["baselines"].values())
    assert list(rows["pinned_to_gpu_4096"]["baselines"]) == [
        *("copy_loop", "memcpy_batch", "bare_kernel", "copy_engine")
    ]
    assert [rows[name]["baseline_name"] for name in PINNED[1:]] == ["copy_engine"] * 3
    assert all(rows[name]["baseline_name"] == "same_to_host" for name in RINGS)
    assert rows["vs_oracle_4096_warm"]["baseline_name"] == "PosixBackend"


@needs_fake
@pytest.mark.slow
def test_the_machine_is_described(report: dict[str, Any]) -> None:
    machine = report["machine"]
    assert machine["gpu"].startswith("Fake")
    assert machine["kernels"] == "in force"
    assert {"driver", "cuda_driver", "pcie", "kernel", "cpu", "date", "rung"} <= set(machine)
    assert any("--ram-disk" in remark for remark in report["remarks"])


@needs_fake
@pytest.mark.slow
def test_no_file_is_left(found: GpuReport, directory: Path) -> None:
    assert list(directory.iterdir()) == []


@needs_fake
@pytest.mark.slow
def test_json_is_one_line_and_the_last(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_fake(settings: GpuSettings, console: Console) -> GpuReport:
        return run_gpu_benchmark(settings, console, device=machine.device)

    monkeypatch.setattr(bench_gpu_run, "run_gpu_benchmark", on_fake)
    options = {"device": "0", "directory": str(tmp_path), "size": "16", "pairs": None}
    bench_gpu.gpu(**options, quick=True, ram_disk=False, as_json=True)
    out, err = capsys.readouterr()
    (line,) = out.splitlines()
    assert set(json.loads(line)) == {"rows", "machine", "remarks"}
    assert "pinned_to_gpu_4096" in err


@needs_fake
@pytest.mark.slow
def test_without_kernels_and_batches_the_rest_is_measured(tmp_path: Path) -> None:
    made = Machine(lacking=("cuMemcpyBatchAsync",))
    try:
        made.fake.fail("cuModuleLoadData", result=NOT_SUPPORTED, times=0)
        report = run_gpu_benchmark(settings_of(tmp_path, size="16"), quietly(), device=made.device)
    finally:
        made.close()
    rows = {row.name: row for row in report.rows}
    assert list(rows["pinned_to_gpu_4096"].baselines) == ["copy_loop", "copy_engine"]
    assert "event_after_100us_p50" in rows
    assert report.machine["batch_copies"] is False
    assert "801" in report.machine["kernels"]


@pytest.fixture(scope="module")
def real_gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    """A GPU on which the benchmark has run: threads that the driver starts at first use and keeps are there already."""
    if not has_extension():
        pytest.skip("the compiled extension is not installed")
    try:
        device = Device(0)
    except UnavailableError as refusal:
        pytest.skip(f"needs a GPU: {refusal}")
    with device:
        run_gpu_benchmark(settings_of(tmp_path_factory.mktemp("first")), quietly(), device=device)
        yield device


@pytest.mark.gpu
@pytest.mark.slow
def test_quick_on_a_gpu(real_gpu: Device, tmp_path: Path) -> None:
    report = run_gpu_benchmark(settings_of(tmp_path), quietly(), device=real_gpu)
    assert {*PINNED, *RINGS} <= {row.name for row in report.rows}


# Without a GPU


def without_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> DriverTable:
        raise UnavailableError("no CUDA driver was found", hint="install the NVIDIA driver")

    monkeypatch.setattr(DriverTable, "load", refuse)


def test_without_a_gpu_it_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_driver(monkeypatch)
    with pytest.raises(UnavailableError, match="no CUDA driver"):
        run_gpu_benchmark(settings_of(tmp_path), quietly())
    assert list(tmp_path.iterdir()) == []


def test_without_a_gpu_the_command_says_so_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_driver(monkeypatch)
    app = typer.Typer()
    app.callback()(lambda: None)
    bench_gpu.register(app)
    monkeypatch.setattr(cli, "app", app)
    monkeypatch.setattr("sys.argv", ["aio-kv", "gpu", "--quick", "--json", "--dir", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("aio-kv: no CUDA driver was found")


# Options


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"directory": "/nowhere/at/all"}, "--dir"),
        ({"device": "x"}, "--device"),
        ({"device": "-1"}, "--device"),
        ({"size": "15"}, "--size is '15': must be an integer from 16"),
        ({"size": "many"}, "--size"),
        ({"pairs": "0"}, "--pairs"),
        ({"pairs": "1.5"}, "--pairs"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, str], complaint: str) -> None:
    with pytest.raises(LayoutError, match=complaint):
        parse_gpu_settings(**options)


def test_quick_is_smaller_and_gives_way() -> None:
    quick, usual = parse_gpu_settings(is_quick=True), parse_gpu_settings()
    assert quick.seconds < usual.seconds
    assert (quick.rounds, usual.rounds) == (1, 5)
    assert quick.nbytes < usual.nbytes
    assert parse_gpu_settings(is_quick=True, pairs="3", size="64").rounds == 3


def test_a_ram_disk_is_for_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(UnavailableError, match="only root"):
        parse_gpu_settings(wants_ram_disk=True)


def test_a_ram_disk_without_its_tools_is_unavailable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with (
        pytest.raises(UnavailableError, match=r"zramctl is not installed.*losetup is not installed"),
        ram_disk(1 << 20),
    ):
        pass


# Measuring


@needs_fake
def test_wrong_bytes_have_no_speed(machine: Machine) -> None:
    with DevicePath(machine.device) as path, machine.device.activated():
        driver = Driver(machine.device, path.kernels)
        with PinnedPool(16 << 20, driver) as pool:
            first, second = pool.jobs(4096, 64, count=2)
            driver.gather(first)
            driver.wait()
            driver.check_bytes(first, pool.target, pool.bytes)
            with pytest.raises(AssertionError, match="64 of 64 groups of 4096 bytes"):
                driver.check_bytes(second, pool.target, pool.bytes)
            for copy in (driver.copy_in_batches, driver.copy_one_by_one):
                pool.clear_target()
                copy(second)
                driver.wait()
                driver.check_bytes(second, pool.target, pool.bytes)
        driver.close()


@needs_fake
def test_places_are_used_once_and_out_of_order(machine: Machine) -> None:
    with DevicePath(machine.device) as path, machine.device.activated():
        driver = Driver(machine.device, path.kernels)
        with PinnedPool(16 << 20, driver) as pool:
            jobs = pool.jobs(65536, 16)
            offsets = np.concatenate([job.offsets for job in jobs])
            places = np.concatenate([job.scatter.offsets for job in jobs])
        driver.close()
    for drawn in (offsets, places):
        assert np.array_equal(np.sort(drawn), np.arange(256) * 65536)
        assert (np.diff(drawn) == 65536).mean() < 0.1


def test_lanes_keep_so_many_in_flight() -> None:
    numbers: list[int] = []
    in_flight = most = 0

    async def start(lane: int, number: int) -> None:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        numbers.append(number)
        await asyncio.sleep(0)
        in_flight -= 1

    speed = asyncio.run(keep_in_flight(start, nbytes=1 << 20, in_flight=3, seconds=0.0))
    assert sorted(numbers) == list(range(len(numbers)))
    assert (len(numbers), most) == (3, 3)
    assert speed > 0


def test_latency_is_told_in_microseconds() -> None:
    latency = latency_of([0.001] * 99 + [0.002])
    assert latency.p50_us == pytest.approx(1000)
    assert 1000 < latency.p99_us <= 2000


# Rows


def test_ratios_are_taken_within_rounds() -> None:
    report = GpuReport()
    report.add("speed", "GB/s", [1.0, 4.0, 9.0], baselines={"a": [2.0, 4.0, 3.0], "b": [0.0, 8.0, 0.0]})
    (row,) = report.rows
    assert (row.value, row.baseline, row.ratio, row.baseline_name) == (4.0, 3.0, pytest.approx(1.0), "a")
    assert row.baselines["b"] == {"value": 0.0, "ratio": 0.5}
    assert (row.rounds, row.met) == (3, None)


@pytest.mark.parametrize(
    ("target", "met"),
    [
        (at_least(4), True),
        (at_least(4.1), False),
        (at_most(4), True),
        (at_most(3.9), False),
        (ratio_at_least(2), True),
        (ratio_at_least(2.1, design=3), False),
    ],
)
def test_a_target_is_met_or_not(target: Any, met: bool) -> None:
    report = GpuReport()
    report.add("figure", "us", [4.0], baselines={"other": [2.0]}, target=target)
    assert report.rows[0].met is met


def test_what_is_missing_is_null_and_printed() -> None:
    report = GpuReport(machine={"gpu": "none", "driver": None})
    report.add("nothing", "us", [], baselines={"other": []}, target=at_most(1))
    report.add("something", "GB/s", [1.23456789], target=ratio_at_least(2))
    report.remark("once")
    report.remark("once")
    first, second = report.as_json()["rows"]
    assert (first["value"], first["ratio"], first["met"]) == (None, None, None)
    assert (second["value"], second["met"]) == (1.235, None)
    console = Console(width=40, record=True, file=io.StringIO())
    print_gpu_report(report, console)
    text = console.export_text()
    assert text.count("once") == 1
    assert "ratio >= 2" in text
