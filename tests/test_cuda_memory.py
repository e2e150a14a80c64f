"""GPU memory and pinned memory without a GPU: who owns what, and which destinations are refused."""

import ctypes
import ctypes.util
import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cuda_stub import StubDriver

from aio_kv.cuda import (
    Device,
    DeviceBuffer,
    DevicePointer,
    PinnedBuffer,
)
from aio_kv.cuda import memory as memory_module
from aio_kv.cuda.destination import device_destination
from aio_kv.errors import ClosedError, DeviceError, LayoutError
from aio_kv.memory import DeviceMemory


@pytest.fixture
def stub() -> StubDriver:
    return StubDriver()


@pytest.fixture
def device(stub: StubDriver) -> Iterator[Device]:
    with Device(0, table=stub.table()) as opened:
        yield opened


class TestMemory:
    def test_device_buffer(self, device: Device, stub: StubDriver) -> None:
        with DeviceBuffer(4096, device) as buffer:
            assert (buffer.data_ptr(), buffer.nbytes) == (0x7000_0000, 4096)
            assert buffer.__cuda_array_interface__["data"] == (0x7000_0000, False)
            assert device_destination(buffer, device, what="into").owner is buffer
        buffer.close()
        assert stub.count("cuMemFree") == 1
        with pytest.raises(ClosedError):
            buffer.data_ptr()
        with pytest.raises(LayoutError):
            DeviceBuffer(0, device)

    def test_pinned_buffer_registers_in_pieces(
        self, device: Device, stub: StubDriver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(memory_module, "_PIECE_NBYTES_MAX", 8192)
        memory = mmap.mmap(-1, 20480)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        stub.foreign.add(start + 8192)
        with PinnedBuffer(memoryview(memory), device) as pinned:
            assert [(p.address - start, p.nbytes, p.is_ours) for p in pinned.pieces] == [
                (0, 8192, True),
                (8192, 8192, False),
                (16384, 4096, True),
            ]
            assert pinned.device_address(16385) == start + 16385 + 0x1_0000_0000
            assert pinned.view.nbytes == pinned.nbytes == 20480
            with pytest.raises(LayoutError):
                pinned.device_address(20480)
        assert not stub.registered
        assert stub.count("cuMemHostUnregister") == 2  # never what someone else registered
        with pytest.raises(ClosedError):
            pinned.device_address()

    def test_pinned_buffer_undoes_what_it_began(
        self, device: Device, stub: StubDriver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(memory_module, "_PIECE_NBYTES_MAX", 4096)
        stub.codes["cuMemHostGetDevicePointer"] = 1
        with pytest.raises(DeviceError, match="cuMemHostGetDevicePointer"):
            PinnedBuffer(memoryview(mmap.mmap(-1, 8192)), device)
        assert not stub.registered
        stub.codes.clear()
        register, pages = stub.cuMemHostRegister, iter([0, 2])
        monkeypatch.setattr(stub, "cuMemHostRegister", lambda *a: next(pages) or register(*a))
        with pytest.raises(DeviceError, match=r"cuMemHostRegister failed.*out of memory"):
            PinnedBuffer(memoryview(mmap.mmap(-1, 8192)), device)
        assert not stub.registered
        stub.codes = {"cuMemHostRegister": 2}
        with pytest.raises(DeviceError, match=r"cuMemHostRegister.*pinned memory is used up"):
            PinnedBuffer(memoryview(mmap.mmap(-1, 8192)), device)

    def test_pinned_memory_is_aligned_and_writable(self, device: Device) -> None:
        memory = memoryview(mmap.mmap(-1, 8192))
        for wrong in (memory[1:], memory[:0], memoryview(bytes(8192)), memory.toreadonly()):
            with pytest.raises(LayoutError):
                PinnedBuffer(wrong, device)

    def test_destination_is_checked_with_the_driver(self, device: Device, stub: StubDriver) -> None:
        stub.memory |= {0x8000: (64, 1, 0), 0x9000: (64, 2, 1)}
        inside = DevicePointer(0x7000_0F00, 0x100)
        found = device_destination(inside, device, what="into")
        assert (found.address, found.nbytes, found.owner) == (0x7000_0F00, 0x100, inside)
        plain = DeviceMemory(0x7000_0000, 16, None)
        assert device_destination(plain, device, what="into") is plain
        assert device_destination(DevicePointer(0, 0), device, what="into").nbytes == 0
        for pointer, kind, text in (
            (DevicePointer(0x7000_0F00, 0x101), LayoutError, "into is 257 .* passes the end by 1 bytes"),
            (DevicePointer(0x8000, 64), LayoutError, "into at 0x8000 is host memory: give memory of GPU 0"),
            (DevicePointer(0x9000, 64), LayoutError, "into at 0x9000 is on GPU 1: give memory of GPU 0"),
            (DevicePointer(0x6000, 64), DeviceError, "into: CUDA knows no memory at 0x6000: it was freed"),
        ):
            with pytest.raises(kind, match=text):
                device_destination(pointer, device, what="into")
        stub.codes["cuPointerGetAttributes"] = 700
        with pytest.raises(DeviceError, match="ILLEGAL_ADDRESS"):
            device_destination(inside, device, what="into")

    @pytest.mark.parametrize("obj", [bytearray(8), np.zeros(4), b"x", None, 7, "text"])
    def test_host_memory_is_no_destination(self, device: Device, obj: Any) -> None:
        with pytest.raises(LayoutError, match="into is host memory"):
            device_destination(obj, device, what="into")

    @pytest.mark.parametrize(("address", "nbytes"), [(-1, 4), (True, 4), (1 << 64, 4), (4, 1.0)])
    def test_pointers_are_integers(self, address: Any, nbytes: Any) -> None:
        with pytest.raises(LayoutError, match="DevicePointer"):
            DevicePointer(address, nbytes)


class Producer:
    """Something with DLPack. The capsule's memory is a ctypes structure that lives as long as this object."""

    def __init__(self, *, version: int | None = 1, flags: int = 0, data: int = 0x7000_0000) -> None:
        from aio_kv.cuda import dlpack

        self.shape = (ctypes.c_int64 * 2)(4, 8)
        self.strides = (ctypes.c_int64 * 2)(8, 1)
        pointers = [ctypes.cast(a, ctypes.POINTER(ctypes.c_int64)) for a in (self.shape, self.strides)]
        self.version, self.place = version, (2, 0)
        self.managed = dlpack._Versioned(
            version or 0, 0, None, None, flags, dlpack._Tensor(data, 2, 0, 2, 2, 16, 1, *pointers, 64)
        )
        self.tensor = self.managed.tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.place

    def __dlpack__(self, *, stream: int | None = None, **newer: Any) -> Any:
        assert stream == -1  # order comes from the stream that the caller names
        if self.version is None and newer:
            raise TypeError("unexpected keyword")
        self.name = b"dltensor" if self.version is None else b"dltensor_versioned"
        address = ctypes.addressof(self.managed) + (type(self.managed).tensor.offset if newer == {} else 0)
        new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(("PyCapsule_New", ctypes.pythonapi))(address, self.name, None)


class TestDlpack:
    @pytest.mark.parametrize("version", [None, 1])
    def test_a_gpu_array(self, device: Device, version: int | None) -> None:
        found = device_destination(Producer(version=version), device, what="into")
        assert (found.address, found.nbytes) == (0x7000_0040, 64)
        assert type(found.owner).__name__ == "PyCapsule"
        assert "used_" not in repr(found.owner)  # so its destructor gives the memory back

    def test_numpy_is_host_memory(self, device: Device) -> None:
        with pytest.raises(LayoutError, match="into is host memory: give memory of GPU 0"):
            device_destination(np.zeros(4), device, what="into")

    @pytest.mark.parametrize(
        ("change", "text"),
        [
            (lambda p: setattr(p, "place", (3, 0)), "pinned host memory"),
            (lambda p: setattr(p, "place", (2, 1)), "is on GPU 1"),
            (lambda p: setattr(p.tensor, "device_type", 1), "is host memory"),
            (lambda p: setattr(p.tensor, "device_id", 3), "is on GPU 3"),
            (lambda p: setattr(p.managed, "flags", 1), "read-only"),
            (lambda p: setattr(p.managed, "major", 2), "version 2"),
            (lambda p: setattr(p.tensor, "ndim", -1), "-1 dimensions"),
            (lambda p: setattr(p.tensor, "ndim", 65), "65 dimensions"),
            (lambda p: setattr(p.tensor, "shape", None), "no usable shape"),
            (lambda p: setattr(p.tensor, "bits", 4), "4 bits"),
            (lambda p: p.shape.__setitem__(0, -4), "shape"),
            (lambda p: p.strides.__setitem__(0, 9), "not C-contiguous"),
            (lambda p: setattr(p.tensor, "data", None), "places 64 bytes at"),
            (lambda p: setattr(p.tensor, "byte_offset", (1 << 64) - 1), "places 64 bytes at"),
            (lambda p: p.shape.__setitem__(0, 1 << 40), "passes the end|places"),
        ],
    )
    def test_what_a_capsule_may_not_say(self, device: Device, change: Any, text: str) -> None:
        producer = Producer()
        change(producer)
        with pytest.raises(LayoutError, match=text):
            device_destination(producer, device, what="into")

    def test_something_that_is_no_capsule(self, device: Device) -> None:
        producer = Producer()
        producer.__class__ = type("Strange", (Producer,), {"__dlpack__": lambda self, **_: object()})
        with pytest.raises(LayoutError, match="fresh DLPack capsule"):
            device_destination(producer, device, what="into")
