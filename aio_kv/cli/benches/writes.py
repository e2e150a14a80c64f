"""Writes: the first one to a place that is only reserved, and the ones after that, which cost half as much."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Protocol

from aio_kv.cli.benches.backend_runs import BackendRun
from aio_kv.cli.benches.desk import Desk, name_of
from aio_kv.cli.benches.fio import FioRun
from aio_kv.cli.benches.measure import Contender, ContenderFailed, Sample, alternating
from aio_kv.cli.benches.results import Rounds
from aio_kv.cli.benches.thread_pool import PoolRun
from aio_kv.cli.benches.throughput import opened
from aio_kv.cli.benches.workload import Workload, layout_of
from aio_kv.files import LayerFiles
from aio_kv.open import open_backend

__all__ = ["bench_writes"]

_GROUPS_MAX = 16384  # of a file that is written once per contender and round
_QUICK_GROUPS_MAX = 2048
_FILE_NBYTES_MAX = 512 << 20
_SHARE = 0.5
_POOL_THREADS = 32


class _Writer(Contender, Protocol):
    async def drive_batches(self, count: int) -> Sample: ...


async def bench_writes(desk: Desk, block: int) -> None:
    """Every block of a fresh file once, in random order; then the same file again for a while."""
    first, again = Rounds(), Rounds()
    latest: dict[str, Contender] = {}
    kinds = ["aio_kv", "thread-pool", *(["fio"] if desk.has_fio else [])]
    for number in range(desk.settings.rounds):
        desk.say(f"writes of {name_of(block)}, round {number + 1} of {desk.settings.rounds}")
        for name in alternating(tuple(kinds), number):
            try:
                latest[name] = await _write_fresh_file(desk, name, block, first, again)
            except ContenderFailed as failure:
                desk.report.remark(f"no {name} row of writes of {name_of(block)}: {failure}")
                kinds.remove(name)
                for rounds in (first, again):
                    rounds.samples.pop(name, None)
        desk.advance()
    contenders = [latest[name] for name in kinds]
    for mode, rounds in (("first-write", first), ("rewrite", again)):
        desk.report.add_rows(contenders, rounds, mode=mode, block=block)
        prefix = mode.replace("-", "_")
        for label, other in (("fio", "fio"), ("threads", "thread-pool")):
            value = rounds.ratio("aio_kv", other, lambda sample: sample.gb_s)
            desk.report.add_ratio(f"{prefix}_vs_{label}", value, block=block)


async def _write_fresh_file(desk: Desk, name: str, block: int, first: Rounds, again: Rounds) -> Contender:
    groups = _QUICK_GROUPS_MAX if desk.settings.is_quick else _GROUPS_MAX
    nbytes = min(desk.settings.file_nbytes, groups * block, _FILE_NBYTES_MAX)
    seconds = desk.settings.seconds * _SHARE
    async with AsyncExitStack() as stack:
        path = stack.enter_context(desk.scratch_directory("fresh"))
        files = stack.enter_context(LayerFiles(path, layout_of(block, nbytes), create=True))
        workload = Workload(files.layout, device=desk.device)
        if name == "fio":
            fio = FioRun(files.path_of(0), workload, depth=workload.shape.depth, is_write=True)
            first.add(name, await fio.drive_once())
            again.add(name, await fio.drive(seconds))
            return fio
        writer: _Writer
        if name == "aio_kv":
            kv = await opened(stack, open_backend(files), workload, desk)
            writer = BackendRun(name, kv, workload, is_write=True)
        else:
            # No tuning: it would have written the file already. This width was never far from the best.
            fd = files.fd(0, direct=True)
            pool = PoolRun(fd, workload, width=_POOL_THREADS, is_chunked=True, is_write=True)
            writer = stack.enter_context(pool)
        first.add(name, await writer.drive_batches(len(workload.batches)))
        again.add(name, await writer.drive(seconds))
        return writer
