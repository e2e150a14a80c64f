"""`aio-kv bench report`: what benches printed becomes one page or picture, with every figure, and errors in one line.

The files in `bench_results` are what short runs of the benches printed, without the rows of some modes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from demo_command import Ran, run_command

pytest.importorskip("matplotlib", reason="the extra 'bench' is not installed")

from aio_kv import LayoutError, UnavailableError
from aio_kv.cli.benches.report_input import load_runs
from aio_kv.cli.benches.report_page import html_of
from aio_kv.cli.benches.report_panels import Bars, Curves, panels_of
from aio_kv.cli.benches.report_plots import check_plots, png_of, svg_of
from aio_kv.cli.benches.tables import figure_of

RESULTS = Path(__file__).resolve().parent / "bench_results"
KINDS = ("disk", "cascade", "trace", "experts")
FILES = [RESULTS / f"{kind}.jsonl" for kind in KINDS]
Run = Callable[..., Ran]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    return partial(run_command, monkeypatch, capfd, "bench", "report")


class Cells(HTMLParser):
    """The text of every table cell of a page, and the tags that are open or load something."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.loaded: list[str] = []
        self.depths: dict[str, int] = {}
        self._is_in_cell = False
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.depths[tag] = self.depths.get(tag, 0) + 1
        if tag == "td":
            self._is_in_cell = True
            self.cells.append("")
        self.loaded += [f"{tag} {value}" for name, value in attributes if name in ("src", "href") and value]

    def handle_endtag(self, tag: str) -> None:
        self.depths[tag] = self.depths.get(tag, 0) - 1
        self._is_in_cell = self._is_in_cell and tag != "td"

    def handle_data(self, data: str) -> None:
        if self._is_in_cell:
            self.cells[-1] += data


def rows_of(kind: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((RESULTS / f"{kind}.jsonl").read_text())["rows"]
    return rows


@pytest.fixture(scope="module")
def page() -> str:
    runs, left = load_runs(FILES)
    return html_of(runs, left, "Side by side")


@pytest.mark.slow
def test_a_page_has_every_figure_of_every_bench(page: str) -> None:
    cells = Cells(page).cells
    for row in [*rows_of("disk"), *rows_of("experts")]:
        for name in ("gb_s", "iops", "p50_us", "p99_us", "cpu_s_per_gb"):
            assert figure_of(row[name]) in cells, (row["engine"], name)
    for kind in ("cascade", "trace"):
        assert {figure_of(row["value"]) for row in rows_of(kind)} <= set(cells)
    ratios = json.loads((RESULTS / "disk.jsonl").read_text())["ratios"]
    assert {figure_of(value) for value in ratios["vs_aiofiles"].values()} <= set(cells)
    assert set(ratios) <= set(cells)


@pytest.mark.slow
def test_a_page_says_where_and_how_it_was_measured(page: str) -> None:
    (line,) = (RESULTS / "disk.jsonl").read_text().splitlines()
    found = json.loads(line)
    cells = Cells(page).cells
    assert {str(value) for value in found["machine"].values() if value is not None} <= set(cells)
    assert all(row["note"] in cells for row in found["rows"] if row["engine"] == "caio")
    assert "emptied before each run" in cells


@pytest.mark.slow
def test_a_page_is_whole_and_loads_nothing(page: str) -> None:
    parsed = Cells(page)
    assert {tag for tag, depth in parsed.depths.items() if depth} <= {"meta", "br"}
    # Uses of shapes that the same drawing defines, and nothing else.
    assert all(one.partition(" ")[2].startswith("#") for one in parsed.loaded), parsed.loaded
    assert not re.findall(r"url\((?!#)|@import|<script", page)


@pytest.mark.slow
def test_plots_take_the_colour_of_the_text(page: str) -> None:
    """Ink that is drawn black is not seen by those who read in the dark."""
    drawings = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    runs, _ = load_runs(FILES)
    assert len(drawings) == sum(len(panels_of(run)) for run in runs) > 0
    for drawing in drawings:
        assert "currentColor" in drawing
        # Text without a colour of its own is black.
        assert all("currentColor" in style for style in re.findall(r'<text style="([^"]*)"', drawing))
        assert not re.findall(r"(?:fill|stroke): #(?:000000|ffffff)", drawing)


def test_every_figure_is_in_a_plot_with_its_unit() -> None:
    (run,), _ = load_runs([RESULTS / "disk.jsonl"])
    bars = [panel for panel in panels_of(run) if isinstance(panel, Bars)]
    assert {panel.unit.partition(";")[0] for panel in bars} == {"GB/s", "CPU s/GB", "us, median"}
    (speeds,) = [
        panel for panel in bars if panel.title.startswith("Direct reads (past") and "GB/s;" in panel.unit
    ]
    shown = {(facet.title, bar.label): bar.value for facet in speeds.facets for bar in facet.bars}
    labels = {"caio": "caio (buffered)", "torch": "torch (buffered)"}
    wanted = {
        ("4 KiB" if row["block"] == 4096 else "1 MiB", labels.get(row["engine"], row["engine"])): row["gb_s"]
        for row in run.engines
        if row["mode"] == "direct"
    }
    assert shown == wanted
    assert {bar.label for facet in speeds.facets for bar in facet.bars if bar.is_ours} == {
        "aio_kv",
        "aio_kv-threads",
    }


def test_hit_ratios_are_curves_and_figures_have_their_baselines() -> None:
    runs, _ = load_runs([RESULTS / "trace.jsonl", RESULTS / "cascade.jsonl"])
    (curves,) = panels_of(runs[0])
    assert isinstance(curves, Curves)
    assert set(curves.curves) == {row["policy"] for row in rows_of("trace")}
    assert all(list(points) == sorted(points) for points in curves.curves.values())
    facets = {
        facet.title: facet
        for panel in panels_of(runs[1])
        if isinstance(panel, Bars)
        for facet in panel.facets
    }
    for row in rows_of("cascade"):
        values = [bar.value for bar in facets[row["name"]].bars]
        assert values == [row["value"], *(other["value"] for other in row["baselines"].values())]
        assert facets[row["name"]].target == (row["target"] if row["target_of"] == "value" else None)


def test_the_same_input_draws_the_same_picture() -> None:
    (run,), _ = load_runs([RESULTS / "trace.jsonl"])
    (panel,) = panels_of(run)
    assert svg_of(panel, "1-0") == svg_of(panel, "1-0")


def test_what_comes_from_a_file_cannot_become_markup(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    row = {"engine": evil, "mode": evil, "block": 4096, "gb_s": 1.0, "note": evil}
    found = {"rows": [row, {"name": evil}], "remarks": [evil], "machine": {evil: evil}, "ratios": {evil: 1.0}}
    path = tmp_path / "evil.jsonl"
    path.write_text(json.dumps(found))
    runs, left = load_runs([path])
    assert "<script" not in html_of(runs, left, evil)


def test_rows_left_out_are_named_with_the_reason(run: Run, tmp_path: Path) -> None:
    rows = [
        {"engine": "aio_kv", "mode": "direct", "block": 4096, "gb_s": 1.0},
        {"engine": "idle", "mode": "idle", "block": 0, "gb_s": None},
        {"name": "hit", "value": None, "unit": "GB/s"},
        {"name": "hit", "value": float("nan"), "unit": "GB/s"},
        {"color": "red"},
        7,
    ]
    path = tmp_path / "some.jsonl"
    path.write_text("\n" + json.dumps({"rows": rows}) + "\n")
    said = run(path, "--output", tmp_path / "r.html", "--json")
    assert said.status == 0
    assert (said.report["rows"], said.report["runs"]) == (1, 1)
    reasons = [(one["line"], one["row"], one["reason"].split(":")[0]) for one in said.report["left_out"]]
    assert reasons == [
        (2, "idle idle 0", "it has no throughput, latency or CPU time"),
        (2, "hit", "it has no value"),
        (2, "hit", "it has no value"),
        (2, "a row", "no bench prints such a row"),
        (2, "7", "it is not an object"),
    ]
    assert said.stderr.count("left out: ") == 5
    assert "it is not an object" in (tmp_path / "r.html").read_text()


@pytest.fixture(scope="module")
def fonts() -> None:
    """matplotlib keeps the files of its fonts open."""
    (run,), _ = load_runs([RESULTS / "trace.jsonl"])
    png_of(panels_of(run), "title", "facts")


@pytest.mark.slow
@pytest.mark.usefixtures("fonts")
def test_a_picture_of_the_plots(run: Run, tmp_path: Path) -> None:
    output = tmp_path / "r.PNG"
    said = run(RESULTS / "trace.jsonl", RESULTS / "cascade.jsonl", "--output", output, "--title", "Tiers")
    assert said.status == 0, said.stderr
    data = output.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = (int.from_bytes(data[start : start + 4]) for start in (16, 20))
    assert width > 1000
    assert height > 500
    assert str(output) in said.stdout
    assert f"{len(data):,} bytes" in said.stdout


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("not json", r"line 1: not JSON \(Expecting value\)"),
        ('{"rows": []}\n{"rows": ', "line 2: not JSON"),
        ("[1, 2]", "line 1: not the result of a bench"),
        ('{"figures": []}', "line 1: not the result of a bench"),
        ('{"rows": []}', "no rows to show; give files"),
        ('{"rows": [3]}', r"no rows to show \(1 left out, the first because: it is not an object\)"),
        ("", "no rows to show"),
    ],
)
def test_a_wrong_file_is_named_with_its_line(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text(text)
    with pytest.raises(LayoutError, match=rf"some\.jsonl.*{complaint}"):
        load_runs([path])


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(LayoutError, match="x: not text"):
        load_runs([tmp_path / "x"])


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((RESULTS / "trace.jsonl", "--output", "r.pdf"), "--output is 'r.pdf': must end in .html or .png"),
        (("nowhere.jsonl", "--output", "r.html"), "read failed (nowhere.jsonl): No such file or directory"),
        (
            (RESULTS / "trace.jsonl", "--output", "/proc/r.html"),
            "--output takes a file in a writable directory",
        ),
    ],
)
def test_a_wrong_argument_is_one_line_and_status_2(
    run: Run, arguments: tuple[object, ...], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = run(*arguments)
    assert (said.status, said.stdout) == (2, "")
    (line,) = said.stderr.splitlines()
    assert complaint in line
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnavailableError, match=r"matplotlib.*pip install 'aio-kv\[bench\]'"):
        check_plots()
