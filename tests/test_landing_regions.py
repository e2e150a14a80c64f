"""Landing regions: memory of the caller that the ring knows, from registration to the end of the I/O in it."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from backends import make_backend
from loops import every_loop
from slow_devices import PADDED, SLOW_KINDS, WHOLE, filled, slow_backend

from aio_kv import BusyError, LandingRegion, LayoutError, allocate_host
from aio_kv.engine import Kind, has_extension
from aio_kv.memory import DeviceMemory
from aio_kv.positional import aligned_buffer

IDS = np.arange(0, 64, 3)
NBYTES = len(IDS) * WHOLE.payload_nbytes
slow_kinds = pytest.mark.parametrize("kind", SLOW_KINDS)


@pytest.fixture
def memory() -> memoryview:
    """Room for IDS, aligned to pages."""
    return aligned_buffer(NBYTES)


def as_rows(memory: memoryview) -> np.ndarray:  # type: ignore[type-arg]
    return np.frombuffer(memory, np.uint8).reshape(-1, WHOLE.payload_nbytes)


@every_loop
@pytest.mark.parametrize("kind", ["uring", "uring-2-rings"])
async def test_the_ring_uses_a_region(kind: str, memory: memoryview, tmp_path: Path) -> None:
    """Inside of it every I/O is on a registered buffer and nothing is staged, with each ring."""
    async with make_backend(kind, tmp_path)(WHOLE) as backend:
        rows = await filled(backend)
        fixed_ops = backend.statistics().engine.fixed_ops  # those of staged writes
        await backend.read_groups(IDS, memory)
        assert backend.statistics().engine.fixed_ops == fixed_ops
        async with await backend.register_landing_region(memory) as region:
            assert region.is_registered
            assert (region.nbytes, region.refusal) == (NBYTES, 0)
            assert backend.statistics().landing_regions == 1
            before = backend.statistics().engine
            memory[:] = bytes(NBYTES)
            await backend.read_groups(IDS, memory)
            assert (as_rows(memory) == rows[IDS]).all()
            await backend.write_groups(IDS, memory)
            after = backend.statistics().engine
            assert after.fixed_ops - before.fixed_ops == 2 * len(IDS)
            assert after.bytes_staged == before.bytes_staged
        assert region.is_closed
        assert backend.statistics().landing_regions == 0
        await backend.read_groups(IDS, memory)
        assert backend.statistics().engine.fixed_ops == after.fixed_ops
        assert (as_rows(memory) == rows[IDS]).all()


@every_loop
@pytest.mark.parametrize("kind", ["threads", "python", "memory", "uring-unregistered"])
async def test_a_region_that_no_ring_knows(kind: str, memory: memoryview, tmp_path: Path) -> None:
    """Where memory cannot be registered, a region says so and changes nothing else."""
    async with make_backend(kind, tmp_path)(WHOLE) as backend:
        rows = await filled(backend)
        async with await backend.register_landing_region(memory) as region:
            assert not region.is_registered
            assert region.refusal
            await backend.read_groups(IDS, memory)
            assert (as_rows(memory) == rows[IDS]).all()
        assert region.is_closed


@every_loop
async def test_padded_groups_are_staged_in_a_region_too(memory: memoryview, tmp_path: Path) -> None:
    async with make_backend("uring", tmp_path)(PADDED) as backend:
        rows = await filled(backend)
        async with await backend.register_landing_region(memory):
            await backend.read_groups(IDS, memory[1 : 1 + len(IDS) * PADDED.payload_nbytes])
        found = np.frombuffer(memory, np.uint8)[1 : 1 + len(IDS) * PADDED.payload_nbytes]
        assert (found.reshape(len(IDS), -1) == rows[IDS]).all()


@every_loop
@slow_kinds
async def test_close_waits_for_the_transfers_in_it(kind: str, memory: memoryview, tmp_path: Path) -> None:
    """The caller frees its memory behind `aclose`; transfers elsewhere are not waited for."""
    elsewhere = aligned_buffer(NBYTES)
    async with slow_backend(kind, tmp_path, WHOLE, only=Kind.READ) as backend:
        await filled(backend)
        region = await backend.register_landing_region(memory)
        inside = backend.read_groups(IDS, memory)
        await region.aclose()
        assert inside.is_done
        other = await backend.register_landing_region(memory)
        outside = backend.read_groups(IDS, elsewhere)
        await other.aclose()
        assert not outside.is_done
        await outside


@every_loop
@slow_kinds
async def test_a_partly_covered_transfer_counts(kind: str, memory: memoryview, tmp_path: Path) -> None:
    """One byte in the region is enough."""
    async with slow_backend(kind, tmp_path, WHOLE, only=Kind.READ) as backend:
        await filled(backend)
        region = await backend.register_landing_region(memory[:4096])
        transfer = backend.read_groups(IDS, memory)
        single = backend.read_groups([1], memory[4095 : 4095 + 4096])
        await region.aclose()
        assert transfer.is_done
        assert single.is_done


@every_loop
@slow_kinds
async def test_a_refused_call_does_not_count(kind: str, memory: memoryview, tmp_path: Path) -> None:
    """A region would wait for ever for a transfer that never was."""
    async with slow_backend(kind, tmp_path, WHOLE) as backend:
        region = await backend.register_landing_region(memory)
        with pytest.raises(LayoutError):
            backend.write_groups([1] * len(IDS), memory)
        with pytest.raises(LayoutError):
            backend.read_groups(IDS, memory, priority=3)  # type: ignore[arg-type]
        with anyio.fail_after(5):
            await region.aclose()


@every_loop
@slow_kinds
async def test_a_call_that_finds_no_room_does_not_count(
    kind: str, memory: memoryview, tmp_path: Path
) -> None:
    async with slow_backend(kind, tmp_path, WHOLE, max_transfers=1) as backend:
        region = await backend.register_landing_region(memory)
        transfer = backend.read_groups([1], aligned_buffer(4096))
        for call in (
            lambda: backend.read_groups(IDS, memory),
            lambda: backend.read_groups([1], memory[:4096]),
        ):
            with pytest.raises(BusyError):
                call()
        assert not region._users
        await region.aclose()
        assert not transfer.is_done
        await transfer


@every_loop
@slow_kinds
async def test_region_and_backend_close_at_once(kind: str, memory: memoryview, tmp_path: Path) -> None:
    """In any order, with I/O in flight: both return, the region is given back, and no error comes of it."""
    async with slow_backend(kind, tmp_path, WHOLE, only=Kind.READ) as backend:
        await filled(backend)
        regions = [
            await backend.register_landing_region(memory[start : start + 8192]) for start in (0, 8192, 16384)
        ]
        transfer = backend.read_groups(IDS, memory)
        async with anyio.create_task_group() as group:
            group.start_soon(regions[0].aclose)
            await anyio.lowlevel.checkpoint()
            group.start_soon(backend.aclose)
            await anyio.lowlevel.checkpoint()
            group.start_soon(regions[1].aclose)
        await regions[2].aclose()
        assert transfer.is_done
        assert all(region.is_closed for region in regions)
        await transfer.outcome()


@every_loop
@slow_kinds
async def test_an_unused_region_closes_while_the_backend_does(
    kind: str, memory: memoryview, tmp_path: Path
) -> None:
    """The engine takes no orders any more, but still has I/O elsewhere in flight."""
    async with slow_backend(kind, tmp_path, WHOLE, only=Kind.READ) as backend:
        await filled(backend)
        region = await backend.register_landing_region(memory)
        transfer = backend.read_groups(IDS, aligned_buffer(NBYTES))
        async with anyio.create_task_group() as group:
            group.start_soon(backend.aclose)
            await anyio.lowlevel.checkpoint()
            assert not transfer.is_done
            await region.aclose()
        assert region.is_closed
        await transfer.outcome()


@every_loop
@slow_kinds
async def test_registering_while_the_backend_closes(kind: str, memory: memoryview, tmp_path: Path) -> None:
    """The registration ends, one way or the other; nothing stays registered and nobody waits for ever."""
    async with slow_backend(kind, tmp_path, WHOLE) as backend:
        made: list[LandingRegion] = []

        async def register() -> None:
            made.append(await backend.register_landing_region(memory))

        with anyio.fail_after(10):
            async with anyio.create_task_group() as group:
                group.start_soon(register)
                await anyio.lowlevel.checkpoint()
                group.start_soon(backend.aclose)
        for region in made:
            await region.aclose()


@every_loop
async def test_closing_a_region_twice_at_once(memory: memoryview, tmp_path: Path) -> None:
    async with slow_backend("uring", tmp_path, WHOLE, only=Kind.READ) as backend:
        await filled(backend)
        region = await backend.register_landing_region(memory)
        transfer = backend.read_groups(IDS, memory)
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(region.aclose)
        assert transfer.is_done
        assert region.is_closed
        async with await backend.register_landing_region(memory):
            await backend.read_groups(IDS, memory)


@every_loop
async def test_memory_that_is_refused(memory: memoryview, tmp_path: Path) -> None:
    async with make_backend("uring", tmp_path)(WHOLE) as backend:
        wrong = {
            "misaligned": memory[512:],
            "odd": memory[1:4097],
            "no whole pages": memory[:4095],
            "empty": memory[:0],
            "read-only": memory.toreadonly(),
            "not contiguous": np.frombuffer(memory, np.uint8)[::2],
            "no memory": None,
            "device memory": DeviceMemory(4096, 4096, None),
        }
        for what, one in wrong.items():
            with pytest.raises(LayoutError):
                await backend.register_landing_region(one)
            assert backend.statistics().landing_regions == 0, what
        async with await backend.register_landing_region(memory[4096 : 4 * 4096]):
            for start, stop in ((0, 2), (3, 5), (2, 3), (0, 6), (1, 4)):
                with pytest.raises(LayoutError, match="overlaps"):
                    await backend.register_landing_region(memory[start * 4096 : stop * 4096])
            async with await backend.register_landing_region(memory[:4096]):
                assert backend.statistics().landing_regions == 2


@every_loop
async def test_region_keeps_its_memory(tmp_path: Path) -> None:
    """Until it is closed, also when the caller has dropped both."""

    class Pages:
        def __init__(self) -> None:
            self.memory = aligned_buffer(8192)
            self.nbytes = 8192

        def data_ptr(self) -> int:
            return int(np.frombuffer(self.memory, np.uint8).ctypes.data)

    async with make_backend("uring", tmp_path)(WHOLE) as backend:
        pages = Pages()
        alive = weakref.ref(pages)
        region = await backend.register_landing_region(pages)
        del pages
        gc.collect()
        assert alive() is not None
        await region.aclose()
        gc.collect()
        assert alive() is None


@every_loop
@pytest.mark.skipif(not has_extension(), reason="the compiled extension is not installed")
async def test_memory_of_allocate_host(tmp_path: Path) -> None:
    async with make_backend("uring", tmp_path)(WHOLE) as backend:
        rows = await filled(backend)
        memory = allocate_host(NBYTES)
        async with await backend.register_landing_region(memory) as region:
            assert region.is_registered
            await backend.read_groups(IDS, memory)
        assert (as_rows(memory) == rows[IDS]).all()
