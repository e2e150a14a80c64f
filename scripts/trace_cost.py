"""Prints what a span costs a transfer: .venv/bin/python scripts/trace_cost.py

Reads of one group that is in the RAM of a cascade, the cheapest transfers there are: on the backend itself, traced
while no provider is set, traced and not sampled, traced and recorded. Alternating rounds; medians of the time for one,
and of what it is above the first way.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from aio_kv import CascadeBackend, GroupLayout
from aio_kv.testing import MemoryBackend
from aio_kv.tracing import TracedBackend

ROUNDS, TRANSFERS = 21, 2000
LAYOUT = GroupLayout(num_layers=1, num_blocks=4, num_kv_heads=1, block_size=16, head_dim=128, itemsize=2)


async def microseconds(backend: CascadeBackend | TracedBackend, target: bytearray) -> float:
    """The time of one awaited read."""
    started = time.perf_counter()
    for _ in range(TRANSFERS):
        await backend.read_groups([1], target)
    return (time.perf_counter() - started) / TRANSFERS * 1e6


async def main() -> None:
    """Measure and print."""
    async with CascadeBackend(MemoryBackend(LAYOUT), capacity_bytes=1 << 20) as cascade:
        await cascade.write_groups([1], bytes(LAYOUT.payload_nbytes))
        ways = {
            "not traced": cascade,
            "no provider": TracedBackend(cascade),
            "not sampled": TracedBackend(cascade, tracer_provider=TracerProvider(sampler=ALWAYS_OFF)),
            "recorded": TracedBackend(cascade, tracer_provider=TracerProvider()),
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        target = bytearray(LAYOUT.payload_nbytes)
        for _ in range(ROUNDS):
            for name, backend in ways.items():
                times[name].append(await microseconds(backend, target))
    for name, found in times.items():
        extra = statistics.median(a - b for a, b in zip(found, times["not traced"], strict=True))
        sys.stdout.write(f"{name:12} {statistics.median(found):6.2f} us   {extra:+6.2f} us\n")


if __name__ == "__main__":
    asyncio.run(main())
