"""A GPU for tests of the device path: the real one where there is one, else the fake CUDA driver.

The same tests run on both. What only one of them can do is asked for with `needs_fake` or `needs_real`, which skip with
a reason. The fake carries an operation out as late as it legally may, so it finds what is reused too early; the GPU
finds what the fake does not model.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import inspect
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import anyio
import numpy as np
import pytest
import trio
from fake_cuda_build import build, skip_reason
from fake_cuda_control import LEGACY, PER_THREAD, FakeCuda
from numpy.typing import NDArray

from aio_kv import (
    EngineOptions,
    GroupLayout,
    LayerFiles,
    PosixBackend,
    Read,
    Scatter,
    ThreadedBackend,
    Transfer,
    UnavailableError,
    UringBackend,
)
from aio_kv.backends.engine_backend import EngineBackend
from aio_kv.cuda import CopyOptions, Device, DeviceBuffer
from aio_kv.cuda.table import DriverTable, Entry
from aio_kv.engine import has_extension

try:
    import uvloop
except ImportError:  # There is none for every system.
    uvloop = None

Bytes = NDArray[np.uint8]
RUNGS = ("uring", "threads")
NON_BLOCKING = 1
# Small enough that queues overflow and staging slots run out within a test.
SMALL = EngineOptions(
    queue_depth=32,
    threads=3,
    staging_nbytes=4 << 20,
    max_requests=4096,
    max_transfers=512,
    op_nbytes_max=128 << 10,
    small_nbytes=16 << 10,
    bulk_nbytes=1 << 20,
    drain_timeout=10.0,
)
_PATIENCE_SECONDS = 10.0


class Gpu:
    """One device, and everything of it that a test makes: buffers and streams are given back by `close`.

    Streams are plain handles. A held stream does none of the work that it is given until it is released.
    """

    is_fake: bool
    device: Device

    def __init__(self) -> None:
        self._buffers: list[DeviceBuffer] = []
        self._streams: list[int] = []
        self._held: set[int] = set()

    def needs_fake(self, why: str) -> FakeCuda:
        """The controls of the fake driver, or a skip that says why a GPU will not do."""
        raise NotImplementedError

    def buffer(self, nbytes: int, value: int | None = None) -> DeviceBuffer:
        """Device memory, filled with `value` if that is given."""
        made = DeviceBuffer(nbytes, self.device)
        self._buffers.append(made)
        if value is not None:
            self.upload(made, bytes([value]) * nbytes)
        return made

    def stream(self, *, blocking: bool = False) -> int:
        """A new stream; a blocking one is ordered with the legacy stream."""
        made = ctypes.c_void_p()
        # Streams of one priority share hardware queues, and one that is held could hold up others by accident: they get
        # different ones; the lowest is left to the default streams, the highest to the copy streams (a GPU has six).
        priority = -1 - len(self._streams) % 4
        with self.device.activated():
            flags = 0 if blocking else NON_BLOCKING
            self.device.call("cuStreamCreateWithPriority", ctypes.byref(made), flags, priority)
        assert made.value
        self._streams.append(made.value)
        return made.value

    def upload(self, buffer: DeviceBuffer, data: bytes | Bytes, offset: int = 0) -> None:
        """Put bytes into device memory now, whatever is queued."""
        raise NotImplementedError

    def download(self, buffer: DeviceBuffer, nbytes: int | None = None, offset: int = 0) -> Bytes:
        """The bytes that device memory holds now, whatever is queued."""
        raise NotImplementedError

    def hold(self, stream: int) -> None:
        raise NotImplementedError

    def release(self, stream: int) -> None:
        raise NotImplementedError

    def fill(self, buffer: DeviceBuffer, value: int, stream: int) -> None:
        """Queue a kernel that fills the buffer: a producer."""
        raise NotImplementedError

    def copy(self, target: DeviceBuffer, source: DeviceBuffer, stream: int) -> None:
        """Queue a kernel that reads all of `source` into `target`: a consumer."""
        raise NotImplementedError

    def stall(self, stream: int) -> None:
        """Queue a kernel that does not end before `finish`: what is behind it on the stream waits."""
        raise NotImplementedError

    def begin_capture(self, stream: int, mode: int) -> None:
        """Have what the stream is given from now on go into a graph."""
        raise NotImplementedError

    def end_capture(self, stream: int) -> int:
        """End the capture and throw the graph away; the driver's answer, 0 if nothing broke it."""
        raise NotImplementedError

    def finish(self, stream: int) -> None:
        """Have the host wait for all that a stream has been given."""
        with self.device.activated():
            self.device.call("cuStreamSynchronize", stream)

    def driver_occupied(self) -> contextlib.AbstractContextManager[None]:
        """A block during which a driver's call by another thread does not return; the test may make none in it."""
        return contextlib.nullcontext()

    @contextmanager
    def holding(self, *streams: int) -> Iterator[None]:
        """Streams held until the end of the block; `release` may end it earlier."""
        for stream in streams:
            self.hold(stream)
        try:
            yield
        finally:
            for stream in streams:
                if stream in self._held:
                    self.release(stream)

    def close(self) -> None:
        """Release, wait, free, close the device."""
        for stream in list(self._held):
            self.release(stream)
        if self.device.fault is not None or self.device.is_closed:
            return
        for stream in self._streams:
            self.finish(stream)
            with self.device.activated():
                self.device.call("cuStreamDestroy", stream)
        for buffer in self._buffers:
            buffer.close()
        self.device.close()


class FakeGpu(Gpu):
    """The device of a new fake machine."""

    is_fake = True

    def __init__(self, seed: int = 0, *, hidden: tuple[str, ...] = (), devices: int = 1) -> None:
        super().__init__()
        self.fake = FakeCuda(build(), seed=seed)
        self.fake.set_devices(devices)
        for name in hidden:
            self.fake.hide(name)
        self.device = Device(0, table=DriverTable(self._lookup, is_fake=True))
        # A test's own calls are made in this thread; the product must not need a current context.
        self.fake.check("cuCtxSetCurrent", self.device.context)

    def _lookup(self, name: str, entry: Entry) -> int:
        address, status = ctypes.c_void_p(), ctypes.c_int()
        places = ctypes.byref(address), entry.version, 1, ctypes.byref(status)
        code = self.fake.call("cuGetProcAddress", name.encode(), *places)
        return 0 if code else address.value or 0

    def needs_fake(self, why: str) -> FakeCuda:
        return self.fake

    def upload(self, buffer: DeviceBuffer, data: bytes | Bytes, offset: int = 0) -> None:
        self.fake.upload(buffer.data_ptr() + offset, bytes(data))

    def download(self, buffer: DeviceBuffer, nbytes: int | None = None, offset: int = 0) -> Bytes:
        count = buffer.nbytes - offset if nbytes is None else nbytes
        return np.frombuffer(self.fake.download(buffer.data_ptr() + offset, count), np.uint8)

    def hold(self, stream: int) -> None:
        self.fake.hold(stream)
        self._held.add(stream)

    def release(self, stream: int) -> None:
        self.fake.release(stream)
        self._held.discard(stream)

    def fill(self, buffer: DeviceBuffer, value: int, stream: int) -> None:
        self.fake.fill(buffer.data_ptr(), buffer.nbytes, value, stream)

    def copy(self, target: DeviceBuffer, source: DeviceBuffer, stream: int) -> None:
        places = target.data_ptr(), source.data_ptr()
        self.fake.check("cuMemcpyDtoDAsync", *places, source.nbytes, stream)

    def stall(self, stream: int) -> None:
        self.fake.slow(stream)

    @contextmanager
    def driver_occupied(self) -> Iterator[None]:
        # A host function runs under the fake's lock, which every call has to take.
        has_begun, may_end = threading.Event(), threading.Event()

        def occupy(_: Any) -> None:
            has_begun.set()
            may_end.wait(10)

        function, stream = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(occupy), self.stream()

        def run() -> None:
            self.device.make_current()
            self.fake.check("cuLaunchHostFunc", stream, function, None)
            self.fake.check("cuStreamSynchronize", stream)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            assert has_begun.wait(10)
            yield
        finally:
            may_end.set()
            thread.join()

    def begin_capture(self, stream: int, mode: int) -> None:
        self.fake.check("cuStreamBeginCapture", stream, mode)

    def end_capture(self, stream: int) -> int:
        graph = ctypes.c_void_p()
        code = self.fake.call("cuStreamEndCapture", stream, ctypes.byref(graph))
        if graph.value:
            self.fake.check("cuGraphDestroy", graph)
        return code

    def close(self) -> None:
        fake = self.fake
        if fake.sticky:
            fake.reset()
            return
        count, last = fake.violations()
        super().close()
        assert count == 0, f"work met memory that was gone: {last}"
        fake.reset()


class RealGpu(Gpu):
    """The first GPU of the machine. Calls that the product has no use for are taken from the driver's own library."""

    is_fake = False
    _LIBRARY = "libcuda.so.1"

    def __init__(self) -> None:
        super().__init__()
        self.device = Device(0)
        self._library = ctypes.CDLL(self._LIBRARY)
        self._flags = self._pinned_flags()
        self._holds: dict[int, tuple[int, threading.Timer]] = {}
        self._next_flag = 0
        self._own = ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(self._own), ctypes.c_uint(NON_BLOCKING))

    def needs_fake(self, why: str) -> NoReturn:
        pytest.skip(f"a GPU cannot: {why}")

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        assert code == 0, f"{name} answered {code}"

    def _pinned_flags(self) -> Any:
        pointer = ctypes.c_void_p()
        self.device.make_current()
        self._call("cuMemHostAlloc", ctypes.byref(pointer), ctypes.c_size_t(4096), ctypes.c_uint(3))
        flags = (ctypes.c_uint32 * 1024).from_address(pointer.value or 0)
        ctypes.memset(flags, 0, 4096)
        return flags

    def upload(self, buffer: DeviceBuffer, data: bytes | Bytes, offset: int = 0) -> None:
        # Not cuMemcpyHtoD: that may return before the bytes have arrived, and would then overwrite what comes later.
        raw, target = bytes(data), ctypes.c_uint64(buffer.data_ptr() + offset)
        self._call("cuMemcpyHtoDAsync_v2", target, raw, ctypes.c_size_t(len(raw)), self._own)
        self._call("cuStreamSynchronize", self._own)

    def download(self, buffer: DeviceBuffer, nbytes: int | None = None, offset: int = 0) -> Bytes:
        count = buffer.nbytes - offset if nbytes is None else nbytes
        out = np.empty(count, np.uint8)
        target, source = ctypes.c_void_p(out.ctypes.data), ctypes.c_uint64(buffer.data_ptr() + offset)
        self._call("cuMemcpyDtoHAsync_v2", target, source, ctypes.c_size_t(count), self._own)
        self._call("cuStreamSynchronize", self._own)
        return out

    def hold(self, stream: int) -> None:
        # The stream itself waits for a word of pinned memory: no kernel occupies the device meanwhile.
        index = self._next_flag
        self._next_flag += 1
        address = ctypes.c_uint64(ctypes.addressof(self._flags) + 4 * index)
        at_least = ctypes.c_uint(0)
        handle = ctypes.c_void_p(stream)
        self._call("cuStreamWaitValue32_v2", handle, address, ctypes.c_uint32(1), at_least)
        # Some calls of the driver wait for all streams: then a test is to fail, not to hang.
        timer = threading.Timer(2 * _PATIENCE_SECONDS, self._flags.__setitem__, (index, 1))
        timer.start()
        self._holds[stream] = index, timer
        self._held.add(stream)

    def release(self, stream: int) -> None:
        index, timer = self._holds.pop(stream)
        self._flags[index] = 1
        self._held.discard(stream)
        timer.cancel()
        timer.join()

    def fill(self, buffer: DeviceBuffer, value: int, stream: int) -> None:
        address, count = ctypes.c_uint64(buffer.data_ptr()), ctypes.c_size_t(buffer.nbytes)
        self._call("cuMemsetD8Async", address, ctypes.c_ubyte(value), count, ctypes.c_void_p(stream))

    def copy(self, target: DeviceBuffer, source: DeviceBuffer, stream: int) -> None:
        places = ctypes.c_uint64(target.data_ptr()), ctypes.c_uint64(source.data_ptr())
        self._call("cuMemcpyDtoDAsync_v2", *places, ctypes.c_size_t(source.nbytes), ctypes.c_void_p(stream))

    def stall(self, stream: int) -> None:
        self.hold(stream)

    def finish(self, stream: int) -> None:
        if stream in self._held:
            self.release(stream)
        super().finish(stream)

    def begin_capture(self, stream: int, mode: int) -> None:
        self._call("cuStreamBeginCapture_v2", ctypes.c_void_p(stream), ctypes.c_int(mode))

    def end_capture(self, stream: int) -> int:
        graph = ctypes.c_void_p()
        code = int(self._library.cuStreamEndCapture(ctypes.c_void_p(stream), ctypes.byref(graph)))
        if graph.value:
            self._call("cuGraphDestroy", graph)
        return code

    def close(self) -> None:
        pointer = ctypes.c_void_p(ctypes.addressof(self._flags))
        for stream in list(self._held):
            self.release(stream)
        for stream in self._streams:
            self.finish(stream)
        self._call("cuMemFreeHost", pointer)
        self._call("cuStreamDestroy_v2", self._own)
        super().close()


@functools.cache
def has_real_gpu() -> bool:
    """Whether this machine has a GPU that the tests can use; AIO_KV_TEST_FAKE_GPU=1 has them use the fake anyway."""
    if os.environ.get("AIO_KV_TEST_FAKE_GPU", "0") not in ("", "0"):
        return False
    try:
        Device(0).close()
    except UnavailableError:
        return False
    return True


def skip_without_gpu() -> None:
    """Skip where there is neither a GPU nor what the fake needs."""
    if not has_extension():
        pytest.skip("the compiled extension is not installed")
    if not has_real_gpu() and (reason := skip_reason()) is not None:
        pytest.skip(reason)


def make_gpu(seed: int = 0) -> Gpu:
    """The GPU of the tests, new."""
    skip_without_gpu()
    return RealGpu() if has_real_gpu() else FakeGpu(seed)


@contextmanager
def gpu_of(seed: int) -> Iterator[Gpu]:
    """A GPU for one example of several in a test."""
    made = make_gpu(seed)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    """The GPU of one test."""
    with gpu_of(7) as made:
        yield made


# Backends


@contextmanager
def layer_files(folder: Path, layout: GroupLayout) -> Iterator[LayerFiles]:
    """New files, which the backend under test and the oracle may share."""
    with LayerFiles(folder / "kv", layout, create=True) as files:
        yield files


@asynccontextmanager
async def backend_on(
    rung: str, files: LayerFiles, device: Device, copies: CopyOptions | None = None, **changes: Any
) -> AsyncIterator[EngineBackend]:
    """An open backend with a device; `changes` are engine options. Skips where the rung cannot be had."""
    options = replace(SMALL, copies=copies, **changes)
    kind: type[EngineBackend] = UringBackend if rung == "uring" else ThreadedBackend
    backend = kind(files, device=device, options=options)
    try:
        await backend
    except UnavailableError as refused:
        pytest.skip(str(refused))
    try:
        assert backend.rung.startswith(rung)
        yield backend
    finally:
        await backend.aclose()


def oracle_write(files: LayerFiles, ids: NDArray[np.int64], payloads: Bytes) -> None:
    """Put groups into the files by other means than those under test; one row of `payloads` each."""
    with PosixBackend(files) as oracle:
        for group_id, row in zip(ids.tolist(), payloads, strict=True):
            oracle.write_from_host(files.layout.key(group_id), row.tobytes())


def oracle_read(files: LayerFiles, ids: NDArray[np.int64]) -> Bytes:
    """What the files hold, one row for each group."""
    rows = np.empty((len(ids), files.layout.payload_nbytes), np.uint8)
    with PosixBackend(files) as oracle:
        oracle.read(
            [Read(files.layout.key(i), memoryview(row)) for i, row in zip(ids.tolist(), rows, strict=True)]
        )
    return rows


def random_rows(layout: GroupLayout, count: int, seed: int = 0) -> Bytes:
    """Payloads, one row for each of `count` groups."""
    return np.random.default_rng(seed).integers(0, 256, (count, layout.payload_nbytes), np.uint8)


def gathered(image: Bytes, scatter: Scatter, payload: int) -> Bytes:
    """The groups that `scatter` has placed in the memory of which `image` is a copy, one row each."""
    return np.stack([image[at : at + payload] for at in scatter.offsets.tolist()])


def scattered(image: Bytes, offsets: NDArray[np.int64], rows: Bytes) -> Bytes:
    """A copy of `image` with the rows at their offsets."""
    whole = image.copy()
    for at, row in zip(offsets.tolist(), rows, strict=True):
        whole[at : at + len(row)] = row
    return whole


# Waiting for what the engine does on its own thread


async def until(is_true: Callable[[], bool], what: str) -> None:
    """Give the loop back until something is so; a bound keeps a failure from hanging."""
    end = time.monotonic() + _PATIENCE_SECONDS
    while not is_true():
        assert time.monotonic() < end, f"waited {_PATIENCE_SECONDS:.0f} s in vain: {what}"
        await anyio.sleep(0.0005)


async def looks(kv: EngineBackend, times: int = 30) -> None:
    """Let the reactor ask the driver so often: what could have become done by then has."""
    first = kv.statistics().engine.cuda_calls
    await until(lambda: kv.statistics().engine.cuda_calls >= first + times, "the reactor asks the driver")


async def ends_within(transfer: Transfer, seconds: float = _PATIENCE_SECONDS) -> None:
    """Await a transfer that must not depend on what a test is holding back."""
    with anyio.fail_after(seconds):
        await transfer


# Loops

Body = Callable[..., Awaitable[None]]


def run_on(loop: str, main: Callable[[], Awaitable[None]]) -> None:
    """Run a coroutine function to its end on "asyncio", "uvloop" or "trio"."""
    if loop == "trio":
        trio.run(main)
        return
    if loop == "uvloop" and uvloop is None:
        pytest.skip("uvloop is not installed")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if loop == "uvloop" else None) as runner:
        runner.run(main())  # type: ignore[arg-type]


def on_loops(*loops: str) -> Callable[[Body], Callable[..., None]]:
    """Make a plain test of an async one, once for each loop."""

    def decorate(body: Body) -> Callable[..., None]:
        def test(loop: str, **arguments: Any) -> None:
            run_on(loop, functools.partial(body, **arguments))

        functools.update_wrapper(test, body)
        del test.__wrapped__  # so that the signature below is the one that pytest sees
        signature = inspect.signature(body)
        asked = inspect.Parameter("loop", inspect.Parameter.KEYWORD_ONLY)
        parameters = [*signature.parameters.values(), asked]
        test.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return pytest.mark.parametrize("loop", loops)(test)

    return decorate


on_asyncio = on_loops("asyncio")
on_every_loop = on_loops("asyncio", "uvloop", "trio")


@contextmanager
def nothing_left(fake: FakeCuda) -> Iterator[None]:
    """Fail if the block leaves more of the driver's objects, descriptors or threads than there were."""
    kinds = ("events", "streams", "registered", "pinned", "modules", "device", "captures")
    before = {kind: fake.live(kind) for kind in kinds}
    tasks, descriptors = set(os.listdir("/proc/self/task")), set(os.listdir("/proc/self/fd"))
    yield
    assert {kind: fake.live(kind) for kind in kinds} == before
    end = time.monotonic() + 5.0
    # A thread that was joined is gone from Python's view a moment before the kernel has taken its entry away.
    while set(os.listdir("/proc/self/task")) - tasks and time.monotonic() < end:
        with contextlib.suppress(InterruptedError):
            time.sleep(0.001)
    assert not set(os.listdir("/proc/self/task")) - tasks
    assert len(os.listdir("/proc/self/fd")) <= len(descriptors)


__all__ = [
    "LEGACY",
    "PER_THREAD",
    "RUNGS",
    "SMALL",
    "Bytes",
    "FakeGpu",
    "Gpu",
    "RealGpu",
    "backend_on",
    "ends_within",
    "gathered",
    "gpu",
    "gpu_of",
    "has_real_gpu",
    "layer_files",
    "looks",
    "make_gpu",
    "nothing_left",
    "on_asyncio",
    "on_every_loop",
    "on_loops",
    "oracle_read",
    "oracle_write",
    "random_rows",
    "run_on",
    "scattered",
    "skip_without_gpu",
    "until",
]
