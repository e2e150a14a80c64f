"""The options of `aio-kv bench gpu`, checked once. They arrive as text: a wrong one is answered in one line."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from aio_kv.engine.options import EngineOptions
from aio_kv.errors import LayoutError, UnavailableError

__all__ = ["GpuSettings", "parse_gpu_settings"]

_MIB = 1 << 20
_SIZE_MIB_MIN = 16


@dataclass(frozen=True, slots=True)
class GpuSettings:
    """What to measure.

    `nbytes` is the size of the pinned pool, of its mirror on the GPU, and of each file. One run of a contender takes
    `seconds`, or `repeats` repetitions where latency is asked for; there are `rounds` of every contender.
    """

    device: int
    directory: str
    nbytes: int
    rounds: int
    seconds: float
    repeats: int
    staging_nbytes: int
    is_quick: bool
    wants_ram_disk: bool


def parse_gpu_settings(
    *,
    device: str = "0",
    directory: str = ".",
    size: str | None = None,
    pairs: str | None = None,
    is_quick: bool = False,
    wants_ram_disk: bool = False,
) -> GpuSettings:
    """Check the options; None means the default, which `--quick` makes smaller. Raises `LayoutError` naming one."""
    if not sys.platform.startswith("linux"):
        raise UnavailableError("bench gpu compares Linux interfaces", hint="run it on Linux")
    if not os.path.isdir(directory):
        raise LayoutError(f"--dir is {directory!r}: must be an existing directory")
    if wants_ram_disk and os.geteuid() != 0:
        raise UnavailableError("--ram-disk makes a block device, which only root may", hint="leave it out")
    return GpuSettings(
        device=_integer("--device", device, 0, 1023),
        directory=os.path.abspath(directory),
        nbytes=_integer("--size", size or ("32" if is_quick else "512"), _SIZE_MIB_MIN, 1 << 16) * _MIB,
        rounds=_integer("--pairs", pairs or ("1" if is_quick else "5"), 1, 1000),
        seconds=0.03 if is_quick else 0.25,
        repeats=20 if is_quick else 500,
        staging_nbytes=8 * _MIB if is_quick else EngineOptions().staging_nbytes,
        is_quick=is_quick,
        wants_ram_disk=wants_ram_disk,
    )


def _integer(option: str, text: str, least: int, most: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        raise LayoutError(f"{option} is {text!r}: must be an integer from {least} to {most}")
    return value
