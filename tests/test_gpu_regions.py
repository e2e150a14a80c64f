"""Landing regions that are pinned: groups between their memory and the GPU, without any file."""

from __future__ import annotations

from pathlib import Path

import anyio
import numpy as np
import pytest
from gpu_cases import LAYOUT, LOST, NEW, OLD, expecting_a_lost_device, filled, is_all
from gpu_support import RUNGS, Gpu, backend_on, gpu, looks, on_asyncio, random_rows, until

from aio_kv import LayoutError, Scatter, TransferError, allocate_host

__all__ = ["gpu"]  # a fixture

REGION = 4 << 20


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("count", [1, 50, 1024, 5000])
@on_asyncio
async def test_save_and_load(gpu: Gpu, tmp_path: Path, rung: str, count: int) -> None:
    memory = allocate_host(count * 4096 + 4096)
    draw, rows = np.random.default_rng(count), random_rows(LAYOUT, count)
    host_places, device_places = draw.permutation(count) * 4096 + 512, draw.permutation(count) * 4099 + 3
    source, into = gpu.buffer(count * 4099 + 3), gpu.buffer(count * 4099 + 3, OLD)
    image = gpu.download(source).copy()
    for at, row in zip(device_places, rows, strict=True):
        image[at : at + 4096] = row
    gpu.upload(source, image)
    stream = gpu.stream()
    with filled(tmp_path) as files:
        async with (
            backend_on(rung, files, gpu.device) as kv,
            await kv.register_landing_region(memory) as region,
        ):
            await kv.save(region, host_places, Scatter(source, device_places), stream=stream)
            host = np.frombuffer(memory, np.uint8)
            assert all(np.array_equal(host[a : a + 4096], r) for a, r in zip(host_places, rows, strict=True))
            transfer = kv.load(region, host_places, Scatter(into, device_places), stream=stream)
            await transfer.enqueued()
            await transfer
            assert kv.statistics().engine.slots_leased == 0
    got = gpu.download(into)
    assert all(np.array_equal(got[a : a + 4096], r) for a, r in zip(device_places, rows, strict=True))


@on_asyncio
async def test_a_region_may_be_larger_than_32_bits_reach(gpu: Gpu, tmp_path: Path) -> None:
    if gpu.is_fake:
        pytest.skip("takes 5 GiB of pinned memory, which a machine with a GPU has")
    nbytes, count, stream = 5 << 30, 3000, gpu.stream()
    memory, into = allocate_host(nbytes), gpu.buffer(count * 4096, OLD)
    host, rows = np.frombuffer(memory, np.uint8), random_rows(LAYOUT, count)
    pages = np.random.default_rng(0).permutation(nbytes // 4096)[:count]
    host.reshape(-1, 4096)[pages] = rows
    for edge in (1 << 30, 2 << 30, 4 << 30):
        host[edge - 8 * 4096 : edge + 8 * 4096] = random_rows(LAYOUT, 16, edge).reshape(-1)
    with filled(tmp_path) as files:
        async with (
            backend_on("uring", files, gpu.device) as kv,
            await kv.register_landing_region(memory) as region,
        ):
            for shift in (0, 0, 8):  # the long way, in whole pages, and not
                await kv.load(region, np.minimum(pages * 4096 + shift, nbytes - 4096), into, stream=stream)
                whole = host[shift : nbytes - 4096 + shift].reshape(-1, 4096)
                inside = pages < len(whole)
                got = gpu.download(into).reshape(count, 4096)
                assert np.array_equal(got[inside], whole[pages[inside]])
            # Neighbours are merged, but not from one registration with CUDA into the next: those end at each GiB.
            for edge in (1 << 30, 2 << 30, 4 << 30):
                offsets = edge + (np.arange(count) - count // 2) * 4096
                await kv.load(region, offsets, into, stream=stream)
                first = int(offsets[0])
                assert np.array_equal(gpu.download(into), host[first : first + count * 4096])


@on_asyncio
async def test_copies_are_not_merged_over_the_edge_of_a_registration(gpu: Gpu, tmp_path: Path) -> None:
    """Memory is registered with CUDA a GiB at a time. On the threads rung it is not touched otherwise."""
    edge, into = 1 << 30, gpu.buffer(2 * 4096, OLD)
    memory = allocate_host(edge + 4 * 4096)
    host = np.frombuffer(memory, np.uint8)
    host[edge - 4096 : edge + 4096] = random_rows(LAYOUT, 2).reshape(-1)
    with filled(tmp_path) as files:
        async with (
            backend_on("threads", files, gpu.device) as kv,
            await kv.register_landing_region(memory) as region,
        ):

            async def runs(first: int) -> int:
                before = kv.statistics().engine.kernel_copies
                await kv.load(region, np.array([first, first + 4096]), into)
                assert np.array_equal(gpu.download(into), host[first : first + 2 * 4096])
                return kv.statistics().engine.kernel_copies - before

            assert await runs(edge) == 1
            assert await runs(edge - 4096) == 2


@on_asyncio
async def test_a_load_waits_for_its_fence_and_keeps_the_region(gpu: Gpu, tmp_path: Path) -> None:
    stream, into, seen = gpu.stream(), gpu.buffer(8 * 4096, OLD), gpu.buffer(8 * 4096)
    memory = allocate_host(REGION)
    memory[:] = bytes([NEW]) * len(memory)
    with filled(tmp_path) as files:
        async with (
            backend_on("uring", files, gpu.device) as kv,
            await kv.register_landing_region(memory) as region,
        ):
            with gpu.holding(stream):
                gpu.copy(seen, into, stream)
                transfer = kv.load(region, np.arange(8) * 4096, into, stream=stream)
                await transfer.enqueued()
                await looks(kv)
                assert is_all(gpu.download(into), OLD)
            await region.aclose()  # waits for what is under way
            assert transfer.is_done
        assert is_all(gpu.download(into), NEW)
        assert is_all(gpu.download(seen), OLD)
        if gpu.is_fake:
            assert gpu.needs_fake("").live("registered") == 0


@on_asyncio
async def test_held_loads_leave_room_for_others(gpu: Gpu, tmp_path: Path) -> None:
    """Loads need no slots, but I/Os of the engine they are: those behind a fence keep to their share."""
    held_stream, into, stuck = gpu.stream(), gpu.buffer(4096, OLD), gpu.buffer(4096, OLD)
    memory = allocate_host(REGION)
    with filled(tmp_path) as files:
        async with (
            backend_on("uring", files, gpu.device) as kv,
            await kv.register_landing_region(memory) as region,
        ):
            with gpu.holding(held_stream):
                held = [kv.load(region, [0], stuck, stream=held_stream) for _ in range(100)]
                await until(lambda: kv.statistics().engine.copy_groups > 0, "copies are queued")
                await kv.load(region, [0], into, stream=gpu.stream())
                await kv.read_groups([0], into, stream=gpu.stream())
                assert is_all(gpu.download(into), NEW)
            for transfer in held:
                await transfer


@on_asyncio
async def test_what_is_not_pinned_or_not_inside_is_refused(gpu: Gpu, tmp_path: Path) -> None:
    into, memory = gpu.buffer(4096), allocate_host(REGION)
    with filled(tmp_path) as files:
        async with backend_on("uring", files, gpu.device) as kv:
            async with await kv.register_landing_region(memory) as region:
                for offset in (-1, REGION - 4095):
                    with pytest.raises(LayoutError):
                        kv.load(region, [offset], into)
                with pytest.raises(LayoutError, match="for device memory"):
                    kv.load(region, [0], bytearray(4096))
                await kv.load(region, [REGION - 4096], into)
            with pytest.raises(LayoutError, match="not pinned"):
                kv.load(region, [0], into)


@pytest.mark.parametrize("code", [LOST, 1])
@on_asyncio
async def test_a_fault_keeps_the_region_s_memory(gpu: Gpu, tmp_path: Path, code: int) -> None:
    """Closing the region ends, and neither unpins its memory nor lets go of it: copies may still run."""
    fake = gpu.needs_fake("be told to fail")
    into, memory = gpu.buffer(4096), allocate_host(REGION)
    with filled(tmp_path) as files, expecting_a_lost_device():
        async with backend_on("uring", files, gpu.device) as kv:
            region = await kv.register_landing_region(memory)
            fake.fail("cuEventQuery", result=code)
            where = rf"landing region at {region.address:#x}, {REGION} bytes: CUDA error {code}"
            with pytest.raises(TransferError, match=where):
                await kv.load(region, [0], into)
            fake.clear_log()
            with anyio.fail_after(5):
                await region.aclose()
            with anyio.fail_after(5):
                await kv.aclose()
        assert "cuMemHostUnregister" not in {call.name for call in fake.log()}
        fake.run_everything()
        assert fake.violations()[0] == 0


@on_asyncio
async def test_a_region_outlives_a_backend_whose_device_was_lost(gpu: Gpu, tmp_path: Path) -> None:
    fake = gpu.needs_fake("be told to fail")
    into, memory = gpu.buffer(4096), allocate_host(REGION)
    with filled(tmp_path) as files, expecting_a_lost_device():
        async with backend_on("uring", files, gpu.device) as kv:
            region = await kv.register_landing_region(memory)
            fake.fail("cuEventQuery", result=1)
            with pytest.raises(TransferError, match="CUDA error 1"):
                await kv.load(region, [0], into)
        fake.clear_log()
        await region.aclose()
        assert "cuMemHostUnregister" not in {call.name for call in fake.log()}
