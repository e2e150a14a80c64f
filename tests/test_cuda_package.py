"""`aio_kv.cuda` without a GPU: the table of driver functions, devices, streams, events, and the path to the engine.

What needs real order of operations (copies, events behind kernels) is tested on the fake driver and on a GPU.
"""

import asyncio
import ctypes
import ctypes.util
import gc
import mmap
import os
import pickle
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_stub import CONTEXTS, StubDriver

import aio_kv
from aio_kv.cuda import (
    AwaitableEvent,
    CopyOptions,
    Device,
    DeviceBuffer,
    DevicePath,
    PinnedBuffer,
    Stream,
)
from aio_kv.cuda import kernels as kernels_module
from aio_kv.cuda import memory as memory_module
from aio_kv.cuda import table as table_module
from aio_kv.cuda.event import Event, EventPool
from aio_kv.cuda.stream import as_stream
from aio_kv.cuda.table import ENTRIES, STICKY_CODES, DriverTable
from aio_kv.errors import BusyError, ClosedError, DeviceError, LayoutError, UnavailableError
from aio_kv.memory import DeviceMemory


@pytest.fixture
def stub() -> StubDriver:
    return StubDriver()


@pytest.fixture
def device(stub: StubDriver) -> Iterator[Device]:
    with Device(0, table=stub.table()) as opened:
        yield opened


class TestTable:
    def test_import_needs_no_cuda(self) -> None:
        program = (
            "import sys; sys.modules['cuda'] = None; sys.modules['torch'] = None\n"
            "import aio_kv.cuda; aio_kv.cuda.CopyOptions()\n"
            "assert not [name for name in sys.modules if name.startswith('cuda.')]"
        )
        environment = {**os.environ, "PYTHONPATH": str(Path(aio_kv.__file__).parent.parent)}
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr

    def test_the_package_does_not_know_the_engine(self) -> None:
        for path in (Path(aio_kv.__file__).parent / "cuda").glob("*.py"):
            assert "aio_kv.engine" not in path.read_text(), path

    def test_no_driver_without_bindings(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "cuda.bindings", None)
        monkeypatch.setattr(table_module, "_LIBRARY", "libcuda-which-is-not-there.so.1")
        with pytest.raises(UnavailableError, match="no CUDA driver was found") as caught:
            DriverTable.load()
        assert "NVIDIA driver" in str(caught.value)
        assert "pip install 'aio_kv[cuda13]'" in str(caught.value)

    def test_bindings_raise_where_there_is_no_driver(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse() -> None:
            raise SystemError("Failed to dlopen libcuda.so.1")

        use_bindings(monkeypatch, types.SimpleNamespace(cuDriverGetVersion=refuse))
        with pytest.raises(UnavailableError, match=r"no CUDA driver was found.*Failed to dlopen") as caught:
            DriverTable.load()
        assert isinstance(caught.value.__cause__, SystemError)

    def test_entries_are_looked_up_at_their_version(
        self, monkeypatch: pytest.MonkeyPatch, stub: StubDriver
    ) -> None:
        asked: dict[str, int] = {}

        def find(name: bytes, version: int, flags: int) -> tuple[int, int, int]:
            assert flags == 1  # handle 0 must mean the legacy stream
            asked[name.decode()] = version
            return 0, stub.lookup(name.decode(), ENTRIES[name.decode()]), 0

        driver = types.SimpleNamespace(cuDriverGetVersion=lambda: (0, 13000), cuGetProcAddress=find)
        use_bindings(monkeypatch, driver)
        stub.hidden = {"cuMemcpyBatchAsync"}
        table = DriverTable.load()
        assert asked == {name: entry.version for name, entry in ENTRIES.items()}
        assert asked["cuMemcpyBatchAsync"] == 13000
        assert not table.is_fake
        assert not table.has("cuMemcpyBatchAsync")
        assert table.address("cuMemcpyBatchAsync") == 0
        assert table.address("cuEventQuery") == stub.lookup("cuEventQuery", ENTRIES["cuEventQuery"])

    def test_what_an_old_driver_lacks_is_named(self, stub: StubDriver) -> None:
        stub.hidden = {"cuStreamGetCtx", "cuMemHostRegister", "cuMemcpyBatchAsync"}
        with pytest.raises(UnavailableError, match="lacks cuStreamGetCtx, cuMemHostRegister") as caught:
            stub.table()
        assert "cuMemcpyBatchAsync" not in str(caught.value)

    def test_a_library_that_is_no_driver(self, tmp_path: Path) -> None:
        with pytest.raises(UnavailableError, match="build the fake driver"):
            DriverTable.from_library(str(tmp_path / "absent.so"))
        with pytest.raises(UnavailableError, match="lacks cuInit"):
            DriverTable.from_library(ctypes.util.find_library("c") or "libc.so.6")

    def test_errors_name_call_code_and_cure(self, stub: StubDriver) -> None:
        table = stub.table()
        stub.codes["cuMemAlloc"] = 2
        with pytest.raises(DeviceError) as caught:
            table.call("cuMemAlloc", None, 1)
        error = caught.value
        assert (error.call, error.code, error.name) == ("cuMemAlloc", 2, "CUDA_ERROR_OUT_OF_MEMORY")
        assert str(error).startswith("cuMemAlloc failed: CUDA_ERROR_OUT_OF_MEMORY (2), out of memory. Hint: ")
        assert vars(pickle.loads(pickle.dumps(error))) == vars(error)
        assert str(table.error("cuLaunchKernel", 4711)) == "cuLaunchKernel failed: CUDA error (4711)"

    @pytest.mark.parametrize("code", [2, 3, 100, 101, 201, 400, 900, 901, *sorted(STICKY_CODES)])
    def test_common_errors_have_hints(self, stub: StubDriver, code: int) -> None:
        assert stub.table().error("cuInit", code).hint


def use_bindings(monkeypatch: pytest.MonkeyPatch, driver: Any) -> None:
    package = types.ModuleType("cuda.bindings")
    package.driver = driver  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", package)


class TestDevice:
    def test_says_what_it_is(self, device: Device) -> None:
        assert (device.name, device.memory_nbytes, device.multiprocessor_count) == ("Stub GPU", 80 << 30, 132)
        assert (device.compute_capability, device.architecture, device.context) == ((9, 0), "sm_90", 0xA000)

    def test_wrong_index_names_how_many_there_are(self, stub: StubDriver) -> None:
        with pytest.raises(UnavailableError, match=r"no GPU 2: this process sees 2.*CUDA_VISIBLE_DEVICES"):
            Device(2, table=stub.table())
        stub.codes["cuInit"] = 100
        with pytest.raises(UnavailableError, match="no GPU 0: this process sees 0"):
            Device(table=stub.table())
        stub.codes["cuInit"] = 3
        with pytest.raises(UnavailableError, match=r"CUDA cannot start: cuInit failed.*spawn"):
            Device(table=stub.table())

    @pytest.mark.parametrize("index", [-1, True, "0", None, 0.0])
    def test_index_is_an_integer(self, stub: StubDriver, index: Any) -> None:
        with pytest.raises(LayoutError, match="index of a GPU"):
            Device(index, table=stub.table())

    def test_the_threads_own_context_comes_back(self, device: Device, stub: StubDriver) -> None:
        with device.activated():
            assert stub.current == 0xA000
            with device.activated():
                pass
            assert stub.current == 0xA000
        assert stub.current == 0x99
        stub.current = 0  # a thread without any context
        with device.activated():
            pass
        assert stub.current == 0
        device.make_current()
        assert stub.current == 0xA000

    def test_close_gives_the_context_back_once(self, stub: StubDriver) -> None:
        device = Device(table=stub.table())
        Stream(5, device).record().release()
        device.close()
        device.close()
        assert stub.count("cuDevicePrimaryCtxRelease") == 1
        assert stub.count("cuEventDestroy") == stub.count("cuEventCreate") == 1
        for use in (device.make_current, lambda: Stream(0, device), lambda: DeviceBuffer(1, device)):
            with pytest.raises(ClosedError, match="device 0 is closed"):
                use()

    def test_a_sticky_fault_is_remembered_and_nothing_is_freed(self, stub: StubDriver) -> None:
        device = Device(table=stub.table())
        memory = mmap.mmap(-1, 8192)
        buffer, pinned = DeviceBuffer(64, device), PinnedBuffer(memoryview(memory), device)
        event = Stream(5, device).record()
        stub.codes["cuEventQuery"] = 700
        with pytest.raises(DeviceError, match="ILLEGAL_ADDRESS"):
            _ = event.is_done
        stub.codes.clear()
        for use in (device.check_usable, lambda: DeviceBuffer(1, device), lambda: DevicePath(device)):
            with pytest.raises(
                DeviceError, match="GPU 0 was lost to an earlier error: cuEventQuery"
            ) as caught:
                use()
            assert caught.value.code == 700
        leaked = len(memory_module._leaked)
        buffer.close()
        pinned.close()
        device.close()
        for name in ("cuMemFree", "cuMemHostUnregister", "cuDevicePrimaryCtxRelease", "cuEventDestroy"):
            assert stub.count(name) == 0, name
        assert len(memory_module._leaked) == leaked + 1

    def test_other_errors_are_not_remembered(self, device: Device, stub: StubDriver) -> None:
        stub.codes["cuMemAlloc"] = 2
        with pytest.raises(DeviceError, match="OUT_OF_MEMORY"):
            DeviceBuffer(64, device)
        device.check_usable()


class TestStream:
    @pytest.mark.parametrize(
        "obj",
        [
            77,
            types.SimpleNamespace(__cuda_stream__=lambda: (0, 77)),
            types.SimpleNamespace(__cuda_stream__=(0, 77)),
            types.SimpleNamespace(cuda_stream=77),
            types.SimpleNamespace(ptr=77),
            types.SimpleNamespace(handle=77),
            types.SimpleNamespace(handle=np.uint64(77)),
        ],
    )
    def test_every_kind_of_stream(self, device: Device, obj: Any) -> None:
        stream = as_stream(obj, device)
        assert (stream.handle, stream.owner) == (77, obj)
        assert as_stream(stream, device) is stream
        assert stream.__cuda_stream__() == (0, 77)

    @pytest.mark.parametrize(
        "obj",
        [
            *(None, True, False, -1, 1 << 64, 1.5, "77", b"7", object()),
            types.SimpleNamespace(__cuda_stream__=lambda: (1, 77)),
            types.SimpleNamespace(__cuda_stream__=lambda: 77),
            types.SimpleNamespace(cuda_stream="77"),
        ],
    )
    def test_what_is_no_stream(self, device: Device, obj: Any) -> None:
        with pytest.raises(LayoutError, match="stream"):
            as_stream(obj, device)

    @pytest.mark.parametrize("handle", [0, 1, 2])
    def test_default_streams_are_streams(self, device: Device, stub: StubDriver, handle: int) -> None:
        stream = Stream(handle, device)
        assert stream.handle == handle
        assert stub.count("cuStreamGetCtx") == 0  # they mean the stream of whatever context is current
        stream.record()
        assert stub.current == 0x99

    def test_stream_of_another_device_names_both(self, device: Device, stub: StubDriver) -> None:
        stub.stream_contexts[77] = CONTEXTS[1]
        with pytest.raises(
            DeviceError,
            match=r"0x4d belongs to device 1 \(context 0xb000\), not to device 0 \(context 0xa000",
        ):
            Stream(77, device)
        assert stub.current == 0x99

    def test_a_capturing_stream_is_refused(self, device: Device, stub: StubDriver) -> None:
        stream, event = Stream(77, device), Stream(78, device).record()
        stub.capturing.add(77)
        assert stream.is_capturing
        before = stub.count("cuEventRecord"), stub.count("cuStreamWaitEvent")
        for use in (stream.record, lambda: stream.wait(event)):
            with pytest.raises(DeviceError, match="0x4d is being captured into a graph"):
                use()
        assert (stub.count("cuEventRecord"), stub.count("cuStreamWaitEvent")) == before
        stub.codes["cuStreamIsCapturing"] = (
            906  # what the legacy stream answers while a blocking one captures
        )
        with pytest.raises(DeviceError, match="being captured"):
            Stream(0, device).record()

    def test_wait_and_synchronize(self, device: Device, stub: StubDriver) -> None:
        stream = Stream(77, device)
        stream.wait(Stream(78, device).record())
        stream.synchronize()
        assert stub.calls.index("cuStreamWaitEvent") < stub.calls.index("cuStreamSynchronize")


class TestEvent:
    @pytest.mark.parametrize("kind", [Event, AwaitableEvent])
    def test_an_event_is_not_made_by_hand(self, kind: Any) -> None:
        with pytest.raises(LayoutError, match=r"Stream\.record\(\)"):
            kind()

    def test_done_is_asked_once(self, device: Device, stub: StubDriver) -> None:
        event = Stream(77, device).record()
        stub.pending.add(event.handle)
        assert not event.is_done
        stub.pending.clear()
        assert event.is_done
        asked = stub.count("cuEventQuery")
        assert event.is_done
        assert stub.count("cuEventQuery") == asked
        assert stub.mode == 0  # the query ran in the relaxed mode, or the stub would have refused it

    def test_handles_are_reused(self, device: Device, stub: StubDriver) -> None:
        stream = Stream(77, device)
        first = stream.record()
        handle = first.handle
        first.release()
        first.release()
        with pytest.raises(ClosedError, match="record a new one"):
            _ = first.handle
        second = stream.record()
        assert second.handle == handle
        assert device.events.lent == 1
        del second
        gc.collect()
        assert device.events.lent == 0
        assert stub.count("cuEventDestroy") == 0

    def test_the_pool_has_a_bound(self, device: Device, stub: StubDriver) -> None:
        pool = EventPool(device, capacity=2)
        with device.activated():
            held = [pool.record(5), pool.record(5)]
            with pytest.raises(BusyError, match="2 events of the device are in use"):
                pool.record(5)
            held.pop().release()
            held.append(pool.record(5))
        stub.codes["cuEventCreate"] = 2
        broken = EventPool(device, capacity=1)
        for _ in range(2):  # a failure does not use up the bound
            with pytest.raises(DeviceError), device.activated():
                broken.record(5)

    def test_a_failed_record_gives_its_handle_back(self, device: Device, stub: StubDriver) -> None:
        stub.codes["cuEventRecord"] = 400
        with pytest.raises(DeviceError) as caught:
            Stream(77, device).record()
        del caught
        gc.collect()
        assert device.events.lent == 0

    def test_awaiting_goes_through_the_backend(self, device: Device) -> None:
        waited: list[int] = []

        async def wait(event: AwaitableEvent) -> None:
            await asyncio.sleep(0)
            waited.append(event.handle)

        async def run(event: AwaitableEvent) -> None:
            await event
            await event

        event = DevicePath(device).record_event(77, wait)
        assert isinstance(event, AwaitableEvent)
        assert event.is_done
        asyncio.run(run(event))
        assert waited == [event.handle] * 2


class TestPath:
    def test_fields_are_those_of_the_engine(self, device: Device, stub: StubDriver) -> None:
        header = (Path(__file__).parent.parent / "native" / "akv.cdef.h").read_text()
        body = re.search(r"typedef struct \{\n    void \*context;(.*?)\} akv_device;", header, re.DOTALL)
        assert body is not None
        text = re.sub(r"/\*.*?\*/", "", "void *context;" + body[1], flags=re.DOTALL)
        names = re.findall(r"\(\*(\w+)\)\(|\b(\w+);", re.sub(r"(\(\*\w+\)\()[^;]*;", r"\1", text))
        fields = DevicePath(device).fields()
        assert set(fields) == {a or b for a, b in names} - {"reserved"}
        assert all(value.__class__ is int and value != 0 for value in fields.values())
        assert fields["context"] == device.context
        assert fields["event_query"] == device.table.address("cuEventQuery")
        assert (fields["kernel_blocks"], fields["kernel_threads"], fields["copy_streams"]) == (32, 256, 4)

    def test_what_the_driver_lacks_is_null(self, stub: StubDriver) -> None:
        stub.hidden = {"cuMemcpyBatchAsync"}
        with Device(table=stub.table()) as device, DevicePath(device) as path:
            assert not path.has_batch_copies
            assert path.fields()["memcpy_batch_async"] == 0

    def test_kernels_are_launched_once_and_unloaded(
        self, stub: StubDriver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(kernels_module, "compile_kernels", lambda device: b"cubin")
        device = Device(table=DriverTable(stub.lookup))
        path = DevicePath(device)
        assert path.kernels is not None
        assert path.kernels_refusal == ""
        assert stub.count("cuLaunchKernel") == 2
        path.close()
        path.close()
        assert stub.count("cuModuleUnload") == 1
        off = DevicePath(device, CopyOptions(kernel_nbytes_max=0))
        assert (off.kernels, off.kernels_refusal) == (None, "kernel_nbytes_max is 0")

    def test_fences(self, device: Device, stub: StubDriver) -> None:
        path = DevicePath(device)
        fence = path.record_fence(77)
        path.order_after(78, fence.handle)
        assert stub.calls.index("cuEventRecord") < stub.calls.index("cuStreamWaitEvent")
        stub.capturing.add(77)
        for use in (lambda: path.record_fence(77), lambda: path.order_after(77, fence.handle)):
            with pytest.raises(DeviceError, match="being captured"):
                use()

    def test_the_copy_of_the_oracle(self, device: Device, stub: StubDriver) -> None:
        DevicePath(device).copy_and_wait(DeviceMemory(0x7000_0000, 4, None), memoryview(bytearray(4)), 77)
        assert stub.calls[-3:] == ["cuMemcpyHtoDAsync", "cuStreamSynchronize", "cuCtxSetCurrent"]

    @pytest.mark.parametrize(
        "wrong",
        [
            *({"kernel_threads": 33}, {"kernel_threads": 1024}, {"kernel_blocks": 0}, {"copy_streams": 65}),
            *({"kernel_nbytes_max": -1}, {"batch_nbytes_max": 1 << 32}, {"copy_streams": True}),
        ],
    )
    def test_options_have_bounds(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(LayoutError, match=next(iter(wrong))):
            CopyOptions(**wrong)
        with pytest.raises(FrozenInstanceError):
            CopyOptions().copy_streams = 2  # type: ignore[misc]
        assert replace(CopyOptions(), copy_streams=2).copy_streams == 2
