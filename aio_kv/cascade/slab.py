"""The bytes of a cascade: rows of one payload each, in one piece of memory, and the copies between rows and callers."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from aio_kv.engine.extension import allocate_host, has_extension, row_copier
from aio_kv.errors import LayoutError
from aio_kv.integers import Int64Array
from aio_kv.memory import host_address, raw_view

__all__ = ["Slab", "numpy_row_copier", "slots_for"]

_PAGE: Final = 4096
_PIECE_NBYTES: Final = 256 << 10  # what is copied through a temporary array at a time: it stays in the cache


def slots_for(capacity_bytes: int, slot_nbytes: int) -> int:
    """How many slots fit into a capacity. Raises `LayoutError` for none, and for more than the machine has memory."""
    if capacity_bytes.__class__ is not int or capacity_bytes < slot_nbytes:
        raise LayoutError(
            f"capacity_bytes is {capacity_bytes!r}: must be an integer of at least one slot, {slot_nbytes} bytes"
        )
    present = _memory_nbytes()
    if present is not None and capacity_bytes > present:
        raise LayoutError(f"capacity_bytes is {capacity_bytes}: this machine has {present} bytes of memory")
    return capacity_bytes // slot_nbytes


def _memory_nbytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None  # not a system that tells


class Slab:
    """`count` rows of `payload` bytes. The memory is the engine's kind: aligned, on huge pages where there are any."""

    def __init__(self, count: int, payload: int) -> None:
        self.payload = payload
        self.nbytes = -(-count * payload // _PAGE) * _PAGE  # what can be registered is whole pages
        self.memory = allocate_host(self.nbytes)
        self._address = host_address(self.memory, writable=True, what="slab").address
        make = row_copier if has_extension() else numpy_row_copier
        self._copy = make(self.memory[: count * payload], payload)

    def offsets(self, rows: Int64Array) -> Int64Array:
        """The byte offsets of rows in the memory."""
        return rows * self.payload

    def row(self, row: int) -> memoryview:
        """The bytes of one row."""
        return self.memory[row * self.payload : (row + 1) * self.payload]

    def copy_out(self, rows: Int64Array, places: Int64Array) -> None:
        """Copy rows to a caller's memory: `places` are the addresses of as many payloads."""
        self._copy(rows, places, False)

    def copy_in(self, rows: Int64Array, places: Int64Array) -> None:
        """Copy a caller's memory to rows, each named once."""
        self._copy(rows, places, True)

    def copy_within(self, sources: Int64Array, targets: Int64Array) -> None:
        """Copy rows to other rows, none of which is a source."""
        if len(sources):
            self._copy(sources, self._address + targets * self.payload, False)


def numpy_row_copier(memory: memoryview, row_nbytes: int) -> Callable[[Int64Array, Int64Array, bool], None]:
    """`row_copier` where there is no extension: slower, since nothing is fetched ahead."""
    element = np.dtype((np.void, row_nbytes))
    elements: NDArray[Any] = np.frombuffer(memory, element)
    step = max(1, _PIECE_NBYTES // row_nbytes)

    def copy(rows: Int64Array, places: Int64Array, inward: bool) -> None:
        if not len(rows):
            return
        # Seen as one array with an element at every byte from the first place to the last: only the places are touched.
        first = int(places.min())
        span = raw_view(first, int(places.max()) - first + row_nbytes)
        outside: NDArray[Any] = np.ndarray((len(span) - row_nbytes + 1,), element, span, strides=(1,))
        for start in range(0, len(rows), step):
            row, place = rows[start : start + step], places[start : start + step] - first
            if inward:
                elements[row] = outside[place]
            else:
                outside[place] = elements[row]

    return copy
