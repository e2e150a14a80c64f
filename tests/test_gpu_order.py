"""Order between callers' streams, the copy streams and the disk.

A stream that is held stands for a kernel that has not ended. What must wait for it waits; what need not does not.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from fake_cuda_control import LEGACY, PER_THREAD
from gpu_cases import LATENT, LAYOUT, NEW, OLD, OTHER, delayed, filled, is_all, some
from gpu_support import (
    RUNGS,
    SMALL,
    Gpu,
    backend_on,
    ends_within,
    gpu,
    gpu_of,
    layer_files,
    looks,
    on_asyncio,
    on_every_loop,
    oracle_read,
    run_on,
    until,
)

from aio_kv import (
    EngineBackend,
    GroupLayout,
    Scatter,
    Transfer,
    TransferError,
)
from aio_kv.cuda import DeviceBuffer
from aio_kv.engine import Kind
from aio_kv.engine.options import Fault, FaultAction

__all__ = ["gpu"]  # a fixture

WIDE = GroupLayout(1, 96, 1, 16, 1024, 2, kinds=LATENT)  # 96 groups of 32 KiB, which is the bulk lane here
DELAYED = delayed(5_000)


# A caller's stream and the copies of its transfers


@pytest.mark.parametrize("rung", RUNGS)
@on_asyncio
async def test_a_read_waits_for_kernels_that_still_use_its_destination(
    gpu: Gpu, tmp_path: Path, rung: str
) -> None:
    ids, stream = some(LAYOUT, 8), gpu.stream()
    into, seen = gpu.buffer(8 * 4096, OLD), gpu.buffer(8 * 4096)
    with filled(tmp_path, LAYOUT) as files:
        async with backend_on(rung, files, gpu.device) as kv:
            with gpu.holding(stream):
                gpu.copy(seen, into, stream)
                transfer = kv.read_groups(ids, into, stream=stream)
                await transfer.enqueued()
                await looks(kv)
                assert is_all(gpu.download(into), OLD)
                assert not transfer.is_done
            await transfer
            assert is_all(gpu.download(into), NEW)
            assert is_all(gpu.download(seen), OLD)


@pytest.mark.parametrize("rung", RUNGS)
@on_asyncio
async def test_a_write_waits_for_the_kernel_that_produces_its_source(
    gpu: Gpu, tmp_path: Path, rung: str
) -> None:
    ids, stream = some(LAYOUT, 8), gpu.stream()
    source = gpu.buffer(8 * 4096, OLD)
    with filled(tmp_path, LAYOUT, OTHER) as files:
        async with backend_on(rung, files, gpu.device) as kv:
            with gpu.holding(stream):
                gpu.fill(source, NEW, stream)
                transfer = kv.write_groups(ids, source, stream=stream)
                await transfer.enqueued()
                await looks(kv)
                assert is_all(oracle_read(files, ids), OTHER)
            await transfer
        assert is_all(oracle_read(files, ids), NEW)


@on_every_loop
async def test_work_launched_after_enqueued_sees_all_bytes(gpu: Gpu, tmp_path: Path) -> None:
    ids, stream = some(LAYOUT, 8), gpu.stream()
    into, seen = gpu.buffer(8 * 4096, OLD), gpu.buffer(8 * 4096)
    with filled(tmp_path, LAYOUT) as files:
        async with backend_on("uring", files, gpu.device, faults=DELAYED) as kv:
            if gpu.is_fake:  # the reactor is not told that a copy is done: nothing but order brings the bytes
                gpu.needs_fake("").set_policy(10_000, 10_000)
            transfer = kv.read_groups(ids, into, stream=stream)
            await transfer.enqueued()
            gpu.copy(seen, into, stream)
            gpu.finish(stream)
            assert is_all(gpu.download(seen), NEW)
            if gpu.is_fake:
                gpu.needs_fake("").run_everything()
            await transfer


@on_asyncio
async def test_a_source_may_be_overwritten_after_enqueued(gpu: Gpu, tmp_path: Path) -> None:
    ids, stream = some(LAYOUT, 16), gpu.stream()
    source = gpu.buffer(16 * 4096, NEW)
    if gpu.is_fake:
        gpu.needs_fake("").set_policy(50, 50)
    with filled(tmp_path, LAYOUT, OTHER) as files:
        async with backend_on("uring", files, gpu.device) as kv:
            transfer = kv.write_groups(ids, source, stream=stream)
            await transfer.enqueued()
            gpu.fill(source, OLD, stream)
            gpu.finish(stream)
            assert is_all(gpu.download(source), OLD)
            await transfer
        assert is_all(oracle_read(files, ids), NEW)


@on_asyncio
async def test_awaiting_without_enqueued_makes_no_stream_wait(gpu: Gpu, tmp_path: Path) -> None:
    fake = gpu.needs_fake("say which calls were made")
    ids, stream = some(LAYOUT, 4), gpu.stream()
    into = gpu.buffer(4 * 4096)
    with filled(tmp_path, LAYOUT) as files:
        async with backend_on("uring", files, gpu.device) as kv:
            fake.clear_log()
            await kv.read_groups(ids, into, stream=stream)
    assert not [c for c in fake.log() if c.name == "cuStreamWaitEvent" and c.stream == stream]


@on_asyncio
async def test_a_transfer_does_not_wait_for_what_is_launched_after_the_call(gpu: Gpu, tmp_path: Path) -> None:
    stream, into = gpu.stream(), gpu.buffer(8 * 4096, OLD)
    with filled(tmp_path, LAYOUT) as files:
        async with backend_on("uring", files, gpu.device, faults=DELAYED) as kv:
            transfer = kv.read_groups(some(LAYOUT, 8), into, stream=stream)
            gpu.stall(stream)
            await ends_within(transfer)
            assert is_all(gpu.download(into), NEW)
            gpu.finish(stream)


@on_asyncio
async def test_a_later_fence_does_not_hold_up_earlier_copies(gpu: Gpu, tmp_path: Path) -> None:
    """Both arrive in one reap, on one stream: the first must not be queued behind the second's fence."""
    stream, busy = gpu.stream(), gpu.stream()
    first, second, other = (gpu.buffer(2 * 4096, OLD) for _ in range(3))
    with filled(tmp_path, LAYOUT) as files:
        async with backend_on("uring", files, gpu.device, faults=delayed(150_000)) as kv:
            with gpu.holding(busy):
                held = kv.read_groups([0, 2], other, stream=busy)
                await held.enqueued()  # from now on the reactor asks the driver for its end, again and again
                early = kv.read_groups([4, 6], first, stream=stream)
                await anyio.sleep(
                    0.05
                )  # its reads are back from the disk, and delayed: the others come after them
                gpu.stall(stream)
                late = kv.read_groups([8, 10], second, stream=stream)
                with gpu.driver_occupied():
                    await anyio.sleep(0.3)  # both have arrived, and the reactor is still in its call
                await ends_within(early)
                assert is_all(gpu.download(first), NEW)
                assert is_all(gpu.download(second), OLD)
                gpu.finish(stream)
                await late
                assert is_all(gpu.download(second), NEW)
            await held


@on_asyncio
async def test_a_fence_is_kept_until_its_transfer_has_ended(gpu: Gpu, tmp_path: Path) -> None:
    """Its event must not be recorded again for somebody else while the copies have yet to ask for it."""
    stream, idle, into = gpu.stream(), gpu.stream(), gpu.buffer(4 * 4096, OLD)
    with filled(tmp_path, LAYOUT) as files:
        async with backend_on("uring", files, gpu.device, faults=delayed(50_000)) as kv:
            with gpu.holding(stream):
                transfer = kv.read_groups(some(LAYOUT, 4), into, stream=stream)
                for _ in range(200):  # every event of the pool comes round
                    kv.record_event(idle)
                await transfer.enqueued()
                await looks(kv)
                assert is_all(gpu.download(into), OLD)
            await transfer


@on_asyncio
async def test_what_enqueued_waits_for_is_not_used_again(gpu: Gpu, tmp_path: Path) -> None:
    """The copies of a write are done long before the disk is. Their event stays theirs until the end."""
    stream, busy = gpu.stream(), gpu.stream()
    source, into, other = gpu.buffer(4096, OLD), gpu.buffer(4096), gpu.buffer(4096)
    # A thousand reads, one after the other, take a GPU and a disk a second or two.
    delay_us = 2_000_000 if gpu.is_fake else 8_000_000
    late = (Fault(FaultAction.DELAY, delay_us, kind=Kind.WRITE, times=1),)
    if gpu.is_fake:
        gpu.needs_fake("").set_policy(0, 0)
    with filled(tmp_path, LAYOUT) as files:
        async with backend_on("uring", files, gpu.device, faults=late, queue_depth=8) as kv:
            write = kv.write_groups([0], source, stream=stream)
            await until(lambda: kv.statistics().engine.copy_groups == 1, "its copy is queued")
            while kv.statistics().engine.copy_groups < 8 + 1024:  # all other events of the reactor
                await kv.read_groups([2], into)
            with gpu.holding(busy):
                held = kv.read_groups([4], other, stream=busy)
                await held.enqueued()
                await write.enqueued()
                assert not write.is_done, "the machine is too slow for this test"
                with anyio.fail_after(5):
                    await kv.record_event(stream)
            await held
            await write


@pytest.mark.parametrize("handle", [0, LEGACY, PER_THREAD])
@on_asyncio
async def test_default_streams_are_streams_like_any_other(gpu: Gpu, tmp_path: Path, handle: int) -> None:
    gpu.needs_fake("hold a default stream without holding up the test itself")
    into, seen = gpu.buffer(8 * 4096, OLD), gpu.buffer(8 * 4096)
    with filled(tmp_path, LAYOUT) as files:
        async with backend_on("uring", files, gpu.device) as kv:
            with gpu.holding(handle):
                gpu.copy(seen, into, handle)
                transfer = kv.read_groups(some(LAYOUT, 8), into, stream=handle)
                await transfer.enqueued()
                await looks(kv)
                assert is_all(gpu.download(into), OLD)
            await transfer
    assert is_all(gpu.download(seen), OLD)
    assert is_all(gpu.download(into), NEW)


@on_asyncio
async def test_no_stream_is_no_fence(gpu: Gpu, tmp_path: Path) -> None:
    """Not even while the legacy stream, whose handle is 0, is held together with a transfer of its own."""
    gpu.needs_fake("hold a default stream without holding up the test itself")
    into, other = gpu.buffer(8 * 4096, OLD), gpu.buffer(8 * 4096, OLD)
    with filled(tmp_path, LAYOUT) as files:
        async with backend_on("uring", files, gpu.device) as kv:
            with gpu.holding(0):
                held = kv.read_groups(some(LAYOUT, 8), other, stream=0)
                await held.enqueued()
                free = kv.read_groups(some(LAYOUT, 8), into)
                await ends_within(free)
                assert is_all(gpu.download(into), NEW)
                assert is_all(gpu.download(other), OLD)
            await held


@on_asyncio
async def test_a_chain_on_one_stream_needs_no_host(gpu: Gpu, tmp_path: Path) -> None:
    """Read, kernel, write, overwrite, read again: only `enqueued` in between, and the stream held at first."""
    ids, stream = some(LAYOUT, 2), gpu.stream()  # few: what is held back may use a part of the slots only
    one, two, three = (gpu.buffer(2 * 4096, OLD) for _ in range(3))
    with filled(tmp_path, LAYOUT) as files:
        async with backend_on("uring", files, gpu.device) as kv:
            with gpu.holding(stream):
                first = kv.read_groups(ids, one, stream=stream)
                await first.enqueued()
                gpu.copy(two, one, stream)
                moved = kv.write_groups(ids + 1, two, stream=stream)
                await moved.enqueued()
                gpu.fill(two, OTHER, stream)
                back = kv.read_groups(ids + 1, three, stream=stream)
            await back.enqueued()
            after = kv.record_event(stream)
            await after
            assert [is_all(gpu.download(b), v) for b, v in ((one, NEW), (two, OTHER), (three, NEW))] == [
                True
            ] * 3
            await first
            await moved
            await back


@on_asyncio
async def test_transfers_of_one_group_take_effect_in_order(gpu: Gpu, tmp_path: Path) -> None:
    """A write behind a read of the same group that a held stream keeps from ending, and a read behind that."""
    ids, stream, other = some(LAYOUT, 8), gpu.stream(), gpu.stream()
    first, second, source = gpu.buffer(8 * 4096), gpu.buffer(8 * 4096), gpu.buffer(8 * 4096, OLD)
    with filled(tmp_path, LAYOUT) as files:
        async with backend_on("uring", files, gpu.device) as kv:
            with gpu.holding(stream):
                before = kv.read_groups(ids, first, stream=stream)
                write = kv.write_groups(ids, source, stream=other)
                after = kv.read_groups(ids, second, stream=other)
                await before.enqueued()
                await looks(kv)
                assert is_all(oracle_read(files, ids), NEW)
            await before
            await write
            await after
    assert is_all(gpu.download(first), NEW)
    assert is_all(gpu.download(second), OLD)


# Callers do not wait for each other


def move(kv: EngineBackend, direction: str, ids: Any, memory: Any, stream: int | None) -> Transfer:
    start = kv.read_groups if direction == "read" else kv.write_groups
    return start(ids, memory, stream=stream)


@pytest.mark.parametrize("rung", RUNGS)
@on_asyncio
async def test_a_held_stream_holds_up_no_other(gpu: Gpu, tmp_path: Path, rung: str) -> None:
    """Three held callers of four copy streams; any other caller's transfers go on, whatever its handle is."""
    held_streams = [gpu.stream() for _ in range(3)]
    free_streams = [gpu.stream() for _ in range(8)]
    stuck, into = gpu.buffer(2 * 4096, OLD), gpu.buffer(2 * 4096, OLD)
    with filled(tmp_path, LAYOUT) as files:
        async with backend_on(rung, files, gpu.device) as kv:
            with gpu.holding(*held_streams):
                held = [kv.read_groups([0, 2], stuck, stream=s) for s in held_streams]
                for transfer in held:
                    await transfer.enqueued()
                for stream in [*free_streams, None]:
                    gpu.upload(into, bytes([OLD]) * into.nbytes)
                    await ends_within(kv.read_groups([4, 6], into, stream=stream))
                    assert is_all(gpu.download(into), NEW)
                    await ends_within(kv.write_groups([8, 10], into, stream=stream))
                assert is_all(gpu.download(stuck), OLD)
            for transfer in held:
                await transfer


@pytest.mark.parametrize("direction", ["read", "write"])
@pytest.mark.parametrize("layout", [LAYOUT, WIDE], ids=["small", "bulk"])
@on_asyncio
async def test_a_held_stream_keeps_a_quarter_of_the_slots(
    gpu: Gpu, tmp_path: Path, layout: GroupLayout, direction: str
) -> None:
    """It asks for more than there is; another caller in the same lane and direction gets through all the same."""
    held_stream, free_stream = gpu.stream(), gpu.stream()
    count = layout.num_groups
    stuck = gpu.buffer(count * layout.payload_nbytes, OLD)
    memory = gpu.buffer(4 * layout.payload_nbytes, NEW)
    slots = {"op_nbytes_max": layout.payload_nbytes, "staging_nbytes": 2 << 20}
    small = SMALL.small_nbytes if layout is LAYOUT else 4096
    with filled(tmp_path, layout) as files:
        async with backend_on("uring", files, gpu.device, small_nbytes=min(small, 4096), **slots) as kv:
            with gpu.holding(held_stream):
                held = move(
                    kv, direction, np.arange(4, count), stuck_part(stuck, layout, count - 4), held_stream
                )
                await until(lambda: kv.statistics().engine.copy_groups > 0, "copies are queued")
                await looks(kv)
                assert 0 < kv.statistics().engine.slots_leased <= 32 // 4
                for _ in range(3):
                    await ends_within(move(kv, direction, np.arange(4), memory, free_stream))
                assert not held.is_done
            await held


def stuck_part(buffer: DeviceBuffer, layout: GroupLayout, count: int) -> Scatter:
    return Scatter(buffer, np.arange(count) * layout.payload_nbytes)


@on_asyncio
async def test_a_held_stream_leaves_copy_groups_to_others(gpu: Gpu, tmp_path: Path) -> None:
    """Many single reads behind its fence, each of which is queued alone; the host waits for none of them."""
    held_stream, free_stream = gpu.stream(), gpu.stream()
    stuck, into = gpu.buffer(4096, OLD), gpu.buffer(4096, OLD)
    with filled(tmp_path, LAYOUT) as files:
        async with backend_on("uring", files, gpu.device, queue_depth=256, small_nbytes=4096) as kv:
            with gpu.holding(held_stream):
                held = []
                for index in range(60):
                    held.append(kv.read_groups([index], stuck, stream=held_stream))
                    with anyio.fail_after(5):
                        await held[-1].enqueued()
                await ends_within(kv.read_groups([62], into, stream=free_stream))
                assert is_all(gpu.download(into), NEW)
                assert is_all(gpu.download(stuck), OLD)
            for transfer in held:
                await transfer


@on_asyncio
async def test_undrained_batches_do_not_stop_the_copies(gpu: Gpu, tmp_path: Path) -> None:
    """Each finished batch keeps its event until it is drained: more of them than there are events, and no drain."""
    gpu.needs_fake("be kept from finishing copies in groups of fewer events")
    into = gpu.buffer(4096, OLD)
    with filled(tmp_path, LAYOUT) as files:
        async with backend_on("uring", files, gpu.device, max_transfers=2048, queue_depth=8) as kv:
            transfers = [kv.read_groups([n % 64], into) for n in range(1500)]
            end = time.monotonic() + 10
            while kv.statistics().engine.copy_groups < 8 + 1024:
                assert time.monotonic() < end
            # Nothing but the drains of these awaits brings events back; the reactor must find them without being told.
            with anyio.fail_after(0.7):
                for transfer in transfers:
                    await transfer


# What the driver is asked, and by whom


@pytest.mark.parametrize("rung", RUNGS)
@on_asyncio
async def test_no_host_wait_and_no_foreign_stream(gpu: Gpu, tmp_path: Path, rung: str) -> None:
    fake = gpu.needs_fake("keep a log of its calls")
    stream, into = gpu.stream(), gpu.buffer(8 * 4096, OLD)
    with filled(tmp_path, LAYOUT) as files:
        async with backend_on(rung, files, gpu.device) as kv:
            fake.clear_log()
            transfer = kv.read_groups(some(LAYOUT, 8), into, stream=stream)
            await transfer.enqueued()
            await transfer
            await kv.write_groups(some(LAYOUT, 8), into, stream=stream)
            await kv.record_event(stream)
            calls = fake.log()
    own = {call.thread for call in calls if call.stream == stream}
    assert len(own) == 1
    reactor = {call.thread for call in calls} - own
    assert len(reactor) == 1
    assert {call.stream for call in calls if call.thread in reactor}.isdisjoint({stream, LEGACY, PER_THREAD})
    assert not [call for call in calls if call.waited]


# Random schedules


class Schedule:
    """Transfers drawn from a seed over groups and memories of which no two are in use at once, and what must result.

    A cancelled write may have taken effect or not, as a whole group each time; a cancelled read leaves undefined bytes.
    """

    def __init__(self, gpu: Gpu, kv: EngineBackend, seed: int) -> None:
        self.gpu, self.kv = gpu, kv
        self.draw = np.random.default_rng(seed)
        self.layout = kv.layout
        self.streams = [gpu.stream() for _ in range(4)]
        self.model = np.zeros((self.layout.num_groups, self.layout.payload_nbytes), np.uint8)
        self.doubtful: set[int] = set()
        self.log: list[str] = []

    async def run(self, steps: int) -> None:
        live: list[tuple[Transfer, DeviceBuffer, Any]] = []
        for number in range(steps):
            live.append(self.start(number))
            if self.draw.random() < 0.15:
                live[int(self.draw.integers(len(live)))][0].cancel()
            if self.draw.random() < 0.3:
                await anyio.lowlevel.checkpoint()
            while len(live) > 24:
                await self.end(*live.pop(0))
        for entry in live:
            await self.end(*entry)

    def start(self, number: int) -> tuple[Transfer, DeviceBuffer, Any]:
        count = int(self.draw.integers(1, 10))
        ids = self.draw.permutation(self.layout.num_groups)[:count]
        stream = self.streams[int(self.draw.integers(4))] if self.draw.random() < 0.8 else None
        memory = self.gpu.buffer(count * self.layout.payload_nbytes, OLD)
        is_write = self.draw.random() < 0.5
        self.log.append(f"{number} {'write' if is_write else 'read'} {ids.tolist()} {stream is not None}")
        if not is_write:
            return self.kv.read_groups(ids, memory, stream=stream), memory, (ids, self.model[ids].copy())
        value = int(self.draw.integers(256))
        if stream is None:
            self.gpu.upload(memory, bytes([value]) * memory.nbytes)
        else:
            if self.gpu.is_fake and self.draw.random() < 0.5:
                self.gpu.needs_fake("").slow(stream, int(self.draw.integers(40)))
            self.gpu.fill(memory, value, stream)
        transfer = self.kv.write_groups(ids, memory, stream=stream)
        return transfer, memory, (ids, self.note_write(ids, value))

    def note_write(self, ids: Any, value: int) -> None:
        self.model[ids] = value

    async def end(self, transfer: Transfer, memory: DeviceBuffer, told: Any) -> None:
        ids, expected = told
        report = await transfer.outcome()
        if expected is None:
            self.doubtful |= {int(i) for i, outcome in zip(ids, report.outcomes, strict=True) if outcome}
            return
        got = self.gpu.download(memory).reshape(len(ids), -1)
        for i, row, wanted, outcome in zip(ids, got, expected, report.outcomes, strict=True):
            if outcome == 0 and int(i) not in self.doubtful:
                assert np.array_equal(row, wanted), f"group {i}"


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("seed", range(6))
def test_random_schedules(tmp_path: Path, rung: str, seed: int) -> None:
    layout = GroupLayout(2, 20, 1, 3, 71, 25, kinds=LATENT)  # 5325 bytes

    async def main() -> None:
        with gpu_of(seed) as gpu, layer_files(tmp_path, layout) as files:
            if gpu.is_fake:
                gpu.needs_fake("").set_policy(0, 1 << seed)
            faults = (Fault(FaultAction.REORDER, 500),)
            small = {"queue_depth": 8, "staging_nbytes": 2 << 20, "faults": faults, "fault_seed": seed}
            async with backend_on(rung, files, gpu.device, **small) as kv:
                schedule = Schedule(gpu, kv, seed)
                await schedule.run(120)
                assert kv.statistics().engine.slots_leased == 0
            ids = np.array(sorted(set(range(layout.num_groups)) - schedule.doubtful))
            assert np.array_equal(oracle_read(files, ids), schedule.model[ids])

    run_on("asyncio", main)


def test_a_seed_gives_one_schedule(tmp_path: Path) -> None:
    logs = []
    for attempt in range(2):

        async def main(attempt: int = attempt) -> None:
            (tmp_path / str(attempt)).mkdir()
            with gpu_of(3) as gpu, layer_files(tmp_path / str(attempt), LAYOUT) as files:
                async with backend_on("uring", files, gpu.device) as kv:
                    schedule = Schedule(gpu, kv, 3)
                    await schedule.run(40)
                    logs.append(schedule.log)

        run_on("asyncio", main)
    assert logs[0] == logs[1]


# Errors before the copies


@on_asyncio
async def test_enqueued_raises_before_the_stream_is_made_to_wait(gpu: Gpu, tmp_path: Path) -> None:
    stream, into = gpu.stream(), gpu.buffer(8 * 4096, OLD)
    faults = (Fault(FaultAction.ERROR, -5, kind=Kind.READ, every=4, phase=3),)
    with filled(tmp_path, LAYOUT) as files:
        async with backend_on("uring", files, gpu.device, faults=faults) as kv:
            if gpu.is_fake:
                gpu.needs_fake("").clear_log()
            transfer = kv.read_groups(some(LAYOUT, 8), into, stream=stream)
            with pytest.raises(TransferError):
                await transfer.enqueued()
            if gpu.is_fake:
                calls = gpu.needs_fake("").log()
                assert not [c for c in calls if c.name == "cuStreamWaitEvent" and c.stream == stream]
