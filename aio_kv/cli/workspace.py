"""Where a demonstration keeps its files: a new directory of its own, removed afterwards, and nothing else touched."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from aio_kv.blockdevice import block_device_of
from aio_kv.errors import StorageError

__all__ = ["workspace"]

_PREFIX = "aio-kv-demo-"


@contextmanager
def workspace(directory: Path | None) -> Iterator[Path]:
    """Give a new, empty directory inside `directory`, or inside a place on a real disk that is found here.

    `directory` is made if it is missing, and then removed again; one that existed is kept with all that is in it.
    What was made is removed after an interruption or SIGTERM as well. Raises `StorageError` where nothing can be made.
    """
    parent = directory if directory is not None else _default_parent()
    with ExitStack() as undo:
        undo.enter_context(_unwinding_when_terminated())
        if _make(parent):
            undo.callback(_remove_if_empty, parent)
        try:
            path = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
        except OSError as error:
            raise _translated(error, parent) from error
        undo.callback(shutil.rmtree, path, ignore_errors=True)
        yield Path(path)


@contextmanager
def _unwinding_when_terminated() -> Iterator[None]:
    """Have SIGTERM end the program as an exit does, instead of at once with everything left where it is."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Only the main thread may say what a signal does.
        return
    earlier = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, earlier)


def _default_parent() -> Path:
    """The first of working directory, cache and temporary directory that is writable, if possible on a disk.

    A directory in memory, such as /tmp often is, would show the speed of memory and call it that of a disk.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    places = [Path.cwd(), Path(cache), Path(tempfile.gettempdir())]
    writable = [place for place in places if place.is_dir() and os.access(place, os.W_OK | os.X_OK)]
    on_disk = [place for place in writable if block_device_of(place).name]
    return next(iter([*on_disk, *writable, *places]))


def _make(parent: Path) -> bool:
    """Make `parent` if it is missing, and say whether it was."""
    try:
        parent.mkdir()
    except FileExistsError:
        return False
    except OSError as error:
        raise _translated(error, parent) from error
    return True


def _remove_if_empty(parent: Path) -> None:
    # Someone else may have put something there meanwhile, and rmdir leaves that alone.
    with suppress(OSError):
        parent.rmdir()


def _translated(error: OSError, path: Path) -> StorageError:
    hint = "--dir takes a writable directory, or a new name in one"
    return StorageError("create", errno=error.errno or errno.EIO, file=str(path), hint=hint)
