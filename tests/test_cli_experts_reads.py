"""`aio-kv experts verify` and `bench`: what they find, what they say, and how they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from experts_command import Run, run
from moe_models import MODELS, all_experts

from aio_kv.cli import experts_verify
from aio_kv.cli.benches.page_cache import resident_nbytes
from aio_kv.cli.expert_models import write_expert_model
from aio_kv.experts import DirectSegment, ExpertMap, PosixExpertReader

pytest.importorskip("gguf")

__all__ = ["run"]  # a fixture


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("direct", ["auto", "off"])
def test_verify_finds_no_difference_in_any_model(
    run: Run, tmp_path: Path, name: str, direct: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts_verify, "_AT_ONCE_NBYTES", 100_000)  # several portions per layer
    paths = write_expert_model(tmp_path / "m.gguf", MODELS[name])
    said = run("verify", paths[0], "--direct", direct, "--json")
    assert said.status == 0, said.stderr
    found = json.loads(said.stdout)
    experts = ExpertMap.open([paths[0]])
    assert found["num_experts"] == len(list(all_experts(experts)))
    assert (found["num_different"], found["differences"], found["target"]) == (0, [], "host")
    assert "no differences" in said.stderr


def test_verify_says_where_bytes_differ(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = write_expert_model(tmp_path / "m.gguf", MODELS["shards"])
    layer = ExpertMap.open([paths[0]]).layers[0]

    class Wrong(PosixExpertReader):
        """An oracle that sees one byte of one expert otherwise."""

        def read_segments(
            self, segments: tuple[DirectSegment, ...], into: Any, *, stream: Any = None
        ) -> None:
            super().read_segments(segments, into, stream=stream)
            if segments == self.experts.segments(layer, 2):
                into[1234] ^= 0x40

    monkeypatch.setattr(experts_verify, "PosixExpertReader", Wrong)
    said = run("verify", paths[0], "--json")
    assert said.status == 1
    found = json.loads(said.stdout)
    assert found["num_different"] == 1
    (one,) = found["differences"]
    assert (one["layer"], one["expert"], one["slot_offset"]) == (layer, 2, 1234)
    assert one["expected"] == one["found"] ^ 0x40
    assert f"layer {layer}, expert 2: byte 1234" in said.stderr


def test_bench_measures_everybody(run: Run, tmp_path: Path) -> None:
    paths = write_expert_model(tmp_path / "m.gguf", MODELS["shards"])
    packed = tmp_path / "m.experts"
    ExpertMap.open([paths[0]]).pack(packed)
    said = run(
        "bench", paths[0], "--packed", packed, "--seconds", "0.05", "--pairs", "2", "--depth", "2", "--json"
    )
    assert said.status == 0, said.stderr
    found = json.loads(said.stdout)
    for mode in ("plain", "packed"):
        engines = {row["engine"] for row in found["rows"] if row["mode"] == mode}
        assert {"aio_kv", "mmap", "pread", "thread pool O_DIRECT"} <= engines
    assert all(row["p50_us"] > 0 and row["gb_s"] > 0 and row["rounds"] == 2 for row in found["rows"])
    assert "packed / plain" in found["ratios"]
    left = found["page_cache_left_nbytes_per_gb"]["plain"]
    assert left["aio_kv, page cache dropped"] == 0
    assert left["pread"] > 0
    assert resident_nbytes(paths[0]) >= 0


@pytest.mark.parametrize(
    ("option", "value"), [("--depth", "0"), ("--pairs", "0"), ("--seconds", "nan"), ("--seconds", "0")]
)
def test_bench_refuses_in_one_line(run: Run, tmp_path: Path, option: str, value: str) -> None:
    said = run("bench", tmp_path / "m.gguf", option, value)
    assert said.status == 2
    assert said.stderr.startswith(f"aio-kv: {option} is")


def test_a_model_that_is_not_there(run: Run, tmp_path: Path) -> None:
    for command in ("verify", "bench"):
        said = run(command, tmp_path / "m.gguf")
        assert said.status == 2
        assert "m.gguf" in said.stderr
