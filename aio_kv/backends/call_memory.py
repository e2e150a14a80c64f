"""The memory of a call: on the host or on the device, checked, and the address of each of its groups in it."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from aio_kv.backends.device_side import DeviceSide
from aio_kv.backends.session import Session
from aio_kv.engine import Kind
from aio_kv.errors import LayoutError, UnavailableError
from aio_kv.integers import Int64Array, check_integers
from aio_kv.memory import DeviceMemory, HostMemory, host_address, is_device_memory
from aio_kv.plan import EMPTY_PLAN, Plan, plan_pinned
from aio_kv.protocols import Scatter
from aio_kv.transfer import LandingRegion

__all__ = ["HOST_TYPES", "addresses_of", "memory_of", "pinned_plan", "role_of"]

# Looked up once: every look at a member of an enumeration is a search.
_READ: Final = Kind.READ
_LOAD: Final = Kind.LOAD
# Host memory by type: these need not be asked whether they lie on a GPU.
HOST_TYPES = frozenset((memoryview, bytearray, bytes, np.ndarray))


def role_of(kind: Kind) -> str:
    """What callers call the memory of a transfer of this kind."""
    return "into" if kind is _READ or kind is _LOAD else "source"


def memory_of(device: DeviceSide | None, place: object, kind: Kind, stream: Any) -> HostMemory | DeviceMemory:
    """The memory behind what a caller hands over, which it borrows. Raises `LayoutError`, `UnavailableError`."""
    is_device = place.__class__ not in HOST_TYPES and is_device_memory(place)
    if (is_device or stream is not None) and device is None:
        raise UnavailableError(
            f"{role_of(kind)} is device memory, or a stream was given, and the backend was opened without a device",
            hint="open the backend with device=INDEX, or use host memory and stream=None",
        )
    if is_device and device is not None:
        return device.memory(place, what=role_of(kind))
    if stream is not None:
        raise LayoutError(
            f"{role_of(kind)} is host memory and a stream was given: streams order device memory only"
        )
    return host_address(place, writable=kind is _READ, what=role_of(kind))


def addresses_of(
    device: DeviceSide | None, payload: int, kind: Kind, place: Any, count: int, stream: Any
) -> tuple[HostMemory | DeviceMemory, Int64Array]:
    """The memory of a call for `count` groups, and the address of each of them, packed or scattered."""
    memory = memory_of(device, place.memory if isinstance(place, Scatter) else place, kind, stream)
    return memory, _addresses_in(memory, kind, place, count, payload)


def _addresses_in(
    memory: HostMemory | DeviceMemory, kind: Kind, place: Any, count: int, payload: int
) -> Int64Array:
    if isinstance(place, Scatter):
        return memory.address + _checked_offsets(memory, place.offsets, count, payload)
    if memory.nbytes != count * payload:
        raise LayoutError(
            f"{role_of(kind)} holds {memory.nbytes} bytes: {count} groups of {payload} bytes need exactly "
            f"{count * payload}; use Scatter to place them in larger memory"
        )
    return np.arange(memory.address, memory.address + memory.nbytes, payload, dtype=np.int64)


def pinned_plan(
    session: Session, kind: Kind, region: LandingRegion, offsets: Any, place: Any, stream: Any
) -> tuple[DeviceMemory, Plan, int]:
    """The device memory of a load or save, its plan, and the number of its copies."""
    payload = session.plan.layout.payload_nbytes
    memory = memory_of(session.device, place.memory if isinstance(place, Scatter) else place, kind, stream)
    if not isinstance(memory, DeviceMemory):
        raise LayoutError("host memory is copied by the caller: load and save are for device memory")
    starts = check_integers(offsets, what="offsets", limit=max(1, region.nbytes - payload + 1))
    addresses = _addresses_in(memory, kind, place, len(starts), payload)
    if len(starts) == 0:
        return memory, EMPTY_PLAN, 0
    return memory, plan_pinned((region.address, region.nbytes), starts, addresses, payload), len(starts)


def _checked_offsets(
    memory: HostMemory | DeviceMemory, offsets: Int64Array, count: int, payload: int
) -> Int64Array:
    if len(offsets) != count:
        raise LayoutError(f"Scatter holds {len(offsets)} offsets for {count} groups: one per group is needed")
    last = memory.nbytes - payload
    # Seen as unsigned: an offset that has become negative since the Scatter was made is found as well.
    unsigned = offsets.view(np.uint64)
    if count and (last < 0 or np.maximum.reduce(unsigned) > last):
        index = int(np.argmax(unsigned > max(last, 0)))
        raise LayoutError(
            f"Scatter.offsets[{index}] is {offsets[index]}: a group of {payload} bytes there would end outside of the "
            f"memory of {memory.nbytes} bytes"
        )
    return offsets
