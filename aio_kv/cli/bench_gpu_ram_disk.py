"""A block device in memory with a file system on it, made for a benchmark by root and removed again."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from aio_kv.errors import UnavailableError

__all__ = ["RamDisk", "ram_disk"]

_MIB = 1 << 20
_METADATA_NBYTES = 96 * _MIB  # journal and tables of ext4, and then some
_BACKING = "/dev/shm"
_PATIENCE_SECONDS = 60
_RELEASE_SECONDS = 10.0
_RELEASE_PAUSE_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class RamDisk:
    """A mounted directory of its own, and what kind of device is below it."""

    directory: str
    kind: str


@contextmanager
def ram_disk(nbytes: int) -> Iterator[RamDisk]:
    """Make a device with room for `nbytes` of files: zram where there is any, else a loop device on tmpfs.

    Everything is undone at the end, whatever happened. Raises `UnavailableError` with what was tried.
    """
    total = -(-(nbytes + nbytes // 8 + _METADATA_NBYTES) // _MIB) * _MIB
    with ExitStack() as undo:
        device, kind = _make_device(total, undo)
        _run("mkfs.ext4", "-q", "-F", "-m", "0", "-E", "lazy_itable_init=0,lazy_journal_init=0", device)
        mount = undo.enter_context(tempfile.TemporaryDirectory(prefix="aio-kv-ram-disk-"))
        _run("mount", device, mount)
        undo.callback(_insist, "umount", mount)
        directory = os.path.join(mount, "kv")
        os.mkdir(directory)
        yield RamDisk(directory, kind)


def _make_device(nbytes: int, undo: ExitStack) -> tuple[str, str]:
    try:
        return _make_zram(nbytes, undo), "ext4 on zram"
    except UnavailableError as refusal:
        try:
            return _make_loop(nbytes, undo), "ext4 on a loop device on tmpfs"
        except UnavailableError as error:
            raise UnavailableError(f"neither zram ({refusal.reason}) nor loop ({error.reason})") from error


def _make_zram(nbytes: int, undo: ExitStack) -> str:
    with suppress(UnavailableError):
        _run("modprobe", "zram")  # it may be there already, or built in
    device = _run("zramctl", "--find", "--size", str(nbytes))
    undo.callback(_insist, "zramctl", "--reset", device)
    return device


def _make_loop(nbytes: int, undo: ExitStack) -> str:
    handle, path = tempfile.mkstemp(prefix="aio-kv-ram-disk-", dir=_BACKING)
    undo.callback(os.unlink, path)
    with os.fdopen(handle, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
    device = _run("losetup", "--find", "--show", path)
    undo.callback(_insist, "losetup", "--detach", device)
    return device


def _insist(*command: str) -> None:
    """Run a command that undoes something, again and again where it is refused.

    A ring lets go of its files only some time after it was closed, and a file system in use cannot be unmounted.
    """
    until = time.monotonic() + _RELEASE_SECONDS
    while True:
        try:
            _run(*command)
            return
        except UnavailableError:
            if time.monotonic() >= until:
                raise
        time.sleep(_RELEASE_PAUSE_SECONDS)


def _run(*command: str) -> str:
    """What a command says. Raises `UnavailableError` where it is missing or fails."""
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=_PATIENCE_SECONDS)
    except FileNotFoundError as error:
        raise UnavailableError(f"{command[0]} is not installed") from error
    except subprocess.CalledProcessError as error:
        said = (error.stderr or error.stdout or f"status {error.returncode}").strip().splitlines()
        raise UnavailableError(f"{command[0]} failed: {said[-1]}") from error
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"{command[0]} took more than {_PATIENCE_SECONDS} s") from error
    return done.stdout.strip()
