"""Batches of 4 KiB reads while another Python thread computes: who still gets the GIL often enough?"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager

from aio_kv.cli.benches.backend_runs import BackendRun
from aio_kv.cli.benches.desk import Desk
from aio_kv.cli.benches.measure import Contender
from aio_kv.cli.benches.thread_pool import PoolRun
from aio_kv.cli.benches.throughput import opened
from aio_kv.cli.benches.workload import Workload
from aio_kv.files import LayerFiles
from aio_kv.open import open_backend

__all__ = ["bench_busy_thread", "spinning_thread"]

_POOL_THREADS = 8


@contextmanager
def spinning_thread() -> Iterator[None]:
    """A thread that counts, in pure Python, for as long as the context is open."""
    is_over = threading.Event()

    def count() -> None:
        number = 0
        while not is_over.is_set():
            for _ in range(10_000):
                number += 1

    thread = threading.Thread(target=count, name="spinning")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


async def bench_busy_thread(desk: Desk, files: LayerFiles) -> None:
    """Our backend beside a thread pool that cuts each batch in chunks, which needs the GIL least of all pools.

    CPU time is left out of the rows: it would be that of the counting thread.
    """
    workload = Workload(files.layout, device=desk.device)
    async with AsyncExitStack() as stack:
        kv = await opened(stack, open_backend(files), workload, desk)
        pool = PoolRun(files.fd(0, direct=True), workload, width=_POOL_THREADS, is_chunked=True)
        contenders: list[Contender] = [BackendRun("aio_kv", kv, workload), stack.enter_context(pool)]
        with spinning_thread():
            rounds = await desk.run_rounds(contenders, "direct reads beside a busy Python thread")
    desk.report.add_rows(contenders, rounds, mode="busy-thread", block=workload.block, has_cpu=False)
    value = rounds.ratio("aio_kv", "thread-pool", lambda sample: sample.gb_s)
    desk.report.add_ratio("busy_thread_vs_threads", value)
