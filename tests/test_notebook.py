"""The measurements behind the notebook: what is compared, on files and on a device, and that a difference is seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_support import Gpu, gpu, on_asyncio
from loops import on_one_loop
from oracle_measures import (
    Compared,
    Content,
    Sizes,
    compare_backends,
    compare_on_gpu,
    corrupted,
    measure_lags,
    measure_sizes,
)

from aio_kv import GroupLayout, PosixBackend
from aio_kv.engine import has_extension

__all__ = ["gpu"]  # a fixture

TINY = Sizes(seconds=0.01, rounds=1, file_nbytes=8 << 20, groups=(4096,), depths=(1,), has_model=False)


@pytest.fixture
def content() -> Content:
    layout = GroupLayout(3, 4, 2, 4, 64, 4)
    draw = np.random.default_rng(1)
    return Content(
        "test", layout, draw.integers(0, 256, (layout.num_groups, layout.payload_nbytes), np.uint8)
    )


@on_one_loop
async def test_every_backend_is_compared(content: Content, tmp_path: Path) -> None:
    compared = await compare_backends(content, tmp_path)
    names = [one.name.split(",")[0] for one in compared]
    assert names[0] == "PosixBackend"
    assert names[-2:] == ["CascadeBackend"] * 2
    assert "ThreadedBackend" in names
    assert all(one.is_equal.shape == (3, 16) for one in compared)
    assert not any(one.differing for one in compared)


@on_one_loop
async def test_a_wrong_byte_is_seen(
    content: Content, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_groups = PosixBackend.read_groups

    def lying(self: PosixBackend, ids: Any, into: Any, stream: Any = None) -> None:
        read_groups(self, ids, into, stream)
        into[17 * content.layout.payload_nbytes] ^= 1

    monkeypatch.setattr(PosixBackend, "read_groups", lying)
    compared = await compare_backends(content, tmp_path)
    assert [one.differing for one in compared] == [1] * len(compared)  # all are held against the oracle
    assert np.argwhere(~compared[0].is_equal).tolist() == [[1, 1]]


def test_a_flipped_bit_is_one_group(content: Content) -> None:
    one = corrupted(Compared("x", np.ones((3, 16), bool)), content, group=20)
    assert np.argwhere(~one.is_equal).tolist() == [[1, 4]]


@on_asyncio
async def test_bytes_on_a_device_are_compared(gpu: Gpu, content: Content, tmp_path: Path) -> None:
    compared = await compare_on_gpu(content, tmp_path, gpu.device)
    assert compared[0].name == "PosixBackend, to the GPU"
    assert len(compared) == 2
    assert not any(one.differing for one in compared)


@pytest.mark.skipif(not has_extension(), reason="the native engine is not built")
@pytest.mark.slow
@on_one_loop
async def test_speeds_and_lags_are_measured_and_the_files_removed(tmp_path: Path) -> None:
    speeds = await measure_sizes(TINY, tmp_path)
    assert {"PosixBackend", "ThreadedBackend", "CascadeBackend"} <= speeds.samples.keys()
    assert all(run.nbytes > 0 for points in speeds.samples.values() for run in points[4096])
    lags = await measure_lags(TINY, tmp_path)
    assert {"idle loop", "CascadeBackend"} <= lags.keys()
    assert all(len(values) > 0 for values in lags.values())
    assert not list(tmp_path.iterdir())


def test_the_notebook_that_is_kept_was_run_in_full() -> None:
    notebook = json.loads(
        (Path(__file__).resolve().parent.parent / "docs/oracle_comparison.ipynb").read_text()
    )
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] for cell in cells)
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert not [output for output in outputs if output.get("name") == "stderr"]
    assert len([output for output in outputs if "image/png" in output.get("data", {})]) >= 7
    assert "has_model=True" in str(outputs)


def test_an_unknown_size_is_refused() -> None:
    assert Sizes.chosen("quick").seconds < Sizes.chosen("full").seconds
    with pytest.raises(ValueError, match="AIO_KV_NOTEBOOK is 'huge': must be quick or full"):
        Sizes.chosen("huge")
