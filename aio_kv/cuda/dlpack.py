"""A consumer of DLPack that takes address, length and device from a capsule, and nothing else.

The capsule is never marked as consumed: kept as the owner, it keeps the producer's memory, and gives it back through
its own destructor when the last reference to it goes.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

from aio_kv.errors import LayoutError
from aio_kv.memory import DeviceMemory

__all__ = ["dlpack_memory", "is_dlpack"]

# DLDeviceType (dlpack.h). Pinned host memory and managed memory are types of their own.
_CUDA = 2
_TYPE_NAMES = {
    1: "host memory",
    2: "GPU memory",
    3: "pinned host memory",
    10: "ROCm memory",
    13: "managed memory",
}
_READ_ONLY = 1
_DIMENSIONS_MAX = 64
_VERSION_MAX = (1, 1)
_NO_SYNCHRONISATION = -1


class _Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    """DLManagedTensorVersioned."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


def is_dlpack(obj: object) -> bool:
    """Whether `obj` offers its memory through DLPack."""
    return hasattr(obj, "__dlpack__") and hasattr(obj, "__dlpack_device__")


def dlpack_memory(obj: Any, device_index: int, *, what: str) -> DeviceMemory:
    """Return the memory of a DLPack producer on GPU `device_index`.

    The result borrows the memory and keeps the producer's capsule through `owner`. The producer is asked not to
    synchronise: order comes from the stream that the caller names. Raises `LayoutError` naming `what` for memory
    elsewhere, read-only or not C-contiguous memory, and a malformed capsule.
    """
    kind, index = obj.__dlpack_device__()
    _check_place(int(kind), int(index), device_index, what)
    try:
        capsule = obj.__dlpack__(stream=_NO_SYNCHRONISATION, max_version=_VERSION_MAX)
    except TypeError:  # a producer from before version 1.0
        capsule = obj.__dlpack__(stream=_NO_SYNCHRONISATION)
    tensor = _tensor_in(capsule, what)
    # What the capsule says is what will be written to.
    _check_place(tensor.device_type, tensor.device_id, device_index, what)
    nbytes = _nbytes_of(tensor, what)
    address = (tensor.data or 0) + tensor.byte_offset
    if nbytes and (not tensor.data or address + nbytes > 1 << 64):
        raise LayoutError(f"{what}: its DLPack capsule places {nbytes} bytes at {address:#x}")
    return DeviceMemory(address, nbytes, capsule)


def _check_place(kind: int, index: int, device_index: int, what: str) -> None:
    if kind != _CUDA:
        found = _TYPE_NAMES.get(kind, f"memory of DLPack device type {kind}")
        raise LayoutError(f"{what} is {found}: give memory of GPU {device_index}")
    if index != device_index:
        raise LayoutError(
            f"{what} is on GPU {index}: give memory of GPU {device_index}, which the backend uses"
        )


def _tensor_in(capsule: object, what: str) -> _Tensor:
    api = ctypes.pythonapi
    # Prototypes of our own: setting argtypes on the shared functions would change them for everybody.
    get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", api)
    )
    is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", api))
    if is_valid(capsule, b"dltensor_versioned"):
        managed = _Versioned.from_address(get_pointer(capsule, b"dltensor_versioned"))
        # The layout of the rest is only promised within a major version.
        if managed.major != _VERSION_MAX[0]:
            raise LayoutError(
                f"{what}: its DLPack capsule has version {managed.major}: must be {_VERSION_MAX[0]}"
            )
        if managed.flags & _READ_ONLY:
            raise LayoutError(f"{what} is read-only: give a writable array")
        tensor: _Tensor = managed.tensor
        return tensor
    if is_valid(capsule, b"dltensor"):
        return _Tensor.from_address(get_pointer(capsule, b"dltensor"))
    raise LayoutError(f"{what}: __dlpack__ gave {capsule!r:.80}: must be a fresh DLPack capsule")


def _nbytes_of(tensor: _Tensor, what: str) -> int:
    ndim, item_bits = tensor.ndim, tensor.bits * tensor.lanes
    if not 0 <= ndim <= _DIMENSIONS_MAX or (ndim and not tensor.shape):
        raise LayoutError(f"{what}: its DLPack capsule has {ndim} dimensions and no usable shape")
    if item_bits == 0 or item_bits % 8:
        raise LayoutError(f"{what} has elements of {item_bits} bits: must be whole bytes")
    shape = tensor.shape[:ndim] if ndim else []
    if any(length < 0 for length in shape):
        raise LayoutError(f"{what}: its DLPack capsule has the shape {shape}")
    strides = tensor.strides[:ndim] if ndim and tensor.strides else None
    if strides is not None and not _is_c_contiguous(shape, strides):
        raise LayoutError(f"{what} is not C-contiguous: make it contiguous first")
    nbytes: int = math.prod(shape) * item_bits // 8
    return nbytes


def _is_c_contiguous(shape: list[int], strides: list[int]) -> bool:
    if 0 in shape:
        return True
    step = 1
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and stride != step:
            return False
        step *= length
    return True
