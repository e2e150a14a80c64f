"""`aio-kv experts`: what it says of a model, what it packs, and how it refuses."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from experts_command import Run, run
from moe_models import MODELS, all_experts, slot_bytes

from aio_kv.cli.expert_models import write_expert_model
from aio_kv.experts import ExpertMap

pytest.importorskip("gguf")

__all__ = ["run"]  # a fixture


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_expert_model(tmp_path / "m.gguf", MODELS["shards"])[0]


def rows_of(listing: dict[str, Any]) -> list[tuple[int, int, int, int]]:
    return [(row["layer"], row["num_experts"], row["slot_nbytes"], row["reads"]) for row in listing["layers"]]


def test_ls(run: Run, model: Path) -> None:
    said = run("ls", model)
    assert said.status == 0
    assert "deepseek2: 10 experts" in said.stdout
    assert "253,440 of" in said.stdout
    assert "in 3 files" in said.stdout
    # Q8_0 has 34 bytes for 32 numbers: gate and up of 96 by 64, down in F16.
    for words in ("2 to 3", "gate Q8_0 6,528", "up Q8_0 6,528", "down F16 12,288", "25,344"):
        assert words in said.stdout
    assert max(map(len, said.stdout.splitlines())) <= 80


def test_ls_as_json(run: Run, model: Path) -> None:
    said = run("ls", model, "--json")
    assert len(said.stdout.splitlines()) == 1
    assert "deepseek2" in said.stderr
    listing = said.report
    assert rows_of(listing) == [(2, 5, 25_344, 3), (3, 5, 25_344, 3)]
    assert (listing["num_experts"], listing["experts_nbytes"]) == (10, 253_440)
    assert listing["paths"] == [str(path) for path in sorted(model.parent.iterdir())]
    assert listing["file_nbytes"] == sum(path.stat().st_size for path in model.parent.iterdir())
    parts = [(part["role"], part["type"], part["nbytes"]) for part in listing["layers"][0]["parts"]]
    assert parts == [("gate", "Q8_0", 6528), ("up", "Q8_0", 6528), ("down", "F16", 12_288)]


def test_over_read_is_what_direct_reads_bring_too_much(run: Run, model: Path) -> None:
    listing = run("ls", model, "--json").report
    experts, block = ExpertMap.open(model), listing["block_nbytes"]
    assert block in (512, 4096)
    too_much, alignment = 0, 1 << 20
    for place in all_experts(experts):
        for segment in experts.segments(*place):
            blocks = set(
                range(segment.file_offset // block, (segment.file_offset + segment.nbytes - 1) // block + 1)
            )
            too_much += len(blocks) * block - segment.nbytes
            while segment.file_offset % alignment or segment.nbytes % alignment:
                alignment //= 2
    assert (
        listing["over_read_nbytes"] == sum(row["over_read_nbytes"] for row in listing["layers"]) == too_much
    )
    assert min(row["alignment"] for row in listing["layers"]) == alignment


def test_pack_and_what_it_changes(run: Run, model: Path) -> None:
    said = run("pack", model, "--check", "--json")
    assert said.status == 0, said.stderr
    assert len(said.stdout.splitlines()) == 1
    target = model.parent / "m.experts"
    done = said.report
    assert (done["target"], done["num_experts"], done["is_checked"]) == (str(target), 10, True)
    assert (done["experts_nbytes"], done["file_nbytes"]) == (253_440, target.stat().st_size)
    listing = run("ls", target, "--json").report
    assert rows_of(listing) == [(2, 5, 25_344, 1), (3, 5, 25_344, 1)]
    assert listing["model"] == "deepseek2"
    plain, packed = ExpertMap.open(model), ExpertMap.open(target)
    for place in all_experts(plain):
        assert slot_bytes(packed, *place) == slot_bytes(plain, *place)


def test_pack_to_another_place(run: Run, model: Path, tmp_path: Path) -> None:
    said = run("pack", model, "--to", tmp_path / "there", "--alignment", 512)
    assert said.status == 0
    assert said.stdout == ""
    assert "10 experts" in said.stderr
    packed = ExpertMap.open(tmp_path / "there")
    assert {
        segment.file_offset % 512 for place in all_experts(packed) for segment in packed.segments(*place)
    } == {0}


def test_a_destination_among_the_models_is_told_apart(run: Run, model: Path) -> None:
    said = run("pack", model, model.with_name("out.experts"))
    assert said.status == 2
    assert "give what to write as --to FILE" in said.stderr
    assert not model.with_name("out.experts").exists()


def test_pack_keeps_what_is_there(run: Run, model: Path) -> None:
    target = model.parent / "m.experts"
    target.write_bytes(b"mine")
    said = run("pack", model)
    assert said.status == 2
    assert "File exists" in said.stderr
    assert target.read_bytes() == b"mine"
    assert run("pack", model, "--overwrite").status == 0
    assert target.read_bytes() != b"mine"


def test_damage_is_found_when_it_is_looked_for(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk loses a write after the packer has seen it succeed."""
    real = os.replace

    def losing(source: str, target: str) -> None:
        with open(source, "r+b") as file:
            file.seek(-4096 * 2, os.SEEK_END)
            file.write(bytes(512))
        real(source, target)

    monkeypatch.setattr(os, "replace", losing)
    said = run("pack", model, "--check", "--json")
    assert said.status == 2
    assert "layer 3, expert 4" in said.stderr
    assert said.stdout == ""


@pytest.mark.parametrize("command", ["ls", "pack"])
def test_what_is_no_model_is_refused_in_one_line(run: Run, tmp_path: Path, command: str) -> None:
    (tmp_path / "x").write_bytes(b"something else")
    for path, words in ((tmp_path / "x", "neither GGUF nor"), (tmp_path / "y.gguf", "No such file")):
        said = run(command, path)
        assert said.status == 2
        assert words in said.stderr
        assert str(path) in said.stderr
        assert len(said.stderr.splitlines()) == 1


def test_make(run: Run, tmp_path: Path) -> None:
    arguments = (
        "make",
        tmp_path / "m.gguf",
        "--layers",
        2,
        "--experts",
        3,
        "--shards",
        2,
        "--alignment",
        4096,
        "--json",
    )
    listing = run(*arguments).report
    paths = [tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    assert listing["paths"] == [str(path) for path in paths]
    assert rows_of(listing) == [(1, 3, 270_336, 3)]
    before = [(path.stat().st_ino, path.stat().st_mtime_ns) for path in paths]
    assert run(*arguments).status == 0
    assert [(path.stat().st_ino, path.stat().st_mtime_ns) for path in paths] == before, "it is made once"
    assert run(*arguments, "--seed", 1).status == 0
    assert [path.stat().st_mtime_ns for path in paths] != [mtime for _, mtime in before]


def test_make_replaces_nothing_that_it_did_not_make(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"precious")
    said = run("make", path)
    assert said.status == 2
    assert "it was not made by this" in said.stderr
    assert path.read_bytes() == b"precious"


def test_make_refuses_what_it_cannot_make(run: Run, tmp_path: Path) -> None:
    for options, words in (
        (("--shape", "gpt-5"), "--shape is 'gpt-5': must be one of qwen3-30b-a3b"),
        (("--form", "round"), "form one of separate, fused, single"),
        (("--type", "IQ2_XS"), "nothing here can quantise to IQ2_XS"),
        (("--type", "Q9_9"), "encoding 'Q9_9' is not known"),
        (("--alignment", "48"), "alignment is 48"),
    ):
        said = run("make", tmp_path / "m.gguf", *options)
        assert said.status == 2, said.stderr
        assert words in " ".join(said.stderr.split())
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given_name", "wanted"),
    [
        ("a.gguf", "a.experts"),
        ("a-00001-of-00003.gguf", "a.experts"),
        ("model.safetensors.index.json", "model.experts"),
        ("plain", "plain.experts"),
    ],
)
def test_name_of_what_is_packed(given_name: str, wanted: str) -> None:
    from aio_kv.cli.experts import _default_target

    assert _default_target(Path("folder") / given_name) == Path("folder") / wanted


def test_json_is_plain(run: Run, model: Path) -> None:
    assert json.loads(run("ls", model, "--json").stdout)
