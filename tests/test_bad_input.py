"""Everything that a caller or a disk can get wrong: a clear error of the right class, nothing leaked, nothing hung.

Wrong keys, memory, group numbers and scatters are checked against every backend by the conformance kit; here are the
mistakes around them.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from backends import SMALL, make_backend
from loops import every_loop
from slow_devices import PADDED, WHOLE, filled

from aio_kv import (
    AioKvError,
    BusyError,
    ClosedError,
    CorruptionError,
    EngineOptions,
    GroupKey,
    GroupLayout,
    KvKind,
    LayerFiles,
    LayoutError,
    Read,
    Scatter,
    StorageError,
    ThreadedBackend,
    UnavailableError,
    UringBackend,
    Write,
    creation,
    open_backend,
)
from aio_kv.backends import engine_session, rungs
from aio_kv.testing import MemoryBackend, MemoryFiles

K = KvKind.K
ROW = PADDED.payload_nbytes


async def open_and_close(path: Any, layout: Any = PADDED, **arguments: Any) -> None:
    async with ThreadedBackend(path, layout, options=SMALL, **arguments):
        pass


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A directory with the files of PADDED."""
    path = tmp_path / "kv"
    LayerFiles(path, PADDED, create=True).close()
    return path


@every_loop
async def test_the_table(tmp_path: Path) -> None:
    """Message and class of each mistake that a single call can make."""
    region = np.zeros(3 * 4096, np.uint8)
    aligned = region[-region.ctypes.data % 4096 :][:4096]
    key = PADDED.key(3)
    async with make_backend("uring", tmp_path)(PADDED) as backend:
        await filled(backend)
        table: list[tuple[str, Callable[[], Any], str]] = [
            (
                "a short destination",
                lambda: backend.read([Read(key, bytearray(ROW - 1))]),
                r"holds 104 bytes.*105",
            ),
            ("a long source", lambda: backend.write([Write(key, bytes(ROW + 1))]), r"holds 106 bytes.*105"),
            (
                "a short batch",
                lambda: backend.read_groups([1, 2], bytearray(ROW)),
                r"105 bytes: 2 groups.*210",
            ),
            (
                "an unknown layer",
                lambda: backend.read([Read(GroupKey(2, 0, 0, K), bytearray(ROW))]),
                r"layer is 2",
            ),
            (
                "an unknown group",
                lambda: backend.read_groups([64], bytearray(ROW)),
                r"\[0\] is 64: must be 0 to 63",
            ),
            ("a negative group", lambda: backend.read_groups([3, -1], bytearray(2 * ROW)), r"\[1\] is -1"),
            (
                "a key of a wrong type",
                lambda: backend.read([Read((0, 0), bytearray(ROW))]),
                r"must be a GroupKey",
            ),
            ("read-only memory", lambda: backend.read([Read(key, bytes(ROW))]), r"read-only"),
            ("gaps", lambda: backend.read_groups([1], np.zeros(2 * ROW, np.uint8)[::2]), r"not C-contiguous"),
            (
                "a twin in a write",
                lambda: backend.write_groups([3, 3], bytes(2 * ROW)),
                r"twice in one write",
            ),
            ("no request", lambda: backend.read([3]), r"requests\[0\] is 3: must be a Read"),  # type: ignore[list-item]
            (
                "too few offsets",
                lambda: backend.read_groups([1, 2], Scatter(aligned, np.array([0]))),
                r"1 offsets",
            ),
            (
                "a far offset",
                lambda: backend.read_groups([1], Scatter(aligned, np.array([4000]))),
                r"outside",
            ),
            (
                "a block too far",
                lambda: backend.read_block(0, 8, bytearray(4 * ROW)),
                r"block is 8: must be 0 to 7",
            ),
            (
                "a priority",
                lambda: backend.read_groups([1], bytearray(ROW), priority=7),
                r"must be a Priority",
            ),  # type: ignore[arg-type]
            (
                "a deadline",
                lambda: backend.read_groups([1], bytearray(ROW), deadline="now"),
                r"must be a time",
            ),  # type: ignore[arg-type]
        ]
        for what, call, message in table:
            with pytest.raises(LayoutError) as caught:
                call()
            assert re.search(message, str(caught.value)), f"{what}: {caught.value}"
        with pytest.raises(LayoutError, match="multiples of 4096"):
            await backend.register_landing_region(aligned[512:])
        with pytest.raises(UnavailableError, match="without a device"):
            backend.read_groups([1], bytearray(ROW), stream=0)
        with pytest.raises(UnavailableError, match="without a device"):
            backend.record_event(0)
        assert (await backend.read_groups([], bytearray())).outcomes.size == 0


@every_loop
async def test_negative_scatter_offsets() -> None:
    with pytest.raises(LayoutError, match=r"offsets\[1\] is -8"):
        Scatter(bytearray(100), np.array([0, -8]))
    with pytest.raises(LayoutError, match="must be integers"):
        Scatter(bytearray(100), np.array([0.0]))


@every_loop
async def test_a_second_opener(made: Path) -> None:
    async with ThreadedBackend(made, PADDED, options=SMALL):
        with pytest.raises(BusyError, match="is open elsewhere"):
            await open_and_close(made)
    await open_and_close(made)


@every_loop
async def test_another_layout(made: Path) -> None:
    for layout in (WHOLE, GroupLayout(2, 8, 2, 3, 7, 5, alignment=8192), GroupLayout(1, 8, 2, 3, 7, 5)):
        with pytest.raises(LayoutError):
            await open_and_close(made, layout)
    await open_and_close(made)


@every_loop
async def test_a_truncated_layer_file(made: Path) -> None:
    os.truncate(made / "layer_00001.kv", 4096)
    with pytest.raises(CorruptionError, match="wrong size") as caught:
        await open_and_close(made)
    assert caught.value.file == str(made / "layer_00001.kv")


@every_loop
async def test_a_missing_layer_file(made: Path) -> None:
    os.unlink(made / "layer_00001.kv")
    with pytest.raises(CorruptionError, match="missing"):
        await open_and_close(made)


@every_loop
async def test_no_files_and_none_wanted(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="create=True"):
        await open_and_close(tmp_path / "kv")
    assert not (tmp_path / "kv").exists()


@every_loop
async def test_a_full_disk_appears_at_creation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what was begun can be finished once there is space."""

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(creation.os, "posix_fallocate", full)
        with pytest.raises(StorageError, match="free space") as caught:
            await open_and_close(tmp_path / "kv", create=True)
        assert caught.value.errno == errno.ENOSPC
    await open_and_close(tmp_path / "kv", create=True)


@every_loop
async def test_read_only_files(made: Path) -> None:
    with LayerFiles(made, PADDED, read_only=True) as files:
        async with ThreadedBackend(files, options=SMALL) as backend:
            target = bytearray(ROW)
            await backend.read_groups([1], target)
            assert target == bytes(ROW)
            with pytest.raises(LayoutError, match="read_only"):
                backend.write_groups([1], bytes(ROW))
            await backend.flush()


@every_loop
async def test_files_that_are_closed(made: Path) -> None:
    files = LayerFiles(made, PADDED)
    files.close()
    with pytest.raises(ClosedError, match="closed"):
        await open_and_close(files, None)


@every_loop
async def test_opening_and_using_at_the_wrong_time(made: Path) -> None:
    backend = ThreadedBackend(made, PADDED, options=SMALL)
    with pytest.raises(ClosedError, match="not open"):
        backend.read_groups([0], bytearray(ROW))
    await backend.aclose()  # there is nothing to close yet
    async with backend:
        with pytest.raises(ClosedError, match="opened once"):
            await backend
        await backend.read_groups([0], bytearray(ROW))
    with pytest.raises(ClosedError, match="closed: open a new one"):
        backend.read_groups([0], bytearray(ROW))
    with pytest.raises(ClosedError):
        await backend
    for name in ("rung", "refusals", "files"):
        with pytest.raises(ClosedError):
            getattr(backend, name)
    with pytest.raises(ClosedError):
        backend.drop_page_cache()


@every_loop
async def test_arguments_of_the_constructors(made: Path) -> None:
    with LayerFiles(made, PADDED) as files:
        with pytest.raises(LayoutError, match="not that of the files"):
            ThreadedBackend(files, WHOLE)
        for layout in (None, "llama", (1, 2)):
            with pytest.raises(LayoutError, match="layout is"):
                UringBackend(made, layout)  # type: ignore[arg-type]
        with pytest.raises(LayoutError, match="must be EngineOptions"):
            ThreadedBackend(files, options={"rings": 2})  # type: ignore[arg-type]
        with pytest.raises(UnavailableError, match=r"CUDA|GPU 99"):
            await open_and_close(files, None, device=99)
    with pytest.raises(LayoutError, match="must be one of auto, uring, threads"):
        open_backend(made, PADDED, backend="mmap")
    with pytest.raises(LayoutError):
        await open_and_close([made, made])
    with pytest.raises(LayoutError):
        MemoryBackend(WHOLE, files=MemoryFiles(PADDED))
    with pytest.raises(LayoutError):
        MemoryBackend(WHOLE, alignment=8192)
    await open_and_close(made)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rings", 0),
        ("rings", 65),
        ("queue_depth", 0),
        ("threads", 0),
        ("staging_nbytes", 4096),
        ("max_requests", 0),
        ("max_transfers", 0),
        ("max_transfers", 1.0),
        ("op_nbytes_max", 40_000),
        ("small_nbytes", 1 << 30),
        ("bulk_nbytes", 4096),
        ("spin_us", -1),
        ("drain_timeout", 0),
        ("drain_timeout", float("nan")),
        ("await_spin_us", True),
    ],
)
def test_options_out_of_range(name: str, value: object) -> None:
    with pytest.raises(LayoutError, match=name):
        EngineOptions(**{name: value})  # type: ignore[arg-type]


@every_loop
@pytest.mark.parametrize("failing", ["the files", "the engine"])
async def test_a_failed_open_leaves_nothing(
    failing: str, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever goes wrong while opening: no lock, no descriptor, no thread (the suite's fixture counts them)."""

    def broken(*arguments: object, **options: object) -> None:
        raise OSError(errno.EMFILE, "no more files")

    with monkeypatch.context() as patch:
        if failing == "the files":
            patch.setattr(LayerFiles, "_open_files", broken)
        else:
            patch.setattr(engine_session, "open_engine", broken)
        with pytest.raises(OSError, match="no more files"):
            await open_and_close(made)
    await open_and_close(made)


@every_loop
async def test_a_rung_that_proves_wrong_is_not_taken(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose first read brings other bytes is refused by name and closed."""
    original = rungs._random_file

    class Forged:
        def __init__(self, probe: Any) -> None:
            self.fd, self.nbytes, self.nbytes_owed = probe.fd, probe.nbytes, probe.nbytes_owed
            self.content = bytes(probe.nbytes)

    def forged(directory: str, is_direct: bool) -> Any:
        from contextlib import contextmanager

        @contextmanager
        def opened() -> Any:
            with original(directory, is_direct) as probe:
                yield Forged(probe)

        return opened()

    monkeypatch.setattr(rungs, "_random_file", forged)
    with pytest.raises(UnavailableError, match="wrong bytes"):
        await open_and_close(made)


@every_loop
async def test_opening_is_cancelled(made: Path) -> None:
    """Everything is given back first: the next opener finds the directory free."""
    with anyio.CancelScope() as scope:
        scope.cancel()
        async with ThreadedBackend(made, PADDED, options=SMALL):
            await anyio.sleep(10)
    assert scope.cancelled_caught
    await open_and_close(made)


@every_loop
async def test_an_exception_in_the_body_closes(made: Path) -> None:
    with suppress(AioKvError):
        async with ThreadedBackend(made, PADDED, options=SMALL) as backend:
            backend.read_groups([1], bytearray(ROW))
            raise BusyError("by the body")
    await open_and_close(made)
