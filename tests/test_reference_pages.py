"""The reference pages name every option, counter, error, public name and command that there is, and no other."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import aio_kv
from aio_kv import cuda, errors, experts, testing
from aio_kv.cascade.options import CascadeOptions
from aio_kv.transfer.dispatcher import DispatcherStatistics

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs" / "reference"
HEADING = re.compile(r"^## (.*)$", re.MULTILINE)

STATISTICS = {
    "Statistics": aio_kv.Statistics,
    "DispatcherStatistics": DispatcherStatistics,
    "EngineStatistics": type(
        aio_kv.EngineBackend("unused", aio_kv.GroupLayout(1, 1, 1, 1, 1, 1)).statistics().engine
    ),
    "CascadeStatistics": aio_kv.CascadeStatistics,
    "TransferReport": aio_kv.TransferReport,
}
OPTIONS = {
    "EngineOptions": aio_kv.EngineOptions,
    "CopyOptions": cuda.CopyOptions,
    "CascadeBackend": CascadeOptions,
}


def sections(page: str) -> dict[str, str]:
    """The text under each second-level heading of a reference page, by the heading without its backticks."""
    parts = HEADING.split((REFERENCE / page).read_text())
    return {heading.strip("`"): text for heading, text in zip(parts[1::2], parts[2::2], strict=True)}


def rows(text: str) -> list[list[str]]:
    """The cells of each row of the tables in a text, without their heads."""
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def names_in(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize("name", STATISTICS)
def test_every_counter_is_explained(name: str) -> None:
    explained = [field for row in rows(sections("statistics.md")[name]) for field in names_in(row[0])]
    assert explained == list(dict.fromkeys(explained))
    assert set(explained) == {field.name for field in dataclasses.fields(STATISTICS[name])}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_is_explained_with_its_default(name: str) -> None:
    explained = {names_in(row[0])[0]: row[1] for row in rows(sections("options.md")[name])}

    def shown(field: dataclasses.Field[Any]) -> str:
        if field.default is dataclasses.MISSING:
            return ""
        return f'"{field.default}"' if isinstance(field.default, str) else str(field.default)

    assert explained == {field.name: shown(field) for field in dataclasses.fields(OPTIONS[name])}


def test_every_error_is_explained() -> None:
    classes = {name for name in errors.__all__ if name.endswith("Error")}
    explained = {names_in(row[0])[0] for row in rows((REFERENCE / "errors.md").read_text())}
    assert explained == classes


def test_every_public_name_is_in_the_reference() -> None:
    page = (REFERENCE / "api.md").read_text()
    described = {line.rpartition(".")[2] for line in page.splitlines() if line.startswith("::: ")}
    public = {*aio_kv.__all__, *cuda.__all__, *experts.__all__, *testing.__all__}
    # Not classes or functions of their own: described in the text, by the module, or inner parts of others.
    elsewhere = {"NAMED_LAYOUTS", "BACKEND_CHECKS", "SYNC_BACKEND_CHECKS", *errors.__all__}
    inner = {"DevicePath", "GgufArray", "GgufShard", "GgufTensor", "ConformanceError", "MemoryFiles"}
    inner |= {"Scheduler", "SeededScheduler"}
    assert public - described - elsewhere - inner == set()
    assert (elsewhere | inner) & described == set()


def test_every_described_name_exists() -> None:
    for line in (REFERENCE / "api.md").read_text().splitlines():
        if line.startswith("::: "):
            module, _, name = line.removeprefix("::: ").rpartition(".")
            assert hasattr(importlib.import_module(module), name), line


def commands_in(text: str) -> set[str]:
    return set(re.findall(r"^#+ `aio-kv ([a-z ]+)`$", text, re.MULTILINE))


@pytest.fixture(scope="module")
def hooks() -> Any:
    """What the site is built with; it needs mkdocs."""
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("the extra 'docs' is not installed")
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "scripts" / "docs_hooks.py")
    assert spec is not None
    assert spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    return hooks


@pytest.mark.slow
def test_the_command_line_is_described_whole(hooks: Any) -> None:
    page = hooks.on_page_markdown((REFERENCE / "cli.md").read_text())
    assert {
        "demo",
        "doctor",
        "bench disk",
        "bench gpu",
        "bench report",
        "experts ls",
        "experts pack",
    } <= commands_in(page)
    assert "Examples:\n\n```console\n$ aio-kv doctor\n$ aio-kv doctor --dir /mnt/nvme --json\n```\n" in page
    for command in ("doctor", "bench disk", "bench report"):
        said = subprocess.run(
            [sys.executable, "-m", "aio_kv", *command.split(), "--help"],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
            env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"},
        ).stdout
        section = page.partition(f"`aio-kv {command}`\n")[2].partition("\n##")[0]
        for option in set(re.findall(r"--[a-z][a-z-]+", said)):
            assert f"`{option}" in section, (command, option)


def test_a_state_diagram_becomes_a_table(hooks: Any) -> None:
    page = "```mermaid\nstateDiagram-v2\n    [*] --> FREE\n    FREE --> FILLING: FILL\n```\n"
    table = "| from | on | to |\n|---|---|---|\n| (start) |  | FREE |\n| FREE | FILL | FILLING |\n"
    assert hooks.on_page_markdown(page) == table


def test_no_page_loads_anything_from_elsewhere(hooks: Any) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_path="page.md"))
    own = '<link rel="stylesheet" href="../assets/main.css"><a href="https://example.org">elsewhere</a>'
    assert hooks.on_post_page(own, page) == own
    for foreign in (
        '<script src="https://example.org/a.js"></script>',
        '<link href="//fonts.example.org/css" rel="stylesheet">',
        '<pre class="mermaid"><code>graph TD</code></pre>',
    ):
        with pytest.raises(hooks.PluginError, match=r"page\.md would load"):
            hooks.on_post_page(own + foreign, page)
