"""`aio-kv bench cascade`: the hit ratios of the policies are those of the study, and what is printed is right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from aio_kv import LayoutError, StorageError
from aio_kv.cli.bench_cascade_trace import CAPACITIES, hit_ratio, read_trace, replay_trace
from aio_kv.policy import POLICY_NAMES

ROOT = Path(__file__).resolve().parent.parent
TRACES = ROOT.parent / "shared" / "data" / "traces"
COMMAND = [sys.executable, "-m", "aio_kv", "bench", "cascade"]

# Hit ratios by capacity in blocks, from an independent simulation of one block at a time: LRU, ARC, S3-FIFO.
CONVERSATION = {1_000: (0.0445, 0.0529, 0.0556), 10_000: (0.2112, 0.2246, 0.1952)}
SYNTHETIC = {
    1_000: (0.0825, 0.0909, 0.0830),
    3_000: (0.1878, 0.1965, 0.1819),
    10_000: (0.4235, 0.4315, 0.4134),
    30_000: (0.6242, 0.6260, 0.6116),
    50_000: (0.6396, 0.6396, 0.6396),
}


def needs_trace(name: str) -> str:
    path = TRACES / f"mooncake_{name}.jsonl"
    if not path.exists():
        pytest.skip(f"{path.name} is not beside the checkout, in shared/data/traces")
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "wanted"), [("conversation", CONVERSATION), ("synthetic", SYNTHETIC)])
def test_lru_is_that_of_the_study_to_four_digits(
    name: str, wanted: dict[int, tuple[float, float, float]]
) -> None:
    trace = read_trace(needs_trace(name))
    found = {blocks: round(hit_ratio(trace, "lru", blocks), 4) for blocks in wanted}
    assert found == {blocks: ratios[0] for blocks, ratios in wanted.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "column"), [("arc", 1), ("s3fifo", 2)])
def test_the_other_policies_come_close(policy: str, column: int) -> None:
    trace = read_trace(needs_trace("synthetic"))
    for blocks, ratios in SYNTHETIC.items():
        assert hit_ratio(trace, policy, blocks) == pytest.approx(ratios[column], abs=0.01), blocks


def write_trace(folder: Path, requests: list[list[int]]) -> str:
    path = folder / "small.jsonl"
    lines = [json.dumps({"timestamp": 0, "hash_ids": blocks}) for blocks in requests]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_a_hit_behind_a_miss_does_not_count(tmp_path: Path) -> None:
    path = write_trace(tmp_path, [[1, 2, 3], [1, 2, 9, 3], [9, 1]])
    trace = read_trace(path)
    assert (trace.references, trace.distinct) == (9, 4)
    for policy in POLICY_NAMES:
        assert hit_ratio(trace, policy, 10) == 4 / 9


def test_a_request_may_name_more_than_the_cache_holds(tmp_path: Path) -> None:
    trace = read_trace(write_trace(tmp_path, [list(range(10)), [8, 9, 1]]))
    assert hit_ratio(trace, "lru", 2) == 2 / 13


def test_one_row_for_each_policy_and_capacity(tmp_path: Path) -> None:
    said: list[str] = []
    rows = replay_trace(write_trace(tmp_path, [[1, 2], [1, 2, 3]]), said.append)
    assert [(row.blocks, row.policy) for row in rows] == [(c, p) for c in CAPACITIES for p in POLICY_NAMES]
    assert {row.value for row in rows} == {0.4}
    assert len(said) == len(rows)


def test_the_last_line_is_one_json_object(tmp_path: Path) -> None:
    path = write_trace(tmp_path, [[1, 2, 3], [1, 2, 9]])
    done = subprocess.run(
        [*COMMAND, "--trace", path, "--json"],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    report = json.loads(done.stdout.splitlines()[-1])
    assert [row["value"] for row in report["rows"]] == [0.333333] * len(CAPACITIES) * len(POLICY_NAMES)
    assert "Hit ratios" in done.stderr


@pytest.mark.parametrize("line", ["no json", "{}", '{"hash_ids": 3}', '{"hash_ids": [[1]]}', "[1, 2]"])
def test_a_wrong_line_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.jsonl"
    path.write_text('{"hash_ids": [1]}\n' + line + "\n")
    with pytest.raises(LayoutError, match=r"wrong\.jsonl, line 2: must be a JSON object"):
        read_trace(str(path))


def test_a_trace_that_is_not_there_or_empty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="absent"):
        read_trace(str(tmp_path / "absent"))
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(LayoutError, match="no request"):
        read_trace(str(tmp_path / "empty"))


def test_every_row_is_there_and_has_figures(tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "--dir", str(tmp_path), "--quick", "--pairs", "1", "--json"],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    rows = {row["name"]: row for row in json.loads(done.stdout.splitlines()[-1])["rows"]}
    kinds = ("hit_host", "hit_host_blocks", "miss_host", "mixed_90_10_host", "write_back")
    wanted = {f"{kind}_{size}" for kind in kinds for size in ("4KiB", "64KiB")}
    assert set(rows) == wanted | {f"book_{policy}" for policy in POLICY_NAMES}
    assert all(row["value"] > 0 for row in rows.values())
    assert all(rows[name]["baseline_name"] == "bare" for name in wanted)
    assert not list(tmp_path.iterdir()), "the scratch directory was left"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--size", "1"], "--size is '1'"),
        (["--pairs", "some"], "--pairs is 'some'"),
        (["--dir", "absent"], "--dir is 'absent'"),
        (["--device", "-1"], "--device is '-1'"),
    ],
)
def test_a_wrong_option_is_answered_in_one_line(options: list[str], complaint: str) -> None:
    done = subprocess.run(
        [*COMMAND, *options], check=False, capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.returncode == 2
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr
