"""The fake CUDA driver itself: what it refuses, the faults it can be told to have, captures, and its books."""

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from ctypes import byref, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import pytest
from fake_cuda_build import build, skip_reason
from fake_cuda_control import (
    GLOBAL,
    LEGACY,
    RELAXED,
    THREAD_LOCAL,
    FakeCuda,
    FakeCudaError,
    HostPages,
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


# Strict


def test_unknown_handles_and_pointers_are_refused(fake: FakeCuda) -> None:
    stream, event, device, host = fake.stream(), fake.event(), fake.alloc(N), fake.pinned(OLD)
    fake.check("cuStreamDestroy", stream)
    fake.check("cuEventDestroy", event)
    live = fake.stream()
    for handle in (stream, 3, 12345, 2**63):
        assert fake.call("cuStreamSynchronize", handle) == 400
        assert fake.call("cuMemcpyHtoDAsync", device, host, N, handle) == 400
        assert fake.call("cuEventRecord", fake.event(), handle) == 400
    for handle in (event, live, 0, 12345):
        assert fake.call("cuEventQuery", handle) == 400
        assert fake.call("cuStreamWaitEvent", live, handle, 0) == 400
        assert fake.call("cuEventDestroy", handle) == 400
    for address in (0, 12345, device + 1, 2**63):
        assert fake.call("cuMemcpyHtoDAsync", address, host, N, live) == 1
        assert fake.call("cuMemcpyDtoHAsync", host, address, N, live) == 1
        assert fake.call("cuMemsetD8Async", address, 0, N, live) == 1
    assert fake.call("cuMemcpyHtoDAsync", device, 4096, N, live) == 1
    assert fake.call("cuMemFree", device + 1) == 1
    assert fake.call("cuLaunchKernel", 1, 1, 1, 1, 1, 1, 1, 0, live, None, None) == 400
    assert fake.pending == 0


def test_a_destroyed_handle_does_not_find_its_successor(fake: FakeCuda) -> None:
    for make, destroy in [(fake.stream, "cuStreamDestroy"), (fake.event, "cuEventDestroy")]:
        old = make()
        fake.check(destroy, old)
        new = make()
        assert fake.call(destroy, old) == 400
        assert fake.call(destroy, new) == 0


def test_a_context_is_needed_in_each_thread(fake: FakeCuda) -> None:
    stream = fake.stream()
    assert in_thread(lambda: fake.call("cuStreamQuery", stream)) == 201
    fake.check("cuDevicePrimaryCtxRelease", 0)
    assert fake.call("cuStreamQuery", stream) == 709


def test_registered_memory(fake: FakeCuda) -> None:
    pages = HostPages(4 * 4096)
    base, out = pages.address, c_uint64()
    assert fake.call("cuMemHostRegister", 0, 4096, 3) == 1
    assert fake.call("cuMemHostRegister", 8192, 4096, 3) == 1
    fake.check("cuMemHostRegister", base, 4096, 3)
    assert fake.call("cuMemHostRegister", base + 100, 10, 3) == 712
    fake.check("cuMemHostRegister", base + 4096, 4096, 1)
    assert fake.call("cuMemHostGetDevicePointer", byref(out), base + 4096, 0) == 1  # not DEVICEMAP
    fake.check("cuMemHostGetDevicePointer", byref(out), base + 8, 0)
    assert out.value not in (0, base + 8)
    assert fake.live("registered") == 2
    stream, device = fake.stream(), fake.alloc(8192)
    assert fake.call("cuMemcpyHtoDAsync", device, base, 8192, stream) == 1  # across two registrations
    fake.check("cuMemcpyHtoDAsync", device, base, 4096, stream)
    assert fake.call("cuMemHostUnregister", base + 1) == 713
    fake.check("cuMemHostUnregister", base)
    assert fake.call("cuStreamSynchronize", stream) == 700  # the copy is still to come, its source is gone
    assert fake.violations()[0] == 1
    assert "source gone" in fake.violations()[1]


def test_a_kernel_sees_what_the_device_sees(fake: FakeCuda) -> None:
    pages, stream, target = HostPages(4096), fake.stream(), fake.alloc(N)
    fake.check("cuMemHostRegister", pages.address, 4096, 3)
    alias = c_uint64()
    fake.check("cuMemHostGetDevicePointer", byref(alias), pages.address, 0)
    pages.map[:N] = NEW
    pages.map[2048 : 2048 + 24] = bytes(KernelCopy(target, alias.value, N))
    fake.launch("akv_gather", stream, c_uint64(alias.value + 2048), c_uint32(1))
    fake.check("cuStreamSynchronize", stream)
    assert fake.download(target, N) == NEW
    pages.map[2048 : 2048 + 24] = bytes(KernelCopy(target, pages.address, N))
    fake.launch("akv_gather", stream, c_uint64(alias.value + 2048), c_uint32(1))
    assert fake.call("cuStreamSynchronize", stream) == 700
    assert "source" in fake.violations()[1]


def test_what_a_pointer_is(fake: FakeCuda) -> None:
    pages, device = HostPages(4096), fake.alloc(100)
    fake.check("cuMemHostRegister", pages.address, 4096, 3)

    def attribute(number: int, address: int, kind: Any) -> Any:
        out = kind()
        fake.check("cuPointerGetAttribute", byref(out), number, address)
        return out.value

    assert attribute(2, device + 99, c_uint32) == 2
    assert attribute(2, pages.address, c_uint32) == 1
    assert attribute(11, device + 50, c_uint64) == device
    assert attribute(12, device + 50, c_size_t) == 100
    assert attribute(9, device, c_int) == 0
    assert attribute(1, device, c_void_p)
    local = ctypes.create_string_buffer(8)
    for address in (0, 8, device + 100, ctypes.addressof(local)):
        assert fake.call("cuPointerGetAttribute", byref(c_uint32()), 2, address) == 1
    base, nbytes = c_uint64(), c_size_t()
    fake.check("cuMemGetAddressRange", byref(base), byref(nbytes), device + 7)
    assert (base.value, nbytes.value) == (device, 100)
    assert fake.call("cuMemGetAddressRange", byref(base), byref(nbytes), 8) == 500


def test_proc_addresses(fake: FakeCuda) -> None:
    def find(name: str, version: int) -> tuple[int, int, int]:
        out, status = c_void_p(), c_int(-1)
        code = fake.call("cuGetProcAddress", name.encode(), byref(out), version, 0, byref(status))
        return code, out.value or 0, status.value

    assert find("cuMemAlloc", 12000) == (0, fake.address("cuMemAlloc"), 0)
    assert find("cuMemcpyBatchAsync", 13000) == (0, fake.address("cuMemcpyBatchAsync"), 0)
    assert find("cuMemcpyBatchAsync", 12080)[1] not in (0, fake.address("cuMemcpyBatchAsync"))
    assert find("cuMemcpyBatchAsync", 12000) == (0, 0, 2)
    assert find("cuNothing", 12000) == (0, 0, 1)
    assert find("cuMemAlloc", 99000)[0] == 1
    fake.hide("cuMemcpyBatchAsync")
    assert find("cuMemcpyBatchAsync", 13000) == (0, 0, 1)


# Faults


def test_the_nth_call_fails(fake: FakeCuda) -> None:
    stream = fake.stream()
    fake.fail("cuEventCreate", nth=2, result=2, times=2)
    out = c_void_p()
    assert [fake.call("cuEventCreate", byref(out), 0) for _ in range(4)] == [0, 2, 2, 0]
    assert fake.live("events") == 2
    assert fake.calls("cuEventCreate") == 4
    fake.fail("cuLaunchKernel", result=719)
    with pytest.raises(FakeCudaError, match="719"):
        fake.slow(stream)
    assert fake.sticky == 719
    assert fake.call("cuStreamQuery", stream) == fake.call("cuMemAlloc", byref(c_uint64()), 1) == 719
    fake.clear_faults()
    assert fake.sticky == 719
    with pytest.raises(KeyError):
        fake.fail("cuNothing", result=1)


def test_a_fault_on_the_device_is_seen_later_and_hardware_may_go_on(fake: FakeCuda) -> None:
    stream, memory = fake.stream(), fake.alloc(2 * N)
    fake.fail_execution(result=700)
    fake.fill(memory, N, 1, stream)
    fake.fill(memory + N, N, 2, stream)
    event = fake.record(stream)
    assert fake.sticky == 0
    assert fake.call("cuEventQuery", event) == 700
    assert fake.download(memory, 2 * N) == UNTOUCHED * 2
    assert fake.run_everything() == 2
    assert fake.download(memory, 2 * N) == UNTOUCHED + b"\2" * N


def test_memory_runs_out(fake: FakeCuda) -> None:
    fake.set_memory_limit(device_nbytes=1000, pinned_nbytes=5000)
    first = fake.alloc(900)
    assert fake.call("cuMemAlloc", byref(c_uint64()), 101) == 2
    fake.free(first)
    fake.alloc(1000)
    pages = HostPages(8192)
    fake.check("cuMemHostRegister", pages.address, 4096, 3)
    assert fake.call("cuMemHostAlloc", byref(c_void_p()), 905, 0) == 2
    fake.check("cuMemHostUnregister", pages.address)
    fake.alloc_pinned(5000)


# Captures


def begin(fake: FakeCuda, stream: int, mode: int) -> None:
    fake.check("cuStreamBeginCapture", stream, mode)


def end(fake: FakeCuda, stream: int) -> int:
    graph = c_void_p()
    code = fake.call("cuStreamEndCapture", stream, byref(graph))
    return code or fake.call("cuGraphDestroy", graph)


def reactor(fake: FakeCuda, context: int, mode: int) -> dict[str, int]:
    """What a second thread hears of its calls on streams of its own."""
    fake.check("cuCtxSetCurrent", context)
    previous = c_int(mode)
    fake.check("cuThreadExchangeStreamCaptureMode", byref(previous))
    assert previous.value == GLOBAL
    stream, memory, event = fake.stream(), c_uint64(), fake.event()
    source = c_void_p()
    codes = {"create": fake.call("cuMemHostAlloc", byref(source), N, 0)}
    codes["alloc"] = fake.call("cuMemAlloc", byref(memory), N)
    if memory.value:
        codes["copy"] = fake.call("cuMemcpyHtoDAsync", memory, source, N, stream)
    codes["record"] = fake.call("cuEventRecord", event, stream)
    codes["query"] = fake.call("cuEventQuery", event)
    codes["synchronise"] = fake.call("cuStreamSynchronize", stream)
    return codes


@pytest.mark.parametrize(
    ("capture", "thread", "broken"),
    [
        (GLOBAL, GLOBAL, True),
        (GLOBAL, THREAD_LOCAL, False),
        (GLOBAL, RELAXED, False),
        (THREAD_LOCAL, GLOBAL, False),
        (RELAXED, GLOBAL, False),
    ],
)
def test_an_unsafe_call_of_another_thread(fake: FakeCuda, capture: int, thread: int, broken: bool) -> None:
    stream, memory, context = fake.stream(), fake.alloc(N), c_void_p()
    fake.check("cuCtxGetCurrent", byref(context))
    fake.function("fake_fill")
    begin(fake, stream, capture)
    fake.fill(memory, N, 1, stream)
    codes = in_thread(lambda: reactor(fake, int(context.value or 0), thread))
    assert codes.pop("record") == 0
    assert set(codes.values()) == ({900} if broken else {0})
    assert end(fake, stream) == (901 if broken else 0)
    assert fake.captures_invalidated == int(broken)
    assert fake.call("cuStreamSynchronize", stream) == 0
    assert fake.download(memory, N) == UNTOUCHED  # a captured launch is not carried out
    assert fake.live("captures") == fake.live("graphs") == 0


def test_a_capturing_stream_cannot_be_asked(fake: FakeCuda) -> None:
    stream, other, status = fake.stream(), fake.stream(), c_int()
    mode = c_int(RELAXED)
    fake.check("cuThreadExchangeStreamCaptureMode", byref(mode))
    pending = fake.record(other)
    for ask, code in [
        (lambda: fake.call("cuStreamQuery", stream), 900),
        (lambda: fake.call("cuStreamSynchronize", stream), 900),
        (lambda: fake.call("cuCtxSynchronize"), 900),
        (lambda: fake.call("cuEventQuery", fake.record(stream)), 907),
        (lambda: fake.call("cuStreamWaitEvent", stream, pending, 0), 905),
    ]:
        begin(fake, stream, GLOBAL)
        fake.check("cuStreamIsCapturing", stream, byref(status))
        assert status.value == 1
        assert ask() == code
        fake.check("cuStreamIsCapturing", stream, byref(status))
        assert status.value == 2
        assert end(fake, stream) == 901
    fake.check("cuStreamIsCapturing", stream, byref(status))
    assert status.value == 0


def test_a_capture_spreads_by_events_and_must_come_back(fake: FakeCuda) -> None:
    stream, branch = fake.stream(), fake.stream()
    for joins in (True, False):
        begin(fake, stream, RELAXED)
        fake.wait(branch, fake.record(stream))
        fake.slow(branch)
        if joins:
            fake.wait(stream, fake.record(branch))
        assert end(fake, stream) == (0 if joins else 904)
        assert fake.call("cuStreamQuery", branch) == 0


def test_the_legacy_stream_is_out_of_use_while_a_blocking_stream_captures(fake: FakeCuda) -> None:
    stream, status = fake.stream(blocking=True), c_int()
    assert fake.call("cuStreamBeginCapture", LEGACY, GLOBAL) == 900
    begin(fake, stream, RELAXED)
    assert fake.call("cuStreamIsCapturing", 0, byref(status)) == 906
    assert fake.call("cuEventRecord", fake.event(), 0) == 906
    assert end(fake, stream) == 901


# The machine


def test_the_log_names_calls_threads_and_streams(fake: FakeCuda) -> None:
    stream = fake.stream()
    fake.clear_log()
    fake.record(stream)
    fake.check("cuStreamSynchronize", stream)
    assert [(c.name, c.stream, c.result, c.waited) for c in fake.log()] == [
        ("cuEventCreate", 0, 0, False),
        ("cuEventRecord", stream, 0, False),
        ("cuStreamSynchronize", stream, 0, True),
    ]
    assert {call.thread for call in fake.log()} == {threading.get_native_id()}


def test_a_reset_is_a_new_machine(fake: FakeCuda) -> None:
    stream, event, memory = fake.stream(), fake.event(), fake.alloc(N)
    fake.fill(memory, N, 1, stream)
    fake.hold(stream)
    fake.reset(3)
    kinds = [
        "streams",
        "events",
        "modules",
        "graphs",
        "contexts",
        "captures",
        "device",
        "pinned",
        "registered",
    ]
    assert [fake.live(kind) for kind in kinds] == [0] * 9
    assert (fake.pending, fake.executed, fake.calls("cuMemAlloc")) == (0, 0, 0)
    assert fake.call("cuStreamQuery", stream) == 201
    fake.open()
    assert fake.call("cuStreamQuery", stream) == 400
    assert fake.call("cuEventQuery", event) == 400
    with pytest.raises(KeyError):
        fake.download(memory, N)


def test_plain_addresses_can_be_used_by_the_host(fake: FakeCuda) -> None:
    fake.set_plain_addresses(True)
    memory, value = fake.alloc(N), c_int()
    assert ctypes.string_at(memory, N) == UNTOUCHED
    fake.check("cuDeviceGetAttribute", byref(value), 91, 0)
    assert value.value == 1


def test_many_threads_at_once(fake: FakeCuda) -> None:
    context = fake.open()
    fake.function("fake_fill")
    memory = fake.alloc(8 * N)
    fake.set_policy(0, 3)

    def work(index: int) -> None:
        fake.check("cuCtxSetCurrent", context)
        stream, event = fake.stream(), fake.event()
        for value in range(50):
            fake.fill(memory + index * N, N, value, stream)
            fake.record(stream, event)
            while not fake.is_done(event):
                pass
            assert fake.download(memory + index * N, N) == bytes([value]) * N
        finished.append(index)

    finished: list[int] = []
    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(finished) == list(range(8))


def test_it_is_built_once(tmp_path: Path) -> None:
    path = build()
    made = path.stat().st_mtime_ns
    build.cache_clear()
    assert build() == path
    assert path.stat().st_mtime_ns == made
    assert path.parent.stat().st_mode & 0o022 == 0
    assert path.parent.stat().st_uid == os.getuid()
