"""The states of a slot and what leads from one to the next: one table, which the cache obeys and the docs show.

A *lease* is counted beside the state: somebody's copy still reads the slot's bytes. A slot that has lost its key to
another slot (its group was written while it was leased or flushed) is *detached*: it waits for its leases to end.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from aio_kv.integers import Int64Array

__all__ = ["TRANSITIONS", "SlotEvent", "SlotState", "diagram", "next_state", "next_states"]


class SlotState(IntEnum):
    """What a slot holds."""

    FREE = 0  # nothing
    FILLING = 1  # bytes are arriving: from a caller, or from below
    CLEAN = 2  # what is below
    DIRTY = 3  # more than is below
    FLUSHING = 4  # the same, and a write of it to below is in flight


class SlotEvent(IntEnum):
    """What happens to a slot."""

    FILL = 0  # bytes begin to arrive
    FILLED_CLEAN = 1  # the last of them came, or did not; nothing to flush
    FILLED_DIRTY = 2  # the same, with something to flush
    FLUSH = 3  # its dirty groups are handed to the backing
    LANDED = 4  # they are below
    FAILED = 5  # they are not
    SUPERSEDED = 6  # a newer slot has its key: detached
    EMPTIED = 7  # evicted, detached without leases, or filled with nothing


_FREE, _FILLING, _CLEAN, _DIRTY, _FLUSHING = SlotState

TRANSITIONS: Final[dict[tuple[SlotState, SlotEvent], SlotState]] = {
    (_FREE, SlotEvent.FILL): _FILLING,
    (_CLEAN, SlotEvent.FILL): _FILLING,
    (_DIRTY, SlotEvent.FILL): _FILLING,
    (_FILLING, SlotEvent.FILL): _FILLING,
    (_FILLING, SlotEvent.FILLED_CLEAN): _CLEAN,
    (_FILLING, SlotEvent.FILLED_DIRTY): _DIRTY,
    (_DIRTY, SlotEvent.FLUSH): _FLUSHING,
    (_FLUSHING, SlotEvent.LANDED): _CLEAN,
    (_FLUSHING, SlotEvent.FAILED): _DIRTY,
    (_CLEAN, SlotEvent.SUPERSEDED): _CLEAN,
    (_DIRTY, SlotEvent.SUPERSEDED): _CLEAN,
    (_FLUSHING, SlotEvent.SUPERSEDED): _FLUSHING,
    (_CLEAN, SlotEvent.EMPTIED): _FREE,
}

_NOT_ALLOWED: Final = 255


def _next_of_each() -> tuple[NDArray[np.uint8], ...]:
    rows = tuple(np.full(len(SlotState), _NOT_ALLOWED, np.uint8) for _ in SlotEvent)
    for (state, event), after in TRANSITIONS.items():
        rows[event][state] = after
    return rows


_NEXT: Final = _next_of_each()  # by event, then by state
_NEXT_OF_ONE: Final = tuple(row.tobytes() for row in _NEXT)


def next_state(states: bytearray, slot: int, event: SlotEvent) -> None:
    """`next_states` for a single slot, in the memory behind the array."""
    after = _NEXT_OF_ONE[event][states[slot]]
    assert after != _NOT_ALLOWED, f"{event.name} of slot {slot} in {SlotState(states[slot]).name}"
    states[slot] = after


def next_states(states: NDArray[np.uint8], slots: Int64Array, event: SlotEvent) -> None:
    """Move `slots` of the state array by one event. A move that the table does not have is our own mistake."""
    if len(slots):
        after = _NEXT[event].take(states[slots])
        assert _NOT_ALLOWED not in after.tobytes(), f"{event.name} of slots in {set(states[slots].tolist())}"
        states[slots] = after


def diagram() -> str:
    """The table as a Mermaid state diagram, for the documentation."""
    lines = ["stateDiagram-v2", "    [*] --> FREE"]
    lines += [
        f"    {state.name} --> {after.name}: {event.name}" for (state, event), after in TRANSITIONS.items()
    ]
    return "\n".join(lines)
