"""The bytes of a cascade: rows of one payload each, in one piece of memory, and the copies between rows and callers."""

from __future__ import annotations

import os
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from aio_kv.engine.extension import allocate_host
from aio_kv.errors import LayoutError
from aio_kv.integers import Int64Array
from aio_kv.memory import raw_view

__all__ = ["HostPlaces", "Slab", "slots_for"]

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


class HostPlaces:
    """Places of one payload each in a caller's host memory, by address. Keeps nothing alive."""

    def __init__(self, addresses: Int64Array, payload: int) -> None:
        self.payload = payload
        self._first = int(addresses.min())
        # Seen as one array over everything between the first and the last place: only the places in it are touched.
        self._bytes = np.frombuffer(
            raw_view(self._first, int(addresses.max()) - self._first + payload), np.uint8
        )
        self._offsets = addresses - self._first
        self._is_packed = len(addresses) == 1 or bool((np.diff(addresses) == payload).all())

    def packed(self) -> NDArray[np.uint8] | None:
        """All places as rows, if they lie one behind the other in order."""
        return self._bytes.reshape(-1, self.payload) if self._is_packed else None

    def elements(self) -> tuple[NDArray[Any], Int64Array]:
        """An array with an element of one payload at every byte, and the index of each place in it."""
        # np.ndarray and not as_strided, which takes ten times as long.
        count = len(self._bytes) - self.payload + 1
        view: NDArray[Any] = np.ndarray(
            (count,), dtype=np.dtype((np.void, self.payload)), buffer=self._bytes, strides=(1,)
        )
        return view, self._offsets


class Slab:
    """`count` rows of `payload` bytes. The memory is the engine's kind: aligned, on huge pages where there are any."""

    def __init__(self, count: int, payload: int) -> None:
        self.payload = payload
        self.nbytes = -(-count * payload // _PAGE) * _PAGE  # what can be registered is whole pages
        self.memory = allocate_host(self.nbytes)
        flat = np.frombuffer(self.memory, np.uint8, count=count * payload)
        self._rows = flat.reshape(count, payload)
        self._elements: NDArray[Any] = flat.view(np.dtype((np.void, payload)))
        self._step = max(1, _PIECE_NBYTES // payload)

    def offsets(self, rows: Int64Array) -> Int64Array:
        """The byte offsets of rows in the memory."""
        return rows * self.payload

    def row(self, row: int) -> memoryview:
        """The bytes of one row."""
        return self.memory[row * self.payload : (row + 1) * self.payload]

    def copy_out(self, rows: Int64Array, places: HostPlaces) -> None:
        """Copy rows to a caller's memory."""
        packed = places.packed()
        if packed is not None:
            np.take(self._rows, rows, axis=0, out=packed, mode="clip")
            return
        target, offsets = places.elements()
        for start in range(0, len(rows), self._step):
            piece = slice(start, start + self._step)
            target[offsets[piece]] = self._elements[rows[piece]]

    def copy_in(self, rows: Int64Array, places: HostPlaces) -> None:
        """Copy a caller's memory to rows, each named once."""
        packed = places.packed()
        if packed is not None:
            self._rows[rows] = packed
            return
        source, offsets = places.elements()
        for start in range(0, len(rows), self._step):
            piece = slice(start, start + self._step)
            self._elements[rows[piece]] = source[offsets[piece]]

    def copy_within(self, sources: Int64Array, targets: Int64Array) -> None:
        """Copy rows to other rows, none of which is a source."""
        for start in range(0, len(sources), self._step):
            piece = slice(start, start + self._step)
            self._elements[targets[piece]] = self._elements[sources[piece]]
