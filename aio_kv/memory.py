"""From whatever a caller hands over to an address and a length that I/O can use.

Accepted for host memory: anything with the buffer protocol (bytes, bytearray, memoryview, NumPy arrays,
mmap), and *pointer holders*, objects with `data_ptr()` and `nbytes` such as torch tensors. Everything must be
C-contiguous. An address is only as good as the object behind it, so each result keeps its owner: for a buffer
that is a memoryview, which also makes Python refuse to resize the buffer meanwhile.
"""

from __future__ import annotations

import ctypes
import math
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aio_kv.errors import LayoutError

__all__ = [
    "DeviceMemory",
    "HostMemory",
    "device_memory",
    "host_address",
    "host_view",
    "is_device_memory",
    "raw_view",
]


_DLPACK_GPU_KINDS = (2, 13)  # kDLCUDA, kDLCUDAManaged


class HostMemory(NamedTuple):
    """`nbytes` bytes of host memory at `address`, valid for as long as `owner` is kept."""

    address: int
    nbytes: int
    owner: object


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """`nbytes` bytes of device memory at `address`, valid for as long as `owner` is kept. A pointer holder itself."""

    address: int
    nbytes: int
    owner: object

    def data_ptr(self) -> int:
        """Return the device address."""
        return self.address

    def part(self, start: int, nbytes: int) -> DeviceMemory:
        """Return the `nbytes` bytes from `start`; both must lie inside."""
        assert 0 <= start <= start + nbytes <= self.nbytes
        return DeviceMemory(self.address + start, nbytes, self.owner)


class _Raw:
    """Lends a raw address to NumPy, which keeps this object, and so the owner, as the base of its array."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def raw_view(address: int, nbytes: int) -> memoryview:
    """Return `nbytes` bytes at `address` as a writable memoryview. Nothing is checked and nothing kept alive."""
    return _bytes_of(np.asarray(_Raw(address, nbytes, None)))


def is_device_memory(obj: object) -> bool:
    """Whether `obj` lies in GPU memory: a CUDA tensor, anything with `__cuda_array_interface__`, or DLPack says so."""
    # torch is asked by `is_cuda` first: its array interface raises RuntimeError for tensors that need
    # gradients.
    is_cuda = getattr(obj, "is_cuda", None)
    if isinstance(is_cuda, bool):
        return is_cuda
    if isinstance(obj, DeviceMemory) or hasattr(obj, "__cuda_array_interface__"):
        return True
    dlpack_device = getattr(obj, "__dlpack_device__", None)
    return callable(dlpack_device) and dlpack_device()[0] in _DLPACK_GPU_KINDS


_addressof, _from_buffer = ctypes.addressof, ctypes.c_char.from_buffer


def host_address(obj: object, *, writable: bool, what: str) -> HostMemory:
    """Return address and length of host memory, in one or two microseconds.

    The result borrows `obj` and keeps it alive through `owner`. Raises `LayoutError`, naming `what`, for
    device memory, memory that is not C-contiguous, read-only memory where `writable` is asked, and anything
    else.
    """
    if (
        obj.__class__ is memoryview
        and obj.format == "B"
        and obj.c_contiguous
        and not obj.readonly
        and obj.nbytes
    ):
        # The usual case without the questions that this already answers.
        return HostMemory._make((_addressof(_from_buffer(obj)), obj.nbytes, obj))
    if hasattr(obj, "data_ptr"):
        return _pointer(obj, what)
    view = _checked_view(obj, writable, what)
    if view.nbytes == 0:
        return HostMemory(0, 0, view)
    return HostMemory(_address_of(view), view.nbytes, view)


def host_view(obj: object, *, writable: bool, what: str) -> memoryview:
    """Return the bytes of host memory as a one-dimensional memoryview of format "B".

    The view borrows `obj` and keeps it alive. Raises `LayoutError` as `host_address` does.
    """
    if hasattr(obj, "data_ptr"):
        memory = _pointer(obj, what)
        if memory.nbytes == 0:
            return memoryview(bytearray())
        return _bytes_of(np.asarray(_Raw(memory.address, memory.nbytes, memory.owner)))
    view = _checked_view(obj, writable, what)
    if view.nbytes == 0:
        return memoryview(bytearray())  # A view with a zero in its shape cannot be cast.
    try:
        return view.cast("B")
    except TypeError:
        # Records, complex numbers and foreign byte orders cannot be cast; NumPy sees their bytes.
        return _bytes_of(np.frombuffer(view, dtype=np.uint8))


def device_memory(obj: object, *, what: str) -> DeviceMemory:
    """Return address and length of writable, C-contiguous GPU memory.

    The result borrows `obj` and keeps it alive through `owner`. Raises `LayoutError` naming `what`.
    """
    if isinstance(obj, DeviceMemory):
        return obj
    if hasattr(obj, "data_ptr"):
        address, nbytes = _pointer_and_nbytes(obj, what)
        return DeviceMemory(address, nbytes, obj)
    interface: dict[str, Any] | None = getattr(obj, "__cuda_array_interface__", None)
    if interface is None:
        raise LayoutError(f"{what} is not device memory ({type(obj).__name__})")
    itemsize = np.dtype(interface["typestr"]).itemsize
    address, read_only = interface["data"]
    if read_only:
        raise LayoutError(f"{what} is read-only: give a writable array")
    if not _is_c_contiguous(interface["shape"], interface.get("strides"), itemsize):
        raise LayoutError(f"{what} is not C-contiguous: make it contiguous first")
    return DeviceMemory(address, math.prod(interface["shape"]) * itemsize, obj)


def _bytes_of(array: NDArray[np.uint8]) -> memoryview:
    # NumPy's stubs declare the buffer protocol only from Python 3.12 on.
    return memoryview(array)  # type: ignore[arg-type, unused-ignore]


def _address_of(view: memoryview) -> int:
    if not view.readonly:
        return ctypes.addressof(
            ctypes.c_char.from_buffer(view)
        )  # Six times faster, but for writable memory only.
    address: int = np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0]
    return address


def _checked_view(obj: object, writable: bool, what: str) -> memoryview:
    try:
        view = memoryview(obj)  # type: ignore[arg-type]
    except (TypeError, ValueError, BufferError) as error:
        view = _view_of_strange_array(obj, what, error)
    # Between colons stand the names of a record's fields; an O elsewhere is a Python object, whose bytes are a pointer.
    if "O" in view.format and "O" in re.sub(":[^:]*:", "", view.format):
        raise LayoutError(
            f"{what} is of type {type(obj).__name__} holding Python objects: give plain numbers"
        )
    if not view.c_contiguous:
        raise LayoutError(f"{what} is not C-contiguous: copy it first (numpy.ascontiguousarray)")
    if writable and view.readonly:
        raise LayoutError(f"{what} is read-only: give writable memory (bytearray, a writable array)")
    return view


def _view_of_strange_array(obj: object, what: str, error: Exception) -> memoryview:
    # Some dtypes (bfloat16, datetime64) have no name in the buffer protocol; their bytes are still bytes.
    if isinstance(obj, np.ndarray) and obj.flags.c_contiguous and not obj.dtype.hasobject:
        return _bytes_of(obj.reshape(-1).view(np.uint8))
    if is_device_memory(obj):
        raise LayoutError(f"{what} is device memory: give host memory") from None
    named = f"{what} is of type {type(obj).__name__}"
    raise LayoutError(f"{named}: must be a C-contiguous buffer or have data_ptr() and nbytes") from error


def _pointer(obj: object, what: str) -> HostMemory:
    if is_device_memory(obj):
        raise LayoutError(f"{what} is device memory: give host memory")
    address, nbytes = _pointer_and_nbytes(obj, what)
    return HostMemory(address, nbytes, obj)


def _pointer_and_nbytes(obj: Any, what: str) -> tuple[int, int]:
    is_contiguous = getattr(obj, "is_contiguous", None)
    if is_contiguous is not None and not is_contiguous():
        raise LayoutError(f"{what} is not contiguous: call .contiguous() first")
    nbytes = getattr(obj, "nbytes", None)
    address = obj.data_ptr()
    if not isinstance(nbytes, int) or not isinstance(address, int) or nbytes < 0 or address < 0:
        raise LayoutError(f"{what} ({type(obj).__name__}) must have integer data_ptr() and nbytes")
    if address == 0 and nbytes:
        raise LayoutError(f"{what} has a null data_ptr() for {nbytes} bytes: its memory was freed")
    return address, nbytes


def _is_c_contiguous(shape: tuple[int, ...], strides: tuple[int, ...] | None, itemsize: int) -> bool:
    if strides is None or 0 in shape:
        return True
    step = itemsize
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and stride != step:
            return False
        step *= length
    return True
