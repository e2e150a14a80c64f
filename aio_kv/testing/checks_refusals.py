"""Checks of the conformance kit: wrong arguments are refused by the call itself, and leave the backend usable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import anyio
import numpy as np

from aio_kv.errors import AioKvError, DeadlineError, LayoutError
from aio_kv.layout import GroupKey, KvKind
from aio_kv.protocols import AsyncStorageBackend, Read, Scatter, Write
from aio_kv.testing.model import (
    PADDED,
    PLAIN,
    ConformanceError,
    MakeBackend,
    empty,
    every_id,
    fill,
    opened,
    payloads,
    refuses,
    require,
    require_contents,
    require_same,
)

PAYLOAD = PLAIN.payload_nbytes


def wrong_keys() -> dict[str, Any]:
    """Keys that name no group of PLAIN."""
    return {
        "a layer too many": GroupKey(2, 0, 0, KvKind.K),
        "a block too many": GroupKey(0, 6, 0, KvKind.K),
        "a head too many": GroupKey(0, 0, 2, KvKind.K),
        "a kind of another layout": GroupKey(0, 0, 0, KvKind.LATENT),
        "a negative layer": GroupKey(-1, 0, 0, KvKind.K),
        "a fractional block": GroupKey(0, 1.0, 0, KvKind.K),  # type: ignore[arg-type]
        "a boolean head": GroupKey(0, 0, True, KvKind.K),
        "a kind in words": GroupKey(0, 0, 0, "k"),  # type: ignore[arg-type]
        "a block of 2**70": GroupKey(0, 2**70, 0, KvKind.V),
        "a number": 3,
        "a tuple": (0, 0, 0, KvKind.K),
        "nothing": None,
    }


def wrong_ids() -> dict[str, Any]:
    """Arguments that are not numbers of groups of PLAIN; each would be one group."""
    return {
        "a number too large": [PLAIN.num_groups],
        "a negative number": [-1],
        "a negative number in an array": np.array([-1]),
        "a number of 2**64": [2**64],
        "a wrapping unsigned number": np.array([2**64 - 1], dtype=np.uint64),
        "fractions": [1.0],
        "an array of fractions": np.array([1.0]),
        "booleans": [True],
        "text": "1",
        "keys": [PLAIN.key(0)],
        "two dimensions": np.zeros((1, 1), dtype=np.int64),
        "nothing": None,
    }


def wrong_targets() -> dict[str, Any]:
    """Arguments that are not writable, contiguous memory of one payload."""
    return {
        "one byte too few": bytearray(PAYLOAD - 1),
        "one byte too many": bytearray(PAYLOAD + 1),
        "no bytes": bytearray(),
        "two payloads": bytearray(2 * PAYLOAD),
        "read-only bytes": bytes(PAYLOAD),
        "a read-only view": memoryview(bytearray(PAYLOAD)).toreadonly(),
        "every other byte": np.zeros(2 * PAYLOAD, dtype=np.uint8)[::2],
        "columns": np.zeros((PAYLOAD, 2), dtype=np.uint8)[:, 0],
        "backwards": np.zeros(PAYLOAD, dtype=np.uint8)[::-1],
        "Python objects": np.zeros(PAYLOAD // 8, dtype=object),
        "a list": [0] * PAYLOAD,
        "text": "x" * PAYLOAD,
        "an address": 1 << 20,
        "nothing": None,
    }


def wrong_sources() -> dict[str, Any]:
    """Arguments that are not contiguous memory of one payload."""
    read_only = ("read-only bytes", "a read-only view")
    return {what: memory for what, memory in wrong_targets().items() if what not in read_only}


Calls: TypeAlias = Callable[[AsyncStorageBackend, Any], dict[str, Callable[[], object]]]


async def _refuse_all(make: MakeBackend, cases: dict[str, Any], calls: Calls) -> None:
    """Every call with every case is a `LayoutError`; nothing was written and the backend goes on working."""
    async with opened(make, PLAIN) as backend:
        rows = await fill(backend)
        for what, case in cases.items():
            for name, call in calls(backend, case).items():
                refuses(LayoutError, f"{name} with {what}", call)
        await require_contents(backend, rows, "after refused calls")
        await fill(backend, seed=2)


async def keys_are_checked(make: MakeBackend) -> None:
    """Each wrong key is a `LayoutError`, alone and behind a right one."""
    right = PLAIN.key(0)

    def calls(backend: AsyncStorageBackend, key: Any) -> dict[str, Callable[[], object]]:
        return {
            "read": lambda: backend.read([Read(key, bytearray(PAYLOAD))]),
            "read of two": lambda: backend.read(
                [Read(right, bytearray(PAYLOAD)), Read(key, bytearray(PAYLOAD))]
            ),
            "write": lambda: backend.write([Write(key, bytes(PAYLOAD))]),
            "write of two": lambda: backend.write([Write(right, bytes(PAYLOAD)), Write(key, bytes(PAYLOAD))]),
        }

    await _refuse_all(make, wrong_keys(), calls)


async def ids_are_checked(make: MakeBackend) -> None:
    """Group numbers that are out of range, or no integers, are a `LayoutError`."""

    def calls(backend: AsyncStorageBackend, ids: Any) -> dict[str, Callable[[], object]]:
        return {
            "read_groups": lambda: backend.read_groups(ids, bytearray(PAYLOAD)),
            "write_groups": lambda: backend.write_groups(ids, bytes(PAYLOAD)),
            "read_groups scattered": lambda: backend.read_groups(
                ids, Scatter(bytearray(PAYLOAD), np.array([0]))
            ),
        }

    await _refuse_all(make, wrong_ids(), calls)


async def destinations_are_checked(make: MakeBackend) -> None:
    """Memory of the wrong length, read-only or not contiguous is a `LayoutError`."""
    key = PLAIN.key(1)

    def calls(backend: AsyncStorageBackend, memory: Any) -> dict[str, Callable[[], object]]:
        return {
            "read": lambda: backend.read([Read(key, memory)]),
            "read_groups": lambda: backend.read_groups([1], memory),
        }

    await _refuse_all(make, wrong_targets(), calls)


async def sources_are_checked(make: MakeBackend) -> None:
    """Memory of the wrong length or not contiguous is a `LayoutError`; read-only memory is a good source."""
    key = PLAIN.key(1)

    def calls(backend: AsyncStorageBackend, memory: Any) -> dict[str, Callable[[], object]]:
        return {
            "write": lambda: backend.write([Write(key, memory)]),
            "write_groups": lambda: backend.write_groups([1], memory),
        }

    await _refuse_all(make, wrong_sources(), calls)


async def scatters_are_checked(make: MakeBackend) -> None:
    """Offsets that are too few, too many, or lead outside of the memory are a `LayoutError`."""
    memory = bytearray(3 * PAYLOAD)
    cases = {
        "too few offsets": [0],
        "too many offsets": [0, PAYLOAD, 2 * PAYLOAD],
        "a byte past the end": [0, 2 * PAYLOAD + 1],
        "far past the end": [0, 2**62],
    }

    def calls(backend: AsyncStorageBackend, offsets: Any) -> dict[str, Callable[[], object]]:
        return {
            "read_groups": lambda: backend.read_groups([1, 2], Scatter(memory, offsets)),
            "write_groups": lambda: backend.write_groups([1, 2], Scatter(memory, offsets)),
        }

    await _refuse_all(make, cases, calls)


async def blocks_are_checked(make: MakeBackend) -> None:
    """Layers and blocks that do not exist, and memory that is not a whole block, are a `LayoutError`."""
    nbytes = PLAIN.groups_per_block * PAYLOAD
    cases = {
        "a layer too many": (2, 0, nbytes),
        "a block too many": (0, 6, nbytes),
        "a negative block": (0, -1, nbytes),
        "a fractional layer": (1.0, 0, nbytes),
        "a byte too few": (0, 0, nbytes - 1),
        "a group too many": (0, 0, nbytes + PAYLOAD),
    }

    def calls(backend: AsyncStorageBackend, case: Any) -> dict[str, Callable[[], object]]:
        layer, block, length = case
        return {
            "read_block": lambda: backend.read_block(layer, block, bytearray(length)),
            "write_block": lambda: backend.write_block(layer, block, bytes(length)),
        }

    await _refuse_all(make, cases, calls)


async def requests_are_checked(make: MakeBackend) -> None:
    """A `read` takes `Read` only and a `write` takes `Write` only."""
    read, write = Read(PLAIN.key(0), bytearray(PAYLOAD)), Write(PLAIN.key(0), bytes(PAYLOAD))
    async with opened(make, PLAIN) as backend:
        refuses(LayoutError, "read of a Write", backend.read, [write])
        refuses(LayoutError, "write of a Read", backend.write, [read])
        refuses(LayoutError, "read of a key", backend.read, [PLAIN.key(0)])
        await fill(backend)


async def options_are_checked(make: MakeBackend) -> None:
    """A priority that is none, and a deadline that is no time, are a `LayoutError`."""
    options: list[dict[str, Any]] = [
        {"priority": 0},
        {"priority": "DEMAND"},
        {"priority": None},
        {"deadline": float("nan")},
        {"deadline": "soon"},
        {"deadline": True},
    ]
    async with opened(make, PLAIN) as backend:
        await fill(backend)
        for option in options:
            target = bytearray(PAYLOAD)
            refuses(LayoutError, f"read with {option}", backend.read_groups, [0], target, **option)
            refuses(LayoutError, f"write with {option}", backend.write_groups, [0], target, **option)
        await fill(backend)


async def twice_in_a_write_is_refused(make: MakeBackend) -> None:
    """A group twice in one write is a `LayoutError`, and nothing of it is written."""
    for layout in (PLAIN, PADDED):
        async with opened(make, layout) as backend:
            rows = await fill(backend)
            other = payloads(layout, 3, 60)
            refuses(LayoutError, "a group twice in write_groups", backend.write_groups, [4, 2, 4], other)
            writes = [Write(layout.key(group), other[i]) for i, group in enumerate((5, 6, 5))]
            refuses(LayoutError, "a group twice in write", backend.write, writes)
            await require_contents(backend, rows, "after refused writes")


async def deadline_in_the_past(make: MakeBackend) -> None:
    """What has not begun by its deadline fails with a `DeadlineError` as cause, and its memory stays as it was."""
    async with opened(make, PLAIN) as backend:
        rows = await fill(backend)
        for deadline in (anyio.current_time() - 1, float("-inf")):
            target = empty(PLAIN, 3)
            transfer = backend.read_groups([1, 2, 3], target, deadline=deadline)
            await _require_late(transfer, requests=3)
            require_same(target, empty(PLAIN, 3), "the destination of a read that did not begin")
            write = backend.write_groups([1, 2, 3], payloads(PLAIN, 3, 61), deadline=deadline)
            await _require_late(write, requests=3)
            await require_contents(backend, rows, "after a write that did not begin")


async def _require_late(transfer: Any, *, requests: int) -> None:
    report = await transfer.outcome()
    require(report.outcomes.tolist() == [3] * requests, f"outcomes are {report.outcomes}, must be LATE")
    require((report.loaded_prefix, report.nbytes) == (0, 0), "a late transfer has moved nothing")
    require(all(isinstance(error, DeadlineError) for error in report.errors), f"errors are {report.errors}")
    require(len(report.errors) > 0, "a late transfer reports errors")
    try:
        await transfer
    except AioKvError as error:
        require(isinstance(error.__cause__, DeadlineError), f"the cause of {error!r} must be a DeadlineError")
        require(getattr(error, "report", None) is not None, "the error must carry the report")
        return
    raise ConformanceError("awaiting a late transfer must raise")


async def deadline_in_time(make: MakeBackend) -> None:
    """A deadline that is kept changes nothing."""
    async with opened(make, PLAIN) as backend:
        rows = payloads(PLAIN, PLAIN.num_groups, 62)
        await backend.write_groups(every_id(PLAIN), rows, deadline=anyio.current_time() + 60)
        for deadline in (anyio.current_time() + 60, float("inf"), None):
            found = empty(PLAIN, PLAIN.num_groups)
            await backend.read_groups(every_id(PLAIN), found, deadline=deadline)
            require_same(found, rows, f"read with deadline {deadline}")
            await backend.read([Read(PLAIN.key(3), found[0])], deadline=deadline)
            require_same(found[0], rows[3], f"one group with deadline {deadline}")


CHECKS = (
    keys_are_checked,
    ids_are_checked,
    destinations_are_checked,
    sources_are_checked,
    scatters_are_checked,
    blocks_are_checked,
    requests_are_checked,
    options_are_checked,
    twice_in_a_write_is_refused,
    deadline_in_the_past,
    deadline_in_time,
)
