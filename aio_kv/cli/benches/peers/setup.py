"""What a peer has to offer, and what several of them share."""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import os
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from aio_kv.cli.benches.workload import Batch, Workload

__all__ = [
    "Part",
    "Peer",
    "Reader",
    "Setup",
    "all_of",
    "import_of",
    "in_parts",
    "opened_fd",
    "places_of",
    "version_of",
    "widths_of",
]

Part: TypeAlias = "list[tuple[memoryview, int]]"  # places, and the offsets that they are read from
_WIDTHS = (8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class Reader:
    """An open peer: `read(lane, batch)` puts the blocks of a batch into `places[lane]`, one after the other."""

    read: Callable[[int, Batch], Coroutine[Any, Any, None]]
    places: Sequence[Sequence[memoryview]]


class Setup(Protocol):
    """One way of setting a peer up."""

    @property
    def note(self) -> str:
        """The way, in words for a row."""

    @property
    def is_direct(self) -> bool:
        """Whether it reads past the page cache."""

    def opened(self, path: str, workload: Workload) -> AbstractAsyncContextManager[Reader]:
        """The peer on a file, until the end of the context; by then nothing is in flight any more.

        The memory is the workload's; a peer that reads into memory of its own says so in its note.
        """


class Peer(Protocol):
    """A library that others use for this."""

    @property
    def name(self) -> str:
        """What `--against` and rows call it."""

    @property
    def module(self) -> str:
        """What is imported."""

    @property
    def install(self) -> str:
        """The command that installs it."""

    @property
    def needs(self) -> str:
        """What it needs besides its package, as a hint for one that fails; may be empty."""

    def load(self) -> None:
        """Import it, and build what it builds on first use. Raises whatever it raises."""

    def setups(self, workload: Workload) -> Sequence[Setup]:
        """The ways to try: at most as many requests at the device as the workload's depth."""


def import_of(name: str) -> Any:
    """A module; these have no types that could be checked."""
    return importlib.import_module(name)


def version_of(module: str) -> str | None:
    """The version of the distribution that a module comes from; None where it is not known."""
    for distribution in importlib.metadata.packages_distributions().get(module, ()):
        return importlib.metadata.version(distribution)
    return None


def widths_of(depth: int) -> tuple[int, ...]:
    """How many threads a pool may have: usual numbers below the depth, and the depth."""
    return (*(width for width in _WIDTHS if width < depth), depth)


def places_of(workload: Workload) -> list[list[memoryview]]:
    """The workload's own memory, by lane and block."""
    return [[vector[0] for vector in vectors] for vectors in workload.vectors]


@contextmanager
def opened_fd(path: str, *, is_direct: bool) -> Iterator[int]:
    """A descriptor for positional reads."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if is_direct else 0))
    try:
        yield fd
    finally:
        os.close(fd)


async def in_parts(
    workload: Workload,
    lane: int,
    batch: Batch,
    *,
    width: int,
    read: Callable[[int, Part], Coroutine[Any, Any, None]],
) -> None:
    """Read a batch by the share of `width` workers that a lane has; `read(worker, part)` is the work of one of them."""
    workers = max(1, width // workload.shape.in_flight)
    pairs = [(vector[0], at) for vector, at in zip(workload.vectors[lane], batch.offsets, strict=True)]
    await all_of(read(lane * workers + i, pairs[i::workers]) for i in range(workers))


async def all_of(works: Iterable[Coroutine[Any, Any, object]]) -> None:
    """Await all to the end, then raise what the first to fail raised.

    Nothing is cancelled: reads use memory and descriptors, and caio never frees a ring with a cancelled read in it.
    """
    for result in await asyncio.gather(*works, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
