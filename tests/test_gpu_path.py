"""Bytes between files and GPU memory: every size, shape and way of copying brings the right ones, and only those."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_support import (
    RUNGS,
    Bytes,
    FakeGpu,
    Gpu,
    backend_on,
    gathered,
    gpu,
    gpu_of,
    layer_files,
    make_gpu,
    nothing_left,
    on_asyncio,
    on_every_loop,
    oracle_read,
    oracle_write,
    random_rows,
    run_on,
    scattered,
    skip_without_gpu,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from aio_kv import EngineBackend, GroupLayout, KvKind, LayerFiles, Read, Scatter, Write
from aio_kv.cuda import CopyOptions, Device, DevicePointer

__all__ = ["gpu"]  # a fixture

LAYOUTS = {
    "whole": GroupLayout(2, 4, 2, 16, 128, 2),  # 4096 bytes, no padding
    "padded": GroupLayout(2, 3, 2, 3, 7, 5),  # 105 bytes: far from any alignment
    "odd": GroupLayout(1, 3, 2, 9, 71, 13),  # 8307 of 12288 bytes
    "latent": GroupLayout(2, 5, 1, 16, 576, 2, kinds=(KvKind.LATENT,)),  # 18432 of 20480 bytes
    "above-an-op": GroupLayout(1, 2, 2, 64, 1001, 5),  # 320320 of 323584 bytes, three I/Os
}
PLAIN = LAYOUTS["whole"]
GUARD = 0xA5


@dataclass(frozen=True)
class Place:
    """Shuffled places for all groups of a layout, at odd addresses with gaps between them, in GPU memory."""

    ids: NDArray[np.int64]
    offsets: NDArray[np.int64]
    nbytes: int

    @classmethod
    def of(cls, layout: GroupLayout, seed: int = 0, *, gap: int = 7) -> Place:
        draw = np.random.default_rng(seed)
        ids = draw.permutation(layout.num_groups).astype(np.int64)
        step = layout.payload_nbytes + gap
        offsets = draw.permutation(len(ids)).astype(np.int64) * step + 3
        return cls(ids, offsets, 3 + len(ids) * step)


def image_of(place: Place, rows: Bytes) -> Bytes:
    """What the memory holds when each group is in its place and nothing else was touched."""
    return scattered(np.full(place.nbytes, GUARD, np.uint8), place.offsets, rows)


async def read_all(kv: EngineBackend, gpu: Gpu, place: Place, **arguments: Any) -> Bytes:
    """Read every group into guarded memory; all of that memory."""
    into = gpu.buffer(place.nbytes, GUARD)
    await kv.read_groups(place.ids, Scatter(into, place.offsets), **arguments)
    return gpu.download(into)


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("name", LAYOUTS)
@on_asyncio
async def test_file_to_gpu_and_back(gpu: Gpu, tmp_path: Path, rung: str, name: str) -> None:
    layout = LAYOUTS[name]
    place = Place.of(layout)
    old, new = (random_rows(layout, layout.num_groups, seed) for seed in (1, 2))
    stream = gpu.stream()
    with layer_files(tmp_path, layout) as files:
        async with backend_on(rung, files, gpu.device) as kv:
            await kv.write_groups(place.ids, old)
            assert np.array_equal(await read_all(kv, gpu, place, stream=stream), image_of(place, old))
            source = gpu.buffer(place.nbytes)
            gpu.upload(source, image_of(place, new))
            await kv.write_groups(place.ids, Scatter(source, place.offsets), stream=stream)
            assert np.array_equal(await read_all(kv, gpu, place), image_of(place, new))
            statistics = kv.statistics().engine
            moved = layout.num_groups * layout.payload_nbytes
            assert (statistics.bytes_from_device, statistics.bytes_to_device) == (moved, 2 * moved)
            assert statistics.slots_leased == statistics.slots_leaked == 0
        assert np.array_equal(oracle_read(files, place.ids), new)
        assert_padding_is_zero(files)


def assert_padding_is_zero(files: LayerFiles) -> None:
    layout = files.layout
    for layer in range(layout.num_layers):
        raw = np.fromfile(files.path_of(layer), np.uint8).reshape(-1, layout.stride)
        assert not raw[:, layout.payload_nbytes :].any()


@on_every_loop
async def test_every_loop_serves_device_memory(gpu: Gpu, tmp_path: Path) -> None:
    place, rows, stream = Place.of(PLAIN), random_rows(PLAIN, PLAIN.num_groups), gpu.stream()
    source = gpu.buffer(place.nbytes)
    gpu.upload(source, image_of(place, rows))
    into = gpu.buffer(place.nbytes, GUARD)
    with layer_files(tmp_path, PLAIN) as files:
        async with backend_on("uring", files, gpu.device) as kv:
            await kv.write_groups(place.ids, Scatter(source, place.offsets), stream=stream)
            transfer = kv.read_groups(place.ids, Scatter(into, place.offsets), stream=stream)
            await transfer.enqueued()
            await kv.record_event(stream)
            assert np.array_equal(gpu.download(into), image_of(place, rows))
            await transfer


# Ways of copying


def sized(nbytes: int, blocks: int = 8) -> GroupLayout:
    """A layout of whole groups of `nbytes`, none of which touch in memory that `Place` chooses."""
    return GroupLayout(1, blocks, 1, 1, nbytes // 2, 2, kinds=(KvKind.LATENT,))


@dataclass(frozen=True)
class Way:
    """A size and options, and how its copies must go: by kernel, by batch, singly."""

    nbytes: int
    blocks: int
    options: CopyOptions
    expected: tuple[bool, bool, bool]


KIB = 1 << 10
DEFAULT = CopyOptions()
WAYS = {
    "small": Way(4 * KIB, 8, DEFAULT, (True, False, False)),
    "at-the-kernel-limit": Way(32 * KIB, 4, DEFAULT, (True, False, False)),
    "above-it": Way(36 * KIB, 4, DEFAULT, (False, True, True)),  # a batch of one is a single copy
    "above-the-batch-limit": Way(64 * KIB, 4, CopyOptions(batch_nbytes_max=60 * KIB), (False, False, True)),
    "alone": Way(64 * KIB, 1, DEFAULT, (False, True, True)),
    "no-kernels": Way(4 * KIB, 8, CopyOptions(kernel_nbytes_max=0), (False, True, True)),
    "no-batches": Way(4 * KIB, 8, CopyOptions(kernel_nbytes_max=0, batch_nbytes_max=0), (False, False, True)),
    "one-block-one-warp": Way(
        4 * KIB, 40, CopyOptions(kernel_blocks=1, kernel_threads=32), (True, False, False)
    ),
}


async def check_way(gpu: Gpu, folder: Path, rung: str, way: Way) -> Any:
    layout = sized(way.nbytes, way.blocks)
    place, rows = Place.of(layout), random_rows(layout, layout.num_groups)
    source = gpu.buffer(place.nbytes)
    gpu.upload(source, image_of(place, rows))
    with layer_files(folder, layout) as files:
        async with backend_on(rung, files, gpu.device, way.options) as kv:
            await kv.write_groups(place.ids, Scatter(source, place.offsets), stream=gpu.stream())
            assert np.array_equal(oracle_read(files, place.ids), rows)
            assert np.array_equal(await read_all(kv, gpu, place), image_of(place, rows))
            return kv.statistics().engine


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("name", WAYS)
@on_asyncio
async def test_the_size_of_a_copy_decides_its_way(gpu: Gpu, tmp_path: Path, rung: str, name: str) -> None:
    way = WAYS[name]
    statistics = await check_way(gpu, tmp_path, rung, way)
    kernel, batch, single = way.expected
    assert (statistics.kernel_copies > 0, statistics.kernel_launches > 0) == (kernel, kernel)
    assert statistics.batch_copies == 0 or batch
    assert statistics.single_copies == 0 or single
    # Each group is one run in each direction, as no two touch in memory; a batch of one is counted both ways.
    total = statistics.kernel_copies + max(statistics.batch_copies, statistics.single_copies)
    assert total == 2 * way.blocks
    if gpu.is_fake:
        assert_calls(gpu, statistics, kernel, batch)


def assert_calls(gpu: Gpu, statistics: Any, kernel: bool, batch: bool) -> None:
    fake = gpu.needs_fake("count calls")
    launches = [call for call in fake.log() if call.name == "cuLaunchKernel"]
    warm = 2 if kernel or statistics.kernel_launches else 0
    assert len(launches) in (statistics.kernel_launches + 2, warm, 0)
    singles = fake.calls("cuMemcpyHtoDAsync") + fake.calls("cuMemcpyDtoHAsync")
    assert singles == statistics.single_copies
    assert fake.calls("cuMemcpyBatchAsync") == 0 or batch


@on_asyncio
async def test_a_driver_without_batch_copies(tmp_path: Path) -> None:
    skip_without_gpu()
    if not make_gpu_is_fake():
        pytest.skip("a driver cannot be made to lack cuMemcpyBatchAsync")
    gpu = FakeGpu(hidden=("cuMemcpyBatchAsync",))
    statistics = await check_way(gpu, tmp_path, "uring", Way(64 * KIB, 6, DEFAULT, (False, False, True)))
    assert (statistics.kernel_copies, statistics.batch_copies, statistics.single_copies) == (0, 0, 12)
    gpu.close()


def make_gpu_is_fake() -> bool:
    with_gpu = make_gpu()
    with_gpu.close()
    return with_gpu.is_fake


@on_asyncio
async def test_a_driver_that_refuses_the_kernels(gpu: Gpu, tmp_path: Path) -> None:
    fake = gpu.needs_fake("be handed kernels that it refuses")
    fake.fail("cuModuleLoadData", result=218)
    statistics = await check_way(gpu, tmp_path, "uring", Way(4 * KIB, 6, DEFAULT, (False, True, True)))
    assert statistics.kernel_launches == statistics.kernel_copies == 0
    assert statistics.batch_copies == 12


@on_asyncio
async def test_neighbours_are_merged(gpu: Gpu, tmp_path: Path) -> None:
    ids = np.arange(PLAIN.num_groups, dtype=np.int64)
    rows = random_rows(PLAIN, len(ids))
    into = gpu.buffer(rows.nbytes, GUARD)
    with layer_files(tmp_path, PLAIN) as files:
        oracle_write(files, ids, rows)
        async with backend_on("uring", files, gpu.device) as kv:
            await kv.read_groups(ids, into)
            statistics = kv.statistics().engine
    assert np.array_equal(gpu.download(into), rows.reshape(-1))
    runs = statistics.kernel_copies + max(statistics.batch_copies, statistics.single_copies)
    assert runs == PLAIN.num_layers  # one file, one I/O, one run each


@on_asyncio
async def test_padding_keeps_neighbours_apart(gpu: Gpu, tmp_path: Path) -> None:
    layout = LAYOUTS["padded"]
    ids = np.arange(layout.num_groups, dtype=np.int64)
    rows = random_rows(layout, len(ids))
    into = gpu.buffer(rows.nbytes, GUARD)
    with layer_files(tmp_path, layout) as files:
        oracle_write(files, ids, rows)
        async with backend_on("uring", files, gpu.device) as kv:
            await kv.read_groups(ids, into)
            assert kv.statistics().engine.kernel_copies == len(ids)
    assert np.array_equal(gpu.download(into), rows.reshape(-1))


@on_asyncio
async def test_more_copies_than_a_list_holds(gpu: Gpu, tmp_path: Path) -> None:
    layout = GroupLayout(1, 4500, 1, 1, 21, 5, kinds=(KvKind.LATENT,))
    place, rows = Place.of(layout), random_rows(layout, layout.num_groups)
    source = gpu.buffer(place.nbytes)
    gpu.upload(source, image_of(place, rows))
    large = {
        "queue_depth": 64,
        "op_nbytes_max": 512 * KIB,
        "bulk_nbytes": 64 << 20,
        "staging_nbytes": 48 << 20,
    }
    with layer_files(tmp_path, layout) as files:
        async with backend_on("uring", files, gpu.device, **large) as kv:
            # All copies of a write are ready at once, and there are more than one launch can take.
            await kv.write_groups(place.ids, Scatter(source, place.offsets))
            statistics = kv.statistics().engine
            assert statistics.kernel_launches >= 2
            assert statistics.kernel_copies == layout.num_groups
            assert np.array_equal(await read_all(kv, gpu, place), image_of(place, rows))


# What is asked for


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("name", ["odd", "above-an-op"])
@on_asyncio
async def test_a_group_named_twice_is_read_once_and_copied_twice(
    gpu: Gpu, tmp_path: Path, rung: str, name: str
) -> None:
    layout = LAYOUTS[name]
    rows = random_rows(layout, layout.num_groups)
    ids = np.array([2, 0, 2, 1, 2], np.int64)
    into = gpu.buffer(len(ids) * layout.payload_nbytes, GUARD)
    with layer_files(tmp_path, layout) as files:
        oracle_write(files, np.arange(layout.num_groups), rows)
        async with backend_on(rung, files, gpu.device) as kv:
            await kv.read_groups(ids, into, stream=gpu.stream())
            statistics = kv.statistics().engine
    assert np.array_equal(gpu.download(into).reshape(len(ids), -1), rows[ids])
    assert statistics.bytes_to_device == len(ids) * layout.payload_nbytes
    assert statistics.bytes_read < 4 * layout.stride + 4096  # three groups, and the probe at open


@pytest.mark.parametrize("name", ["whole", "padded", "above-an-op"])
@on_asyncio
async def test_blocks(gpu: Gpu, tmp_path: Path, name: str) -> None:
    layout = LAYOUTS[name]
    per_block = layout.groups_per_block
    rows = random_rows(layout, per_block)
    source, into = gpu.buffer(rows.nbytes), gpu.buffer(rows.nbytes, GUARD)
    gpu.upload(source, rows.reshape(-1))
    with layer_files(tmp_path, layout) as files:
        async with backend_on("uring", files, gpu.device) as kv:
            await kv.write_block(0, 1, source, stream=gpu.stream())
            await kv.read_block(0, 1, into, stream=gpu.stream())
        assert np.array_equal(gpu.download(into), rows.reshape(-1))
        first = layout.block_group_id(0, 1)
        assert np.array_equal(oracle_read(files, np.arange(first, first + per_block)), rows)


@on_asyncio
async def test_requests_with_memory_of_their_own(gpu: Gpu, tmp_path: Path) -> None:
    layout = LAYOUTS["odd"]
    rows, stream = random_rows(layout, 3), gpu.stream()
    keys = [layout.key(i) for i in (4, 0, 1)]
    sources = [gpu.buffer(layout.payload_nbytes) for _ in keys]
    targets = [gpu.buffer(layout.payload_nbytes + 64, GUARD) for _ in keys]
    for source, row in zip(sources, rows, strict=True):
        gpu.upload(source, row)
    places = [DevicePointer(target.data_ptr() + 5, layout.payload_nbytes) for target in targets]
    with layer_files(tmp_path, layout) as files:
        async with backend_on("threads", files, gpu.device) as kv:
            await kv.write([Write(k, s) for k, s in zip(keys, sources, strict=True)], stream=stream)
            await kv.read([Read(k, p) for k, p in zip(keys, places, strict=True)], stream=stream)
            await kv.read([Read(keys[0], sources[1])])
    for target, row in zip(targets, rows, strict=True):
        expected = np.full(target.nbytes, GUARD, np.uint8)
        expected[5 : 5 + len(row)] = row
        assert np.array_equal(gpu.download(target), expected)
    assert np.array_equal(gpu.download(sources[1]), rows[0])


@on_asyncio
async def test_one_group_in_its_place(gpu: Gpu, tmp_path: Path) -> None:
    """A list of one number takes the short way for host memory, which has to know a Scatter when it sees one."""
    rows, memory, host = random_rows(PLAIN, 1), gpu.buffer(8192, GUARD), bytearray(8192)
    with layer_files(tmp_path, PLAIN) as files:
        oracle_write(files, np.array([3]), rows)
        async with backend_on("uring", files, gpu.device) as kv:
            await kv.read_groups([3], Scatter(memory, np.array([5])), stream=gpu.stream())
            await kv.read_groups([3], Scatter(host, np.array([5])))
    assert np.array_equal(gpu.download(memory, 4096, 5), rows[0])
    assert host[5 : 5 + 4096] == rows[0].tobytes()


@on_asyncio
async def test_no_groups_at_all(gpu: Gpu, tmp_path: Path) -> None:
    into, none = gpu.buffer(64, GUARD), np.empty(0, np.int64)
    with layer_files(tmp_path, PLAIN) as files:
        async with backend_on("uring", files, gpu.device) as kv:
            transfer = kv.read_groups(none, Scatter(into, none), stream=gpu.stream())
            await transfer.enqueued()
            assert (await transfer).nbytes == 0


@on_asyncio
async def test_several_rings(gpu: Gpu, tmp_path: Path) -> None:
    place, rows = Place.of(PLAIN), random_rows(PLAIN, PLAIN.num_groups)
    into, stream = gpu.buffer(place.nbytes, GUARD), gpu.stream()
    with layer_files(tmp_path, PLAIN) as files:
        oracle_write(files, place.ids, rows)
        async with backend_on("uring", files, gpu.device, rings=3) as kv:
            transfer = kv.read_groups(place.ids, Scatter(into, place.offsets), stream=stream)
            await transfer.enqueued()
            after = gpu.buffer(place.nbytes)
            gpu.copy(after, into, stream)
            await kv.record_event(stream)
            assert np.array_equal(gpu.download(after), image_of(place, rows))
            await transfer


@pytest.mark.parametrize("rung", RUNGS)
@on_asyncio
async def test_nothing_is_left_after_close(gpu: Gpu, tmp_path: Path, rung: str) -> None:
    fake = gpu.needs_fake("count what it holds")
    place, rows, stream = Place.of(PLAIN), random_rows(PLAIN, PLAIN.num_groups), gpu.stream()
    source, into = gpu.buffer(place.nbytes), gpu.buffer(place.nbytes)
    gpu.upload(source, image_of(place, rows))
    with layer_files(tmp_path, PLAIN) as files, nothing_left(fake):
        async with backend_on(rung, files, Device(0, table=gpu.device.table)) as kv:
            device = kv._plan.device
            assert isinstance(device, Device)
            await kv.write_groups(place.ids, Scatter(source, place.offsets), stream=stream)
            await kv.read_groups(place.ids, Scatter(into, place.offsets), stream=stream)
            await kv.record_event(stream)
        device.close()
    assert np.array_equal(gathered(gpu.download(into), Scatter(into, place.offsets), 4096), rows)


# Against the oracle

ID = st.integers(0, LAYOUTS["odd"].num_groups - 1)
IDS = st.lists(ID, min_size=1, max_size=6, unique=True)


@st.composite
def operations(draw: st.DrawFn) -> list[tuple[str, list[int], int, bool]]:
    """What to do (kind, groups, seed, whether to await it before going on), in order."""
    kind = st.sampled_from(["gpu-read", "gpu-write", "host-read", "host-write"])
    return draw(
        st.lists(st.tuples(kind, IDS, st.integers(0, 1 << 20), st.booleans()), min_size=1, max_size=12)
    )


@settings(
    max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
@given(steps=operations(), rung=st.sampled_from(RUNGS), seed=st.integers(0, 1 << 30))
def test_any_operations_agree_with_the_oracle(
    tmp_path_factory: pytest.TempPathFactory, steps: Any, rung: str, seed: int
) -> None:
    layout = LAYOUTS["odd"]
    folder = tmp_path_factory.mktemp("oracle")

    async def main() -> None:
        with gpu_of(seed) as gpu, layer_files(folder, layout) as files:
            await play(gpu, files, steps, rung)

    run_on("asyncio", main)


async def play(gpu: Gpu, files: LayerFiles, steps: Any, rung: str) -> None:
    payload = files.layout.payload_nbytes
    model = np.zeros((files.layout.num_groups, payload), np.uint8)
    stream = gpu.stream()
    expected: list[tuple[Any, Bytes]] = []
    async with backend_on(rung, files, gpu.device) as kv:
        pending = []
        for kind, ids, seed, is_awaited in steps:
            rows = random_rows(files.layout, len(ids), seed)
            place: Any = bytearray(rows.nbytes)
            if kind.startswith("gpu"):
                place = gpu.buffer(rows.nbytes, GUARD)
            if kind.endswith("write"):
                model[ids] = rows
                if kind == "gpu-write":
                    gpu.upload(place, rows.reshape(-1))
                else:
                    place[:] = rows.tobytes()
            else:
                expected.append((place, model[ids].reshape(-1)))
            move = kv.write_groups if kind.endswith("write") else kv.read_groups
            pending.append(move(np.array(ids), place, stream=stream if kind.startswith("gpu") else None))
            if is_awaited:
                await pending[-1]
        for transfer in pending:
            await transfer
        for place, bytes_there in expected:
            got = np.frombuffer(place, np.uint8) if isinstance(place, bytearray) else gpu.download(place)
            assert np.array_equal(got, bytes_there)
    assert np.array_equal(oracle_read(files, np.arange(files.layout.num_groups)), model)
