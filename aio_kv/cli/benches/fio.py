"""fio, the reference, run at its best: io_uring, registered files and buffers, huge pages, batched submission.

fio's default buffers are on 4 KiB pages, which costs it up to two thirds of its bandwidth; glibc's malloc puts them on
huge pages when told to through a tunable. Without the alignment their first and last pages would still be small ones:
up to a fifth of the bandwidth, and at 4 KiB no huge page at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import shutil
from typing import Any

from aio_kv.cli.benches.measure import ContenderFailed, Sample, cpu_seconds
from aio_kv.cli.benches.workload import Workload
from aio_kv.errors import UnavailableError

__all__ = ["FioRun", "fio_version", "run_fio", "why_no_fio"]

_OPTIONS = (
    *(
        "--name=job",
        "--output-format=json",
        "--ioengine=io_uring",
        "--direct=1",
        "--thread",
        "--group_reporting",
    ),
    *(
        "--iomem=malloc",
        "--fixedbufs",
        "--registerfiles",
        "--randrepeat=0",
        "--fallocate=none",
        "--allow_file_create=0",
    ),
    *("--iodepth_batch_submit=32", "--iodepth_batch_complete_min=1", "--iodepth_batch_complete_max=64"),
)
_RAMP_MS_MAX = 300
_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


class FioRun:
    """fio on the same file, with the same block size; it uses one block of memory per unit of depth.

    Its CPU time is that of the job: user and system share as fio itself measures them, times the job's run time. The
    process as a whole uses about 0.2 s more, to start, which a run would have to last minutes to outweigh; that is
    kept apart in `process_cpu_seconds`.
    """

    name = "fio"
    latency_of = "request"
    is_on_loop = False

    def __init__(
        self, path: str, workload: Workload, *, depth: int, share: float = 1.0, is_write: bool = False
    ) -> None:
        self.note = f"io_uring, depth {depth}, huge pages"
        self.share = share
        self._block = workload.block
        self._rw = "--rw=randwrite" if is_write else "--rw=randread"
        self._options = (
            f"--filename={path}",
            f"--size={workload.layout.nbytes_per_layer}",
            f"--bs={workload.block}",
            f"--iodepth={depth}",
        )

    async def drive(self, seconds: float) -> Sample:
        """Run for `seconds`."""
        return await self._run(
            "--time_based", f"--runtime={max(1, round(seconds * 1000))}ms", "--norandommap"
        )

    async def drive_once(self) -> Sample:
        """Touch every block of the file once, in random order."""
        return await self._run()

    async def _run(self, *options: str) -> Sample:
        before = cpu_seconds(resource.RUSAGE_CHILDREN)
        try:
            report = await run_fio(self._rw, *self._options, *options)
        except UnavailableError as failure:  # a small locked-memory limit, say, which it may meet on any run
            raise ContenderFailed(str(failure)) from failure
        cpu = cpu_seconds(resource.RUSAGE_CHILDREN) - before
        job = report["jobs"][0]
        side = job["write" if self._rw == "--rw=randwrite" else "read"]
        percentiles = side["clat_ns"].get("percentile", {})
        seconds = side["io_bytes"] / side["bw_bytes"]
        return Sample(
            requests=side["total_ios"],
            nbytes=side["io_bytes"],
            seconds=seconds,
            cpu_seconds=(job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000,
            p50_us=_microseconds(percentiles.get("50.000000")),
            p99_us=_microseconds(percentiles.get("99.000000")),
            process_cpu_seconds=cpu,
        )


def _microseconds(nanoseconds: float | None) -> float | None:
    return None if nanoseconds is None else nanoseconds / 1e3


async def run_fio(*options: str) -> dict[str, Any]:
    """Run fio and return its report. Raises `UnavailableError` with fio's own words if it fails."""
    process = await asyncio.create_subprocess_exec(
        *("fio", *_OPTIONS, *options),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **_HUGE_PAGES},
    )
    try:
        output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    text = output.decode(errors="replace")
    if process.returncode or "{" not in text:
        said = (errors.decode(errors="replace") or text).strip().splitlines()
        raise UnavailableError(f"fio failed: {said[0] if said else f'status {process.returncode}'}")
    report: dict[str, Any] = json.loads(text[text.index("{") :])  # warnings may come first
    if report["jobs"][0]["error"]:
        raise UnavailableError(f"fio failed: {os.strerror(report['jobs'][0]['error'])}")
    return report


async def fio_version() -> str | None:
    """What fio calls itself; None where it is not installed."""
    if shutil.which("fio") is None:
        return None
    process = await asyncio.create_subprocess_exec("fio", "--version", stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    return output.decode(errors="replace").strip()


async def why_no_fio(path: str) -> str | None:
    """Why fio cannot take part, by trying it on a file; None where it can."""
    if shutil.which("fio") is None:
        return "fio is not installed"
    try:
        await run_fio("--rw=randread", f"--filename={path}", "--bs=4096", "--number_ios=1", "--size=4096")
    except UnavailableError as error:
        return str(error)
    return None
