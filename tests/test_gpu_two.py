"""Two GPUs in one process: each backend serves its own, and refuses what is of the other. Skips with fewer."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from gpu_cases import LAYOUT, some
from gpu_support import NON_BLOCKING, RUNGS, backend_on, layer_files, on_every_loop, oracle_write, random_rows

from aio_kv import DeviceError, LayoutError, Scatter, UnavailableError
from aio_kv.cuda import Device, DeviceBuffer, DevicePath

COUNT = 32
NBYTES = LAYOUT.payload_nbytes


@pytest.fixture(scope="module")
def devices() -> Iterator[tuple[Device, Device]]:
    """Both GPUs, used once, so that what the driver keeps of them is there before a test counts."""
    try:
        first = Device(0)
    except UnavailableError as refusal:
        pytest.skip(f"needs two GPUs: {refusal}")
    with first:
        try:
            second = Device(1)
        except UnavailableError as refusal:
            pytest.skip(f"needs two GPUs: {refusal}")
        with second, DevicePath(second):
            yield first, second


class Side:
    """Memory and a stream of one GPU."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.into = DeviceBuffer(COUNT * NBYTES, device)
        stream = ctypes.c_void_p()
        with device.activated():
            device.call("cuStreamCreate", ctypes.byref(stream), NON_BLOCKING)
        self.stream = stream.value or 0

    def bytes(self) -> Any:
        found = np.empty(COUNT * NBYTES, np.uint8)
        with self.device.activated():
            self.device.call(
                "cuMemcpyDtoHAsync", found.ctypes.data, self.into.data_ptr(), found.nbytes, self.stream
            )
            self.device.call("cuStreamSynchronize", self.stream)
        return found

    def close(self) -> None:
        self.into.close()
        with self.device.activated():
            self.device.call("cuStreamDestroy", self.stream)


@pytest.fixture
def sides(devices: tuple[Device, Device]) -> Iterator[tuple[Side, Side]]:
    made = Side(devices[0]), Side(devices[1])
    yield made
    for side in made:
        side.close()


@pytest.mark.gpu
@pytest.mark.parametrize("rung", RUNGS)
@on_every_loop
async def test_each_backend_serves_its_own(sides: tuple[Side, Side], tmp_path: Path, rung: str) -> None:
    ids, rows = some(LAYOUT, COUNT), random_rows(LAYOUT, LAYOUT.num_groups)
    places = np.random.default_rng(1).permutation(COUNT) * NBYTES
    with layer_files(tmp_path, LAYOUT) as files:
        oracle_write(files, np.arange(LAYOUT.num_groups), rows)
        async with (
            backend_on(rung, files, sides[0].device) as a,
            backend_on(rung, files, sides[1].device) as b,
        ):

            async def restore(kv: Any, side: Side) -> None:
                for _ in range(5):
                    transfer = kv.read_groups(ids, Scatter(side.into, places), stream=side.stream)
                    await transfer.enqueued()
                    await transfer

            async with anyio.create_task_group() as group:
                group.start_soon(restore, a, sides[0])
                group.start_soon(restore, b, sides[1])
    for side in sides:
        assert np.array_equal(side.bytes().reshape(COUNT, NBYTES)[places // NBYTES], rows[ids])


@pytest.mark.gpu
@on_every_loop
async def test_what_is_of_the_other_gpu_is_refused(sides: tuple[Side, Side], tmp_path: Path) -> None:
    first, second = sides
    with layer_files(tmp_path, LAYOUT) as files:
        async with backend_on("uring", files, first.device) as kv:
            ids = np.arange(COUNT)
            await kv.read_groups(ids, first.into, stream=first.stream)  # its stream is known from here on
            for _ in range(2):
                with pytest.raises(LayoutError, match="is on GPU 1: give memory of GPU 0"):
                    kv.read_groups(ids, second.into, stream=first.stream)
                with pytest.raises(DeviceError, match="belongs to device 1"):
                    kv.read_groups(ids, first.into, stream=second.stream)
                with pytest.raises(DeviceError, match="belongs to device 1"):
                    kv.record_event(second.stream)
            await kv.read_groups(ids, first.into, stream=first.stream)
