"""On a real GPU, beside the libraries that callers bring: torch tensors, streams and graphs, CuPy, cuda.core.

Nothing here runs on the fake driver: what is tested is that others' objects and ours mean the same device.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from gpu_cases import LAYOUT, NEW, apart, filled
from gpu_support import RUNGS, backend_on, has_real_gpu, on_asyncio, on_every_loop, oracle_read

from aio_kv import Scatter
from aio_kv.cuda import Device

COUNT = 16
NBYTES = LAYOUT.payload_nbytes


@pytest.fixture(scope="module")
def torch() -> Any:
    """torch with the GPU that the tests use, which it has opened: the descriptors are its own, and it keeps them."""
    if not has_real_gpu():
        pytest.skip("needs a GPU")
    found = pytest.importorskip("torch", reason="torch is not installed")
    if not found.cuda.is_available():
        pytest.skip("this torch is built without CUDA")
    found.zeros(1, device="cuda:0")
    return found


@pytest.fixture
def device(torch: Any) -> Iterator[Device]:
    """The GPU, whose context torch shares."""
    with Device(0) as opened:
        yield opened


def shuffled(count: int = COUNT) -> Any:
    return np.random.default_rng(0).permutation(count) * NBYTES


@pytest.mark.parametrize("rung", RUNGS)
@on_every_loop
async def test_tensor_and_stream(torch: Any, device: Device, tmp_path: Path, rung: str) -> None:
    """A kernel that still reads the destination is not overtaken; one launched behind `enqueued` sees every byte."""
    stream = torch.cuda.Stream()
    with filled(tmp_path, LAYOUT) as files:
        async with backend_on(rung, files, device) as kv:
            for _ in range(10):
                with torch.cuda.stream(stream):
                    cache = torch.full((COUNT, NBYTES), 7, dtype=torch.uint8, device="cuda:0")
                    torch.cuda._sleep(2_000_000)
                    before = cache.clone()
                transfer = kv.read_groups(apart(COUNT), Scatter(cache, shuffled()), stream=stream)
                await transfer.enqueued()
                with torch.cuda.stream(stream):
                    after = cache.clone()
                await transfer
                assert bool((before == 7).all())
                assert bool((after == NEW).all())


@on_every_loop
async def test_a_slow_producer_of_a_write(torch: Any, device: Device, tmp_path: Path) -> None:
    stream = torch.cuda.Stream()
    with filled(tmp_path, LAYOUT) as files:
        async with backend_on("uring", files, device) as kv:
            source = torch.zeros((COUNT, NBYTES), dtype=torch.uint8, device="cuda:0")
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(50_000_000)
                source.fill_(9)
            transfer = kv.write_groups(apart(COUNT), source, stream=stream)
            await transfer.enqueued()
            with torch.cuda.stream(stream):
                source.fill_(1)  # it may be overwritten from here on
            await transfer
        assert (oracle_read(files, apart(COUNT)) == 9).all()


@on_asyncio
async def test_another_stream_does_not_wait(torch: Any, device: Device, tmp_path: Path) -> None:
    """A read on stream B ends while stream A sits behind a kernel of about a second."""
    busy, stream = torch.cuda.Stream(), torch.cuda.Stream()
    with filled(tmp_path, LAYOUT) as files:
        async with backend_on("uring", files, device) as kv:
            first, second = (
                torch.zeros((COUNT, NBYTES), dtype=torch.uint8, device="cuda:0") for _ in range(2)
            )
            torch.cuda.synchronize()
            with torch.cuda.stream(busy):
                torch.cuda._sleep(2_000_000_000)
            held = kv.read_groups(apart(COUNT), first, stream=busy)
            await kv.read_groups(apart(COUNT), second, stream=stream)
            assert not held.is_done
            assert not busy.query()
            await held
            assert bool((first == NEW).all())
            assert bool((second == NEW).all())


@pytest.mark.parametrize("handle", [0, 1, 2], ids=["default", "legacy", "per-thread"])
@on_asyncio
async def test_default_streams(torch: Any, device: Device, tmp_path: Path, handle: int) -> None:
    with filled(tmp_path, LAYOUT) as files:
        async with backend_on("uring", files, device) as kv:
            cache = torch.full((COUNT, NBYTES), 7, dtype=torch.uint8, device="cuda:0")
            torch.cuda.synchronize()
            transfer = kv.read_groups(apart(COUNT), cache, stream=handle)
            await transfer.enqueued()
            await transfer
            assert bool((cache == NEW).all())


@on_asyncio
async def test_graph_captures_of_another_thread_survive(torch: Any, device: Device, tmp_path: Path) -> None:
    """torch captures in the global mode: any unsafe call of any thread would end the capture."""
    failures: list[BaseException] = []
    captured: list[int] = []
    is_over = threading.Event()

    def capture() -> None:
        try:
            tensor = torch.zeros(1024, device="cuda:0")
            for _ in range(50):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    for _ in range(20):
                        tensor += 1
                    time.sleep(0.002)
                graph.replay()
                captured.append(1)
        except BaseException as error:
            failures.append(error)
        finally:
            is_over.set()

    stream = torch.cuda.Stream()
    with filled(tmp_path, LAYOUT) as files:
        async with backend_on("uring", files, device) as kv:
            cache = torch.zeros((COUNT, NBYTES), dtype=torch.uint8, device="cuda:0")
            torch.cuda.synchronize()
            await kv.read_groups(apart(COUNT), cache, stream=stream)
            thread = threading.Thread(target=capture)
            thread.start()
            reads = 0
            while not is_over.is_set():
                transfer = kv.read_groups(apart(COUNT), cache, stream=stream)
                await transfer.enqueued()
                await transfer
                await kv.record_event(stream)
                reads += 1
            await anyio.to_thread.run_sync(thread.join)
    assert not failures, failures
    assert len(captured) == 50
    assert reads > 0


@on_asyncio
async def test_dlpack_only(torch: Any, device: Device, tmp_path: Path) -> None:
    """An object that offers nothing but DLPack."""
    tensor = torch.zeros(COUNT * NBYTES, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()

    class Exporter:
        def __dlpack__(self, **arguments: Any) -> Any:
            return tensor.__dlpack__(**arguments)

        def __dlpack_device__(self) -> Any:
            return tensor.__dlpack_device__()

    with filled(tmp_path, LAYOUT) as files:
        async with backend_on("uring", files, device) as kv:
            await kv.read_groups(apart(COUNT), Exporter(), stream=torch.cuda.Stream())
    assert bool((tensor == NEW).all())


@on_asyncio
async def test_cuda_core_buffers_and_streams(torch: Any, device: Device, tmp_path: Path) -> None:
    core = pytest.importorskip("cuda.core", reason="cuda.core is not installed")
    theirs = core.Device(0)
    theirs.set_current()
    stream = theirs.create_stream()
    buffer = theirs.allocate(COUNT * NBYTES, stream=stream)
    with filled(tmp_path, LAYOUT) as files:
        async with backend_on("uring", files, device) as kv:
            transfer = kv.read_groups(apart(COUNT), buffer, stream=stream)
            await transfer.enqueued()
            await transfer
            await kv.write_groups(apart(COUNT) + 1, buffer, stream=stream)
        assert (oracle_read(files, apart(COUNT) + 1) == NEW).all()
    buffer.close(stream)


@on_asyncio
async def test_cupy_arrays_and_streams(torch: Any, device: Device, tmp_path: Path) -> None:
    cupy = pytest.importorskip("cupy", reason="cupy is not installed")
    array, stream = cupy.zeros((COUNT, NBYTES), cupy.uint8), cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device(0).synchronize()
    with filled(tmp_path, LAYOUT) as files:
        async with backend_on("uring", files, device) as kv:
            await kv.read_groups(apart(COUNT), array, stream=stream)
    assert bool((array == NEW).all())
