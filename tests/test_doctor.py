"""`aio-kv doctor`: what it finds here, what it finds where something is refused, and how it says so."""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import require_locked_memory, run_program

from aio_kv import GroupLayout, LayerFiles
from aio_kv.backends import rungs
from aio_kv.backends.rungs import open_engine
from aio_kv.blockdevice import BlockDevice
from aio_kv.cli import doctor_checks, main
from aio_kv.direct import DirectProbe
from aio_kv.engine import RingInfo, has_extension
from aio_kv.engine.options import EngineOptions

NAMES = {
    *("kernel", "compiled extension", "io_uring", "locked memory", "registered memory", "huge pages"),
    *("file system", "direct I/O", "block device", "CUDA"),
}
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
native_only = pytest.mark.skipif(not has_extension(), reason="the compiled extension is not installed")


class Doctor:
    """Runs the command in this process, as the console script does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capfd = capfd

    def run(self, *arguments: str) -> tuple[int, str, str]:
        self._monkeypatch.setattr(sys, "argv", ["aio-kv", "doctor", *arguments])
        self._monkeypatch.setenv("COLUMNS", "200")
        self._capfd.readouterr()
        status = 0
        try:
            main()
        except SystemExit as ended:
            status = int(ended.code or 0)
        caught = self._capfd.readouterr()
        return status, caught.out, caught.err

    def findings(self, folder: Path) -> tuple[str, dict[str, dict[str, Any]]]:
        """The rung and the checks by name."""
        status, out, _ = self.run("--json", "--dir", str(folder))
        assert status == 0
        said = json.loads(out.splitlines()[-1])
        return said["rung"], {check["name"]: check for check in said["checks"]}


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Doctor:
    return Doctor(monkeypatch, capfd)


def test_json_is_one_object_on_the_only_line(doctor: Doctor, tmp_path: Path) -> None:
    status, out, err = doctor.run("--json", "--dir", str(tmp_path))
    assert status == 0
    assert len(out.splitlines()) == 1
    said = json.loads(out)
    assert set(said) == {"rung", "checks"}
    assert {check["name"] for check in said["checks"]} >= NAMES
    for check in said["checks"]:
        assert set(check) == {"name", "ok", "detail", "hint"}
        assert isinstance(check["ok"], bool)
        assert check["detail"]
        assert not (check["ok"] and check["hint"]), "nothing is to be done about what works"
    assert said["rung"] in err, "the table is for people, and goes to stderr"


def test_table(doctor: Doctor, tmp_path: Path) -> None:
    status, out, _ = doctor.run("--dir", str(tmp_path))
    rung, checks = doctor.findings(tmp_path)
    assert status == 0
    assert f"rung in force: {rung}" in out
    assert all(name in out for name in checks)


def test_nothing_is_left_in_the_directory(doctor: Doctor, tmp_path: Path) -> None:
    doctor.run("--dir", str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_the_working_directory_is_the_default(
    doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, _ = doctor.run()
    assert status == 0
    assert "rung in force" in out
    assert list(tmp_path.iterdir()) == []


def test_agrees_with_what_a_backend_gets(doctor: Doctor, tmp_path: Path) -> None:
    rung, checks = doctor.findings(tmp_path)
    with LayerFiles(tmp_path / "kv", GroupLayout(1, 2, 1, 16, 64, 2), create=True) as files:
        opened = open_engine(files, EngineOptions())
        info = opened.engine.ring_info()
        opened.engine.close()
        assert rung == opened.rung
        assert checks["direct I/O"]["ok"] == (files.direct_alignment is not None)
    assert checks["io_uring"]["ok"] == opened.mechanism.startswith("uring")
    assert checks["registered memory"]["ok"] == (info.registered_nbytes == 64 << 20)
    refused = {name.removeprefix("rung ") for name in checks if name.startswith("rung ")}
    assert refused == {refusal.rung for refusal in opened.refusals}


@pytest.mark.parametrize("what", ["missing", "file", "missing/below"])
def test_an_unusable_directory_is_status_2(doctor: Doctor, tmp_path: Path, what: str) -> None:
    (tmp_path / "file").touch()
    status, out, err = doctor.run("--json", "--dir", str(tmp_path / what))
    assert (status, out) == (2, "")
    assert err.startswith("aio-kv: ")
    assert str(tmp_path / what) in err
    assert "--dir" in err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@linux_only
def test_a_directory_that_takes_no_files_is_status_2(doctor: Doctor) -> None:
    status, _, err = doctor.run("--dir", "/proc")
    assert status == 2
    assert "/proc" in err


def test_refused_direct_io(doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = DirectProbe(None, "EINVAL on the first read")
    monkeypatch.setattr("aio_kv.direct._probe_file", lambda path: refused)
    rung, checks = doctor.findings(tmp_path)
    assert rung.endswith("-buffered")
    for name in ("direct I/O", "rung direct"):
        assert not checks[name]["ok"]
        assert checks[name]["detail"] == "EINVAL on the first read"
        assert "ext4" in checks[name]["hint"]


def test_without_the_extension(doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (rungs, doctor_checks):
        monkeypatch.setattr(module, "has_extension", lambda: False)
    rung, checks = doctor.findings(tmp_path)
    assert rung.startswith("threads-python-")
    for name in ("compiled extension", "io_uring", "rung uring", "rung threads"):
        assert not checks[name]["ok"]
        assert checks[name]["hint"]


@pytest.mark.parametrize(
    ("device", "words"),
    [
        (BlockDevice("md0", 512 << 10, 1024, True, False), ("md RAID", "path=[")),
        (BlockDevice("sda", None, None, False, True), ("rotates", "queue/rotational")),
        (BlockDevice("", None, None, False, False), ("none", "ext4")),
    ],
)
def test_devices_to_be_warned_of(
    doctor: Doctor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: BlockDevice,
    words: tuple[str, ...],
) -> None:
    monkeypatch.setattr(doctor_checks, "block_device_of", lambda path: device)
    _, checks = doctor.findings(tmp_path)
    assert not checks["block device"]["ok"]
    told = f"{checks['block device']['detail']} {checks['block device']['hint']}"
    assert all(word in told for word in words)


def test_an_old_kernel(doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, checks = doctor.findings(tmp_path)
    if not checks["io_uring"]["ok"]:
        pytest.skip(f"there is no ring here: {checks['io_uring']['detail']}")
    info = RingInfo(1 << 3, True, False, errno.EINVAL, 64 << 20, 0)
    monkeypatch.setattr("aio_kv.engine.native.Engine.ring_info", lambda engine, ring=0: info)
    rung, checks = doctor.findings(tmp_path)
    assert rung.startswith("uring-")
    assert not rung.startswith("uring-fixed")
    assert checks["ring flags"]["detail"] == "CQSIZE"
    assert "kernel" in checks["ring flags"]["hint"]
    assert "EINVAL" in checks["registered memory"]["detail"]
    assert "kernel" in checks["rung uring-fixed"]["hint"]


def found_in_sandbox(restriction: str, folder: Path) -> tuple[str, dict[str, dict[str, Any]]]:
    program = f"""
import sys
from sandbox import *
from aio_kv.cli import main
{restriction}
sys.argv = ["aio-kv", "doctor", "--json", "--dir", {str(folder)!r}]
main()
"""
    said = json.loads(run_program(program).splitlines()[-1])
    return said["rung"], {check["name"]: check for check in said["checks"]}


@pytest.mark.slow
@linux_only
@native_only
@pytest.mark.parametrize(("number", "cause"), [(errno.EPERM, "seccomp"), (errno.ENOSYS, "kernel")])
def test_names_what_refuses_io_uring(tmp_path: Path, number: int, cause: str) -> None:
    rung, checks = found_in_sandbox(f"refuse_uring({number})", tmp_path)
    assert rung.startswith("threads-")
    for name in ("io_uring", "rung uring"):
        assert not checks[name]["ok"]
        assert errno.errorcode[number] in checks[name]["detail"]
        assert cause in checks[name]["hint"]
    assert not checks["registered memory"]["ok"]


@pytest.mark.slow
@linux_only
@native_only
def test_names_the_limit_of_locked_memory(tmp_path: Path) -> None:
    rung, checks = found_in_sandbox("limit_locked_memory(65536)", tmp_path)
    if not checks["io_uring"]["ok"]:
        pytest.skip("there is no ring here")
    assert rung.startswith("uring-")
    assert not rung.startswith("uring-fixed")
    assert "64 KiB" in checks["locked memory"]["detail"]
    assert "ENOMEM" in checks["registered memory"]["detail"]
    for name in ("locked memory", "registered memory", "rung uring-fixed"):
        assert not checks[name]["ok"]
        assert "memlock" in checks[name]["hint"]


@pytest.mark.slow
@linux_only
@native_only
def test_tells_how_much_of_it_could_be_registered(tmp_path: Path) -> None:
    require_locked_memory(6 << 20)
    _, checks = found_in_sandbox("limit_locked_memory(6 << 20)", tmp_path)
    if not checks["io_uring"]["ok"]:
        pytest.skip("there is no ring here")
    assert checks["registered memory"]["detail"] == "4 of 64 MiB (ENOMEM)"
    assert "memlock" in checks["registered memory"]["hint"]
