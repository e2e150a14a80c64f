"""What the block device below a file takes in one request, as the kernel tells it in /sys."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["BlockDevice", "block_device_of"]

_PAGE = 4096


@dataclass(frozen=True, slots=True)
class BlockDevice:
    """Limits of a device's request queue; None where the kernel tells nothing (tmpfs, network, overlay)."""

    name: str
    request_nbytes_max: int | None
    requests_max: int | None
    is_raid: bool
    is_rotational: bool


def block_device_of(path: str | os.PathLike[str]) -> BlockDevice:
    """Return the limits of the device that holds `path`. Never raises for a path that exists."""
    number = os.stat(path).st_dev
    folder = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if (folder / "partition").exists():
        folder = folder.resolve().parent
    queue = folder / "queue"
    sizes = [value for value in (_kib(queue / "max_sectors_kb"), _segments(queue / "max_segments")) if value]
    return BlockDevice(
        name=folder.resolve().name if folder.exists() else "",
        request_nbytes_max=min(sizes) if sizes else None,
        requests_max=_number(queue / "nr_requests"),
        is_raid=(folder / "md").exists(),
        is_rotational=_number(queue / "rotational") == 1,
    )


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _kib(path: Path) -> int | None:
    value = _number(path)
    return value * 1024 if value else None


def _segments(path: Path) -> int | None:
    # A segment is one page where memory is scattered. Requests above this are split, and split requests leave
    # io_uring's non-blocking path for its worker threads.
    value = _number(path)
    return value * _PAGE if value else None
