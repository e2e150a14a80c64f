"""Every Python block in the README and in docs/ runs; the blocks of one page run in turn, as one program.

Blocks marked `output` are what that program prints, all of it, in order.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OUTPUT = re.compile(r"^```output\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OF_EXTRAS = ("opentelemetry", "prometheus_client", "torch", "transformers", "safetensors", "gguf")
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_run(page: Path, tmp_path: Path) -> None:
    program = "\n".join(FENCE.findall(page.read_text()))
    if not program:
        pytest.skip("the page has no Python example")
    if missing := [name for name in OF_EXTRAS if name in program and find_spec(name) is None]:
        pytest.skip(f"the page's example needs what is not installed: {', '.join(missing)}")
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    if shown := "".join(OUTPUT.findall(page.read_text())):
        assert result.stdout == shown


def test_readme_example_proves_something(tmp_path: Path) -> None:
    program = FENCE.findall((ROOT / "README.md").read_text())[0]
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert result.stdout.split()[-1] == "True", result.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    missing = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert not missing
