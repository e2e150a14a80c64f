"""A thousand lives of a backend: descriptors, threads and memory stay where they were."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
from backends import TMPFS, backend_on, open_files, require_kind, rung_of
from leaks import holdings
from loops import LOOPS, run_on
from slow_devices import PADDED

from aio_kv.engine import EngineStatistics

CYCLES = 1000
IDS = np.arange(0, 64, 3)


def resident_nbytes() -> int:
    """The memory of this process that is in RAM now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


async def live_once(kind: str, files: object, cycle: int) -> EngineStatistics:
    target = np.empty((len(IDS), PADDED.payload_nbytes), np.uint8)
    async with backend_on(kind, files, PADDED, staging_nbytes=2 << 20, queue_depth=8) as backend:  # type: ignore[arg-type]
        await backend.write_groups(IDS, np.full_like(target, cycle % 251))
        await backend.read_groups(IDS, target)
        assert (target == cycle % 251).all()
        backend.read_groups(IDS, target)  # which nobody awaits
    return backend.statistics().engine


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["uring", "threads", "python", "memory"])
def test_a_thousand_lives(kind: str, tmp_path: Path) -> None:
    """Each opens, writes, reads, leaves a read un-awaited and closes; after ten of them comes another loop."""
    if not Path("/proc/self/statm").exists():
        pytest.skip("memory is measured in /proc")
    chosen = require_kind(kind)
    folder = Path(TMPFS) if Path(TMPFS).is_dir() else tmp_path
    cycles = CYCLES if kind == "uring" else CYCLES // 4

    async def live(first: int, count: int, files: object) -> None:
        for cycle in range(first, first + count):
            engine = await live_once(kind, files, cycle)
            assert (engine.in_flight, engine.slots_leased) == (0, 0)

    with open_files(chosen, folder, PADDED) as files, rung_of(chosen):
        run_on("asyncio", lambda: live(0, 50, files))  # what is allocated once is allocated now
        gc.collect()
        before, memory = holdings(), resident_nbytes()
        for start in range(0, cycles, 10):
            run_on(LOOPS[start // 10 % len(LOOPS)], lambda first=start: live(first, 10, files))  # type: ignore[misc]
        gc.collect()
        assert holdings().beyond(before) == {}
        grown = resident_nbytes() - memory
    assert grown < 8 << 20, f"{grown >> 10} KiB more after {cycles} lives"
