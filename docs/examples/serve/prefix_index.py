"""Which blocks of tokens are kept, and in which slot of the layout: a bounded index in memory, and a file for restarts.

A block is known by its *chained digest*: of the block before it, and of its own tokens. Two prompts share a block only
where everything before it is the same as well, which is what makes its keys and values the same. The first digest of
a chain is that of the *namespace*, which says what else the values depend on: model, element type, layout.

The index file is taken away when it is read, and written again at an orderly end, after the data is durable. After a
crash there is none, and the cache starts empty: that costs time, where an old file would name slots that hold other
blocks by now, and cost right answers.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

__all__ = ["PrefixIndex", "digests_of"]

_FORMAT = "aio-kv example prefix index 1"


def digests_of(tokens: Sequence[int], *, block_size: int, namespace: str) -> list[str]:
    """Return the chained digest of every block of `tokens`; the last block may be a part of one."""
    numbers = np.asarray(tokens, dtype="<i4")
    parent = hashlib.blake2b(namespace.encode(), digest_size=16).digest()
    digests = []
    for first in range(0, len(numbers), block_size):
        block = numbers[first : first + block_size]
        parent = hashlib.blake2b(parent + block.tobytes(), digest_size=16).digest()
        digests.append(parent.hex())
    return digests


class PrefixIndex:
    """Digests and their slots, at most `capacity` of them; the one that was used longest ago goes first.

    A chain is touched from its end to its head, so that its end goes first: a block without those before it is useless.
    Slots that are leased, or reserved and not published yet, are not given to others. For one thread, without I/O
    except in `open` and `write`.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._slots: OrderedDict[str, int] = OrderedDict()  # oldest first
        self._free = list(
            range(capacity - 1, -1, -1)
        )  # lowest last, where it is taken: neighbours on disk merge
        self._leases: Counter[int] = Counter()
        self._reserved: set[str] = set()

    def __len__(self) -> int:
        return len(self._slots)

    @classmethod
    def open(cls, path: Path, capacity: int) -> PrefixIndex:
        """Return the index that `path` holds, and remove the file; an empty index where there is none, or another."""
        index = cls(capacity)
        try:
            found = json.loads(path.read_text())
        except (FileNotFoundError, ValueError):
            found = None
        path.unlink(missing_ok=True)
        _sync_directory(path.parent)
        if isinstance(found, dict) and found.get("format") == _FORMAT and found.get("capacity") == capacity:
            index._slots.update(found["slots"])
            taken = set(index._slots.values())
            index._free = [slot for slot in index._free if slot not in taken]
        return index

    def write(self, path: Path) -> None:
        """Make `path` hold the index, all of it or not at all. The slots' data must be durable by now."""
        text = json.dumps({"format": _FORMAT, "capacity": self._capacity, "slots": dict(self._slots)})
        draft = path.with_suffix(".draft")
        with open(draft, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)
        _sync_directory(path.parent)

    @contextmanager
    def lease(self, digests: Sequence[str]) -> Iterator[list[int]]:
        """Give the slots of the longest kept prefix of a chain; they keep their content while the block runs."""
        slots = []
        for digest in digests:
            if digest not in self._slots:
                break
            slots.append(self._slots[digest])
        self._touch(digests[: len(slots)])
        self._leases.update(slots)
        try:
            yield slots
        finally:
            for slot in slots:
                self._leases[slot] -= 1

    def reserve(self, digests: Sequence[str]) -> dict[str, int]:
        """Give a slot to each digest that has none, as far as slots can be had without the chain's own; in order.

        Each must be handed to `publish` when its data is written, or to `give_up`.
        """
        chain, found = set(digests), dict[str, int]()
        for digest in digests:
            if digest in self._slots:
                continue
            if digest in self._reserved:
                break  # Someone else is writing it. What comes after it would have no head if that fails.
            slot = self._free.pop() if self._free else self._evict(chain)
            if slot is None:
                break
            found[digest] = slot
        self._reserved.update(found)
        return found

    def publish(self, reserved: dict[str, int], chain: Sequence[str]) -> None:
        """Make reserved slots known, now that their data is written; touches the chain that they belong to."""
        self._reserved.difference_update(reserved)
        self._slots.update(reserved)
        self._touch([digest for digest in chain if digest in self._slots])

    def give_up(self, reserved: dict[str, int]) -> None:
        """Take reserved slots back whose data could not be written."""
        for digest, slot in reversed(reserved.items()):
            self._reserved.remove(digest)
            self._free.append(slot)

    def forget(self, digests: Sequence[str]) -> None:
        """Drop digests whose data could not be read. Their slots are not used again before the next start."""
        for digest in digests:
            self._slots.pop(digest, None)

    def _touch(self, digests: Sequence[str]) -> None:
        for digest in reversed(digests):
            self._slots.move_to_end(digest)

    def _evict(self, chain: set[str]) -> int | None:
        for digest, slot in self._slots.items():
            if digest not in chain and not self._leases[slot]:
                del self._slots[digest]
                return slot
        return None


def _sync_directory(path: Path) -> None:
    """Make creations and removals in a directory durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
