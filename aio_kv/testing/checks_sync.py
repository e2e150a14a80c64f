"""Checks of the conformance kit for synchronous backends (`StorageBackend`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from aio_kv.errors import ClosedError, LayoutError
from aio_kv.layout import GroupKey, GroupLayout
from aio_kv.protocols import Read, StorageBackend
from aio_kv.testing.checks_refusals import wrong_keys, wrong_sources, wrong_targets
from aio_kv.testing.model import (
    LARGE,
    LAYOUTS,
    PADDED,
    PLAIN,
    Bytes,
    MakeSyncBackend,
    empty,
    payloads,
    refuses,
    require,
    require_same,
    shuffled,
)


@contextmanager
def _opened(make: MakeSyncBackend, layout: GroupLayout) -> Iterator[StorageBackend]:
    backend = make(layout)
    try:
        yield backend
    finally:
        backend.close()


def _fill(backend: StorageBackend, seed: int = 1) -> Bytes:
    layout = backend.layout
    rows = payloads(layout, layout.num_groups, seed)
    for group in shuffled(layout).tolist():
        backend.write_from_host(layout.key(group), rows[group])
    return rows


def _require_contents(backend: StorageBackend, expected: Bytes, what: str) -> None:
    layout = backend.layout
    found = empty(layout, layout.num_groups)
    backend.read([Read(layout.key(group), found[group]) for group in shuffled(layout, 5).tolist()])
    require_same(found, expected, what)


def sync_layout_is_the_given_one(make: MakeSyncBackend) -> None:
    """`backend.layout` equals what the backend was made with."""
    with _opened(make, PADDED) as backend:
        require(backend.layout == PADDED, f"layout is {backend.layout}, must be {PADDED}")


def sync_round_trip(make: MakeSyncBackend) -> None:
    """Groups that were written are read, on every layout, one at a time and many."""
    for layout in (*LAYOUTS, LARGE):
        with _opened(make, layout) as backend:
            rows = _fill(backend)
            _require_contents(backend, rows, f"{layout}")
            rows[1] = payloads(layout, 1, 2)
            backend.write_from_host(layout.key(1), rows[1])
            _require_contents(backend, rows, f"after overwriting a group, {layout}")


def sync_round_trip_by_blocks(make: MakeSyncBackend) -> None:
    """A block is its groups, packed in (kind, head) order without padding."""
    for layout in LAYOUTS:
        with _opened(make, layout) as backend:
            count = layout.groups_per_block
            rows = payloads(layout, count, 3)
            backend.write_block(1, 2, rows)
            keys = [
                GroupKey(1, 2, head, kind) for kind in layout.kinds for head in range(layout.num_kv_heads)
            ]
            found = empty(layout, count)
            backend.read([Read(key, found[i]) for i, key in enumerate(keys)])
            require_same(found, rows, f"groups of a written block, {layout}")
            backend.write_from_host(keys[0], rows[-1])
            backend.read_block(1, 2, found)
            require_same(found[0], rows[-1], "a group that was written into a block")
            require_same(found[1:], rows[1:], "the rest of that block")


def sync_never_written_reads_as_zeros(make: MakeSyncBackend) -> None:
    """Groups that nobody wrote, also beside written ones, are zeros."""
    for layout in LAYOUTS:
        with _opened(make, layout) as backend:
            expected = np.zeros((layout.num_groups, layout.payload_nbytes), dtype=np.uint8)
            _require_contents(backend, expected, "before any write")
            expected[1] = payloads(layout, 1, 4)
            backend.write_from_host(layout.key(1), expected[1])
            _require_contents(backend, expected, "beside a written group")


def sync_twice_in_a_read(make: MakeSyncBackend) -> None:
    """A group named twice in one read arrives in both places; an empty read is nothing."""
    with _opened(make, PADDED) as backend:
        rows = _fill(backend)
        found = empty(PADDED, 3)
        backend.read([Read(PADDED.key(group), found[i]) for i, group in enumerate((7, 2, 7))])
        require_same(found, rows[[7, 2, 7]], "a group read twice")
        backend.read([])


def sync_memory_is_checked(make: MakeSyncBackend) -> None:
    """Wrong keys and memory are a `LayoutError` before anything is read or written."""
    with _opened(make, PLAIN) as backend:
        rows = _fill(backend)
        right, good = PLAIN.key(0), empty(PLAIN, 1)
        for what, key in wrong_keys().items():
            refuses(LayoutError, f"write with {what}", backend.write_from_host, key, rows[3])
            reads = [Read(right, good), Read(key, bytearray(PLAIN.payload_nbytes))]
            refuses(LayoutError, f"read with {what}", backend.read, reads)
        for what, memory in wrong_sources().items():
            refuses(LayoutError, f"write of {what}", backend.write_from_host, right, memory)
            refuses(LayoutError, f"write_block of {what}", backend.write_block, 0, 0, memory)
        for what, memory in wrong_targets().items():
            reads = [Read(right, good), Read(right, memory)]
            refuses(LayoutError, f"read into {what}", backend.read, reads)
            refuses(LayoutError, f"read_block into {what}", backend.read_block, 0, 0, memory)
        require_same(good, empty(PLAIN, 1), "the good destination beside a wrong one")
        _require_contents(backend, rows, "after refused calls")


def sync_use_after_close(make: MakeSyncBackend) -> None:
    """Every call on a closed backend is a `ClosedError`; closing again is not."""
    with _opened(make, PLAIN) as backend:
        backend.close()
        target = bytearray(PLAIN.payload_nbytes)
        block = bytearray(PLAIN.groups_per_block * PLAIN.payload_nbytes)
        refuses(ClosedError, "read when closed", backend.read, [Read(PLAIN.key(0), target)])
        refuses(ClosedError, "write when closed", backend.write_from_host, PLAIN.key(0), target)
        refuses(ClosedError, "read_block when closed", backend.read_block, 0, 0, block)
        refuses(ClosedError, "write_block when closed", backend.write_block, 0, 0, block)
        backend.close()


CHECKS = (
    sync_layout_is_the_given_one,
    sync_round_trip,
    sync_round_trip_by_blocks,
    sync_never_written_reads_as_zeros,
    sync_twice_in_a_read,
    sync_memory_is_checked,
    sync_use_after_close,
)
