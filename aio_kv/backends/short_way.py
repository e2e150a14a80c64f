"""The short ways: one group from a file, and any groups between pinned memory and a GPU.

They are what latency is measured by, so the engine records and starts them in one step, and everything that need not be
known for that is prepared while the device works. What is not quite usual (None is the answer), and all that is wrong,
takes the long way, which says what it is.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aio_kv.backends.call_memory import HOST_TYPES
from aio_kv.backends.session import Session
from aio_kv.engine import Engine, Kind
from aio_kv.integers import Int64Array
from aio_kv.memory import device_memory, host_address, is_device_memory
from aio_kv.plan import PINNED_COPIES_MAX, new_record, plan_of_record
from aio_kv.protocols import Priority, Scatter
from aio_kv.transfer import LandingRegion, Transfer

__all__ = ["copy_pinned", "read_one"]

_INT64 = np.dtype(np.int64)
_COPIES_MAX = 1 << 16  # in one call: they are listed while the caller waits
_NO_GROUP: Int64Array = np.empty(0, np.int64)  # of no file: there is nothing to order it against


def read_one(session: Session, group_id: int, place: Any, priority: Priority) -> Transfer | None:
    """Start reading one group into host memory."""
    dispatcher, layout, limits = session.dispatcher, session.plan.layout, session.limits
    engine, payload = dispatcher.engine, layout.payload_nbytes
    if (
        engine.__class__ is not Engine
        or not 0 <= group_id < layout.num_groups
        or layout.stride > limits.op_nbytes_max
        or priority.__class__ is not Priority
        or not dispatcher.is_free(Kind.READ, priority)
    ):
        return None
    dispatcher.announce()
    memory = _writable(engine, place, payload)
    if memory is None:
        return None
    layer, index = divmod(group_id, layout.groups_per_layer)
    nbytes = -(-payload // limits.offset_alignment) * limits.offset_alignment
    record = new_record(1)
    offset = index * layout.stride
    ticket = engine.read_one(layer, offset, nbytes, memory, payload, record, priority, place)
    if ticket is None:
        return None
    plan, result = plan_of_record(record, 1)
    transfer = Transfer(dispatcher, Kind.READ, plan, group_id, 1, payload, priority, 0, place, result)
    if session.table.regions:
        address = engine.address_of(memory)
        transfer.use_regions(session.table.covering(address, address + payload - 1))
    dispatcher.adopt(transfer, ticket)
    transfer.expect_success()
    return transfer


def copy_pinned(
    session: Session,
    kind: Kind,
    region: LandingRegion,
    offsets: Any,
    place: Any,
    stream: Any,
    priority: Priority,
) -> Transfer | None:
    """Start copying groups between a pinned region and device memory; the fence included."""
    dispatcher, device, payload = session.dispatcher, session.device, session.plan.layout.payload_nbytes
    engine = dispatcher.engine
    if (
        engine.__class__ is not Engine
        or device is None
        or not _is_plain_array(offsets)
        or priority.__class__ is not Priority
        or not dispatcher.is_free(kind, priority)
    ):
        return None
    if place.__class__ is Scatter:
        memory, places = place.memory, place.offsets
        if len(places) != len(offsets):
            return None
    else:
        memory, places = place, None
    if not is_device_memory(memory):
        return None
    if len(offsets) <= PINNED_COPIES_MAX:  # more take longer to list than the engine waits
        dispatcher.announce()
    memory = device_memory(memory, what="into" if kind is Kind.LOAD else "source")
    fenced = device.begin_fence(stream)
    if fenced is None and stream is not None:
        return None
    # The engine asks for the fence until the copies are queued: it goes back to its pool with the rest.
    record, owner = new_record(len(offsets)), (memory, place, fenced)
    ticket = engine.copy_pinned(
        kind,
        priority,
        device.device.index,
        (region.address, region.nbytes, offsets),
        (memory.address, memory.nbytes, places),
        payload,
        record,
        (0, 0) if fenced is None else fenced.fence,
        owner,
    )
    if ticket is None:
        if fenced is not None:
            fenced.release()
        return None
    plan, result = plan_of_record(record, len(offsets))
    transfer = Transfer(dispatcher, kind, plan, _NO_GROUP, len(offsets), payload, priority, 0, owner, result)
    transfer.stream = fenced
    transfer.use_regions((region,))
    dispatcher.adopt(transfer, ticket)
    transfer.expect_success()
    return transfer


def _writable(engine: Engine, place: Any, nbytes: int) -> Any:
    """`nbytes` of plain host memory that may be written; None for what is not that, or not for certain."""
    kind = place.__class__
    if kind not in HOST_TYPES:
        return _behind_pointer(engine, place, nbytes)
    if kind is memoryview:
        is_plain = place.format == "B"
    else:  # an array may hold Python objects, whose bytes are pointers
        is_plain = kind is not np.ndarray or not place.dtype.hasobject
    try:
        memory = engine.export(place) if is_plain else None
    except (TypeError, ValueError, BufferError):  # read-only, not contiguous
        return None
    return memory if memory is not None and len(memory) == nbytes else None


def _behind_pointer(engine: Engine, place: Any, nbytes: int) -> Any:
    if not hasattr(place, "data_ptr") or is_device_memory(place):
        return None
    memory = host_address(place, writable=True, what="into")
    return engine.pointer(memory.address) if memory.nbytes == nbytes else None


def _is_plain_array(offsets: Any) -> bool:
    return (
        offsets.__class__ is np.ndarray
        and offsets.dtype is _INT64
        and offsets.ndim == 1
        and 0 < offsets.size <= _COPIES_MAX
        and offsets.flags.carray
    )
