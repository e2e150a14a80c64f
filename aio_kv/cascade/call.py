"""One call on a cascade: which groups, where in the caller's memory, and how; and parts of it for who moves them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from aio_kv.backends.call_memory import addresses_of, memory_of, role_of
from aio_kv.backends.device_side import DeviceSide
from aio_kv.engine import Kind
from aio_kv.errors import LayoutError
from aio_kv.flags import some
from aio_kv.integers import Int64Array
from aio_kv.layout import GroupLayout
from aio_kv.memory import DeviceMemory, HostMemory
from aio_kv.protocols import Priority, Read, Scatter, Write, check_count, limited
from aio_kv.transfer import LoopBinding

__all__ = ["Call", "How", "groups_call", "requests_call"]

# Looked up once: every look at a member of an enumeration is a search.
_READ: Final = Kind.READ


class How(NamedTuple):
    """What every call may say: which stream, until when, how urgently; `deadline_ns` on CLOCK_MONOTONIC, 0 for none."""

    stream: Any
    deadline: float | None
    priority: Priority
    deadline_ns: int = 0

    def options(self) -> dict[str, Any]:
        """The same as keywords of a backend's call."""
        return {"stream": self.stream, "deadline": self.deadline, "priority": self.priority}

    @property
    def is_late(self) -> bool:
        """Whether the deadline has passed."""
        return bool(self.deadline_ns) and time.monotonic_ns() >= self.deadline_ns


_PLAIN: Final = {priority: How(None, None, priority) for priority in Priority}


def checked_how(binding: LoopBinding, stream: Any, deadline: float | None, priority: Priority) -> How:
    """Check what a call says. Raises `LayoutError`."""
    if priority.__class__ is not Priority:
        raise LayoutError(f"priority is {priority!r}: must be a Priority")
    if deadline is None:
        return _PLAIN[priority] if stream is None else How(stream, None, priority)
    if deadline.__class__ not in (int, float) or math.isnan(deadline):
        raise LayoutError(f"deadline is {deadline!r}: must be a time on the clock of anyio.current_time()")
    left = min(max(deadline - binding.time(), -1e9), 1e9)  # infinities are deadlines too
    return How(stream, deadline, priority, max(1, time.monotonic_ns() + int(left * 1e9)))


class Call(NamedTuple):
    """The groups of one call and their places.

    `ids` are the cascade's own; `addresses` say where each group lies in the caller's memory, which `owner` keeps
    alive. `place` is what the caller gave: a buffer, a `Scatter`, or a list of requests.
    """

    kind: Kind
    ids: Int64Array
    addresses: Int64Array
    payload: int
    is_device: bool
    place: Any
    owner: object
    how: How

    def places(self, index: Int64Array) -> Int64Array:
        """The addresses of some of the groups."""
        return self.addresses if len(index) == len(self.ids) else self.addresses[index]

    def parts(self, index: Int64Array) -> Iterator[slice]:
        """Slices of `index` that can each be copied in one go: on a device, what lies in one piece of memory."""
        if self.is_device and isinstance(self.place, list):
            yield from (slice(start, start + 1) for start in range(len(index)))
        else:
            yield slice(0, len(index))

    def device_place(self, index: Int64Array) -> Any:
        """Where some of the groups, a part, lie on the device."""
        if isinstance(self.place, list):
            request = self.place[int(index[0])]
            return request.into if isinstance(request, Read) else request.source
        return self._subset(index)

    def read_below(self, backing: Any, index: Int64Array) -> Any:
        """Have the backing read some of the groups to where they belong; returns its transfer."""
        if isinstance(self.place, list):
            return backing.read([self.place[i] for i in index.tolist()], **self.how.options())
        return backing.read_groups(self.ids[index], self._subset(index), **self.how.options())

    def _subset(self, index: Int64Array) -> Any:
        if len(index) == len(self.ids):
            return self.place
        if isinstance(self.place, Scatter):
            return Scatter(self.place.memory, self.place.offsets[index])
        return Scatter(self.place, index * self.payload)


def groups_call(
    layout: GroupLayout, device: DeviceSide | None, kind: Kind, ids: Any, place: Any, how: How
) -> Call:
    """Check a call by group numbers. Raises `LayoutError`, `UnavailableError`."""
    check_count(ids, what="group_ids")
    checked = layout.check_ids(ids)
    memory, addresses = addresses_of(device, layout.payload_nbytes, kind, place, len(checked), how.stream)
    # The caller may change its array at once, and it is needed later: a copy.
    own = checked.copy()
    _check_unique(layout, kind, own)
    is_device = isinstance(memory, DeviceMemory)
    return Call(kind, own, addresses, layout.payload_nbytes, is_device, place, (memory, place), how)


def requests_call(
    layout: GroupLayout, device: DeviceSide | None, kind: Kind, requests: Any, how: How
) -> Call:
    """Check a call by requests, each with its own memory. Raises `LayoutError`, `UnavailableError`."""
    wanted = Read if kind is _READ else Write
    listed: list[Any] = []
    ids: list[int] = []
    memories: list[HostMemory | DeviceMemory] = []
    for index, request in enumerate(limited(requests)):
        if not isinstance(request, wanted):
            raise LayoutError(f"requests[{index}] is {request!r}: must be a {wanted.__name__}")
        place = request.into if isinstance(request, Read) else request.source
        ids.append(layout.group_id(request.key))
        memory = memory_of(device, place, kind, how.stream)
        if memory.nbytes != layout.payload_nbytes:
            raise LayoutError(
                f"requests[{index}]: {role_of(kind)} holds {memory.nbytes} bytes, a group has exactly "
                f"{layout.payload_nbytes}"
            )
        memories.append(memory)
        listed.append(request)
    is_device = _is_device(kind, memories)
    own = np.array(ids, np.int64)
    _check_unique(layout, kind, own)
    addresses = np.array([memory.address for memory in memories], np.int64)
    return Call(kind, own, addresses, layout.payload_nbytes, is_device, listed, memories, how)


def _is_device(kind: Kind, memories: Sequence[HostMemory | DeviceMemory]) -> bool:
    count = sum(isinstance(memory, DeviceMemory) for memory in memories)
    if 0 < count < len(memories):
        raise LayoutError(f"{role_of(kind)}: host and device memory in one call: make two calls")
    return count > 0


def _check_unique(layout: GroupLayout, kind: Kind, ids: Int64Array) -> None:
    if kind is _READ or len(ids) < 2:
        return
    ordered = ids.copy()
    ordered.sort()
    is_twice = ordered[1:] == ordered[:-1]
    if some(is_twice):
        key = layout.key(int(ordered[np.argmax(is_twice)]))
        raise LayoutError(f"group {key} is named twice in one write: which bytes should stay?")
