"""The facts about a machine that its figures depend on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

from aio_kv.blockdevice import block_device_of

__all__ = ["machine_facts"]


def machine_facts(directory: str, *, loop: str, fio: str | None) -> dict[str, Any]:
    """The machine, its disk below `directory` and its software, in plain values; None for what is not known."""
    device = block_device_of(directory)
    return {
        "kernel": platform.release(),
        "cpu": _cpu_model(),
        "cpus": os.cpu_count(),
        "cpus_usable": len(os.sched_getaffinity(0)),
        "memory_nbytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "huge_pages": _chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
        "filesystem": _filesystem_of(directory),
        "device": device.name or None,
        "device_request_nbytes_max": device.request_nbytes_max,
        "device_requests_max": device.requests_max,
        "device_scheduler": _chosen(f"/sys/block/{device.name}/queue/scheduler"),
        "device_is_raid": device.is_raid,
        "python": platform.python_version(),
        "loop": loop,
        "fio": fio,
        "numpy": _version("numpy"),
        "aio_kv": _version("aio-kv"),
    }


def _cpu_model() -> str | None:
    for line in _text("/proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Processor", "cpu model"):
            return value.strip()
    return platform.machine() or None


def _filesystem_of(directory: str) -> str | None:
    number = os.stat(directory).st_dev
    wanted = f"{os.major(number)}:{os.minor(number)}"
    found = None
    for line in _text("/proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2] == wanted:
            found = after.split()[0]
    return found


def _chosen(path: str) -> str | None:
    # The kernel lists the choices and puts the one in force in brackets.
    text = _text(path).strip()
    return text.partition("[")[2].partition("]")[0] or text or None


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
