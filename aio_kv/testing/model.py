"""What the checks of the conformance kit stand on: layouts, expected contents, and how a failure is told."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from aio_kv.integers import Int64Array
from aio_kv.layout import GroupLayout, KvKind
from aio_kv.protocols import AsyncStorageBackend, StorageBackend

__all__ = ["ConformanceError", "MakeBackend", "MakeSyncBackend"]

MakeBackend: TypeAlias = Callable[
    [GroupLayout], "AbstractAsyncContextManager[AsyncStorageBackend] | Awaitable[AsyncStorageBackend]"
]
MakeSyncBackend: TypeAlias = Callable[[GroupLayout], StorageBackend]
Bytes: TypeAlias = NDArray[np.uint8]

# A payload that is a multiple of everything; one that is a multiple of nothing; one that direct I/O takes in units of
# 512 bytes only, with one kind; and one above the largest single I/O that any backend should use.
PLAIN = GroupLayout(2, 6, 2, 16, 64, 4)
PADDED = GroupLayout(2, 5, 3, 3, 7, 5)
FINE = GroupLayout(2, 7, 1, 3, 128, 4, kinds=(KvKind.LATENT,), alignment=512)
LARGE = GroupLayout(1, 2, 1, 1, 530_001, 1)
LAYOUTS = (PLAIN, PADDED, FINE)


class ConformanceError(AssertionError):
    """A backend does not do what the contract says. `check` is the name of the check that found it."""

    check = ""


def require(condition: object, what: str) -> None:
    """Raise `ConformanceError` saying `what` is wrong unless `condition` holds."""
    if not condition:
        raise ConformanceError(what)


def refuses(
    error: type[Exception], what: str, call: Callable[..., object], *arguments: Any, **options: Any
) -> None:
    """Require that a call raises `error`, and that it does so by itself and not when its result is awaited."""
    try:
        call(*arguments, **options)
    except error:
        return
    except Exception as other:
        raise ConformanceError(f"{what}: raised {other!r}, must raise {error.__name__}") from other
    raise ConformanceError(f"{what}: was accepted, must raise {error.__name__}")


async def refuses_async(
    error: type[Exception], what: str, call: Callable[..., Awaitable[object]], *arguments: Any
) -> None:
    """The same for a coroutine function."""
    try:
        await call(*arguments)
    except error:
        return
    except Exception as other:
        raise ConformanceError(f"{what}: raised {other!r}, must raise {error.__name__}") from other
    raise ConformanceError(f"{what}: was accepted, must raise {error.__name__}")


@asynccontextmanager
async def opened(make: MakeBackend, layout: GroupLayout) -> AsyncIterator[AsyncStorageBackend]:
    """Open a backend by whichever way `make` offers, and close it at the end."""
    made: Any = make(layout)
    if hasattr(made, "__aenter__"):
        async with made as backend:
            yield backend
        return
    require(inspect.isawaitable(made), "make(layout) must return an async context manager or an awaitable")
    backend = await made
    try:
        yield backend
    finally:
        await backend.aclose()


def every_id(layout: GroupLayout) -> Int64Array:
    """All groups of a layout, in file order."""
    return np.arange(layout.num_groups, dtype=np.int64)


def shuffled(layout: GroupLayout, seed: int = 0) -> Int64Array:
    """All groups of a layout, in an order that repeats itself for each seed."""
    return np.random.default_rng(seed).permutation(every_id(layout))


def payloads(layout: GroupLayout, count: int, seed: int) -> Bytes:
    """Random contents for `count` groups, one row each: the same for each seed, and none of them zero."""
    rows: Bytes = np.random.default_rng(seed).integers(1, 256, (count, layout.payload_nbytes), dtype=np.uint8)
    return rows


def empty(layout: GroupLayout, count: int) -> Bytes:
    """Memory for `count` packed groups, filled with a pattern that no read may leave behind."""
    return np.full((count, layout.payload_nbytes), 0xA5, dtype=np.uint8)


def require_same(found: object, expected: object, what: str) -> None:
    """Require equal bytes, and name the first row and byte that differ."""
    left, right = _as_bytes(found), _as_bytes(expected)
    require(left.size == right.size, f"{what}: {left.size} bytes, must be {right.size}")
    differing = np.flatnonzero(left != right)
    if differing.size:
        first = int(differing[0])
        raise ConformanceError(
            f"{what}: {differing.size} of {left.size} bytes are wrong; byte {first} is {left[first]:#04x}, "
            f"must be {right[first]:#04x}"
        )


def _as_bytes(buffer: Any) -> Bytes:
    if isinstance(buffer, np.ndarray):
        return np.ascontiguousarray(buffer).reshape(-1).view(np.uint8)
    return np.frombuffer(buffer, dtype=np.uint8)


async def fill(backend: AsyncStorageBackend, seed: int = 1) -> Bytes:
    """Write every group; returns what must be read, one row per group in file order."""
    rows = payloads(backend.layout, backend.layout.num_groups, seed)
    await backend.write_groups(every_id(backend.layout), rows)
    return rows


async def require_contents(backend: AsyncStorageBackend, expected: Bytes, what: str) -> None:
    """Read every group and compare."""
    found = empty(backend.layout, backend.layout.num_groups)
    await backend.read_groups(every_id(backend.layout), found)
    require_same(found, expected, what)
