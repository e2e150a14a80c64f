"""The cascade and the GPU: hits go up and writes come down straight between the pinned slab and the device.

On the fake driver a copy is made as late as it legally may, so that a slot which is used again too early is a wrong
byte.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from gpu_cases import LAYOUT, LOST, NEW, OLD, expecting_a_lost_device, filled, is_all
from gpu_support import (
    RUNGS,
    Gpu,
    backend_on,
    gpu,
    layer_files,
    looks,
    on_asyncio,
    on_every_loop,
    oracle_read,
    random_rows,
)

from aio_kv import (
    CascadeBackend,
    DeviceError,
    GroupLayout,
    LayerFiles,
    NotDurableError,
    Read,
    Scatter,
    TransferError,
    Write,
)
from aio_kv.cascade import session as cascade_session

__all__ = ["gpu"]  # a fixture

PAYLOAD = LAYOUT.payload_nbytes
BLOCKS = GroupLayout(2, 8, 2, 16, 64, 2, alignment=512)  # 64 groups of 2048 bytes, 4 to a block


@asynccontextmanager
async def cascade_on(
    rung: str, files: LayerFiles, gpu: Gpu, slots: int, slot: str = "group", **options: Any
) -> AsyncIterator[CascadeBackend]:
    """An open cascade over a backend with the device."""
    per_slot = files.layout.groups_per_block if slot == "block" else 1
    capacity = slots * per_slot * files.layout.payload_nbytes
    async with (
        backend_on(rung, files, gpu.device) as backing,
        CascadeBackend(backing, capacity_bytes=capacity, slot=slot, **options) as cascade,
    ):
        yield cascade


def row_of(value: int) -> bytes:
    return bytes([value]) * PAYLOAD


@pytest.mark.parametrize("rung", RUNGS)
@on_every_loop
async def test_two_slots_four_groups_and_evictions_while_copies_are_in_flight(
    gpu: Gpu, tmp_path: Path, rung: str
) -> None:
    """Groups 0 and 1 are on their way to the GPU when 2 and 3 need their slots; then all four are read."""
    stream, other = gpu.stream(), gpu.stream()
    first, all_four = gpu.buffer(2 * PAYLOAD, 0), gpu.buffer(4 * PAYLOAD, 0)
    with filled(tmp_path, value=99) as files:
        async with cascade_on(rung, files, gpu, slots=2) as kv:
            await kv.write_groups([0, 1], row_of(10) + row_of(11))
            await kv.flush()
            with gpu.holding(stream):
                copies = kv.read_groups([0, 1], first, stream=stream)
                await copies.enqueued()
                writes = [kv.write_groups([group], row_of(10 + group)) for group in (2, 3)]
                await looks(kv.backing)
                assert not any(write.is_done for write in writes), "the slots are being read"
                assert kv.statistics().leases == 2
            mixed = kv.read_groups([3, 0, 2, 1], all_four, stream=other)
            await mixed
            await copies
            for write in writes:
                await write
            assert kv.statistics().evicted_slots == 2
            host = np.zeros((4, PAYLOAD), np.uint8)
            await kv.read_groups([0, 1, 2, 3], host)
        assert [set(row) for row in gpu.download(first).reshape(2, -1).tolist()] == [{10}, {11}]
        assert [set(row) for row in gpu.download(all_four).reshape(4, -1).tolist()] == [
            {13},
            {10},
            {12},
            {11},
        ]
        assert [set(row) for row in host.tolist()] == [{10}, {11}, {12}, {13}]
        assert [set(row) for row in oracle_read(files, np.arange(4)).tolist()] == [{10}, {11}, {12}, {13}]


@on_asyncio
async def test_a_write_to_a_group_that_is_being_copied_goes_to_another_slot(gpu: Gpu, tmp_path: Path) -> None:
    stream, into = gpu.stream(), gpu.buffer(PAYLOAD, 0)
    with filled(tmp_path) as files:
        async with cascade_on("uring", files, gpu, slots=2) as kv:
            await kv.write_groups([5], row_of(50))
            with gpu.holding(stream):
                copy = kv.read_groups([5], into, stream=stream)
                await copy.enqueued()
                await kv.write_groups([5], row_of(51))
                found = bytearray(PAYLOAD)
                await kv.read_groups([5], found)
                assert set(found) == {51}
                assert kv.statistics().superseded_slots == 1
                await kv.flush()
                assert set(oracle_read(files, np.array([5]))[0].tolist()) == {51}
            await copy
            assert kv.statistics().leases == 0
        assert is_all(gpu.download(into), 50)


@pytest.mark.parametrize("rung", RUNGS)
@on_asyncio
async def test_a_write_from_the_device_is_read_behind_and_comes_down(
    gpu: Gpu, tmp_path: Path, rung: str
) -> None:
    stream, source, into = gpu.stream(), gpu.buffer(4 * PAYLOAD), gpu.buffer(4 * PAYLOAD, 0)
    rows = random_rows(LAYOUT, 4)
    with filled(tmp_path) as files:
        async with cascade_on(rung, files, gpu, slots=8) as kv:
            with gpu.holding(stream):
                gpu.upload(source, rows.reshape(-1))
                write = kv.write_groups([4, 5, 6, 7], source, stream=stream)
                read = kv.read_groups([7, 6, 5, 4], into, stream=stream)
                host = np.zeros((4, PAYLOAD), np.uint8)
                host_read = kv.read_groups([4, 5, 6, 7], host)
                await looks(kv.backing)
                assert not read.is_done
                assert not host_read.is_done
            await write.enqueued()
            await host_read
            assert (host == rows).all()
            await read
            await kv.flush()
            assert (oracle_read(files, np.arange(4, 8)) == rows).all()
            assert kv.statistics().waits_for_order == 2
    assert (gpu.download(into).reshape(4, -1) == rows[::-1]).all()


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize(("slots", "slot"), [(3, "block"), (5, "group"), (100, "group")])
@on_asyncio
async def test_everything_at_once(gpu: Gpu, tmp_path: Path, rung: str, slots: int, slot: str) -> None:
    """Writes from host and device, reads to both, scattered, over more groups than there are slots."""
    layout = BLOCKS
    payload, count = layout.payload_nbytes, layout.num_groups
    latest = np.zeros((count, payload), np.uint8)
    random = np.random.default_rng(slots)
    stream = gpu.stream()
    with layer_files(tmp_path, layout) as files:
        async with cascade_on(rung, files, gpu, slots, slot, promote=slots == 5) as kv:
            pending = []
            for turn in range(24):
                ids = random.permutation(count)[: int(random.integers(1, 24))]
                rows = random_rows(layout, len(ids), turn)
                places = random.permutation(len(ids)) * (payload + 16) + 16
                buffer = gpu.buffer(len(ids) * (payload + 16) + 16, OLD)
                if turn % 3 == 0:
                    image = gpu.download(buffer).copy()
                    for at, row in zip(places.tolist(), rows, strict=True):
                        image[at : at + payload] = row
                    gpu.upload(buffer, image)
                    pending.append((kv.write_groups(ids, Scatter(buffer, places), stream=stream), None))
                    latest[ids] = rows
                elif turn % 3 == 1:
                    pending.append((kv.write_groups(ids, rows), None))
                    latest[ids] = rows
                else:
                    read = kv.read_groups(ids, Scatter(buffer, places), stream=stream)
                    pending.append((read, (buffer, places, latest[ids].copy())))
            for transfer, expected in pending:
                await transfer
                if expected is not None:
                    buffer, places, rows = expected
                    got = gpu.download(buffer)
                    for at, row in zip(places.tolist(), rows, strict=True):
                        assert (got[at : at + payload] == row).all()
            host = np.zeros((count, payload), np.uint8)
            await kv.read_groups(np.arange(count), host)
            assert (host == latest).all()
            await kv.flush()
            assert kv.statistics().leases == 0
        assert (oracle_read(files, np.arange(count)) == latest).all()


@on_asyncio
async def test_requests_with_device_memory_of_their_own(gpu: Gpu, tmp_path: Path) -> None:
    buffers = [gpu.buffer(PAYLOAD, value) for value in (1, 2, 3)]
    targets = [gpu.buffer(PAYLOAD, 0) for _ in range(4)]
    stream = gpu.stream()
    with filled(tmp_path, value=9) as files:
        async with cascade_on("uring", files, gpu, slots=4) as kv:
            await kv.write(
                [Write(LAYOUT.key(group), buffer) for group, buffer in enumerate(buffers)], stream=stream
            )
            reads = [Read(LAYOUT.key(group), targets[group]) for group in range(4)]
            report = await kv.read(reads, stream=stream)
            assert report.loaded_prefix == 4
            statistics = kv.statistics()
            assert (statistics.hits, statistics.misses) == (3, 1)
    assert [int(gpu.download(target)[0]) for target in targets] == [1, 2, 3, 9]


@on_asyncio
async def test_a_cancelled_write_from_the_device_leaves_old_bytes_or_new_ones(
    gpu: Gpu, tmp_path: Path
) -> None:
    source, stream = gpu.buffer(16 * PAYLOAD, NEW), gpu.stream()
    ids = np.arange(16)
    with filled(tmp_path) as files:
        async with cascade_on("uring", files, gpu, slots=20, dirty_limit=1) as kv:
            await kv.write_groups(ids, bytes([OLD]) * (16 * PAYLOAD))
            with gpu.holding(stream):
                write = kv.write_groups(ids, source, stream=stream)
                write.cancel()
            report = await write.outcome()
            host = np.zeros((16, PAYLOAD), np.uint8)
            await kv.read_groups(ids, host)
            for row, outcome in zip(host, report.outcomes.tolist(), strict=True):
                assert set(row.tolist()) == {NEW if outcome == 0 else OLD}
            assert kv.statistics().leases == 0


@pytest.mark.parametrize("what", ["read", "write"])
@on_asyncio
async def test_a_lost_device_is_told_and_its_slots_are_not_used_again(
    gpu: Gpu, tmp_path: Path, what: str
) -> None:
    fake = gpu.needs_fake("be told to fail")
    device = gpu.buffer(PAYLOAD, 0)
    with filled(tmp_path) as files, expecting_a_lost_device():
        before = len(cascade_session._leaked)
        async with backend_on("uring", files, gpu.device) as backing:
            kv = CascadeBackend(backing, capacity_bytes=2 * PAYLOAD, slot="group")
            await kv
            await kv.write_groups([1], row_of(5))
            fake.fail("cuEventQuery", result=LOST)
            with pytest.raises(TransferError, match=f"CUDA error {LOST}") as caught:
                await (kv.read_groups([1], device) if what == "read" else kv.write_groups([2], device))
            assert isinstance(caught.value.__cause__, DeviceError)
            found = bytearray(PAYLOAD)
            await kv.read_groups([1], found)
            assert set(found) == {5}, "host memory is still served"
            assert kv.statistics().quarantined_slots == (1 if what == "write" else 0)
            with anyio.fail_after(10):
                if what == "write":
                    with pytest.raises(NotDurableError, match=r"1 groups are not durable \(2\)"):
                        await kv.aclose()
                else:
                    await kv.aclose()
        del cascade_session._leaked[before:]
        assert set(oracle_read(files, np.array([1]))[0].tolist()) == {5}
        fake.run_everything()
        assert fake.violations()[0] == 0


@on_asyncio
async def test_a_cascade_on_a_cascade_reaches_the_device_from_both(gpu: Gpu, tmp_path: Path) -> None:
    stream, into = gpu.stream(), gpu.buffer(4 * PAYLOAD, 0)
    with filled(tmp_path, value=9) as files:
        async with cascade_on("uring", files, gpu, slots=4) as inner:
            await inner.write_groups([1], row_of(1))
            async with CascadeBackend(inner, capacity_bytes=2 * PAYLOAD, slot="group") as kv:
                await kv.write_groups([2], row_of(2))
                await kv.read_groups([0, 1, 2, 1], into, stream=stream)
                assert kv.statistics().hits == 1
                assert inner.statistics().hits == 2
    assert gpu.download(into).reshape(4, -1)[:, 0].tolist() == [9, 1, 2, 1]


@on_asyncio
async def test_hits_need_no_file(gpu: Gpu, tmp_path: Path) -> None:
    """A restore of resident groups asks nothing of the disk, and the slab is pinned and registered."""
    into, stream = gpu.buffer(32 * PAYLOAD, 0), gpu.stream()
    with filled(tmp_path) as files:
        async with cascade_on("uring", files, gpu, slots=32, dirty_limit=1) as kv:
            rows = random_rows(LAYOUT, 32)
            await kv.write_groups(np.arange(32), rows)
            before = kv.statistics().backing.engine.bytes_read
            order = np.random.default_rng(1).permutation(32)
            transfer = kv.read_groups(order, into, stream=stream)
            await transfer.enqueued()
            await transfer
            statistics = kv.statistics()
            assert statistics.backing.engine.bytes_read == before
            assert statistics.is_pinned
            assert statistics.hits == 32
    assert (gpu.download(into).reshape(32, -1) == rows[order]).all()
