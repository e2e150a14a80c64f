"""The options of `aio-kv bench disk`, checked once. They arrive as text: a wrong one is answered in one line."""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from dataclasses import dataclass

from aio_kv.cli.benches.workload import shape_of
from aio_kv.errors import LayoutError, UnavailableError

__all__ = ["PEER_NAMES", "DiskSettings", "parse_settings"]

_MIB = 1 << 20
_LOOPS = ("asyncio", "uvloop")
_MODES = ("direct", "warm")
PEER_NAMES = ("kvikio", "aiofiles", "anyio", "caio", "deepspeed", "torch")
_BLOCKS = (4096, 64 << 10, 256 << 10, _MIB)
_BLOCK_NBYTES_MAX = 4 * _MIB


@dataclass(frozen=True, slots=True)
class DiskSettings:
    """What to measure: `file_nbytes` per block size, `seconds` per run, `rounds` of every contender."""

    directory: str
    file_nbytes: int
    seconds: float
    rounds: int
    blocks: tuple[int, ...]
    modes: tuple[str, ...]
    loop: str
    is_quick: bool
    against: tuple[str, ...] = ()


def parse_settings(
    *,
    directory: str,
    size: str | None,
    seconds: str | None,
    pairs: str | None,
    sizes: str | None,
    modes: str | None,
    loop: str,
    is_quick: bool,
    against: str | None = None,
) -> DiskSettings:
    """Check the options; None means the default, which `--quick` makes smaller.

    Raises `LayoutError` naming the option, `UnavailableError` for a loop that is not installed.
    """
    if not sys.platform.startswith("linux"):
        raise UnavailableError("bench disk compares Linux interfaces", hint="run it on Linux")
    if not os.path.isdir(directory):
        raise LayoutError(f"--dir is {directory!r}: must be an existing directory")
    if loop not in _LOOPS:
        raise LayoutError(f"--loop is {loop!r}: must be one of {', '.join(_LOOPS)}")
    if loop != "asyncio" and importlib.util.find_spec(loop) is None:
        raise UnavailableError(f"--loop {loop}: it is not installed", hint=f"pip install {loop}")
    settings = DiskSettings(
        directory=os.path.abspath(directory),
        file_nbytes=_integer("--size", size or ("64" if is_quick else "1024"), 1, 1 << 20) * _MIB,
        seconds=_seconds(seconds or ("0.1" if is_quick else "1")),
        rounds=_integer("--pairs", pairs or ("1" if is_quick else "5"), 1, 1000),
        blocks=_blocks(sizes),
        modes=_words("--modes", modes, _MODES),
        loop=loop,
        is_quick=is_quick,
        against=() if against is None else _words("--against", against, PEER_NAMES),
    )
    if settings.against and "direct" not in settings.modes:
        raise LayoutError(
            f"--against is {against!r}: peers take part in direct reads, which --modes leaves out"
        )
    _check_size(settings)
    return settings


def _check_size(settings: DiskSettings) -> None:
    for block in settings.blocks:
        # Every other group is drawn, and one batch must come out of that.
        least = 2 * shape_of(block).batch * block
        if settings.file_nbytes < least:
            raise LayoutError(
                f"--size is {settings.file_nbytes // _MIB}: must be at least {-(-least // _MIB)} (MiB) for blocks "
                f"of {block} bytes"
            )


def _blocks(text: str | None) -> tuple[int, ...]:
    if text is None:
        return _BLOCKS
    blocks = tuple(_integer("--sizes", part, 4096, _BLOCK_NBYTES_MAX) for part in text.split(","))
    if any(block % 4096 for block in blocks):
        raise LayoutError(f"--sizes is {text!r}: must be multiples of 4096 bytes")
    if len(set(blocks)) != len(blocks):
        raise LayoutError(f"--sizes is {text!r}: names a size twice")
    return blocks


def _words(option: str, text: str | None, known: tuple[str, ...]) -> tuple[str, ...]:
    if text is None:
        return known
    words = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for word in words:
        if word not in known:
            raise LayoutError(f"{option} is {text!r}: {word!r} is not one of {', '.join(known)}")
    return words


def _integer(option: str, text: str, least: int, most: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        raise LayoutError(f"{option} is {text!r}: must be an integer from {least} to {most}")
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.05 <= value <= 600:  # false for nan too
        raise LayoutError(f"--seconds is {text!r}: must be a number from 0.05 to 600")
    return value
