"""From group numbers and addresses to the list of I/Os that moves them. Pure and vectorised.

An *op* is one I/O of at most `op_nbytes_max` bytes. Groups that touch in the file become one op; where their memory
touches as well the op lands in it directly, where it is merely scattered and aligned the op is vectored, and
everything else goes through a staging slot, with a copy list. A group larger than an op becomes several.

No Python object is made per group: a plan of 100,000 groups is a few arrays.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aio_kv.errors import LayoutError
from aio_kv.flags import every, some
from aio_kv.integers import Int64Array
from aio_kv.layout import GroupLayout

__all__ = [
    "COPY_DTYPE",
    "EMPTY_PLAN",
    "OP_DTYPE",
    "PINNED_COPIES_MAX",
    "RESULT_DTYPE",
    "IoLimits",
    "Placement",
    "Plan",
    "new_record",
    "plan_groups",
    "plan_of_record",
    "plan_pinned",
]

# The memory of these is what the native engine reads (akv_op, akv_copy, akv_result in native/akv.cdef.h).
OP_DTYPE: Final = np.dtype(
    [
        ("file_offset", "=u8"),
        ("address", "=u8"),
        ("nbytes", "=u4"),
        ("file", "=u4"),
        ("copy_first", "=u4"),
        ("copy_count", "=u4"),
        ("placement", "=u4"),
        ("nbytes_owed", "=u4"),
    ]
)
COPY_DTYPE: Final = np.dtype([("address", "=u8"), ("op_offset", "=u4"), ("nbytes", "=u4")])
RESULT_DTYPE: Final = np.dtype([("code", "=i4"), ("nbytes", "=u4")])
PINNED_COPIES_MAX: Final = 1024  # in one op of a load or save (AKV_PINNED_COPIES)
_OP_AND_RESULT: Final = OP_DTYPE.itemsize + RESULT_DTYPE.itemsize
_PACK_OP: Final = struct.Struct("=QQIIIIII").pack

# From here on a scattered run is worth one op per piece: it can use a registered buffer, a vectored op cannot.
_VECTORED_STRIDE_MAX: Final = 64 << 10


class Placement(IntEnum):
    """Where the bytes of an op are (AKV_DIRECT, AKV_STAGED, AKV_VECTORED, AKV_PINNED)."""

    DIRECT = 0
    STAGED = 1
    VECTORED = 2
    PINNED = 3


# As plain integers: NumPy takes its time with enumerations.
_DIRECT, _STAGED, _VECTORED, _PINNED = (int(placement) for placement in Placement)


@dataclass(frozen=True, slots=True)
class IoLimits:
    """What the files and the device ask of an I/O, in bytes; alignments of 1 mean buffered files."""

    memory_alignment: int
    offset_alignment: int
    op_nbytes_max: int
    iov_max: int = 128


class Plan(NamedTuple):
    """The I/Os of one transfer.

    `ops` (OP_DTYPE) in file order and `copies` (COPY_DTYPE), grouped by op, are read by the engine until the transfer
    has ended. Request i is done when ops `first_ops(n)[i]` to `+ ops_per_request` are: these are in `op_of_request`, or
    follow from `request_of_op` where each request is an op of its own, or from the copies where each request is one.
    `ops_per_request` is one number for all requests, or one for each.
    """

    ops: NDArray[Any] | bytes | memoryview
    op_count: int
    copies: NDArray[Any] | memoryview | None
    copy_count: int
    op_of_request: Int64Array | None
    ops_per_request: int | Int64Array
    request_of_op: Int64Array | None = None

    def first_ops(self, request_count: int) -> Int64Array:
        """The first op of each request, in the order of the call. Worked out only where something has failed."""
        if self.op_of_request is not None:
            return self.op_of_request
        if self.request_of_op is None:
            return (
                np.arange(request_count) // PINNED_COPIES_MAX
                if self.op_count > 1
                else np.zeros(request_count, np.int64)
            )
        first = np.empty(request_count, dtype=np.int64)
        first[self.request_of_op] = np.arange(request_count)
        return first


EMPTY_PLAN: Final = Plan(np.empty(0, OP_DTYPE), 0, None, 0, np.empty(0, np.int64), 1)
_plan_of = Plan._make  # cheaper than naming the fields


def new_record(copy_count: int) -> bytearray:
    """Memory for a batch that the engine records itself: its ops, their results, `copy_count` copies."""
    op_count = -(-copy_count // PINNED_COPIES_MAX)
    return bytearray(op_count * _OP_AND_RESULT + copy_count * COPY_DTYPE.itemsize)


def plan_of_record(record: bytearray, copy_count: int) -> tuple[Plan, memoryview]:
    """What the engine has recorded, one request for each copy, as a plan and its results."""
    op_count, view = -(-copy_count // PINNED_COPIES_MAX), memoryview(record)
    results, copies = op_count * OP_DTYPE.itemsize, op_count * _OP_AND_RESULT
    plan = _plan_of((view[:results], op_count, view[copies:], copy_count, None, 1, None))
    return plan, view[results:copies]


def plan_groups(
    layout: GroupLayout,
    ids: Int64Array,
    addresses: Int64Array,
    limits: IoLimits,
    *,
    is_write: bool,
    is_device: bool = False,
) -> Plan:
    """Plan the movement of groups `ids` to or from `addresses` (int64, one per group; payload_nbytes each).

    Reads may name a group twice: it is read once and copied twice. Raises `LayoutError` for a group twice in a write.
    """
    one = _one_run(layout, ids, addresses, limits, is_write, is_device)
    if one is not None:
        return one
    apart = None if is_device else _groups_apart(layout, ids, addresses, limits, is_write)
    if apart is not None:
        return apart
    order = None if _is_increasing(ids) else ids.argsort()
    sorted_ids = ids if order is None else ids[order]
    sorted_addresses = addresses if order is None else addresses[order]
    is_first = np.ones(len(ids), dtype=bool)
    if order is not None:
        np.not_equal(sorted_ids[1:], sorted_ids[:-1], out=is_first[1:])
    has_twins = order is not None and not every(is_first)
    if has_twins and is_write:
        twin = int(sorted_ids[1:][~is_first[1:]][0])
        raise LayoutError(f"group {twin} ({layout.key(twin)}) is twice in one write: which bytes should win?")
    group_of_request = is_first.cumsum() - 1 if has_twins else None
    unique = sorted_ids[is_first] if has_twins else sorted_ids
    first_address = sorted_addresses[is_first] if has_twins else sorted_addresses
    is_landable = _landable(layout, first_address, limits, is_write, is_device)
    if group_of_request is not None:
        is_landable &= np.bincount(group_of_request, minlength=len(unique)) == 1
    requests = _Requests(order, sorted_addresses, group_of_request)
    if layout.stride > limits.op_nbytes_max:
        make = _split_groups
    else:
        make = _merge_groups if some(unique[1:] == unique[:-1] + 1) else _single_groups
    return make(layout, unique, first_address, is_landable, limits, requests, is_write)


def _one_run(
    layout: GroupLayout,
    ids: Int64Array,
    addresses: Int64Array,
    limits: IoLimits,
    is_write: bool,
    is_device: bool,
) -> Plan | None:
    """The plan where one op holds all groups because they are neighbours in order: one group, one block; else None.

    What `_merge_groups` would answer, without its arrays.
    """
    stride, payload, count, first = layout.stride, layout.payload_nbytes, len(ids), ids.item(0)
    layer, index = divmod(first, layout.groups_per_layer)
    if (
        stride > limits.op_nbytes_max
        or ids.item(-1) - first != count - 1
        or count > _groups_max(layout, limits)
        or index + count > layout.groups_per_layer
        or not (count == 1 or _is_increasing(ids))
    ):
        return None
    does_fit = not is_device and _fits(layout, limits, is_write)
    does_follow = count == 1 or every(addresses[1:] - addresses[:-1] == stride)
    if does_fit and not does_follow and stride >= _VECTORED_STRIDE_MAX:
        return None
    does_land = does_fit and not np.bitwise_or.reduce(addresses) & (limits.memory_alignment - 1)
    place, placement, copies = 0, _STAGED, count
    if does_land and does_follow and (count == 1 or payload == stride):
        place, placement, copies = addresses.item(0), _DIRECT, 0
    elif does_land and payload == stride:
        placement = _VECTORED
    nbytes = (count - 1) * stride + _tail_nbytes(layout, limits, is_write)
    op = np.frombuffer(_PACK_OP(index * stride, place, nbytes, layer, 0, copies, placement, 0), OP_DTYPE)
    if not copies:
        return Plan(op, 1, None, 0, None, 1)
    offsets = np.arange(0, count * stride, stride)
    return Plan(op, 1, _piece_copies(offsets, addresses, payload), count, None, 1)


def _groups_max(layout: GroupLayout, limits: IoLimits) -> int:
    """How many groups one op holds at most."""
    return max(1, min(limits.op_nbytes_max // layout.stride, limits.iov_max))


def _groups_apart(
    layout: GroupLayout, ids: Int64Array, addresses: Int64Array, limits: IoLimits, is_write: bool
) -> Plan | None:
    """The plan where no two groups touch and all land where they belong, with few NumPy calls; else None.

    It is what most batches are, and after a wait for the device every call costs several times what it does in a loop.
    """
    stride = layout.stride
    nbytes = stride if is_write else layout.payload_nbytes
    if (
        stride > limits.op_nbytes_max
        or (nbytes != layout.payload_nbytes if is_write else nbytes % limits.offset_alignment)
        or np.bitwise_or.reduce(addresses) & (limits.memory_alignment - 1)
    ):
        return None
    order = ids.argsort()
    groups = ids[order]
    if np.minimum.reduce(groups[1:] - groups[:-1]) < 2:
        return None
    ops = np.zeros(len(groups), dtype=OP_DTYPE)
    if layout.num_layers > 1:
        layer = groups // layout.groups_per_layer
        groups -= layer * layout.groups_per_layer
        ops["file"] = layer
    ops["file_offset"] = groups * stride
    ops["address"] = addresses[order]
    ops["nbytes"] = nbytes
    return Plan(ops, len(ops), None, 0, None, 1, order)


_WINDOW_BITS = 31  # an op reaches over 2 GiB of pinned memory: its copies have 32-bit offsets


def plan_pinned(
    region: tuple[int, int], offsets: Int64Array, addresses: Int64Array, piece_nbytes: int
) -> Plan:
    """Plan copies of `piece_nbytes` each between pinned host memory and device addresses, without any file.

    `region` is (address, nbytes) of the host memory, `offsets` are places in it, one per device address.
    """
    if (
        region[1] <= 1 << _WINDOW_BITS and len(offsets) <= PINNED_COPIES_MAX
    ):  # all in one op: the usual small restore
        op = _PACK_OP(0, region[0], region[1], 0, 0, len(offsets), _PINNED, 0)
        return Plan(op, 1, _piece_copies(offsets, addresses, piece_nbytes), len(offsets), None, 1)
    windows = offsets >> _WINDOW_BITS
    order = None if windows.min() == windows.max() else np.argsort(windows, kind="stable")
    if order is not None:
        offsets, addresses, windows = offsets[order], addresses[order], windows[order]
    is_same_window = np.zeros(len(windows), dtype=bool)
    np.equal(windows[1:], windows[:-1], out=is_same_window[1:])
    op_starts, op_of_piece, _ = _cut(is_same_window, PINNED_COPIES_MAX)
    base = windows[op_starts] << _WINDOW_BITS
    ops = np.zeros(len(op_starts), dtype=OP_DTYPE)
    ops["address"] = region[0] + base
    ops["nbytes"] = np.minimum(region[1] - base, (1 << _WINDOW_BITS) + piece_nbytes)
    ops["placement"] = _PINNED
    ops["copy_first"] = op_starts
    ops["copy_count"] = np.diff(op_starts, append=len(offsets))
    copies = _piece_copies(offsets - base[op_of_piece], addresses, piece_nbytes)
    return Plan(
        ops, len(ops), copies, len(copies), _Requests(order, addresses, None).in_call_order(op_of_piece), 1
    )


def _piece_copies(op_offsets: Int64Array, addresses: Int64Array, piece_nbytes: int) -> NDArray[Any]:
    copies = np.empty(len(op_offsets), dtype=COPY_DTYPE)
    copies["address"] = addresses
    copies["op_offset"] = op_offsets
    copies["nbytes"] = piece_nbytes
    return copies


@dataclass(frozen=True, slots=True)
class _Requests:
    """The requests in file order; several may want one group (`group_of_request`, None when each wants its own)."""

    order: Int64Array | None
    addresses: Int64Array
    group_of_request: Int64Array | None

    def per_group(self, values: NDArray[Any]) -> NDArray[Any]:
        return values if self.group_of_request is None else values[self.group_of_request]

    def in_call_order(self, values: Int64Array) -> Int64Array:
        if self.order is None:
            return values
        result = np.empty_like(values)
        result[self.order] = values
        return result


def _is_increasing(ids: Int64Array) -> bool:
    return every(ids[1:] > ids[:-1])


def _landable(
    layout: GroupLayout, addresses: Int64Array, limits: IoLimits, is_write: bool, is_device: bool
) -> NDArray[np.bool_]:
    if is_device or not _fits(layout, limits, is_write):
        return np.zeros(len(addresses), dtype=bool)
    is_aligned: NDArray[np.bool_] = (addresses & (limits.memory_alignment - 1)) == 0
    return is_aligned


def _fits(layout: GroupLayout, limits: IoLimits, is_write: bool) -> bool:
    # A write covers its padding too, which only a staging slot can provide; a read may leave it out.
    if is_write:
        return layout.payload_nbytes == layout.stride
    return layout.payload_nbytes % limits.offset_alignment == 0


def _tail_nbytes(layout: GroupLayout, limits: IoLimits, is_write: bool) -> int:
    # How much of the last group of an op is moved: all of it when writing, the payload when reading.
    if is_write:
        return layout.stride
    return -(-layout.payload_nbytes // limits.offset_alignment) * limits.offset_alignment


def _single_groups(
    layout: GroupLayout,
    groups: Int64Array,
    addresses: Int64Array,
    is_landable: NDArray[np.bool_],
    limits: IoLimits,
    requests: _Requests,
    is_write: bool,
) -> Plan:
    """No two groups touch: `_merge_groups` without the questions that this answers, at a third of its cost."""
    layer = groups // layout.groups_per_layer
    ops = np.zeros(len(groups), dtype=OP_DTYPE)
    ops["file_offset"] = (groups - layer * layout.groups_per_layer) * layout.stride
    ops["file"] = layer
    ops["nbytes"] = _tail_nbytes(layout, limits, is_write)
    ops["placement"] = ~is_landable  # direct or staged
    ops["address"] = np.where(is_landable, addresses, 0)
    op_of_request = requests.per_group(np.arange(len(ops)))
    copies = _copies(ops, op_of_request, requests, np.zeros_like(op_of_request), layout.payload_nbytes)
    return Plan(ops, len(ops), copies, len(copies), requests.in_call_order(op_of_request), 1)


def _merge_groups(
    layout: GroupLayout,
    groups: Int64Array,
    addresses: Int64Array,
    is_landable: NDArray[np.bool_],
    limits: IoLimits,
    requests: _Requests,
    is_write: bool,
) -> Plan:
    stride, payload = layout.stride, layout.payload_nbytes
    layer = groups // layout.groups_per_layer
    index = groups - layer * layout.groups_per_layer
    does_touch = np.zeros(len(groups), dtype=bool)  # in the file, with the group before
    np.equal(groups[1:], groups[:-1] + 1, out=does_touch[1:])
    does_touch &= index != 0
    does_follow = np.zeros(len(groups), dtype=bool)  # in memory, behind the group before
    np.equal(addresses[1:], addresses[:-1] + stride, out=does_follow[1:])
    if stride >= _VECTORED_STRIDE_MAX:
        does_touch &= does_follow | ~is_landable
    op_starts, op_of_group, place_in_op = _cut(does_touch, _groups_max(layout, limits))
    counts = np.bincount(op_of_group)
    lands = np.logical_and.reduceat(is_landable, op_starts)
    follows = np.logical_and.reduceat(does_follow | (place_in_op == 0), op_starts)
    if payload == stride:
        placement = np.where(lands, np.where(follows, _DIRECT, _VECTORED), _STAGED)
    else:
        placement = np.where(lands & (counts == 1), _DIRECT, _STAGED)
    ops = np.zeros(len(op_starts), dtype=OP_DTYPE)
    ops["file_offset"] = index[op_starts] * stride
    ops["file"] = layer[op_starts]
    ops["nbytes"] = (counts - 1) * stride + _tail_nbytes(layout, limits, is_write)
    ops["placement"] = placement
    ops["address"] = np.where(placement == _DIRECT, addresses[op_starts], 0)
    op_of_request = requests.per_group(op_of_group)
    copies = _copies(ops, op_of_request, requests, requests.per_group(place_in_op) * stride, payload)
    return Plan(ops, len(ops), copies, len(copies), requests.in_call_order(op_of_request), 1)


def _cut(does_touch: NDArray[np.bool_], groups_max: int) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Cut groups into ops: where each op starts, the op of each group, and the group's place in it."""
    position = np.arange(len(does_touch))
    is_apart = ~does_touch
    (run_starts,) = is_apart.nonzero()
    in_run = position - run_starts[is_apart.cumsum() - 1]
    is_start = in_run % groups_max == 0
    (op_starts,) = is_start.nonzero()
    op_of_group = is_start.cumsum() - 1
    return op_starts, op_of_group, position - op_starts[op_of_group]


def _copies(
    ops: NDArray[Any], op_of_request: Int64Array, requests: _Requests, op_offset: Int64Array, payload: int
) -> NDArray[Any]:
    """The copy list of all ops that are not direct; enters each op's range in it into `ops`."""
    needs_copy = (ops["placement"] != _DIRECT)[op_of_request]
    owner = op_of_request[needs_copy]
    copies = np.empty(len(owner), dtype=COPY_DTYPE)
    copies["address"] = requests.addresses[needs_copy]
    copies["op_offset"] = op_offset[needs_copy]
    copies["nbytes"] = payload
    counts = np.bincount(owner, minlength=len(ops))
    ops["copy_count"] = counts
    ops["copy_first"] = counts.cumsum() - counts
    return copies


def _split_groups(
    layout: GroupLayout,
    groups: Int64Array,
    addresses: Int64Array,
    is_landable: NDArray[np.bool_],
    limits: IoLimits,
    requests: _Requests,
    is_write: bool,
) -> Plan:
    step = limits.op_nbytes_max
    total = _tail_nbytes(layout, limits, is_write)
    piece_starts = np.arange(0, total, step)
    pieces = len(piece_starts)
    layer = groups // layout.groups_per_layer
    index = groups - layer * layout.groups_per_layer
    ops = np.zeros((len(groups), pieces), dtype=OP_DTYPE)
    ops["file_offset"] = (index * layout.stride)[:, None] + piece_starts
    ops["file"] = layer[:, None]
    ops["nbytes"] = np.minimum(step, total - piece_starts)
    ops["placement"] = np.where(is_landable, _DIRECT, _STAGED)[:, None]
    ops["address"] = np.where(is_landable[:, None], addresses[:, None] + piece_starts, 0)
    # The payload may end before the last pieces, which are padding and have nothing to copy.
    lengths = np.clip(layout.payload_nbytes - piece_starts, 0, step)
    flat = ops.reshape(-1)
    first_op = requests.per_group(np.arange(len(groups)) * pieces)
    copies = _split_copies(flat, first_op, requests, piece_starts, lengths)
    return Plan(flat, len(flat), copies, len(copies), requests.in_call_order(first_op), pieces)


def _split_copies(
    ops: NDArray[Any],
    first_op: Int64Array,
    requests: _Requests,
    piece_starts: Int64Array,
    lengths: Int64Array,
) -> NDArray[Any]:
    used = np.flatnonzero(lengths)
    needs_copy = (ops["placement"] != _DIRECT)[first_op]
    owner = (first_op[needs_copy][:, None] + used).reshape(-1)
    copies = np.zeros((int(needs_copy.sum()), len(used)), dtype=COPY_DTYPE)
    copies["address"] = requests.addresses[needs_copy][:, None] + piece_starts[used]
    copies["nbytes"] = lengths[used]
    # Twins bring their pieces one request after the other; the engine wants them one op after the other.
    order = np.argsort(owner, kind="stable")
    counts = np.bincount(owner, minlength=len(ops))
    ops["copy_count"] = counts
    ops["copy_first"] = counts.cumsum() - counts
    return copies.reshape(-1)[order]
