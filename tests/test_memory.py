"""From objects to addresses: what is accepted, what keeps it alive, and what is refused; and aligned positional I/O."""

import ctypes
import errno
import gc
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aio_kv import LayoutError, ShortReadError, StorageError, positional
from aio_kv.memory import DeviceMemory, device_memory, host_address, host_view, is_device_memory
from aio_kv.positional import aligned_buffer, read_exactly, write_all


class Pointer:
    """A pointer holder like a torch tensor, over a NumPy array."""

    def __init__(self, array: np.ndarray, *, contiguous: bool = True, is_cuda: bool = False) -> None:
        self.array = array
        self.nbytes = array.nbytes
        self.is_cuda = is_cuda
        self._contiguous = contiguous

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def is_contiguous(self) -> bool:
        return self._contiguous


class CudaArray:
    """A stand-in for device memory that announces itself by the array interface."""

    def __init__(self, **changes: Any) -> None:
        interface = {"shape": (4, 8), "typestr": "<f4", "data": (4096, False), "strides": None, "version": 3}
        self.__cuda_array_interface__ = interface | changes


RECORDS = np.zeros(3, dtype=[("a", "<i4"), ("b", "<f8")])
BUFFERS = [
    bytearray(range(24)),
    memoryview(bytearray(24))[4:20],
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.arange(6, dtype=">i2"),
    np.arange(6, dtype=np.complex64),
    np.arange(6).astype("M8[s]"),
    np.array(7.5),
    RECORDS,
    (ctypes.c_int * 5)(1, 2, 3, 4, 5),
    Pointer(np.arange(10, dtype=np.int16)),
]


@pytest.mark.parametrize("buffer", BUFFERS, ids=lambda b: type(b).__name__)
def test_view_and_address_show_the_same_bytes(buffer: Any) -> None:
    view = host_view(buffer, writable=True, what="into")
    memory = host_address(buffer, writable=True, what="into")
    assert (view.format, view.ndim, view.nbytes) == ("B", 1, memory.nbytes)
    assert ctypes.string_at(memory.address, memory.nbytes) == bytes(view)
    view[:2] = b"\xab\xcd"
    assert ctypes.string_at(memory.address, 2) == b"\xab\xcd"


@pytest.mark.parametrize("source", [b"abc", memoryview(b"abc"), np.frombuffer(b"abc", dtype=np.uint8)])
def test_read_only_memory_serves_as_source_only(source: Any) -> None:
    assert bytes(host_view(source, writable=False, what="source")) == b"abc"
    assert host_address(source, writable=False, what="source").nbytes == 3
    for function in (host_view, host_address):
        with pytest.raises(LayoutError, match="into is read-only"):
            function(source, writable=True, what="into")


@pytest.mark.parametrize("empty", [b"", bytearray(), np.zeros((0, 3)), memoryview(b""), Pointer(np.zeros(0))])
def test_nothing_has_no_length(empty: Any) -> None:
    assert host_view(empty, writable=False, what="x").nbytes == 0
    assert host_address(empty, writable=False, what="x").nbytes == 0


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        (np.zeros((4, 4))[:, 1], "not C-contiguous"),
        (np.zeros((4, 4), order="F"), "not C-contiguous"),
        (memoryview(bytearray(8))[::2], "not C-contiguous"),
        (np.array([object()]), "of type ndarray"),
        ("text", "of type str"),
        (None, "of type NoneType"),
        ([1, 2], "of type list"),
        (7, "of type int"),
        (Pointer(np.zeros(4), contiguous=False), "contiguous"),
        (Pointer(np.zeros(4), is_cuda=True), "device memory"),
        (CudaArray(), "device memory"),
    ],
)
def test_unfit_memory_is_refused(memory: Any, message: str) -> None:
    for function in (host_view, host_address):
        with pytest.raises(LayoutError, match=f"into.*{message}"):
            function(memory, writable=True, what="into")


def test_pointer_holders_must_be_whole() -> None:
    freed, vague = Pointer(np.zeros(4)), Pointer(np.zeros(4))
    freed.data_ptr = lambda: 0  # type: ignore[method-assign]
    vague.nbytes = "32"  # type: ignore[assignment]
    with pytest.raises(LayoutError, match="null data_ptr"):
        host_address(freed, writable=True, what="into")
    with pytest.raises(LayoutError, match="integer data_ptr"):
        host_view(vague, writable=True, what="into")


def test_a_buffer_in_use_cannot_be_resized() -> None:
    buffer = bytearray(16)
    memory = host_address(buffer, writable=True, what="into")
    with pytest.raises(BufferError):
        buffer.extend(b"more")
    del memory
    buffer.extend(b"more")


@pytest.mark.parametrize("function", [host_view, host_address])
def test_results_keep_the_owner_alive(function: Callable[..., Any]) -> None:
    holder = Pointer(np.zeros(4))
    alive = weakref.ref(holder)
    result = function(holder, writable=True, what="into")
    del holder
    gc.collect()
    assert alive() is not None
    del result
    gc.collect()
    assert alive() is None


def test_device_memory_is_recognised() -> None:
    assert is_device_memory(CudaArray())
    assert is_device_memory(Pointer(np.zeros(4), is_cuda=True))
    assert is_device_memory(DeviceMemory(4096, 8, None))
    assert not any(map(is_device_memory, BUFFERS))


def test_device_memory_has_address_and_length() -> None:
    array = CudaArray()
    memory = device_memory(array, what="into")
    assert (memory.data_ptr(), memory.nbytes, memory.owner) == (4096, 128, array)
    assert memory.part(32, 64) == DeviceMemory(4128, 64, array)
    assert device_memory(CudaArray(strides=(32, 4)), what="into").nbytes == 128
    assert device_memory(CudaArray(shape=(1, 8), strides=(999, 4)), what="into").nbytes == 32


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (CudaArray(data=(4096, True)), "read-only"),
        (CudaArray(strides=(64, 4)), "not C-contiguous"),
        (bytearray(4), "not device memory"),
    ],
)
def test_unfit_device_memory_is_refused(array: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        device_memory(array, what="into")


@pytest.mark.parametrize(("nbytes", "alignment"), [(1, 4096), (10_000, 512), (4096, 1 << 21)])
def test_aligned_buffers(nbytes: int, alignment: int) -> None:
    buffer = aligned_buffer(nbytes, alignment)
    assert len(buffer) == nbytes
    assert host_address(buffer, writable=True, what="buffer").address % alignment == 0
    assert not any(buffer[:64])


@pytest.mark.parametrize(("nbytes", "alignment"), [(0, 4096), (-1, 4096), (8, 3000), (8, 0)])
def test_impossible_buffers_are_refused(nbytes: int, alignment: int) -> None:
    with pytest.raises(LayoutError, match="cannot make a buffer"):
        aligned_buffer(nbytes, alignment)


class ShortCalls:
    """Positional calls that move a few bytes at a time and record where each began."""

    def __init__(self, data: bytearray, steps: list[int]) -> None:
        self.data, self.steps, self.starts = data, steps, []  # type: ignore[var-annotated]

    def read(self, fd: int, view: memoryview, file_offset: int) -> int:
        piece = self.data[file_offset : file_offset + min(view.nbytes, self.steps.pop(0))]
        self.starts.append(file_offset)
        view[: len(piece)] = piece
        return len(piece)

    def write(self, fd: int, view: memoryview, file_offset: int) -> int:
        count = min(view.nbytes, self.steps.pop(0))
        self.starts.append(file_offset)
        self.data[file_offset : file_offset + count] = view[:count]
        return count


@pytest.mark.parametrize(
    ("alignment", "steps", "starts"),
    [(1, [700, 700, 700], [0, 700, 1400]), (512, [700, 700, 9999], [0, 512, 1024])],
)
def test_short_calls_are_resumed(
    monkeypatch: pytest.MonkeyPatch, alignment: int, steps: list[int], starts: list[int]
) -> None:
    source = bytearray(i % 251 for i in range(2048))
    reads, writes = ShortCalls(source, steps[:]), ShortCalls(bytearray(2048), steps[:])
    monkeypatch.setattr(positional, "_read_once", reads.read)
    monkeypatch.setattr(positional, "_write_once", writes.write)
    target = bytearray(2048)
    read_exactly(0, memoryview(target)[:2048], 0, file="f", alignment=alignment)
    write_all(0, memoryview(source), 0, file="f", alignment=alignment)
    assert target == source == writes.data
    assert reads.starts == writes.starts == starts


@pytest.mark.parametrize("alignment", [1, 512])
def test_the_end_of_a_file_is_an_error(tmp_path: Path, alignment: int) -> None:
    path = tmp_path / "short"
    path.write_bytes(bytes(1000))
    fd = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(ShortReadError) as caught:
            read_exactly(fd, memoryview(bytearray(4096)), 0, file="short", alignment=alignment)
    finally:
        os.close(fd)
    assert caught.value.arrived == 1000
    assert (caught.value.file, caught.value.file_offset, caught.value.nbytes) == ("short", 0, 4096)


def test_a_write_without_progress_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(positional, "_write_once", lambda *_: 0)
    with pytest.raises(StorageError, match="write failed"):
        write_all(0, memoryview(b"abc"), 0, file="f")


def test_again_is_retried_with_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def stubborn(fd: int, view: memoryview, file_offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls < patience:
            raise BlockingIOError(errno.EAGAIN, "again")
        return view.nbytes

    monkeypatch.setattr(positional, "_read_once", stubborn)
    monkeypatch.setattr(positional, "_AGAIN_PAUSE_SECONDS", 0)
    patience = 3
    read_exactly(0, memoryview(bytearray(8)), 0, file="f")
    calls, patience = 0, 10**9
    with pytest.raises(StorageError, match="EAGAIN"):
        read_exactly(0, memoryview(bytearray(8)), 0, file="f")
    assert calls < 20


def test_system_errors_name_the_place() -> None:
    with pytest.raises(StorageError, match=r"read failed \(gone, offset 512, 8 bytes\).*EBADF"):
        read_exactly(-1, memoryview(bytearray(8)), 512, file="gone")
