"""The fake CUDA driver itself: it is late, it keeps order, and a seed decides the rest."""

import ctypes
import threading
from collections.abc import Callable, Iterator
from ctypes import byref, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any

import pytest
from fake_cuda_build import build, skip_reason
from fake_cuda_control import (
    LEGACY,
    NOT_READY,
    PER_THREAD,
    CopyAttributes,
    FakeCuda,
    KernelCopy,
)

pytestmark = pytest.mark.skipif(skip_reason() is not None, reason=str(skip_reason()))

N = 64
OLD, NEW, UNTOUCHED = b"o" * N, b"n" * N, b"\xcb" * N


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    fake = FakeCuda(build(), seed=7)
    fake.set_policy(0, 0)
    fake.open()
    yield fake
    fake.reset()


def in_thread(work: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join(20)
    assert results, "the thread did not finish"
    return results[0]


# Late


def test_a_copy_reads_its_source_when_it_is_carried_out(fake: FakeCuda) -> None:
    stream, source, target = fake.stream(), fake.pinned(OLD), fake.alloc(N)
    fake.check("cuMemcpyHtoDAsync", target, source, N, stream)
    event = fake.record(stream)
    fake.upload(source, NEW)  # Too early: this is the mistake that the fake is there to show.
    assert fake.download(target, N) == UNTOUCHED
    assert fake.is_done(event)
    assert fake.download(target, N) == NEW


def test_a_copy_to_the_host_writes_late(fake: FakeCuda) -> None:
    stream, source, target = fake.stream(), fake.alloc(N), fake.pinned(OLD)
    fake.upload(source, NEW)
    fake.check("cuMemcpyDtoHAsync", target, source, N, stream)
    assert fake.download(target, N) == OLD
    fake.check("cuStreamSynchronize", stream)
    assert fake.download(target, N) == NEW


@pytest.mark.parametrize("name", ["akv_gather", "akv_scatter"])
def test_a_kernel_reads_its_list_when_it_is_carried_out(fake: FakeCuda, name: str) -> None:
    stream, sources, targets = fake.stream(), fake.pinned(OLD + NEW), fake.alloc(2 * N)
    if name == "akv_scatter":
        sources, targets = targets, sources
        fake.upload(sources, OLD + NEW)
    before = fake.download(targets, 2 * N)
    copies = fake.pinned(
        bytes(KernelCopy(targets, sources, N)) + bytes(KernelCopy(targets + N, sources + N, N))
    )
    fake.launch(name, stream, c_uint64(copies), c_uint32(2))
    event = fake.record(stream)
    assert fake.download(targets, 2 * N) == before
    fake.upload(copies + ctypes.sizeof(KernelCopy), bytes(KernelCopy(targets + N, sources, N)))
    assert fake.is_done(event)
    assert fake.download(targets, 2 * N) == OLD + OLD


def test_pageable_memory_goes_through_the_driver(fake: FakeCuda) -> None:
    stream, device = fake.stream(), fake.alloc(N)
    source, target = ctypes.create_string_buffer(OLD, N), ctypes.create_string_buffer(N)
    fake.check("cuMemcpyHtoDAsync", device, ctypes.addressof(source), N, stream)
    source.raw = NEW  # Allowed: the driver has taken the bytes already.
    assert fake.waits() == []
    fake.check("cuMemcpyDtoHAsync", ctypes.addressof(target), device, N, stream)
    assert target.raw == OLD
    assert [call.name for call in fake.waits()] == ["cuMemcpyDtoHAsync"]


@pytest.mark.parametrize(("order", "expected"), [(1, {NEW}), (2, {OLD}), (3, {OLD, NEW})])
def test_a_batch_reads_its_sources_as_its_attributes_say(
    fake: FakeCuda, order: int, expected: set[bytes]
) -> None:
    seen = set()
    for _ in range(20):
        stream, source, target = fake.stream(), fake.pinned(OLD), fake.alloc(N)
        attributes, index = CopyAttributes(source_access_order=order), c_size_t(0)
        one = byref(c_uint64(target)), byref(c_uint64(source)), byref(c_size_t(N))
        fake.check("cuMemcpyBatchAsync", *one, 1, byref(attributes), byref(index), 1, stream)
        fake.upload(source, NEW)
        assert fake.download(target, N) == UNTOUCHED
        fake.check("cuStreamSynchronize", stream)
        seen.add(fake.download(target, N))
    assert seen == expected


def test_a_batch_is_refused_as_the_driver_refuses_it(fake: FakeCuda) -> None:
    stream, source, target = fake.stream(), fake.pinned(OLD), fake.alloc(N)
    good = CopyAttributes(source_access_order=1)

    def copy(nbytes: int, attributes: CopyAttributes, index: int, stream: int) -> int:
        one = byref(c_uint64(target)), byref(c_uint64(source)), byref(c_size_t(nbytes))
        return fake.call("cuMemcpyBatchAsync", *one, 1, byref(attributes), byref(c_size_t(index)), 1, stream)

    assert copy(N, good, 0, stream) == 0
    assert copy(0, good, 0, stream) == 1
    assert copy(N, CopyAttributes(), 0, stream) == 1
    assert copy(N, good, 1, stream) == 1
    assert copy(N, good, 0, LEGACY) == 1
    assert copy(N, good, 0, stream + 1) == 400


# Order


def test_an_event_brings_what_came_before_it_and_nothing_else(fake: FakeCuda) -> None:
    first, second, other = fake.stream(), fake.stream(), fake.stream()
    memory = fake.alloc(4 * N)
    fake.fill(memory, N, 1, first)
    middle = fake.record(first)
    fake.fill(memory + N, N, 2, first)  # Behind the record: not needed.
    fake.wait(second, middle)
    fake.fill(memory + 2 * N, N, 3, second)
    end = fake.record(second)
    fake.fill(memory + 3 * N, N, 4, other)
    assert fake.is_done(end)
    assert fake.download(memory, 4 * N) == b"\1" * N + UNTOUCHED + b"\3" * N + UNTOUCHED
    assert fake.pending == 2
    assert fake.is_done(middle)


def test_a_wait_means_the_record_at_the_call(fake: FakeCuda) -> None:
    first, second = fake.stream(), fake.stream()
    memory = fake.alloc(2 * N)
    event = fake.event()
    fake.wait(second, event)  # Never recorded: no wait.
    fake.hold(first)
    fake.fill(memory, N, 1, first)
    assert fake.is_done(fake.record(second))
    fake.record(first, event)
    fake.wait(second, event)
    fake.record(second, event)  # Now it stands for something else; the wait does not.
    assert not fake.is_done(event)
    fake.release(first)
    assert fake.is_done(event)
    assert fake.download(memory, N) == b"\1" * N


def test_events_without_a_record_and_of_the_past_are_done(fake: FakeCuda) -> None:
    stream = fake.stream()
    assert fake.is_done(fake.event())
    event = fake.record(stream)
    fake.check("cuCtxSynchronize")
    fake.set_policy(5, 5)
    assert fake.is_done(event)
    assert fake.pending == 0


def test_destroying_does_not_wait(fake: FakeCuda) -> None:
    stream, memory = fake.stream(), fake.alloc(N)
    fake.fill(memory, N, 1, stream)
    event = fake.record(stream)
    other = fake.stream()
    fake.wait(other, event)
    fake.check("cuStreamDestroy", stream)
    fake.check("cuEventDestroy", event)
    assert fake.download(memory, N) == UNTOUCHED
    fake.check("cuStreamSynchronize", other)
    assert fake.download(memory, N) == b"\1" * N
    assert fake.live("streams") == 1


@pytest.mark.parametrize("legacy", [0, LEGACY])
def test_the_legacy_stream_is_ordered_with_blocking_streams_only(fake: FakeCuda, legacy: int) -> None:
    blocking, free = fake.stream(blocking=True), fake.stream()
    memory = fake.alloc(3 * N)
    fake.fill(memory, N, 1, blocking)
    fake.fill(memory + N, N, 2, free)
    fake.fill(memory, N // 2, 3, legacy)
    fake.fill(memory + 2 * N, N, 4, blocking)
    assert fake.call("cuStreamQuery", legacy) == 0
    assert fake.download(memory, 2 * N) == b"\3" * (N // 2) + b"\1" * (N // 2) + UNTOUCHED
    fake.check("cuStreamSynchronize", blocking)
    assert fake.download(memory + 2 * N, N) == b"\4" * N
    assert fake.pending == 1


def test_blocking_streams_wait_for_the_legacy_stream(fake: FakeCuda) -> None:
    blocking, free = fake.stream(blocking=True), fake.stream()
    fake.hold(LEGACY)
    fake.slow(0, 0)
    behind, beside, own = fake.record(blocking), fake.record(free), fake.record(PER_THREAD)
    assert [fake.is_done(event) for event in (behind, beside, own)] == [False, True, False]
    fake.release(LEGACY)
    assert fake.is_done(behind)
    assert fake.is_done(own)


def test_each_thread_has_its_own_stream(fake: FakeCuda) -> None:
    memory = fake.alloc(2 * N)
    context = c_void_p()
    fake.check("cuCtxGetCurrent", byref(context))
    fake.fill(memory, N, 1, PER_THREAD)

    def other() -> int:
        fake.check("cuCtxSetCurrent", context)
        fake.fill(memory + N, N, 2, PER_THREAD)
        return fake.call("cuStreamSynchronize", PER_THREAD)

    assert in_thread(other) == 0
    assert fake.download(memory, 2 * N) == UNTOUCHED + b"\2" * N


def test_a_synchronous_copy_is_one_on_the_legacy_stream(fake: FakeCuda) -> None:
    blocking, free = fake.stream(blocking=True), fake.stream()
    memory, out = fake.alloc(2 * N), ctypes.create_string_buffer(2 * N)
    fake.fill(memory, N, 1, blocking)
    fake.fill(memory + N, N, 2, free)
    fake.check("cuMemcpyDtoH", ctypes.addressof(out), memory, 2 * N)
    assert out.raw == b"\1" * N + UNTOUCHED
    fake.check("cuMemcpyHtoD", memory, ctypes.addressof(out), N)
    assert [call.name for call in fake.waits()] == ["cuMemcpyDtoH", "cuMemcpyHtoD"]


def test_freeing_waits_for_the_context(fake: FakeCuda) -> None:
    stream, memory, kept = fake.stream(), fake.alloc(N), fake.alloc(N)
    fake.fill(kept, N, 1, stream)
    fake.free(memory)
    assert fake.download(kept, N) == b"\1" * N
    assert [call.name for call in fake.waits()] == ["cuMemFree"]


def test_a_long_chain_of_streams(fake: FakeCuda) -> None:
    first, second = fake.stream(), fake.stream()
    event = fake.event()
    for _ in range(4_000):
        fake.wait(first, fake.record(second, event))
        fake.wait(second, fake.record(first, event))
    fake.check("cuStreamSynchronize", second)
    assert fake.pending == 0


# The schedule


def test_a_held_stream_holds_what_depends_on_it(fake: FakeCuda) -> None:
    long, copy, other = fake.stream(), fake.stream(), fake.stream()
    memory = fake.alloc(2 * N)
    fake.hold(long)
    fence = fake.record(long)
    fake.wait(copy, fence)
    fake.fill(memory, N, 1, copy)
    fake.fill(memory + N, N, 2, other)
    done = fake.record(copy)
    assert not any(fake.is_done(done) for _ in range(50))
    assert fake.is_done(fake.record(other))
    assert fake.run_everything() == 0
    assert fake.download(memory, N) == UNTOUCHED
    fake.release(long)
    assert fake.is_done(done)
    assert fake.download(memory, N) == b"\1" * N


def test_the_host_waits_for_the_release(fake: FakeCuda) -> None:
    stream = fake.stream()
    fake.hold(stream)
    event = fake.record(stream)
    started = threading.Event()
    context = c_void_p()
    fake.check("cuCtxGetCurrent", byref(context))

    def wait() -> int:
        fake.check("cuCtxSetCurrent", context)
        started.set()
        return fake.call("cuEventSynchronize", event)

    def release() -> None:
        started.wait(10)
        fake.release(stream)

    thread = threading.Thread(target=release)
    thread.start()
    assert in_thread(wait) == 0
    thread.join()
    fake.hold(stream)
    fake.record(stream, event)
    fake.set_wait_limit(1)
    assert fake.call("cuEventSynchronize", event) == 909


def test_a_query_says_not_yet(fake: FakeCuda) -> None:
    fake.set_policy(1, 1)
    stream = fake.stream()
    event = fake.record(stream)
    assert [fake.call("cuEventQuery", event) for _ in range(2)] == [NOT_READY, 0]
    fake.slow(stream, 0)
    assert [fake.call("cuStreamQuery", stream) for _ in range(2)] == [NOT_READY, 0]
    assert [call.name for call in fake.log()].count("cuEventQuery") == 1


def test_a_slow_kernel_wants_so_many_queries(fake: FakeCuda) -> None:
    stream = fake.stream()
    fake.slow(stream, 3)
    event = fake.record(stream)
    assert [fake.is_done(event) for _ in range(5)] == [False, False, False, True, True]
    fake.slow(stream)
    fake.record(stream, event)
    assert not any(fake.is_done(event) for _ in range(100))
    fake.check("cuEventSynchronize", event)
    assert fake.is_done(event)


def queries_until_due(fake: FakeCuda, seed: int) -> list[int]:
    fake.reset(seed)
    fake.open()
    fake.set_policy(1, 9)
    stream, event = fake.stream(), fake.event()
    counts = []
    for _ in range(20):
        fake.record(stream, event)
        counts.append(next(count for count in range(100) if fake.is_done(event)))
    return counts


def test_the_seed_decides_when_an_event_is_due(fake: FakeCuda) -> None:
    counts = queries_until_due(fake, 1)
    assert counts == queries_until_due(fake, 1) != queries_until_due(fake, 2)
    assert min(counts) >= 1
    assert max(counts) <= 9
    assert len(set(counts)) > 3


def written_by_streams(fake: FakeCuda) -> bytes:
    """What is left of bytes that four streams have written without order between them."""
    memory = fake.alloc(4)
    for stream in [fake.stream() for _ in range(4)]:
        for cell in range(4):
            fake.fill(memory + cell, 1, stream & 0xFF, stream)
    fake.check("cuCtxSynchronize")
    return fake.download(memory, 4)


def written_by_a_list(fake: FakeCuda) -> bytes:
    """The same for the entries of one kernel's list."""
    memory, values, stream = fake.alloc(4), fake.pinned(bytes(range(16))), fake.stream()
    copies = b"".join(bytes(KernelCopy(memory + i % 4, values + i, 1)) for i in range(16))
    fake.launch("akv_gather", stream, c_uint64(fake.pinned(copies)), c_uint32(16))
    fake.check("cuCtxSynchronize")
    return fake.download(memory, 4)


@pytest.mark.parametrize("write", [written_by_streams, written_by_a_list])
def test_the_seed_decides_the_order_where_there_is_none(
    fake: FakeCuda, write: Callable[[FakeCuda], bytes]
) -> None:
    def left(seed: int) -> bytes:
        fake.reset(seed)
        fake.open()
        return write(fake)

    first = [left(seed) for seed in range(10)]
    assert first == [left(seed) for seed in range(10)]
    assert len(set(first)) > 5


def test_host_functions_run_on_the_thread_that_carries_them_out(fake: FakeCuda) -> None:
    stream, seen = fake.stream(), []

    @ctypes.CFUNCTYPE(None, c_void_p)
    def function(data: int | None) -> None:
        seen.append((threading.get_ident(), data, fake.call("cuStreamQuery", stream)))

    fake.check("cuLaunchHostFunc", stream, function, 5)
    event = fake.record(stream)
    assert seen == []
    assert fake.is_done(event)
    assert seen == [(threading.get_ident(), 5, 800)]
