"""Making directories of layer files so that a crash at any point leaves something that can be told apart.

    1. `layout.json.creating` is written and synced in every directory.
    2. Every layer file gets all of its space, and is synced.
    3. Each `layout.json.creating` is renamed to `layout.json`, which says: complete.

So a directory is complete (has the header), interrupted (has only the other name: creation may go on), empty,
or orphaned (layer files that nothing describes: refused, never deleted). A creation that fails takes back
what it made itself and nothing else. The caller holds the directory locks throughout.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from enum import Enum

from aio_kv.errors import CorruptionError, LayoutError, StorageError, hint_for, storage_error
from aio_kv.header import CREATING_NAME, HEADER_NAME, HEADER_NBYTES_MAX, Header
from aio_kv.positional import write_all

__all__ = [
    "DirectoryPlan",
    "DirectoryState",
    "complete_creation",
    "make_directory",
    "open_regular",
    "read_header",
]

_LAYER_FILE = re.compile(r"layer_\d{5,}\.kv")
_ZEROS_NBYTES = 1 << 20
# What a filesystem without preallocation says; EINVAL comes from old kernels and some network filesystems.
_NO_PREALLOCATION = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENODEV)
_SAFE_FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)


class DirectoryState(Enum):
    """What the names in a directory say about it."""

    COMPLETE = "complete"
    INTERRUPTED = "interrupted"
    EMPTY = "empty"
    ORPHANED = "orphaned"


@dataclass(frozen=True, slots=True)
class DirectoryPlan:
    """One directory as it should become: its header and the paths of its layer files, `file_nbytes` each."""

    path: str
    header: Header
    files: tuple[str, ...]

    @property
    def header_path(self) -> str:
        """The name of the finished header."""
        return os.path.join(self.path, HEADER_NAME)

    @property
    def creating_path(self) -> str:
        """The name that the header has until every file has its space."""
        return os.path.join(self.path, CREATING_NAME)

    @property
    def file_nbytes(self) -> int:
        """Bytes of one layer file."""
        return self.header.layout.nbytes_per_layer

    def state(self) -> DirectoryState:
        """Look at the directory. Raises `StorageError` where it cannot be listed."""
        try:
            names = os.listdir(self.path)
        except OSError as error:
            raise _translated(error, "list", self.path) from error
        if HEADER_NAME in names:
            return DirectoryState.COMPLETE
        if CREATING_NAME in names:
            return DirectoryState.INTERRUPTED
        orphans = [name for name in names if _LAYER_FILE.fullmatch(name)]
        return DirectoryState.ORPHANED if orphans else DirectoryState.EMPTY


def open_regular(path: str, flags: int) -> int:
    """Open an existing regular file with `flags`, not following a symbolic link; the caller owns the
    descriptor.

    Raises `StorageError` for a link or whatever the system refuses, `CorruptionError` for pipes, devices and
    the like.
    """
    try:
        # Looking first keeps a pipe from blocking the open; O_NOFOLLOW and the second look close the gap
        # between.
        _check_regular(os.lstat(path), path)
        fd = os.open(path, flags | _SAFE_FLAGS)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise _translated(error, "open", path) from error
    try:
        _check_regular(os.fstat(fd), path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_header(path: str) -> bytes:
    """Return the bytes of a header file, at most one more than `HEADER_NBYTES_MAX`. Raises as `open_regular`."""
    with open(open_regular(path, os.O_RDONLY), "rb") as file:
        try:
            return file.read(HEADER_NBYTES_MAX + 1)
        except OSError as error:
            raise _translated(error, "read", path) from error


def make_directory(path: str, undo: ExitStack) -> None:
    """Make `path` if it is missing. Its parent must exist: a forgotten mount should fail, not fill the root disk."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        return
    except OSError as error:
        raise _translated(error, "create", path) from error
    undo.callback(_quietly, os.rmdir, path)


def complete_creation(plans: Sequence[DirectoryPlan], undo: ExitStack) -> None:
    """Bring every directory to COMPLETE, going on with an interrupted creation.

    What has to be taken back on failure is pushed on `undo`, which the caller unwinds, or empties on success.
    Raises `LayoutError` for directories that hold something else and `StorageError` for what the system
    refuses, a lack of space before anything is written.
    """
    states = [plan.state() for plan in plans]
    unfinished = [
        plan for plan, state in zip(plans, states, strict=True) if state is not DirectoryState.COMPLETE
    ]
    if not unfinished:
        return
    for plan, state in zip(plans, states, strict=True):
        _check_may_create(plan, state, among_complete=DirectoryState.COMPLETE in states)
    try:
        _check_free_space(unfinished)
    except OSError as error:
        raise _translated(error, "inspect", unfinished[0].path) from error
    for plan in unfinished:
        _write_creating(plan, undo)
    for plan in unfinished:
        for path in plan.files:
            _allocate(path, plan.file_nbytes, undo)
        _sync_directory(plan.path)
    for plan in unfinished:
        _finish(plan, undo)


def _check_may_create(plan: DirectoryPlan, state: DirectoryState, *, among_complete: bool) -> None:
    if state is DirectoryState.COMPLETE:
        plan.header.check(read_header(plan.header_path), file=plan.header_path)
    elif state is DirectoryState.INTERRUPTED:
        _check_interrupted(plan)
    elif state is DirectoryState.ORPHANED:
        raise orphaned(plan)
    elif among_complete:
        # Filling the gap would turn lost layers into zeros that look like data.
        raise LayoutError(
            f"{plan.path} is empty but belongs to directories that are complete: its layers are lost. Put them "
            "back, or empty every directory and create all anew"
        )


def orphaned(plan: DirectoryPlan) -> LayoutError:
    """Return the error for layer files that no header describes."""
    return LayoutError(
        f"{plan.path} has layer files but no {HEADER_NAME}, so what is in them is unknown: restore the header, or "
        f"remove {os.path.join(plan.path, 'layer_*.kv')} yourself and create anew"
    )


def _check_interrupted(plan: DirectoryPlan) -> None:
    found, wanted = read_header(plan.creating_path), plan.header.encode()
    if found == wanted:
        return
    # A crash may cut the first write short. No layer file can exist then, and nothing is lost by writing it
    # again.
    has_files = any(_LAYER_FILE.fullmatch(name) for name in os.listdir(plan.path))
    if wanted.startswith(found) and not has_files:
        return
    files = os.path.join(plan.path, "layer_*.kv")
    raise LayoutError(
        f"{plan.creating_path} is left from an interrupted creation with another layout: create with that layout, "
        f"or remove it and {files}"
    )


def _check_free_space(plans: Sequence[DirectoryPlan]) -> None:
    if not hasattr(os, "statvfs"):
        return
    needed: dict[int, int] = {}
    for plan in plans:
        device = os.stat(plan.path).st_dev
        needed[device] = needed.get(device, 0) + _missing_nbytes(plan)
    for plan in plans:
        space = os.statvfs(plan.path)
        free = space.f_bavail * space.f_frsize
        wanted = needed[os.stat(plan.path).st_dev]
        if space.f_blocks and wanted > free:  # Filesystems without a size report no blocks at all.
            raise _no_space(plan.files[0], wanted, free)


def _missing_nbytes(plan: DirectoryPlan) -> int:
    total = 0
    for path in plan.files:
        allocated = 0
        with suppress(FileNotFoundError):
            # In units of 512 bytes on every filesystem (POSIX).
            allocated = os.lstat(path).st_blocks * 512
        total += max(0, plan.file_nbytes - allocated)
    return total


def _no_space(file: str, needed: int, free: int) -> StorageError:
    hint = f"{needed} bytes are needed and {free} are free; {hint_for(errno.ENOSPC)}"
    return StorageError("create", errno=errno.ENOSPC, file=file, nbytes=needed, hint=hint)


def _write_creating(plan: DirectoryPlan, undo: ExitStack) -> None:
    path = plan.creating_path
    fd = _open_new_or_own(path, undo)
    try:
        data = memoryview(plan.header.encode())
        write_all(fd, data, 0, file=path)
        os.fsync(fd)
    except OSError as error:
        raise _translated(error, "create", path) from error
    finally:
        os.close(fd)
    _sync_directory(plan.path)


def _allocate(path: str, nbytes: int, undo: ExitStack) -> None:
    fd = _open_new_or_own(path, undo)
    try:
        found = os.fstat(fd).st_size
        if found > nbytes:
            raise CorruptionError("the layer file is too large", file=path, expected=nbytes, found=found)
        _reserve(fd, path, nbytes)
        os.fsync(fd)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise _no_space(path, nbytes, _free_nbytes(path)) from error
        raise _translated(error, "create", path, nbytes) from error
    finally:
        os.close(fd)


def _reserve(fd: int, path: str, nbytes: int) -> None:
    fallocate = getattr(os, "posix_fallocate", None)
    if fallocate is not None:
        try:
            fallocate(fd, 0, nbytes)
            return
        except OSError as error:
            if error.errno not in _NO_PREALLOCATION:
                raise
    zeros = memoryview(bytes(min(_ZEROS_NBYTES, nbytes)))
    for start in range(0, nbytes, _ZEROS_NBYTES):
        write_all(fd, zeros[: nbytes - start], start, file=path)


def _open_new_or_own(path: str, undo: ExitStack) -> int:
    """Open a file of this creation for writing, made with mode 0600; one left by an earlier attempt is kept."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _SAFE_FLAGS, 0o600)
    except FileExistsError:
        return open_regular(path, os.O_RDWR)
    except OSError as error:
        raise _translated(error, "create", path) from error
    undo.callback(_quietly, os.unlink, path)
    try:
        if hasattr(os, "fchmod"):
            os.fchmod(fd, 0o600)  # The umask may have taken bits away from the mode.
    except OSError as error:
        os.close(fd)
        raise _translated(error, "create", path) from error
    return fd


def _finish(plan: DirectoryPlan, undo: ExitStack) -> None:
    try:
        os.replace(plan.creating_path, plan.header_path)
    except OSError as error:
        raise _translated(error, "rename", plan.creating_path) from error
    # Should a later directory fail, this one must not be left looking complete.
    undo.callback(_quietly, os.replace, plan.header_path, plan.creating_path)
    _sync_directory(plan.path)


def _sync_directory(path: str) -> None:
    if not hasattr(os, "O_DIRECTORY"):
        return  # Windows has no descriptors of directories; its renames are journalled.
    fd = -1
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _SAFE_FLAGS)
        os.fsync(fd)
    except OSError as error:
        raise _translated(error, "sync", path) from error
    finally:
        if fd >= 0:
            os.close(fd)


def _check_regular(status: os.stat_result, path: str) -> None:
    if stat.S_ISLNK(status.st_mode):
        raise storage_error(errno.ELOOP, action="open", file=path, file_offset=None, nbytes=None)
    if not stat.S_ISREG(status.st_mode):
        kind = stat.filemode(status.st_mode)
        raise CorruptionError("not a file", file=path, expected="a regular file", found=f"mode {kind}")


def _free_nbytes(path: str) -> int:
    space = os.statvfs(os.path.dirname(path))
    return space.f_bavail * space.f_frsize


def _quietly(action: object, *arguments: str) -> None:
    # Undoing is best effort: the error that made it necessary is the one to report.
    with suppress(OSError):
        action(*arguments)  # type: ignore[operator]


def _translated(error: OSError, action: str, file: str, nbytes: int | None = None) -> StorageError:
    if isinstance(error, StorageError):
        return error
    return storage_error(error.errno or errno.EIO, action=action, file=file, file_offset=None, nbytes=nbytes)
