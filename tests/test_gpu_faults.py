"""The device path when things go wrong: faults of the driver, wrong arguments.

The rule behind most of these: memory that hardware may still touch is kept, and a call that ends says that it is not.
"""

from __future__ import annotations

import ctypes
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import numpy as np
import pytest
from fake_cuda_control import FakeCuda, HostPages
from gpu_cases import LAYOUT, LOST, NEW, OLD, apart, expecting_a_lost_device, filled, is_all, owned
from gpu_support import (
    RUNGS,
    FakeGpu,
    Gpu,
    backend_on,
    ends_within,
    gpu,
    layer_files,
    looks,
    nothing_left,
    on_asyncio,
    oracle_read,
    oracle_write,
    skip_without_gpu,
    until,
)

from aio_kv import (
    ClosedError,
    DeviceError,
    EngineBackend,
    GroupLayout,
    KvKind,
    LayerFiles,
    LayoutError,
    Outcome,
    Read,
    Scatter,
    TransferError,
    UnavailableError,
    UringBackend,
)
from aio_kv.cuda import CopyOptions, Device, DeviceBuffer, DevicePointer

__all__ = ["gpu"]  # a fixture

OUT_OF_MEMORY, INVALID_VALUE = 2, 1


# Faults of the driver


async def host_paths_work(kv: EngineBackend, files: LayerFiles) -> None:
    data = np.random.default_rng(3).integers(0, 256, (4, 4096), np.uint8)
    await kv.write_groups(apart(4) + 40, data)
    got = np.zeros_like(data)
    await kv.read_groups(apart(4) + 40, got)
    assert np.array_equal(got, data)
    assert np.array_equal(oracle_read(files, apart(4) + 40), data)


async def device_transfers_fail(kv: EngineBackend, buffer: DeviceBuffer, code: int) -> None:
    """Raising where the call is made, or in the transfer: either way a DeviceError with the CUresult."""
    for start in (kv.read_groups, kv.write_groups):
        with pytest.raises((DeviceError, TransferError)) as caught:
            await start(apart(2), Scatter(buffer, np.arange(2) * 4096))
        assert cause_of(caught.value).code == code


def cause_of(error: BaseException) -> DeviceError:
    found = error.__cause__ if isinstance(error, TransferError) else error
    assert isinstance(found, DeviceError)
    assert str(found.code) in str(found)
    return found


FAULTS = {
    # What fails: the entry, its CUresult, options that lead there, the direction, whether a fence is in the way.
    "kernel-launch": ("cuLaunchKernel", LOST, CopyOptions(), "read", False),
    "kernel-launch-refused": ("cuLaunchKernel", INVALID_VALUE, CopyOptions(), "write", False),
    "batch": ("cuMemcpyBatchAsync", INVALID_VALUE, CopyOptions(kernel_nbytes_max=0), "write", False),
    "single-to-device": (
        "cuMemcpyHtoDAsync",
        LOST,
        CopyOptions(kernel_nbytes_max=0, batch_nbytes_max=0),
        "read",
        False,
    ),
    "single-from-device": (
        "cuMemcpyDtoHAsync",
        LOST,
        CopyOptions(kernel_nbytes_max=0, batch_nbytes_max=0),
        "write",
        False,
    ),
    "event-record": ("cuEventRecord", LOST, CopyOptions(), "read", False),
    "event-query": ("cuEventQuery", LOST, CopyOptions(), "read", False),
    "fence": ("cuStreamWaitEvent", LOST, CopyOptions(), "write", True),
    "execution": ("", LOST, CopyOptions(), "read", False),
    "execution-of-a-write": ("", LOST, CopyOptions(), "write", False),
}


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("name", FAULTS)
@on_asyncio
async def test_a_fault_ends_the_device_path_and_nothing_else(
    gpu: Gpu, tmp_path: Path, rung: str, name: str
) -> None:
    fake = gpu.needs_fake("be told to fail")
    entry, code, copies, direction, needs_fence = FAULTS[name]
    buffer, stream = gpu.buffer(8 * 4096, OLD), gpu.stream()
    with filled(tmp_path) as files, expecting_a_lost_device():
        async with backend_on(rung, files, gpu.device, copies) as kv:
            if needs_fence:
                fake.slow(stream, 1000)
            if entry:
                fake.fail(entry, result=code)
            else:
                fake.fail_execution(result=code)
            into, is_alive = owned(buffer)
            start = kv.read_groups if direction == "read" else kv.write_groups
            transfer = start(apart(8), into, stream=stream if needs_fence else None)
            del into
            with pytest.raises(TransferError, match=f"CUDA error {code}") as caught:
                await ends_within(transfer)
            assert cause_of(caught.value).code == code
            await device_transfers_fail(kv, buffer, code)
            await host_paths_work(kv, files)
            statistics = kv.statistics().engine
            assert 0 < statistics.slots_leaked <= 8
            assert statistics.slots_leased == 0
            assert statistics.device_error == code
            assert is_alive(), "hardware may still write there"
            assert is_all(oracle_read(files, apart(8)), NEW), (
                "a write without its bytes must not reach the file"
            )
            fake.clear_log()
        given_back = {
            "cuMemHostUnregister",
            "cuStreamDestroy",
            "cuEventDestroy",
            "cuModuleUnload",
            "cuMemFree",
        }
        assert not given_back & {call.name for call in fake.log()}
        # The hardware gets to what was queued after all: it finds its memory.
        fake.run_everything()
        assert fake.violations()[0] == 0


@on_asyncio
async def test_slots_of_a_fault_are_not_lent_again(gpu: Gpu, tmp_path: Path) -> None:
    """A staged host read after the fault must not overwrite a slot that a queued copy may still read."""
    fake = gpu.needs_fake("be told to fail")
    stream, buffer = gpu.stream(), gpu.buffer(4 * 4096, OLD)
    odd = GroupLayout(1, 64, 1, 1, 500, 8, kinds=(KvKind.LATENT,))  # 4000 bytes: host memory is staged too
    with layer_files(tmp_path, odd) as files, expecting_a_lost_device():
        oracle_write(files, np.arange(32), np.full((32, 4000), NEW, np.uint8))
        oracle_write(files, np.arange(32, 64), np.full((32, 4000), OLD, np.uint8))
        async with backend_on("uring", files, gpu.device) as kv:
            gpu.hold(stream)
            held = kv.read_groups(apart(4), Scatter(buffer, np.arange(4) * 4000), stream=stream)
            await held.enqueued()
            fake.fail("cuEventQuery", result=LOST)
            with pytest.raises(TransferError, match="CUDA error 719"):
                await held
            got = np.zeros((32, 4000), np.uint8)
            for _ in range(40):  # every slot that is free comes round
                await kv.read_groups(np.arange(32, 64), got)
            assert is_all(got.reshape(-1), OLD)
            gpu.release(stream)
            fake.run_everything()
            assert is_all(gpu.download(buffer, 4 * 4000), NEW)
            assert kv.statistics().engine.slots_leaked == 4


@on_asyncio
async def test_a_fault_outweighs_a_cancellation(gpu: Gpu, tmp_path: Path) -> None:
    """Some I/Os were dropped first; the batch's answer must still say that hardware may touch its memory."""
    fake = gpu.needs_fake("be told to fail")
    stream, buffer = gpu.stream(), gpu.buffer(32 * 4096, OLD)
    with filled(tmp_path) as files, expecting_a_lost_device():
        async with backend_on("uring", files, gpu.device) as kv:
            into, is_alive = owned(buffer)
            gpu.hold(stream)
            transfer = kv.read_groups(apart(32), into, stream=stream)
            del into
            await until(lambda: kv.statistics().engine.copy_groups > 0, "copies are queued")
            transfer.cancel()
            await until(lambda: kv.statistics().engine.dropped_ops > 0, "the rest is dropped")
            fake.fail("cuEventQuery", result=LOST)
            report = await transfer.outcome()
            assert set(report.outcomes.tolist()) == {Outcome.FAILED, Outcome.CANCELLED}
            del transfer
            assert is_alive()


@on_asyncio
async def test_a_failed_event_is_told_of(gpu: Gpu, tmp_path: Path) -> None:
    fake = gpu.needs_fake("be told to fail")
    stream = gpu.stream()
    with filled(tmp_path) as files, expecting_a_lost_device():
        async with backend_on("uring", files, gpu.device) as kv:
            with gpu.holding(stream):
                event = kv.record_event(stream)
                raised: list[DeviceError] = []

                async def wait() -> None:
                    with pytest.raises(DeviceError) as caught:
                        await event
                    raised.append(caught.value)

                async with anyio.create_task_group() as tasks:
                    for _ in range(2):
                        tasks.start_soon(wait)
                    await looks(kv, 3)
                    fake.fail("cuEventQuery", result=LOST, times=1)
            assert [error.code for error in raised] == [LOST] * 2
            with pytest.raises(DeviceError):
                await event


@on_asyncio
async def test_a_device_lost_to_somebody_else_is_noticed_at_close(gpu: Gpu, tmp_path: Path) -> None:
    fake = gpu.needs_fake("be told to fail")
    with filled(tmp_path) as files, expecting_a_lost_device():
        async with backend_on("uring", files, Device(0, table=gpu.device.table)) as kv:
            before = mapped_nbytes()
            fake.fail("cuStreamDestroy", result=LOST)
            await kv.aclose()
        # The staging memory could not be unregistered, so it is still there.
        assert mapped_nbytes() > before - (4 << 20)


def mapped_nbytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * 4096


OPENING = {
    # Which call of the entry fails, from the opening on; 0 is the first by the reactor.
    "cuCtxSetCurrent": (0, OUT_OF_MEMORY),
    "cuThreadExchangeStreamCaptureMode": (0, INVALID_VALUE),
    "cuMemHostRegister": (1, OUT_OF_MEMORY),
    "cuMemHostRegister-lists": (2, OUT_OF_MEMORY),
    "cuMemHostGetDevicePointer": (1, OUT_OF_MEMORY),
    "cuMemHostGetDevicePointer-lists": (2, OUT_OF_MEMORY),
    "cuEventCreate": (100, OUT_OF_MEMORY),
    "cuStreamCreateWithPriority": (3, OUT_OF_MEMORY),
    "cuLaunchKernel": (2, INVALID_VALUE),
    "cuEventRecord": (1, OUT_OF_MEMORY),
}


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("name", OPENING)
@on_asyncio
async def test_a_failure_at_open_is_told_and_leaves_nothing(
    gpu: Gpu, tmp_path: Path, rung: str, name: str
) -> None:
    fake = gpu.needs_fake("be told to fail")
    nth, code = OPENING[name]
    entry = name.split("-")[0]
    with filled(tmp_path) as files, nothing_left(fake):
        device = Device(0, table=gpu.device.table)
        async with backend_on(rung, files, device):
            pass  # so that the next openings make the same calls
        fake.clear_log()
        async with backend_on(rung, files, device):
            nth = nth or first_call_by_the_reactor(fake, entry)
        fake.fail(entry, nth=nth, result=code)
        with pytest.raises(DeviceError, match=f"\\b{code}\\b") as caught:
            async with backend_on(rung, files, device):
                pass
        assert caught.value.code == code
        fake.clear_faults()
        async with backend_on(rung, files, device) as kv:
            await host_paths_work(kv, files)
        device.close()


def first_call_by_the_reactor(fake: FakeCuda, entry: str) -> int:
    """Its number among the calls of the entry since an opening began."""
    calls = fake.log()
    reactor = next(call.thread for call in calls if call.name == "cuMemHostRegister")
    made = [call.thread for call in calls if call.name == entry]
    return made.index(reactor) + 1


@on_asyncio
async def test_too_little_pinned_memory_at_open(gpu: Gpu, tmp_path: Path) -> None:
    fake = gpu.needs_fake("be short of memory")
    fake.set_memory_limit(pinned_nbytes=5 << 20)  # room for the staging memory, not for the lists
    with filled(tmp_path) as files, nothing_left(fake):
        with pytest.raises(DeviceError, match="CUDA error 2 at open"):
            async with backend_on("uring", files, gpu.device, queue_depth=256):
                pass
        gpu.device.events.close()


# Wrong arguments


@asynccontextmanager
async def refusing(gpu: Gpu, folder: Path) -> AsyncIterator[EngineBackend]:
    """A backend that must be as good as new after the refusals of the block: no event lent, no transfer counted."""
    memory = gpu.buffer(4096, OLD)
    with filled(folder) as files:
        async with backend_on("uring", files, gpu.device) as kv:
            yield kv
            assert gpu.device.events.lent == 0
            assert kv.statistics().transfers.transfers == 0
            await kv.read_groups([0], memory, stream=gpu.stream())
            assert is_all(gpu.download(memory), NEW)


@on_asyncio
async def test_a_backend_without_a_device_refuses_device_memory(gpu: Gpu, tmp_path: Path) -> None:
    memory = gpu.buffer(4096)
    with filled(tmp_path) as files:
        async with UringBackend(files) as kv:
            for call in (
                lambda: kv.read_groups([0], memory),
                lambda: kv.write_groups([0], memory),
                lambda: kv.read_groups([0], bytearray(4096), stream=0),
                lambda: kv.record_event(0),
            ):
                with pytest.raises(UnavailableError, match="without a device"):
                    call()


@on_asyncio
async def test_there_is_no_such_gpu(gpu: Gpu, tmp_path: Path) -> None:
    with filled(tmp_path), pytest.raises(UnavailableError, match="there is no GPU 99"):
        Device(99, table=gpu.device.table)


@on_asyncio
async def test_host_and_device_memory_are_told_apart(gpu: Gpu, tmp_path: Path) -> None:
    stream, device_memory = gpu.stream(), gpu.buffer(4096)
    host = bytearray(4096)
    address = ctypes.addressof(ctypes.c_char.from_buffer(host))
    async with refusing(gpu, tmp_path) as kv:
        with pytest.raises(LayoutError, match="host memory and a stream was given"):
            kv.read_groups([0], host, stream=stream)
        with pytest.raises(DeviceError, match="CUDA knows no memory at"):
            kv.read_groups([0], DevicePointer(address, 4096), stream=stream)
        keys = [LAYOUT.key(0), LAYOUT.key(1)]
        with pytest.raises(LayoutError, match="host and device memory in one call"):
            kv.read([Read(keys[0], host), Read(keys[1], device_memory)])


@on_asyncio
async def test_pinned_host_memory_is_no_device_memory(gpu: Gpu, tmp_path: Path) -> None:
    fake = gpu.needs_fake("register memory through this test's controls")
    pages = HostPages(4096)
    fake.check("cuMemHostRegister", pages.address, 4096, 3)
    async with refusing(gpu, tmp_path) as kv:
        with pytest.raises(LayoutError, match="is host memory"):
            kv.read_groups([0], DevicePointer(pages.address, 4096))
    fake.check("cuMemHostUnregister", pages.address)


@on_asyncio
async def test_memory_that_is_gone_or_too_small(gpu: Gpu, tmp_path: Path) -> None:
    memory = gpu.buffer(2 * 4096)
    async with refusing(gpu, tmp_path) as kv:
        gone = DeviceBuffer(4096, gpu.device)
        address = gone.data_ptr()
        gone.close()
        with pytest.raises(ClosedError):
            kv.read_groups([0], gone)
        with pytest.raises(DeviceError, match="CUDA knows no memory at"):
            kv.write_groups([0], DevicePointer(address, 4096))
        with pytest.raises(LayoutError, match="passes the end by 4096 bytes"):
            kv.read_groups([0, 1, 2], DevicePointer(memory.data_ptr(), 3 * 4096))
        with pytest.raises(LayoutError, match="need exactly"):
            kv.read_groups([0], memory)
        with pytest.raises(LayoutError, match="would end outside"):
            kv.read_groups([0], Scatter(memory, np.array([4097])))
        with pytest.raises(LayoutError, match="2 offsets for 1 groups"):
            kv.read_groups([0], Scatter(memory, np.array([0, 1])))


@on_asyncio
async def test_what_is_of_another_device_is_refused(tmp_path: Path) -> None:
    skip_without_gpu()
    gpu = FakeGpu(devices=2)
    other = Device(1, table=gpu.device.table)
    memory = DeviceBuffer(4096, other)
    with other.activated():
        foreign = gpu.fake.stream()
    async with refusing(gpu, tmp_path) as kv:
        with pytest.raises(LayoutError, match="is on GPU 1: give memory of GPU 0"):
            kv.read_groups([0], memory)
        for call in (
            lambda: kv.read_groups([0], gpu.buffer(4096), stream=foreign),
            lambda: kv.record_event(foreign),
        ):
            with pytest.raises(DeviceError, match="belongs to device 1"):
                call()
    memory.close()
    other.close()
    gpu.close()


@on_asyncio
async def test_what_is_no_stream_is_refused(gpu: Gpu, tmp_path: Path) -> None:
    memory = gpu.buffer(4096)
    async with refusing(gpu, tmp_path) as kv:
        for stream in ("0", 1.5, object(), -1):
            with pytest.raises(LayoutError, match="stream"):
                kv.read_groups([0], memory, stream=stream)
        if gpu.is_fake:  # a GPU's driver may not survive a handle that is none
            destroyed = destroyed_stream(gpu.needs_fake(""))
            with pytest.raises(DeviceError, match="cuStreamGetCtx failed"):
                kv.read_groups([0], memory, stream=destroyed)


def destroyed_stream(fake: FakeCuda) -> int:
    stream = fake.stream()
    fake.check("cuStreamDestroy", stream)
    return stream


@on_asyncio
async def test_a_busy_backend_gives_the_fence_back(gpu: Gpu, tmp_path: Path) -> None:
    stream, memory = gpu.stream(), gpu.buffer(4096)
    with filled(tmp_path) as files:
        async with backend_on("uring", files, gpu.device, max_transfers=1) as kv:
            with gpu.holding(stream):
                first = kv.read_groups([0], memory, stream=stream)
                lent = gpu.device.events.lent
                with pytest.raises(Exception, match="max_transfers"):
                    kv.read_groups([1], memory, stream=stream)
                assert gpu.device.events.lent == lent
            await first
            assert gpu.device.events.lent == 0
