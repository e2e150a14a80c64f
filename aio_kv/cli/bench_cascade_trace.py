"""Hit ratios of the eviction policies on a trace of requests, in the public Mooncake form: one JSON object a line.

Of each line `hash_ids` counts: the blocks of the request's prefix, in order. A hit counts only inside the leading run
of hits of its request, since a block behind a missing one is of no use to anybody. Every block is used in order, and
a missing one comes in.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from aio_kv.cascade import SlotCache
from aio_kv.errors import LayoutError, storage_error
from aio_kv.integers import Int64Array
from aio_kv.policy import POLICY_NAMES

__all__ = ["CAPACITIES", "TraceRow", "hit_ratio", "read_trace", "replay_trace"]

CAPACITIES = (1_000, 3_000, 10_000, 30_000, 50_000)
_DIGITS = 6


@dataclass(frozen=True, slots=True)
class Trace:
    """The blocks of each request, numbered from 0 in the order of their first use."""

    name: str
    requests: tuple[Int64Array, ...]
    distinct: int

    @property
    def references(self) -> int:
        """How many blocks all requests name."""
        return sum(map(len, self.requests))


@dataclass(frozen=True, slots=True)
class TraceRow:
    """The hit ratio of one policy at one capacity: hits in leading runs by blocks named, a fraction."""

    trace: str
    policy: str
    blocks: int
    value: float
    requests: int
    references: int
    name: str = "trace_hit_ratio"
    unit: str = "fraction"


def read_trace(path: str) -> Trace:
    """Read a trace file. Raises `StorageError` if it cannot be read, `LayoutError` naming the first wrong line."""
    numbers: dict[Any, int] = {}
    requests: list[Int64Array] = []
    try:
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    blocks = _blocks_of(line, f"{path}, line {number}")
                    found = [numbers.setdefault(block, len(numbers)) for block in blocks]
                    requests.append(np.array(found, np.int64))
    except OSError as error:
        raise storage_error(
            error.errno or 5, action="read", file=path, file_offset=None, nbytes=None
        ) from error
    if not numbers:
        raise LayoutError(f"--trace {path}: there is no request in it")
    return Trace(Path(path).name, tuple(requests), len(numbers))


def _blocks_of(line: str, where: str) -> list[Any]:
    try:
        blocks = json.loads(line)["hash_ids"]
    except (ValueError, KeyError, TypeError):
        blocks = None
    if not isinstance(blocks, list) or not all(isinstance(block, int | str) for block in blocks):
        raise LayoutError(f'--trace {where}: must be a JSON object whose "hash_ids" is a list of block ids')
    return list(dict.fromkeys(blocks))


def hit_ratio(trace: Trace, policy: str, blocks: int) -> float:
    """Replay a trace through a `SlotCache` of `blocks` slots."""
    cache = SlotCache(blocks, trace.distinct, policy=policy)
    hits = 0
    for ids in trace.requests:
        hits += _leading_hits(cache, ids)
    return hits / trace.references


def _leading_hits(cache: SlotCache, ids: Int64Array) -> int:
    """Use the blocks of one request in order, runs of hits and runs of misses in turn."""
    leading, start = 0, 0
    while start < len(ids):
        plan = cache.plan_read(ids[start:])
        is_hit = bool(plan.is_hit[0])
        changes = np.flatnonzero(plan.is_hit != is_hit)
        run = int(changes[0]) if len(changes) else len(plan.is_hit)
        if is_hit:
            cache.touch(cache.slots_of(plan.rows[:run]))
            leading += run if start == 0 else 0
        else:
            fill = cache.plan_promote(ids[start : start + run])
            landed = fill.rows[fill.rows >= 0]
            cache.commit(fill, landed, is_dirty=False)
            run = len(landed)  # one request may name more than the cache holds
        start += run
    return leading


def replay_trace(path: str, say: Callable[[str], None]) -> list[TraceRow]:
    """Every policy at every capacity, one row each; `say` is told what is going on."""
    trace = read_trace(path)
    rows = []
    for blocks in CAPACITIES:
        for policy in POLICY_NAMES:
            say(f"{trace.name}: {policy}, {blocks} blocks")
            value = round(hit_ratio(trace, policy, blocks), _DIGITS)
            rows.append(TraceRow(trace.name, policy, blocks, value, len(trace.requests), trace.references))
    return rows
