"""`ExpertReader` and its oracle: exact bytes, exact lengths, clean page caches, and errors that say what they mean."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import anyio
import numpy as np
import pytest
from backends import SMALL, TIGHT
from expert_files import Model, make_model
from loops import every_loop, on_one_loop
from page_cache import make_cold, resident_nbytes

from aio_kv import (
    BusyError,
    ClosedError,
    CorruptionError,
    LayoutError,
    Priority,
    Scatter,
    ShortReadError,
    StorageError,
    TransferError,
    UnavailableError,
    allocate_host,
    direct,
)
from aio_kv.backends import rungs
from aio_kv.direct import DirectProbe
from aio_kv.engine import has_extension
from aio_kv.experts import DirectSegment, ExpertMap, ExpertReader, PosixExpertReader

WAYS = {
    "uring-direct": ("uring", "on", SMALL),
    "uring-buffered": ("uring", "off", SMALL),
    "uring-tight": ("uring", "on", TIGHT),
    "threads-direct": ("threads", "on", SMALL),
    "threads-buffered": ("threads", "off", TIGHT),
    "python-direct": ("python", "on", SMALL),
    "python-buffered": ("python", "off", TIGHT),
}
ways = pytest.mark.parametrize("way", WAYS)
FILLER = 0xA5


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return make_model(tmp_path)


@asynccontextmanager
async def reader_on(model: Model, way: str, **changes: object) -> AsyncIterator[ExpertReader]:
    """An open reader on one rung and in one file mode; skipped where the extension is needed and not there."""
    backend, mode, options = WAYS[way]
    if backend != "python" and not has_extension():
        pytest.skip("the compiled extension is not installed")
    with pytest.MonkeyPatch.context() as patch:
        if backend == "python":
            patch.setattr(rungs, "has_extension", lambda: False)
            backend = "threads"
        arguments = {"direct": mode, "backend": backend, "options": options, **changes}
        async with ExpertReader(model.experts, **arguments) as reader:  # type: ignore[arg-type]
            assert reader.rung.endswith("direct" if mode == "on" else "buffered")
            yield reader


@every_loop
@ways
async def test_every_expert_has_its_bytes(way: str, model: Model) -> None:
    async with reader_on(model, way) as reader:
        for layer in model.experts.layers:
            slot = model.experts.slot_nbytes(layer)
            ids = [3, 0, 2, 1, 3]
            memory = np.full(len(ids) * slot, FILLER, np.uint8)
            report = await reader.read(layer, ids, memory)
            assert report.nbytes == len(memory)
            for index, expert in enumerate(ids):
                assert memory[index * slot :][:slot].tobytes() == model.image(layer, expert)


@pytest.mark.parametrize("mode", ["on", "off"])
def test_the_oracle_reads_what_is_in_the_files(mode: str, model: Model) -> None:
    with PosixExpertReader(model.experts, direct=mode) as oracle:
        for layer, expert in model.everything():
            memory = bytearray(b"\xa5" * (model.experts.slot_nbytes(layer) + 1))
            oracle.read(layer, expert, memory)
            assert memory == model.image(layer, expert) + b"\xa5"
    with pytest.raises(ClosedError):
        oracle.read(0, 0, memory)


@every_loop
@ways
async def test_what_is_not_owed_is_left_alone(way: str, model: Model) -> None:
    """Windows reach beyond their segments on both sides; memory beside the slot must not notice."""
    async with reader_on(model, way) as reader:
        layer, slot = 0, model.experts.slot_nbytes(0)
        memory = np.frombuffer(allocate_host(8 * slot), np.uint8)
        memory[:] = FILLER
        offsets = np.array([100, 100 + 2 * slot, 4 * slot + 512])
        await reader.read(layer, [1, 3, 2], Scatter(memory, offsets))
        wanted = np.full(len(memory), FILLER, np.uint8)
        for offset, expert in zip(offsets, [1, 3, 2], strict=True):
            wanted[offset : offset + slot] = np.frombuffer(model.image(layer, expert), np.uint8)
        assert np.array_equal(memory, wanted)


@every_loop
@ways
async def test_many_reads_at_once(way: str, model: Model) -> None:
    async with reader_on(model, way) as reader:
        jobs = [*model.everything() * 5]
        memories = [bytearray(model.experts.slot_nbytes(layer)) for layer, _ in jobs]

        async def read(index: int) -> None:
            layer, expert = jobs[index]
            priority = Priority(index % 3)
            while True:
                try:
                    transfer = reader.read(layer, expert, memories[index], priority=priority)
                    break
                except BusyError:
                    await reader.wait_ready()
            await transfer

        async with anyio.create_task_group() as group:
            for index in range(len(jobs)):
                group.start_soon(read, index)
        for (layer, expert), memory in zip(jobs, memories, strict=True):
            assert memory == model.image(layer, expert)


@every_loop
async def test_registered_memory_needs_no_staging_where_everything_is_aligned(tmp_path: Path) -> None:
    model = make_model(tmp_path, sizes=[(8192, 4096)], alignment=4096)
    async with reader_on(model, "uring-direct") as reader:
        memory = allocate_host(1 << 21)
        async with await reader.register_landing_region(memory):
            before = reader.statistics().engine
            await reader.read(0, [0, 1, 2, 3], memory[: 4 * 12288])
            after = reader.statistics().engine
            assert after.bytes_staged == before.bytes_staged
            assert after.fixed_ops - before.fixed_ops == after.ops - before.ops
        assert bytes(memory[12288:24576]) == model.image(0, 1)


@every_loop
@ways
async def test_a_file_that_ends_too_early(way: str, model: Model) -> None:
    """The error names the file, where, and how much came; what is still there can be read as before."""
    async with reader_on(model, way) as reader:
        last = max(
            (
                segment
                for layer, expert in model.everything()
                for segment in model.experts.segments(layer, expert)
            ),
            key=lambda segment: (segment.shard == 0, segment.file_offset),
        )
        path = model.experts.paths[0]
        os.truncate(path, last.file_offset + last.nbytes - 1)
        with pytest.raises(TransferError) as caught:
            await reader.read_segments([last], bytearray(1 << 16))
        first = caught.value.report.errors[0]
        assert isinstance(first, ShortReadError)
        assert first.file == str(path)
        assert first.file_offset is not None
        assert first.file_offset <= last.file_offset + last.nbytes - 1
        assert first.nbytes is not None
        assert first.file_offset + first.nbytes == last.file_offset + last.nbytes
        assert first.arrived == first.nbytes - 1
        kept = replace(last, nbytes=last.nbytes - 1)
        memory = bytearray(1 << 16)
        await reader.read_segments([kept], memory)
        assert (
            memory[last.slot_offset :][: kept.nbytes] == model.content[0][last.file_offset :][: kept.nbytes]
        )


@pytest.mark.parametrize("mode", ["on", "off"])
def test_the_oracle_notices_it_too(mode: str, model: Model) -> None:
    with PosixExpertReader(model.experts, direct=mode) as oracle:
        for path in model.experts.paths:
            os.truncate(path, path.stat().st_size - 1)
        with pytest.raises(ShortReadError, match=r"only \d+ bytes arrived"):
            oracle.read(2, 3, bytearray(1 << 16))  # its tensor is the last of its file


@every_loop
async def test_one_expert_of_several_fails(model: Model) -> None:
    """A report says which: requests have different numbers of I/Os, and each is judged by its own."""
    async with reader_on(model, "threads-buffered") as reader:
        shard = model.experts.segments(2, 3)[0].shard  # of a layer whose tensor ends its file
        os.truncate(model.experts.paths[shard], model.experts.segments(2, 3)[0].file_offset + 1)
        report = await reader.read(2, [3, 0, 3, 1], bytearray(4 * 33)).outcome()
        assert report.outcomes.tolist() == [1, 0, 1, 0]
        assert report.loaded_prefix == 0
        assert len(report.errors) == 2


@on_one_loop
async def test_requests_of_several_ios_are_judged_each_by_its_own(tmp_path: Path) -> None:
    model = make_model(tmp_path, sizes=[(30000, 10000)], shards=1, num_experts=3)
    async with reader_on(model, "threads-buffered") as reader:
        tensor = model.experts.segments(0, 1)[0]
        os.truncate(
            model.experts.paths[0], tensor.file_offset + tensor.nbytes
        )  # the second tensor of all is gone
        whole = [model.experts.segments(0, expert)[0] for expert in range(3)]
        report = await reader.read(0, [0, 1, 2], bytearray(3 * 40000)).outcome()
        assert report.outcomes.tolist() == [1, 1, 1]
        memory = bytearray(30000)
        await reader.read_segments([whole[0]], memory)
        assert memory == model.content[0][whole[0].file_offset :][:30000]


@every_loop
async def test_dropped_reads_leave_no_page_cache(tmp_path: Path) -> None:
    """Rounded outward: the first and last page of every segment belong to its neighbours too, and go as well."""
    model = make_model(tmp_path, sizes=[(300_001, 200_003)], num_experts=8, shards=1)
    path = model.experts.paths[0]
    make_cold(path)
    async with reader_on(model, "uring-buffered") as reader:
        await reader.read(0, range(8), bytearray(8 * 500_004))
        await reader.wait_dropped()
        assert resident_nbytes(path) == 0
    async with reader_on(model, "uring-buffered", keep_page_cache=True) as reader:
        await reader.read(0, range(8), bytearray(8 * 500_004))
    assert resident_nbytes(path) > 8 * 490_000


@every_loop
async def test_a_close_drops_what_was_read(tmp_path: Path) -> None:
    model = make_model(tmp_path, sizes=[(300_001,)], num_experts=8, shards=1)
    path = model.experts.paths[0]
    make_cold(path)
    async with reader_on(model, "threads-buffered") as reader:
        transfers = [reader.read(0, expert, bytearray(300_001)) for expert in range(8)]
    for transfer in transfers:
        await transfer.outcome()
    assert resident_nbytes(path) == 0


@pytest.mark.parametrize("mode", ["on", "off"])
def test_the_oracle_leaves_no_page_cache(mode: str, tmp_path: Path) -> None:
    model = make_model(tmp_path, sizes=[(300_001,)], shards=1)
    path = model.experts.paths[0]
    make_cold(path)
    with PosixExpertReader(model.experts, direct=mode) as oracle:
        oracle.read(0, 1, bytearray(300_001))
        assert resident_nbytes(path) == 0
    with PosixExpertReader(model.experts, direct="off", keep_page_cache=True) as oracle:
        oracle.read(0, 1, bytearray(300_001))
    assert resident_nbytes(path) >= 300_001


@on_one_loop
async def test_reads_past_the_page_cache_leave_none(tmp_path: Path) -> None:
    model = make_model(tmp_path, sizes=[(300_001,)], shards=1)
    path = model.experts.paths[0]
    make_cold(path)
    async with reader_on(model, "uring-direct") as reader:
        await reader.read(0, [0, 1, 2, 3], bytearray(4 * 300_001))
    assert resident_nbytes(path) == 0


@every_loop
async def test_direct_io_that_is_refused(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = DirectProbe(None, "refused by the test")
    monkeypatch.setattr(direct, "_probe_file", lambda path: refused)
    with pytest.raises(UnavailableError, match=r"direct='on'.*shard-0.*refused by the test"):
        async with ExpertReader(model.experts, direct="on"):
            pass
    async with ExpertReader(model.experts, direct="auto", options=SMALL) as reader:
        assert reader.rung.endswith("-buffered")
        assert any("refused by the test" in refusal.reason for refusal in reader.refusals)
        memory = bytearray(model.experts.slot_nbytes(1))
        await reader.read(1, 2, memory)
        assert memory == model.image(1, 2)
    with PosixExpertReader(model.experts, direct="auto") as oracle:
        oracle.read(1, 3, memory)
    assert memory == model.image(1, 3)


@every_loop
async def test_bad_input_is_refused_and_the_reader_goes_on(model: Model) -> None:
    async with reader_on(model, "uring-direct") as reader:
        slot = model.experts.slot_nbytes(0)
        memory = bytearray(slot)
        with pytest.raises(LayoutError, match="layer"):
            reader.read(9, 0, memory)
        for expert in (-1, 4, True, 1.5):
            with pytest.raises(LayoutError, match="experts of layer 0"):
                reader.read(0, expert, memory)
        with pytest.raises(LayoutError, match="need exactly"):
            reader.read(0, [0, 1], memory)
        with pytest.raises(LayoutError, match="one each"):
            reader.read(0, [0, 1], Scatter(memory, np.array([0])))
        with pytest.raises(LayoutError, match="outside"):
            reader.read(0, [0], Scatter(memory, np.array([1])))
        with pytest.raises(LayoutError, match="do not fit"):
            reader.read_segments([DirectSegment(0, 0, slot, 1)], memory)
        with pytest.raises(LayoutError, match="read-only"):
            reader.read(0, 0, bytes(slot))
        with pytest.raises(LayoutError, match="priority"):
            reader.read(0, 0, memory, priority=0)  # type: ignore[arg-type]
        with pytest.raises(LayoutError, match="deadline"):
            reader.read(0, 0, memory, deadline="soon")  # type: ignore[arg-type]
        with pytest.raises(UnavailableError, match="device"):
            reader.read(0, 0, memory, stream=0)
        assert (await reader.read(0, [], bytearray())).nbytes == 0
        late = await reader.read(0, 0, memory, deadline=anyio.current_time() - 1).outcome()
        assert late.outcomes.tolist() == [3]
        await reader.read(0, 1, memory)
        assert memory == model.image(0, 1)


@on_one_loop
async def test_shards_that_are_not_there_or_no_files(tmp_path: Path, model: Model) -> None:
    path = model.experts.paths[1]
    path.unlink()
    with pytest.raises(StorageError, match=r"shard-1.*all 2 files") as caught:
        await ExpertReader(model.experts)
    assert caught.value.errno == errno.ENOENT
    path.mkdir()
    with pytest.raises(CorruptionError, match="shard-1"):
        await ExpertReader(model.experts)
    with pytest.raises(CorruptionError, match="shard-1"):
        PosixExpertReader(model.experts)
    for wrong in ({"direct": "yes"}, {"backend": "fast"}, {"options": 1}):
        with pytest.raises(LayoutError):
            ExpertReader(model.experts, **wrong)  # type: ignore[arg-type]


@on_one_loop
async def test_a_shard_may_be_a_link(tmp_path: Path, model: Model) -> None:
    """Model caches are made of them."""
    links = tuple(tmp_path / f"link-{index}" for index in range(2))
    for link, path in zip(links, model.experts.paths, strict=True):
        link.symlink_to(path)
    linked = ExpertMap(links, {layer: model.experts._layer(layer) for layer in model.experts.layers})
    async with ExpertReader(linked, options=SMALL) as reader:
        memory = bytearray(model.experts.slot_nbytes(0))
        await reader.read(0, 2, memory)
        assert memory == model.image(0, 2)


@every_loop
async def test_use_before_and_after(model: Model) -> None:
    reader = ExpertReader(model.experts, options=SMALL)
    with pytest.raises(ClosedError, match="not open"):
        reader.read(0, 0, bytearray(1))
    async with reader:
        pass
    await reader.aclose()
    with pytest.raises(ClosedError, match="closed"):
        reader.read(0, 0, bytearray(1))
    with pytest.raises(ClosedError, match="once"):
        await reader
    assert reader.statistics().backend == "ExpertReader"


@every_loop
async def test_a_tiny_file_can_be_opened(tmp_path: Path) -> None:
    """Shorter than a block of direct I/O: even the read that proves the engine has to know what it may ask for."""
    model = make_model(tmp_path, sizes=[(7,)], num_experts=2, shards=1)
    for way in ("uring-direct", "python-buffered", "threads-direct"):
        async with reader_on(model, way) as reader:
            memory = bytearray(14)
            await reader.read(0, [1, 0], memory)
            assert memory == model.image(0, 1) + model.image(0, 0)
