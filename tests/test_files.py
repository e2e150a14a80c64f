"""Layer files: creation, reopening, locks, headers, damage, a full disk, interruption, and nothing left open."""

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from aio_kv import (
    BusyError,
    ClosedError,
    CorruptionError,
    DirectAlignment,
    GroupLayout,
    KvKind,
    LayerFiles,
    LayoutError,
    StorageError,
    UnavailableError,
    creation,
    direct,
)
from aio_kv.header import HEADER_NBYTES_MAX, Header

LAYOUT = GroupLayout(3, 4, 2, 2, 8, 2)
FILE_NBYTES = 4 * 2 * 2 * 4096

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="descriptors are counted in /proc")


def open_fds() -> set[str]:
    return {f"{fd}:{os.readlink(f'/proc/self/fd/{fd}')}" for fd in os.listdir("/proc/self/fd") if is_open(fd)}


def is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    before = open_fds()
    yield
    assert open_fds() == before


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A directory with the files of LAYOUT, closed."""
    path = tmp_path / "kv"
    LayerFiles(path, LAYOUT, create=True).close()
    return path


@contextmanager
def refused(error: type[Exception], *parts: str) -> Iterator[None]:
    with pytest.raises(error) as caught:
        yield
    for part in parts:
        assert part in str(caught.value)


def rewrite_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the header and make its checksum right again."""
    fields = json.loads((path / "layout.json").read_text())
    fields.pop("crc32")
    change(fields)
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    (path / "layout.json").write_text(json.dumps(fields | {"crc32": zlib.crc32(canonical.encode())}))


def test_creation_makes_whole_private_files(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    old = os.umask(0o277)
    try:
        with LayerFiles(tmp_path / "kv", LAYOUT, create=True, model="m@1") as files:
            assert files.layout is LAYOUT
            assert not files.read_only
            assert files.directories == (str(tmp_path / "kv"),)
    finally:
        os.umask(old)
    names = sorted(os.listdir(tmp_path / "kv"))
    assert names == ["layer_00000.kv", "layer_00001.kv", "layer_00002.kv", "layout.json"]
    for name in names:
        status = os.stat(tmp_path / "kv" / name)
        assert status.st_mode & 0o777 == 0o600
        if name.endswith(".kv"):
            assert status.st_size == FILE_NBYTES
            assert status.st_blocks * 512 >= FILE_NBYTES
    assert json.loads((tmp_path / "kv" / "layout.json").read_text())["model"] == "m@1"


def test_reopening_keeps_the_bytes(made: Path) -> None:
    with LayerFiles(made, LAYOUT) as files:
        os.pwrite(files.fd(1), b"kept", 4096)
        files.sync()
        files.drop_page_cache()
    for options in ({"create": True}, {"read_only": True}, {}):
        with LayerFiles(made, LAYOUT, **options) as files:
            assert os.pread(files.fd(1), 4, 4096) == b"kept"
            files.drop_page_cache()


def test_dirty_pages_are_written_before_the_cache_is_dropped(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, int]] = []
    monkeypatch.setattr(os, "fdatasync", lambda fd: calls.append(("sync", fd)))
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, *_: calls.append(("advise", fd)))
    with LayerFiles(made, LAYOUT) as files:
        files.drop_page_cache()
        assert calls == [(name, fd) for name in ("sync", "advise") for fd in files.fds()]
    calls.clear()
    with LayerFiles(made, LAYOUT, read_only=True) as files:
        files.drop_page_cache()
        assert calls == [("advise", fd) for fd in files.fds()]


def test_read_only_refuses_writing(made: Path) -> None:
    with LayerFiles(made, LAYOUT, read_only=True) as files:
        assert files.read_only
        with pytest.raises(OSError, match="descriptor"):
            os.pwrite(files.fd(0), b"x", 0)
    with refused(LayoutError, "create", "read_only"):
        LayerFiles(made, LAYOUT, create=True, read_only=True)


def test_missing_files_need_create(tmp_path: Path) -> None:
    with refused(StorageError, "create=True", "ENOENT"):
        LayerFiles(tmp_path, LAYOUT)
    with refused(StorageError, "ENOENT", "nowhere"):
        LayerFiles(tmp_path / "nowhere", LAYOUT)
    with refused(StorageError, "ENOENT"):
        LayerFiles(tmp_path / "no" / "parent", LAYOUT, create=True)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("layout", "field"),
    [
        (dataclasses.replace(LAYOUT, num_blocks=8), "num_blocks 4, wanted 8"),
        (dataclasses.replace(LAYOUT, num_blocks=2, num_kv_heads=4), "num_blocks 4, wanted 2"),
        (dataclasses.replace(LAYOUT, kinds=(KvKind.V, KvKind.K)), "kinds ['K', 'V'], wanted ['V', 'K']"),
        (dataclasses.replace(LAYOUT, itemsize=1), "itemsize 2, wanted 1"),
        (dataclasses.replace(LAYOUT, alignment=512), "alignment 4096, wanted 512"),
    ],
)
@pytest.mark.parametrize("create", [False, True])
def test_other_geometry_is_refused(made: Path, layout: GroupLayout, field: str, create: bool) -> None:
    with refused(LayoutError, "layout.json", field):
        LayerFiles(made, layout, create=create)


def test_other_model_is_refused(made: Path) -> None:
    with refused(LayoutError, "model '', wanted 'llama'"):
        LayerFiles(made, LAYOUT, model="llama")
    for model in (None, "x" * 5000):
        with refused(LayoutError, "model is"):
            LayerFiles(made, LAYOUT, model=model)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda fields: fields.update(version=2), "version 2, newer than 1"),
        (lambda fields: fields.update(version="1"), "version 1"),
        (lambda fields: fields.update(format="other"), "format 'other'"),
        (lambda fields: fields.update(num_blocks=4.0), "num_blocks 4.0"),
        (lambda fields: fields.pop("model"), "model None"),
        (lambda fields: fields.update(extra=1), "unknown fields ['extra']"),
    ],
)
def test_sound_headers_that_say_something_else_are_refused(made: Path, change: Any, message: str) -> None:
    rewrite_header(made, change)
    with refused(LayoutError, message):
        LayerFiles(made, LAYOUT)


SOUND = Header(LAYOUT, "", 0, 1).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        SOUND[:-5],
        SOUND.replace(b'"num_blocks": 4', b'"num_blocks": 5'),
        SOUND.replace(b'"crc32"', b'"crc33"'),
        b"[" * 20_000,
        b"[1]",
        b"\xff\xfe",
        b'{"a": NaN}',
        SOUND + b" " * HEADER_NBYTES_MAX,
    ],
)
def test_damaged_headers_are_refused(made: Path, data: bytes) -> None:
    (made / "layout.json").write_bytes(data)
    with refused(CorruptionError, "layout.json"):
        LayerFiles(made, LAYOUT, create=True)
    assert (made / "layout.json").read_bytes() == data


@pytest.mark.parametrize("nbytes", [0, FILE_NBYTES - 1, FILE_NBYTES + 1])
def test_files_of_another_size_are_refused(made: Path, nbytes: int) -> None:
    os.truncate(made / "layer_00001.kv", nbytes)
    for create in (False, True):
        with refused(
            CorruptionError, "layer_00001.kv", f"expected {FILE_NBYTES} bytes, found {nbytes} bytes"
        ):
            LayerFiles(made, LAYOUT, create=create)


def test_a_lost_file_is_not_made_again(made: Path) -> None:
    os.unlink(made / "layer_00002.kv")
    with refused(CorruptionError, "layer_00002.kv", "missing"):
        LayerFiles(made, LAYOUT, create=True)


@pytest.mark.parametrize("name", ["layer_00001.kv", "layout.json"])
def test_symbolic_links_are_refused(made: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    os.rename(made / name, made / "elsewhere")
    os.symlink("elsewhere", made / name)
    with refused(StorageError, name, "symbolic links are refused"):
        LayerFiles(made, LAYOUT)
    # A link put in place after the first look is refused by the open itself.
    monkeypatch.setattr(os, "lstat", os.stat)
    with refused(StorageError, name, "symbolic links are refused"):
        LayerFiles(made, LAYOUT)


@pytest.mark.parametrize("name", ["layer_00001.kv", "layout.json"])
def test_only_regular_files_are_opened(made: Path, name: str) -> None:
    os.unlink(made / name)
    os.mkfifo(made / name)
    with refused(CorruptionError, name, "a regular file"):
        LayerFiles(made, LAYOUT)


def test_a_second_opener_is_refused(made: Path) -> None:
    with LayerFiles(made, LAYOUT):
        for read_only in (False, True):
            with refused(BusyError, str(made), "close the other opener"):
                LayerFiles(made, LAYOUT, read_only=read_only)
    LayerFiles(made, LAYOUT).close()


def test_readers_share(made: Path) -> None:
    with LayerFiles(made, LAYOUT, read_only=True):
        with LayerFiles(made, LAYOUT, read_only=True) as files:
            assert len(files.fds()) == 3
        with refused(BusyError, str(made)):
            LayerFiles(made, LAYOUT)


def test_layers_are_dealt_over_directories(tmp_path: Path) -> None:
    paths = [tmp_path / "a", str(tmp_path / "b")]
    with LayerFiles(paths, LAYOUT, create=True) as files:
        assert files.path_of(0) == str(tmp_path / "a" / "layer_00000.kv")
        assert files.path_of(1) == str(tmp_path / "b" / "layer_00001.kv")
        assert files.path_of(2) == str(tmp_path / "a" / "layer_00002.kv")
        assert [os.readlink(f"/proc/self/fd/{fd}") for fd in files.fds()] == list(
            map(files.path_of, range(3))
        )
    with refused(LayoutError, "directory_index 1, wanted 0"):
        LayerFiles(paths[::-1], LAYOUT)
    with refused(LayoutError, "directory_count 2, wanted 1"):
        LayerFiles(paths[0], LAYOUT)


def test_an_emptied_directory_is_not_filled_with_zeros(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    LayerFiles(paths, LAYOUT, create=True).close()
    for name in os.listdir(paths[1]):
        os.unlink(paths[1] / name)
    with refused(LayoutError, str(paths[1]), "lost"):
        LayerFiles(paths, LAYOUT, create=True)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ([], "0 directories"),
        (["a", "b", "c", "d"], "4 directories given: must be 1 to 3"),
        (["a", "./a"], "twice"),
        (7, "path is 7"),
        (b"a", "path is b'a'"),
        ([7], "no path"),
    ],
)
def test_bad_paths_are_refused(path: Any, message: str) -> None:
    with refused(LayoutError, message):
        LayerFiles(path, LAYOUT)
    with refused(LayoutError, "must be a GroupLayout"):
        LayerFiles("a", None)  # type: ignore[arg-type]


def test_layers_are_checked_and_closing_ends_all(made: Path) -> None:
    files = LayerFiles(made, LAYOUT)
    for layer in (-1, 3, True, 0.0):
        with refused(LayoutError, "layer is"):
            files.fd(layer)  # type: ignore[arg-type]
    files.close()
    files.close()
    assert files.closed
    for call in (files.fds, files.sync, files.drop_page_cache, lambda: files.fd(0)):
        with refused(ClosedError, str(made)):
            call()


def test_files_without_header_are_never_touched(made: Path) -> None:
    os.unlink(made / "layout.json")
    for create in (False, True):
        with refused(LayoutError, "layer_*.kv", "remove"):
            LayerFiles(made, LAYOUT, create=create)
    assert len(os.listdir(made)) == 3


def interrupted(made: Path, *, present: int) -> None:
    """Turn finished files into what a crash during creation leaves, with `present` files, the last half-made."""
    os.rename(made / "layout.json", made / "layout.json.creating")
    for layer in range(present, 3):
        os.unlink(made / f"layer_{layer:05d}.kv")
    if present:
        os.truncate(made / f"layer_{present - 1:05d}.kv", 5000)


@pytest.mark.parametrize("present", [0, 1, 3])
def test_interrupted_creation_is_finished(made: Path, present: int) -> None:
    interrupted(made, present=present)
    with refused(StorageError, "interrupted", "create=True"):
        LayerFiles(made, LAYOUT)
    with LayerFiles(made, LAYOUT, create=True) as files:
        assert all(os.fstat(fd).st_size == FILE_NBYTES for fd in files.fds())
    assert not (made / "layout.json.creating").exists()


def test_interrupted_creation_of_another_layout_is_refused(made: Path) -> None:
    interrupted(made, present=2)
    with refused(LayoutError, "layout.json.creating", "remove"):
        LayerFiles(made, dataclasses.replace(LAYOUT, num_blocks=5), create=True)
    os.truncate(made / "layout.json.creating", 10)  # Cut short, but there are files: not what a crash leaves.
    with refused(LayoutError, "layout.json.creating"):
        LayerFiles(made, LAYOUT, create=True)
    assert sorted(os.listdir(made)) == ["layer_00000.kv", "layer_00001.kv", "layout.json.creating"]


def test_a_header_cut_short_by_a_crash_is_written_again(made: Path) -> None:
    interrupted(made, present=0)
    os.truncate(made / "layout.json.creating", 10)
    LayerFiles(made, LAYOUT, create=True).close()


def test_interruption_between_directories_is_finished(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    LayerFiles(paths, LAYOUT, create=True).close()
    os.rename(paths[1] / "layout.json", paths[1] / "layout.json.creating")
    LayerFiles(paths, LAYOUT, create=True).close()
    assert (paths[1] / "layout.json").exists()


KILLED = """
import os, signal, sys
from aio_kv import GroupLayout, LayerFiles
step, calls = int(sys.argv[2]), 0
def counted(function):
    def call(*arguments, **options):
        global calls
        calls += 1
        if calls == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)
    return call
for name in ("fsync", "posix_fallocate", "replace"):
    setattr(os, name, counted(getattr(os, name)))
LayerFiles([sys.argv[1] + "/a", sys.argv[1] + "/b"], GroupLayout(3, 4, 2, 2, 8, 2), create=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 2, 4, 6, 8, 12, 13, 15])
def test_a_kill_at_any_step_can_be_recovered_from(tmp_path: Path, step: int) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), str(step)], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    with LayerFiles([tmp_path / "a", tmp_path / "b"], LAYOUT, create=True) as files:
        assert all(os.fstat(fd).st_size == FILE_NBYTES for fd in files.fds())


def fail_at(function: Callable[..., Any], count: int, number: int) -> Callable[..., Any]:
    """Return `function` failing with error `number` at its call `count`."""
    calls = iter(range(1, 10**6))

    def call(*arguments: Any) -> Any:
        if next(calls) == count:
            raise OSError(number, os.strerror(number))
        return function(*arguments)

    return call


def test_a_disk_that_fills_up_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for paths in ([tmp_path / "kv"], [tmp_path / "a", tmp_path / "b"]):
        monkeypatch.setattr(os, "posix_fallocate", fail_at(os.posix_fallocate, 2, errno.ENOSPC))
        with refused(StorageError, "ENOSPC", "layer_0000", str(FILE_NBYTES), "are free"):
            LayerFiles(paths, LAYOUT, create=True)
        monkeypatch.undo()
        assert os.listdir(tmp_path) == []


def test_failure_keeps_what_others_made(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(made, present=1)
    (made / "notes.txt").write_text("mine")
    monkeypatch.setattr(os, "posix_fallocate", fail_at(os.posix_fallocate, 3, errno.ENOSPC))
    with refused(StorageError, "ENOSPC"):
        LayerFiles(made, LAYOUT, create=True)
    assert sorted(os.listdir(made)) == ["layer_00000.kv", "layout.json.creating", "notes.txt"]


@pytest.mark.parametrize("name", ["fsync", "replace", "mkdir", "listdir", "fchmod", "statvfs"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_failure_at_any_call_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, count: int
) -> None:
    paths = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    monkeypatch.setattr(os, name, fail_at(getattr(os, name), count, errno.EIO))
    with refused(StorageError, "EIO"):
        LayerFiles(paths, LAYOUT, create=True)
    monkeypatch.undo()
    assert [str(path) for path in tmp_path.rglob("*")] == []
    LayerFiles(paths, LAYOUT, create=True).close()


def test_running_out_of_descriptors_leaves_none_open(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LayerFiles(made, LAYOUT) as files:
        opens = (
            1 + 1 + 3 + (4 if files.direct_alignment else 0)
        )  # directory, header, layers, probe and layers
    for count in range(1, opens + 1):
        before = open_fds()
        monkeypatch.setattr(os, "open", fail_keywords_at(os.open, count, errno.EMFILE))
        with refused(StorageError, "EMFILE", "ulimit -n"):
            LayerFiles(made, LAYOUT)
        monkeypatch.undo()
        assert open_fds() == before
    LayerFiles(made, LAYOUT).close()


def fail_keywords_at(function: Callable[..., Any], count: int, number: int) -> Callable[..., Any]:
    failing = fail_at(lambda arguments, options: function(*arguments, **options), count, number)
    return lambda *arguments, **options: failing(arguments, options)


def test_lack_of_space_is_noticed_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        os, "fsync", fail_at(os.fsync, 1, errno.EIO)
    )  # The first thing that writing would do.
    space = os.statvfs(tmp_path)
    blocks = space.f_bavail * space.f_frsize // (3 * 16384) + 1000
    with refused(StorageError, "ENOSPC", "are needed", "are free"):
        LayerFiles(tmp_path / "kv", dataclasses.replace(LAYOUT, num_blocks=blocks), create=True)
    assert os.listdir(tmp_path) == []


def test_a_really_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=128k", "none", str(mount)]
    try:
        is_mounted = subprocess.run(command, check=False, capture_output=True, timeout=60).returncode == 0
    except FileNotFoundError:
        is_mounted = False
    if not is_mounted:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        with refused(StorageError, "ENOSPC"):
            LayerFiles(mount / "kv", LAYOUT, create=True)
        monkeypatch.setattr(creation, "_check_free_space", lambda plans: None)
        with refused(StorageError, "ENOSPC", "are free"):
            LayerFiles(mount / "kv", LAYOUT, create=True)
        assert os.listdir(mount) == []
    finally:
        subprocess.run(["umount", str(mount)], check=True, timeout=60)


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL])
def test_zeros_are_written_where_space_cannot_be_reserved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*arguments: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    monkeypatch.setattr(creation, "_ZEROS_NBYTES", 5000)
    with LayerFiles(tmp_path / "kv", LAYOUT, create=True) as files:
        assert os.pread(files.fd(2), FILE_NBYTES + 1, 0) == bytes(FILE_NBYTES)


def fake_reads(*, memory: int, offset: int) -> Callable[[int, memoryview, int], int]:
    """Direct reads of a device that asks for these alignments."""
    from aio_kv.memory import host_address

    def read(fd: int, view: memoryview, file_offset: int) -> int:
        address = host_address(view, writable=True, what="view").address
        if address % memory or view.nbytes % offset or file_offset % offset:
            raise OSError(errno.EINVAL, "unaligned")
        return view.nbytes

    return read


@pytest.mark.skipif(not direct.SUPPORTS_DIRECT, reason="this system has no direct I/O")
@pytest.mark.parametrize("offset", [512, 4096])
@pytest.mark.parametrize("memory", [512, 4096])
def test_direct_alignment_is_found_by_doing(
    made: Path, monkeypatch: pytest.MonkeyPatch, memory: int, offset: int
) -> None:
    with LayerFiles(made, LAYOUT) as files:
        if files.direct_alignment is None:
            pytest.skip(f"no direct I/O here: {files.direct_refusal}")
    monkeypatch.setattr(direct, "read_at", fake_reads(memory=memory, offset=offset))
    with LayerFiles(made, LAYOUT) as files:
        assert files.direct_alignment == DirectAlignment(memory, offset)
        assert files.direct_refusal is None
        assert len({*files.fds(), *files.fds(direct=True)}) == 6


def test_without_direct_io_there_is_a_reason(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "read_at", fake_reads(memory=8192 * 8192, offset=8192))
    with LayerFiles(made, LAYOUT) as files:
        assert files.direct_alignment is None
        assert files.direct_refusal
        assert len(files.fds()) == 3
        with refused(UnavailableError, files.direct_refusal, "direct=False"):
            files.fds(direct=True)


def test_groups_finer_than_the_device_are_not_read_directly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "read_at", fake_reads(memory=512, offset=4096))
    fine = dataclasses.replace(LAYOUT, alignment=512, num_blocks=64)
    with LayerFiles(tmp_path / "kv", fine, create=True) as files:
        assert files.direct_alignment is None
        if direct.SUPPORTS_DIRECT:
            assert files.direct_refusal is not None
            assert "512" in files.direct_refusal
