"""What pyproject.toml says of the package: extras, the command, completion. The wheel itself: `make wheel-check`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import aio_kv

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
COMMAND = shutil.which("aio-kv", path=str(Path(sys.executable).parent)) or ""
COMMANDS = ["demo", "doctor", "bench", "experts"]
needs_command = pytest.mark.skipif(not COMMAND, reason="aio-kv is not installed beside this Python")


def name_of(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None
    return match[0]


def run(*arguments: str, **environment: str) -> str:
    done = subprocess.run(arguments, env=os.environ | environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_version_is_said_in_one_way() -> None:
    assert aio_kv.__version__ == PROJECT["version"]


def test_every_extra_is_in_the_reference() -> None:
    page = (ROOT / "docs" / "reference" / "packaging.md").read_text()
    listed = {
        name
        for row in re.findall(r"^\| (`[^|]+) \|", page, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    }
    assert set(EXTRAS) <= listed
    assert {"cuda", "model", "metrics", "bench", "dev"} <= set(EXTRAS)


def test_the_tests_have_what_they_test_with() -> None:
    """`dev` holds the optional libraries that tests use for real."""
    dev = {name_of(requirement) for requirement in EXTRAS["dev"]}
    for extra in ("metrics", "cuda"):
        assert {name_of(requirement) for requirement in EXTRAS[extra]} <= dev
    assert EXTRAS["cuda"] == EXTRAS["cuda13"]


def test_no_extra_pins_or_repeats() -> None:
    """Exact versions are for constraints.txt: a library that pins cannot be installed beside others."""
    for extra, requirements in {**EXTRAS, "": PROJECT["dependencies"]}.items():
        names = [name_of(requirement) for requirement in requirements]
        assert len(names) == len(set(names)), extra
        assert not [one for one in requirements if "==" in one.partition(";")[0]], extra


def test_the_module_is_the_command() -> None:
    said = run(sys.executable, "-m", "aio_kv", "--help", COLUMNS="200")
    for name in COMMANDS:
        assert re.search(rf"\b{name}\b", said)


@needs_command
@pytest.mark.slow
def test_completion_knows_the_commands() -> None:
    completing = {"_AIO_KV_COMPLETE": "complete_bash", "COMP_CWORD": "1", "COMP_WORDS": "aio-kv do"}
    assert run(COMMAND, **completing).split() == ["doctor"]
    assert "_AIO_KV_COMPLETE=complete_zsh" in run(COMMAND, _AIO_KV_COMPLETE="source_zsh")
