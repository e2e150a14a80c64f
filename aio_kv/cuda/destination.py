"""Whether memory that a caller hands over is what it must be: GPU memory, of this device, and long enough.

A copy to a wrong address is a fault that the whole process does not survive, so the driver is asked first.
"""

from __future__ import annotations

import ctypes
from typing import Any

from aio_kv.cuda.device import Device
from aio_kv.cuda.dlpack import dlpack_memory, is_dlpack
from aio_kv.errors import DeviceError, LayoutError
from aio_kv.memory import DeviceMemory, device_memory, is_device_memory

__all__ = ["device_destination"]

_INVALID_VALUE, _INVALID_CONTEXT = 1, 201
_TYPE_HOST = 1  # CUmemorytype
# CUpointer_attribute
_MEMORY_TYPE, _DEVICE_ORDINAL, _RANGE_START, _RANGE_NBYTES, _IS_MAPPED = 2, 9, 11, 12, 13
_ASKED = (ctypes.c_int * 4)(_MEMORY_TYPE, _DEVICE_ORDINAL, _RANGE_START, _RANGE_NBYTES)
_Places = ctypes.c_uint64 * 4


class _Answers(ctypes.Structure):
    """What the driver writes, each answer in eight bytes of its own; zeros where it knows nothing."""

    _fields_ = (
        ("kind", ctypes.c_uint32),
        ("_", ctypes.c_uint32),
        ("device", ctypes.c_int32),
        ("__", ctypes.c_uint32),
        ("start", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64),
    )


def device_destination(obj: Any, device: Device, *, what: str) -> DeviceMemory:
    """Return address and length of writable, C-contiguous memory on `device`, checked with the driver.

    Accepted: CUDA tensors, anything with `__cuda_array_interface__` or DLPack, `DeviceBuffer`, `DevicePointer`,
    `DeviceMemory`. The result borrows the memory and keeps `obj` through `owner`. Raises `LayoutError` for host memory,
    memory of another GPU and a length that passes the end of its allocation, `DeviceError` for memory that was freed
    and after a fault; both name `what`.
    """
    device.check_usable()
    memory = _memory_of(obj, device, what)
    if memory.nbytes:
        with device.activated():
            _check(memory, device, what)
    return memory


def _memory_of(obj: Any, device: Device, what: str) -> DeviceMemory:
    # DLPack last of the three: an address is had from the others without asking the producer for a capsule.
    if is_dlpack(obj) and not hasattr(obj, "data_ptr") and not hasattr(obj, "__cuda_array_interface__"):
        return dlpack_memory(obj, device.index, what=what)
    if is_device_memory(obj):
        return device_memory(obj, what=what)
    raise LayoutError(
        f"{what} is host memory or no memory at all ({type(obj).__name__}): give memory of GPU {device.index}, such as "
        "a CUDA tensor, a DeviceBuffer or a DevicePointer"
    )


def _check(memory: DeviceMemory, device: Device, what: str) -> None:
    address, nbytes = memory.address, memory.nbytes
    kind, index, start, length = _facts(device, address)
    if kind == 0:
        raise DeviceError(
            f"{what}: CUDA knows no memory at {address:#x}: it was freed, or it is ordinary host memory",
            call="cuPointerGetAttributes",
            code=_INVALID_VALUE,
            hint="keep the tensor or buffer alive until the transfer has ended",
        )
    if kind == _TYPE_HOST:
        raise LayoutError(f"{what} at {address:#x} is host memory: give memory of GPU {device.index}")
    if index != device.index:
        raise LayoutError(
            f"{what} at {address:#x} is on GPU {index}: give memory of GPU {device.index}, which the backend uses"
        )
    # For memory that is mapped piece by piece (torch's expandable segments) this is the whole reserved range.
    if length:
        _check_range(memory, start, start + length, what)
    is_mapped = ctypes.c_int(1)
    _ask(device, is_mapped, _IS_MAPPED, address + nbytes - 1)
    if not is_mapped.value:
        raise DeviceError(
            f"{what}: no memory is mapped at {address + nbytes - 1:#x}, the last of its {nbytes} bytes",
            hint="keep the tensor or buffer alive until the transfer has ended",
        )


def _facts(device: Device, address: int) -> tuple[int, int, int, int]:
    """Kind of memory (0: none that CUDA knows), device, and start and length of its allocation, in one driver call."""
    answers = _Answers()
    at = ctypes.addressof(answers)
    places = _Places(at, at + 8, at + 16, at + 24)
    ask = device.table.function("cuPointerGetAttributes")
    code = ask(len(places), ctypes.addressof(_ASKED), ctypes.addressof(places), address)
    if code and code not in (_INVALID_VALUE, _INVALID_CONTEXT):
        raise device.failure("cuPointerGetAttributes", code)
    return (0, -1, 0, 0) if code else (answers.kind, answers.device, answers.start, answers.nbytes)


def _check_range(memory: DeviceMemory, start: int, end: int, what: str) -> None:
    last = memory.address + memory.nbytes
    if not start <= memory.address <= last <= end:
        raise LayoutError(
            f"{what} is {memory.nbytes} bytes at {memory.address:#x} but its allocation is {end - start} bytes at "
            f"{start:#x}: it passes the end by {max(last - end, 0)} bytes"
        )


def _ask(device: Device, value: Any, attribute: int, address: int) -> bool:
    """Ask the driver about an address; False where it has no answer. Raises `DeviceError` after a fault."""
    code = device.table.function("cuPointerGetAttribute")(ctypes.byref(value), attribute, address)
    if code and code != _INVALID_VALUE:
        raise device.failure("cuPointerGetAttribute", code)
    return code == 0
