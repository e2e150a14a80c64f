"""The short ways of one small read and of copies to and from a GPU: the engine records what the planner would have."""

from __future__ import annotations

import array
import ctypes
import errno
import gc
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from backends import make_backend
from gpu_cases import LAYOUT as GPU_LAYOUT
from gpu_cases import LOST, NEW, OLD, expecting_a_lost_device, filled, is_all
from gpu_support import FakeGpu, Gpu, backend_on, gpu, looks, on_asyncio, random_rows, skip_without_gpu

from aio_kv import (
    AioKvError,
    DeviceError,
    GroupLayout,
    KvKind,
    LayoutError,
    Scatter,
    TransferError,
    UnavailableError,
    allocate_host,
)
from aio_kv.cuda import Device, Stream
from aio_kv.engine import Batch, Engine, Kind, Order
from aio_kv.engine.options import Fault, FaultAction
from aio_kv.memory import DeviceMemory
from aio_kv.plan import (
    COPY_DTYPE,
    OP_DTYPE,
    PINNED_COPIES_MAX,
    RESULT_DTYPE,
    Placement,
    new_record,
    plan_groups,
    plan_of_record,
    plan_pinned,
)

__all__ = ["gpu"]  # a fixture

LATENT = (KvKind.LATENT,)
LAYOUTS = {
    "whole pages": GroupLayout(3, 8, 2, 16, 128, 2),
    "padded": GroupLayout(2, 8, 1, 3, 50, 2, kinds=LATENT),
    "two pages and a half": GroupLayout(1, 8, 1, 10, 512, 2, kinds=LATENT),
}
KINDS = ("uring", "uring-buffered", "uring-2-rings", "threads")


def ops_of(plan: Any) -> list[Any]:
    return np.frombuffer(plan.ops, OP_DTYPE)[: plan.op_count].tolist()  # type: ignore[no-any-return]


def copies_of(plan: Any, count: int) -> list[Any]:
    return [] if count == 0 else np.frombuffer(plan.copies, COPY_DTYPE)[:count].tolist()


async def filled_backend(kv: Any, layout: GroupLayout) -> Any:
    rows = np.random.default_rng(3).integers(0, 256, (layout.num_groups, layout.payload_nbytes), np.uint8)
    await kv.write_groups(np.arange(layout.num_groups), rows)
    return rows


@pytest.mark.parametrize("shift", [0, 512, 3])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
@on_asyncio
async def test_one_read_is_what_would_be_planned(kind: str, name: str, shift: int, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    async with make_backend(kind, tmp_path)(layout) as kv:
        rows = await filled_backend(kv, layout)
        memory = np.frombuffer(allocate_host(layout.payload_nbytes + 4096), np.uint8)
        for group in (0, 1, layout.groups_per_layer - 1, layout.num_groups - 1):
            memory[:] = 0xE7
            into = memory[shift : shift + layout.payload_nbytes]
            transfer = kv.read_groups([group], into)
            assert isinstance(transfer.plan.ops, memoryview), "it went the long way"
            address = np.array([into.ctypes.data])
            limits = kv._require_session().limits
            planned = plan_groups(layout, np.array([group]), address, limits, is_write=False)
            assert ops_of(transfer.plan) == ops_of(planned)
            count = int(np.frombuffer(planned.ops, OP_DTYPE)["copy_count"].sum())
            assert copies_of(transfer.plan, count) == copies_of(planned, count)
            report = await transfer
            assert (report.is_complete, report.nbytes) == (True, layout.payload_nbytes)
            assert transfer.group_ids.tolist() == [group]
            assert np.array_equal(into, rows[group])
            outside = np.concatenate([memory[:shift], memory[shift + layout.payload_nbytes :]])
            assert (outside == 0xE7).all()


def frozen(nbytes: int) -> Any:
    made = np.zeros(nbytes, np.uint8)
    made.flags.writeable = False
    return made


class Pointer:
    """Host memory as a tensor shows it."""

    def __init__(self, memory: bytearray, *, is_cuda: bool = False) -> None:
        self.memory, self.nbytes, self.is_cuda = memory, len(memory), is_cuda

    def data_ptr(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def __bytes__(self) -> bytes:
        return bytes(self.memory)


PLACES: dict[str, Callable[[int], Any]] = {
    "memoryview": lambda n: memoryview(bytearray(n)),
    "bytearray": bytearray,
    "array": lambda n: np.zeros(n, np.uint8),
    "halves": lambda n: np.zeros((2, n // 4), np.float16),
    "view of shorts": lambda n: memoryview(array.array("H", bytes(n))),
    "ctypes": lambda n: (ctypes.c_char * n)(),
    "too short": lambda n: np.zeros(n - 1, np.uint8),
    "too long": lambda n: bytearray(n + 1),
    "empty": lambda n: bytearray(),
    "bytes": bytes,
    "read-only array": frozen,
    "read-only view": lambda n: memoryview(bytes(n)),
    "every second byte": lambda n: memoryview(bytearray(2 * n))[::2],
    "every second element": lambda n: np.zeros(2 * n, np.uint8)[::2],
    "columns first": lambda n: np.zeros((n // 64, 64), np.uint8, order="F"),
    "objects": lambda n: np.zeros(n // 8, object),
    "view of objects": lambda n: memoryview(np.zeros(n // 8, object)),
    "text": lambda n: "x" * n,
    "nothing": lambda n: None,
    "pointer": lambda n: Pointer(bytearray(n)),
    "pointer to too little": lambda n: Pointer(bytearray(n - 1)),
    "pointer to a GPU": lambda n: Pointer(bytearray(n), is_cuda=True),
}


@pytest.mark.parametrize("name", PLACES)
@on_asyncio
async def test_any_memory_meets_the_same_end_either_way(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS["whole pages"]
    async with make_backend("uring", tmp_path)(layout) as kv:
        rows = await filled_backend(kv, layout)

        async def read(ids: Any) -> tuple[Any, ...]:
            place = PLACES[name](layout.payload_nbytes)
            try:
                await kv.read_groups(ids, place)
            except (LayoutError, UnavailableError) as error:
                return type(error), str(error)
            return bytes(place), bytes(rows[5])

        short, long = await read([5]), await read(np.array([5]))
        assert short == long
        assert isinstance(short[0], type) or short[0] == short[1]


@on_asyncio
async def test_the_memory_of_one_read_is_kept_until_it_has_ended(tmp_path: Path) -> None:
    layout = LAYOUTS["whole pages"]
    faults = (Fault(FaultAction.DELAY, 50_000, kind=Kind.READ),)
    async with make_backend("uring", tmp_path, faults=faults)(layout) as kv:
        await filled_backend(kv, layout)
        into = np.zeros(layout.payload_nbytes, np.uint8)
        is_there = weakref.ref(into)
        transfer = kv.read_groups([5], into)
        del into
        (ticket,) = transfer.tickets
        gc.collect()
        assert is_there() is not None
        # The engine keeps it by itself: not even a transfer that was given up may take it away.
        transfer.owner = None
        gc.collect()
        assert is_there() is not None
        assert ticket.owners
        await transfer
        gc.collect()
        assert is_there() is None


@on_asyncio
async def test_a_small_call_rouses_an_engine_that_has_nothing_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = LAYOUTS["whole pages"]
    faults = (Fault(FaultAction.DELAY, 20_000, kind=Kind.READ),)
    async with make_backend("uring", tmp_path, faults=faults)(layout) as kv:
        await filled_backend(kv, layout)
        order: list[str] = []
        rouse, read_one = Engine.rouse, Engine.read_one
        monkeypatch.setattr(Engine, "rouse", lambda self: order.append("rouse") or rouse(self))
        monkeypatch.setattr(
            Engine, "read_one", lambda self, *all: order.append("read") or read_one(self, *all)
        )
        first = kv.read_groups([0], bytearray(layout.payload_nbytes))
        second = kv.read_groups([1], bytearray(layout.payload_nbytes))
        assert order == ["rouse", "read", "read"]
        await first
        await second


# Pinned memory and the GPU


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("count", [1, 64, PINNED_COPIES_MAX, PINNED_COPIES_MAX + 1, 3000])
@on_asyncio
async def test_copies_are_what_would_be_planned(
    gpu: Gpu, tmp_path: Path, count: int, is_packed: bool
) -> None:
    memory = allocate_host(count * 4096 + 4096)
    rows = random_rows(GPU_LAYOUT, count)
    draw = np.random.default_rng(count)
    offsets, places = draw.permutation(count) * 4096 + 512, draw.permutation(count) * 4096
    np.frombuffer(memory, np.uint8)[offsets[:, None] + np.arange(4096)] = rows
    into, stream = gpu.buffer(count * 4096, OLD), gpu.stream()
    with filled(tmp_path) as files:
        async with (
            backend_on("uring", files, gpu.device) as kv,
            await kv.register_landing_region(memory) as region,
        ):
            await kv.load(
                region, offsets[:1], Scatter(into, places[:1]), stream=stream
            )  # the stream is known now
            target = into if is_packed else Scatter(into, places)
            transfer = kv.load(region, offsets, target, stream=stream)
            where = into.data_ptr() + (np.arange(count) * 4096 if is_packed else places)
            planned = plan_pinned((region.address, region.nbytes), offsets, where, 4096)
            unit_of_bytes = [(1, *op[1:]) for op in ops_of(planned)]
            assert ops_of(transfer.plan) == unit_of_bytes
            assert copies_of(transfer.plan, count) == copies_of(planned, count)
            assert transfer.plan.first_ops(count).tolist() == planned.first_ops(count).tolist()
            await transfer
    got = gpu.download(into).reshape(count, 4096)
    assert np.array_equal(got if is_packed else got[places // 4096], rows)


@pytest.mark.parametrize("unit", [0, 1, 64, 4096])
@on_asyncio
async def test_a_pinned_op_counts_in_units(gpu: Gpu, tmp_path: Path, unit: int) -> None:
    """A region may be larger than what 32 bits of bytes reach; how its offsets are counted makes no difference."""
    count, nbytes = 8, 16 * 4096
    memory = allocate_host(nbytes)
    bytes_of = np.frombuffer(memory, np.uint8)
    bytes_of[:] = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    into = gpu.buffer(count * 512, OLD)
    with filled(tmp_path) as files:
        async with (
            backend_on("uring", files, gpu.device) as kv,
            await kv.register_landing_region(memory) as region,
        ):
            engine = kv._require_session().opened.engine
            ops, copies = np.zeros(1, OP_DTYPE), np.zeros(count, COPY_DTYPE)
            step = max(unit, 1)
            places = np.random.default_rng(1).permutation(nbytes // 4096)[:count] * (4096 // step)
            ops["address"], ops["nbytes"], ops["file_offset"] = region.address, nbytes // step, unit
            ops["copy_count"], ops["placement"] = count, Placement.PINNED
            copies["address"] = into.data_ptr() + np.arange(count) * 512
            copies["op_offset"], copies["nbytes"] = places, 512
            results = np.zeros(1, RESULT_DTYPE)
            batch = Batch(Kind.LOAD, ops, 1, results, copies, count, owner=into, order=Order(0, 0))
            ticket = engine.submit(batch)
            assert engine.wait(ticket, 10)
            assert ticket.status == 0
            # One unit more, and the last piece would end outside; a unit of gigabytes would overflow.
            copies["op_offset"][0] = nbytes // step
            assert engine.wait(ticket := engine.submit(batch), 10)
            assert ticket.status < 0
            copies["op_offset"][0], ops["file_offset"] = 0, 1 << 40
            assert engine.wait(ticket := engine.submit(batch), 10)
            assert ticket.status == -errno.EINVAL
    wanted = bytes_of[(places * step)[:, None] + np.arange(512)]
    assert np.array_equal(gpu.download(into).reshape(count, 512), wanted)


class Known:
    """An open backend with a pinned region of NEW, on whose stream a first load has gone the long way."""

    def __init__(self, gpu: Gpu, kv: Any, region: Any) -> None:
        self.gpu, self.kv, self.region = gpu, kv, region
        self.stream, self.into = gpu.stream(), gpu.buffer(COUNT * 4096, OLD)
        self.offsets, self.places = np.arange(COUNT) * 4096, np.arange(COUNT) * 4096

    def load(self, into: Any = None) -> Any:
        target = Scatter(self.into, self.places) if into is None else into
        return self.kv.load(self.region, self.offsets, target, stream=self.stream)

    def started(self) -> Any:
        """A load that has gone the short way."""
        transfer = self.load()
        assert transfer.plan.ops.obj.__class__ is bytearray
        return transfer


COUNT = 8


@asynccontextmanager
async def known(gpu: Gpu, folder: Path) -> AsyncIterator[Known]:
    memory = allocate_host(COUNT * 4096)
    memory[:] = bytes([NEW]) * len(memory)
    with filled(folder) as files:
        async with backend_on("uring", files, gpu.device) as kv:
            region = await kv.register_landing_region(memory)
            made = Known(gpu, kv, region)
            await made.load()
            gpu.upload(made.into, bytes([OLD]) * (COUNT * 4096))
            yield made
            await region.aclose()


@on_asyncio
async def test_arrays_that_change_after_the_call_do_not_matter(gpu: Gpu, tmp_path: Path) -> None:
    async with known(gpu, tmp_path) as known_:
        with gpu.holding(known_.stream):
            transfer = known_.started()
            known_.offsets[:], known_.places[:] = 1 << 60, -1
        await transfer
        assert is_all(gpu.download(known_.into), NEW)


@on_asyncio
async def test_a_load_comes_behind_what_its_stream_was_given(gpu: Gpu, tmp_path: Path) -> None:
    async with known(gpu, tmp_path) as known_:
        seen = gpu.buffer(COUNT * 4096)
        with gpu.holding(known_.stream):
            gpu.copy(seen, known_.into, known_.stream)
            transfer = known_.started()
            await looks(known_.kv)
        await transfer
        assert is_all(gpu.download(seen), OLD)
        assert is_all(gpu.download(known_.into), NEW)


@on_asyncio
async def test_what_follows_enqueued_sees_the_bytes(gpu: Gpu, tmp_path: Path) -> None:
    async with known(gpu, tmp_path) as known_:
        seen = gpu.buffer(COUNT * 4096)
        transfer = known_.started()
        await transfer.enqueued()
        gpu.copy(seen, known_.into, known_.stream)
        gpu.finish(known_.stream)
        assert is_all(gpu.download(seen), NEW)
        await transfer


@on_asyncio
async def test_a_capturing_stream_is_refused(gpu: Gpu, tmp_path: Path) -> None:
    async with known(gpu, tmp_path) as known_:
        gpu.begin_capture(known_.stream, 2)
        try:
            with pytest.raises(DeviceError, match="captured into a graph"):
                known_.load()
        finally:
            gpu.end_capture(known_.stream)
        await known_.started()


@on_asyncio
async def test_the_engine_takes_no_fewer_places_than_offsets(gpu: Gpu, tmp_path: Path) -> None:
    async with known(gpu, tmp_path) as known_:
        engine, index = known_.kv._require_session().opened.engine, gpu.device.index
        region, into = known_.region, known_.into
        source = region.address, region.nbytes, known_.offsets
        for places, is_taken in ((known_.places[:-1], False), (known_.places, True)):
            target, record = (into.data_ptr(), into.nbytes, places), new_record(COUNT)
            ticket = engine.copy_pinned(Kind.LOAD, 0, index, source, target, 4096, record, (0, 0), into)
            assert (ticket is not None) == is_taken
            assert ticket is None or engine.wait(ticket, 10)
        assert is_all(gpu.download(into), NEW)


@on_asyncio
async def test_a_stream_object_goes_with_its_own_device_only(tmp_path: Path) -> None:
    """The default streams of all devices have the same handle."""
    skip_without_gpu()
    gpu = FakeGpu(devices=2)
    other = Device(1, table=gpu.device.table)
    try:
        async with known(gpu, tmp_path) as known_:
            known_.stream = 0
            await known_.load()
            await known_.started()
            known_.stream = Stream(0, gpu.device)
            await known_.started()
            known_.stream = Stream(0, other)
            with pytest.raises(DeviceError, match="belongs to device 1"):
                known_.load()
    finally:
        other.close()
        gpu.close()


@on_asyncio
async def test_memory_of_the_host_is_refused(gpu: Gpu, tmp_path: Path) -> None:
    class Wrong:
        nbytes, is_cuda = COUNT * 4096, True

        def data_ptr(self) -> int:
            return int(host.ctypes.data)

    host = np.frombuffer(allocate_host(COUNT * 4096), np.uint8)
    async with known(gpu, tmp_path) as known_:
        with pytest.raises(AioKvError, match="into"):
            known_.load(Wrong())
        with pytest.raises(AioKvError, match="into"):
            known_.load(DeviceMemory(int(host.ctypes.data), COUNT * 4096, host))
        assert not host.any()
        await known_.started()


MANY = 60  # more than the engine has under way at a time


@on_asyncio
async def test_a_region_outlasts_the_loads_that_have_not_begun(gpu: Gpu, tmp_path: Path) -> None:
    async with known(gpu, tmp_path) as known_, anyio.create_task_group() as group:
        with gpu.holding(known_.stream):
            transfers = [known_.started() for _ in range(MANY)]
            group.start_soon(known_.region.aclose)
            await looks(known_.kv)
            assert not known_.region.is_closed
        for transfer in transfers:
            assert (await transfer).is_complete


@on_asyncio
async def test_a_region_outlasts_the_single_reads_that_have_not_begun(tmp_path: Path) -> None:
    layout = LAYOUTS["whole pages"]
    faults = (Fault(FaultAction.DELAY, 10_000, kind=Kind.READ),)
    async with make_backend("uring", tmp_path, faults=faults)(layout) as kv:
        memory = allocate_host(MANY * 4096)
        region = await kv.register_landing_region(memory)
        transfers = [kv.read_groups([5], memory[i * 4096 : (i + 1) * 4096]) for i in range(MANY)]
        await region.aclose()
        assert all(transfer.is_done for transfer in transfers)


class Destination:
    """Device memory of which a test can tell whether somebody still keeps it."""

    is_cuda = True

    def __init__(self, buffer: Any) -> None:
        self.nbytes, self._address = buffer.nbytes, buffer.data_ptr()

    def data_ptr(self) -> int:
        return int(self._address)


@on_asyncio
async def test_the_destination_of_a_load_is_kept_until_it_has_ended(gpu: Gpu, tmp_path: Path) -> None:
    async with known(gpu, tmp_path) as known_:
        into = Destination(known_.into)
        is_there = weakref.ref(into)
        with gpu.holding(known_.stream):
            transfer = known_.load(into)
            assert isinstance(transfer.plan.ops, memoryview)
            transfer.owner = None  # the engine keeps it by itself: whatever becomes of the transfer
            del into
            gc.collect()
            assert is_there() is not None
        await transfer
        gc.collect()
        assert is_there() is None


@on_asyncio
async def test_after_a_fault_the_destination_of_a_load_is_never_given_back(gpu: Gpu, tmp_path: Path) -> None:
    """The hardware may still write there."""
    fake = gpu.needs_fake("be told to fail")
    with expecting_a_lost_device():
        async with known(gpu, tmp_path) as known_:
            into = Destination(known_.into)
            is_there = weakref.ref(into)
            fake.fail("cuEventQuery", result=LOST)
            transfer = known_.load(into)
            assert isinstance(transfer.plan.ops, memoryview)
            with pytest.raises(TransferError, match=f"CUDA error {LOST}"):
                await transfer
            del into, transfer
            gc.collect()
            assert is_there() is not None


@on_asyncio
async def test_a_fence_is_kept_until_its_load_has_ended(gpu: Gpu, tmp_path: Path) -> None:
    """Its event must not be recorded again for somebody else while the copies have yet to ask for it."""
    async with known(gpu, tmp_path) as known_:
        idle = gpu.stream()
        lent = gpu.device.events.lent
        with gpu.holding(known_.stream):
            transfer = known_.started()
            for _ in range(200):  # every event of the pool comes round
                known_.kv.record_event(idle)
            await looks(known_.kv)
            assert gpu.device.events.lent == lent + 1
            # The engine keeps it by itself, whatever becomes of the transfer.
            transfer.stream, fence = None, weakref.ref(transfer.stream)
            gc.collect()
            assert fence() is not None
            transfer.stream = fence()
            assert is_all(gpu.download(known_.into), OLD)
        await transfer
        assert gpu.device.events.lent == lent


@on_asyncio
async def test_the_record_is_kept_by_the_engine_itself(gpu: Gpu, tmp_path: Path) -> None:
    async with known(gpu, tmp_path) as known_:
        with gpu.holding(known_.stream):
            transfer = known_.started()
            record = transfer.plan.ops.obj
            transfer.plan, transfer.results = transfer.plan._replace(ops=b"", copies=None), b""
            gc.collect()
            with pytest.raises(BufferError):  # the engine reads it: Python must not move it
                record.append(0)
        await transfer
        record.append(0)


def test_records_of_many_copies_name_the_op_of_each() -> None:
    count = 2 * PINNED_COPIES_MAX + 5
    plan, results = plan_of_record(new_record(count), count)
    assert (plan.op_count, len(results)) == (3, 3 * RESULT_DTYPE.itemsize)
    assert len(copies_of(plan, count)) == count
    assert np.bincount(plan.first_ops(count)).tolist() == [PINNED_COPIES_MAX, PINNED_COPIES_MAX, 5]
