"""Every exception that aio_kv raises, by role.

`AioKvError` catches all of them. Where a builtin says the same thing (`ValueError`, `OSError`,
`TimeoutError`), the class derives from it too, so code that knows nothing of aio_kv still handles it. Each
message says what was tried and, where we know it, what to do. All of them survive pickling: errors cross
process borders in serving stacks.
"""

from __future__ import annotations

import errno as errno_codes
import os
from collections.abc import Callable, Sequence
from typing import Any

__all__ = [
    "AioKvError",
    "BusyError",
    "ClosedError",
    "CorruptionError",
    "DeadlineError",
    "DeviceError",
    "LayoutError",
    "NotDurableError",
    "PeerError",
    "ShortReadError",
    "StorageError",
    "TransferError",
    "UnavailableError",
    "hint_for",
    "storage_error",
]

# What a person can do about an error number. Only numbers whose cure is the same wherever they appear are
# listed; a caller that knows more passes its own hint instead.
_HINTS = {
    errno_codes.EACCES: "the process may not open this path: check its owner and mode",
    errno_codes.EBADF: "the file was closed, or opened read-only, while it was in use",
    errno_codes.EBUSY: "something else holds the file or device: close the other user and try again",
    errno_codes.EDQUOT: "the disk quota is used up: raise it or choose a smaller layout",
    errno_codes.EFBIG: "the file would pass the size limit of the process (ulimit -f) or of the filesystem",
    errno_codes.EINVAL: "direct I/O needs aligned memory, offset and length: try buffered I/O (direct=False)",
    errno_codes.EIO: "the device failed: look at the kernel log before trusting anything on this disk",
    errno_codes.ELOOP: "symbolic links are refused: give the real path",
    errno_codes.EMFILE: "too many open files: raise the limit (ulimit -n) above two per layer",
    errno_codes.ENFILE: "the system has no open files left: raise fs.file-max",
    errno_codes.ENODEV: "the filesystem cannot do this: use one that supports preallocation",
    errno_codes.ENOENT: "check the path; create=True makes new files",
    errno_codes.ENOMEM: "out of memory, or over the locked-memory limit (ulimit -l): raise it or use fewer buffers",
    errno_codes.ENOSPC: "the filesystem is full: free space or choose a smaller layout",
    errno_codes.ENOSYS: "this kernel or sandbox lacks the system call: use another backend",
    errno_codes.ENOTDIR: "a part of the path is not a directory",
    errno_codes.EOPNOTSUPP: "the filesystem does not support this operation: use another filesystem",
    errno_codes.EPERM: "a sandbox or missing capability forbids this: use another backend or grant it",
    errno_codes.EROFS: "the filesystem is read-only: open with read_only=True or remount it",
}


def hint_for(error_number: int) -> str | None:
    """Return what to do about an operating system error number, or None where there is no general advice."""
    return _HINTS.get(error_number)


class AioKvError(Exception):
    """Base of every error raised by aio_kv."""

    def __reduce__(self) -> tuple[Callable[..., AioKvError], tuple[Any, ...]]:
        # The default calls the class with `args`, which fails for constructors with required keywords.
        state = dict(self.__dict__)
        if isinstance(self, OSError) and self.errno is not None:
            state.update(errno=self.errno, strerror=self.strerror)
        return _rebuild, (type(self), self.args, state)


def _rebuild(cls: type[AioKvError], args: tuple[Any, ...], state: dict[str, Any]) -> AioKvError:
    error = cls.__new__(cls, *args)
    error.args = args
    for name, value in state.items():
        setattr(error, name, value)
    return error


class LayoutError(AioKvError, ValueError):
    """The caller's geometry, key, identifier, buffer or option does not fit; nothing was read or written."""


class ClosedError(AioKvError):
    """The object was used after it was closed."""


class BusyError(AioKvError):
    """Someone else holds what was asked for, or a bounded queue is full: wait for it, then try again."""


class UnavailableError(AioKvError):
    """An ability is missing on this machine.

    `reason` is the message alone, `hint` says what would provide it; `error_number` and `step` are the errno and the
    step at which the system refused. Each but `reason` is None where there is none.
    """

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        error_number: int | None = None,
        step: str | None = None,
    ) -> None:
        super().__init__(_with_hint(message, hint))
        self.reason = message
        self.hint = hint
        self.error_number = error_number
        self.step = step


class StorageError(AioKvError, OSError):
    """An operation on a file failed.

    `action` says what was tried ("read", "create"). Attributes: `errno`, `file`, `file_offset` in bytes,
    `nbytes` asked for, and `hint`; each but `errno` is None where it is not known.
    """

    def __init__(
        self,
        action: str,
        *,
        errno: int = errno_codes.EIO,
        file: str | None = None,
        file_offset: int | None = None,
        nbytes: int | None = None,
        hint: str | None = None,
    ) -> None:
        name = errno_codes.errorcode.get(errno, str(errno))
        message = f"{action} failed{_place(file, file_offset, nbytes)}: {os.strerror(errno)} ({name})"
        super().__init__(errno, _with_hint(message, hint))
        self.file = file
        self.file_offset = file_offset
        self.nbytes = nbytes
        self.hint = hint


class ShortReadError(StorageError):
    """The file ended before every byte had been read. `arrived` counts the bytes that did come."""

    def __init__(
        self,
        action: str = "read",
        *,
        arrived: int,
        file: str | None = None,
        file_offset: int | None = None,
        nbytes: int | None = None,
        hint: str | None = None,
    ) -> None:
        told = hint or "the file is shorter than its layout: it was truncated while open"
        told = f"only {arrived} bytes arrived; {told}"
        super().__init__(action, file=file, file_offset=file_offset, nbytes=nbytes, hint=told)
        self.arrived = arrived


class CorruptionError(AioKvError):
    """Stored bytes are not what was written. Nothing is deleted: the message names what to look at.

    Attributes: `file`, `file_offset` in bytes, `expected`, `found`, `hint`; None where not known.
    """

    def __init__(
        self,
        what: str,
        *,
        file: str | None = None,
        file_offset: int | None = None,
        expected: object = None,
        found: object = None,
        hint: str | None = None,
    ) -> None:
        message = f"{what}{_place(file, file_offset, None)}"
        if expected is not None or found is not None:
            message += f": expected {expected}, found {found}"
        super().__init__(_with_hint(message, hint))
        self.file = file
        self.file_offset = file_offset
        self.expected = expected
        self.found = found
        self.hint = hint


class DeviceError(AioKvError):
    """The GPU, or memory or a stream on it, failed or is not what was promised.

    `reason` is the message alone. `call` names the driver function, `code` is its CUresult and `name` that number's
    name, `hint` says what to do; each is None where it is not known.
    """

    def __init__(
        self,
        message: str,
        *,
        call: str | None = None,
        code: int | None = None,
        name: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(_with_hint(message, hint))
        self.reason = message
        self.call = call
        self.code = code
        self.name = name
        self.hint = hint


class PeerError(AioKvError):
    """The remote tier failed or cannot be reached."""


class DeadlineError(AioKvError, TimeoutError):
    """The deadline passed before the request was given to the device."""


class TransferError(StorageError):
    """A transfer did not wholly succeed. `report` holds the outcome of every request in it."""

    def __init__(
        self,
        action: str = "transfer",
        *,
        report: Any = None,
        errno: int = errno_codes.EIO,
        file: str | None = None,
        file_offset: int | None = None,
        nbytes: int | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(action, errno=errno, file=file, file_offset=file_offset, nbytes=nbytes, hint=hint)
        self.report = report


class NotDurableError(StorageError):
    """Groups whose writes were accepted are not on stable storage: `group_ids` names them, in rising order.

    A cascade still holds their bytes unless it is closed; `flush` tries again.
    """

    def __init__(
        self,
        action: str = "flush",
        *,
        group_ids: Sequence[int],
        errno: int = errno_codes.EIO,
        file: str | None = None,
        file_offset: int | None = None,
        nbytes: int | None = None,
        hint: str | None = None,
    ) -> None:
        shown = ", ".join(map(str, group_ids[:8])) + (", ..." if len(group_ids) > 8 else "")
        what = f"{action}: {len(group_ids)} groups are not durable ({shown}); {action}"
        super().__init__(what, errno=errno, file=file, file_offset=file_offset, nbytes=nbytes, hint=hint)
        self.group_ids = tuple(group_ids)


def storage_error(
    err: int, *, action: str, file: str, file_offset: int | None, nbytes: int | None
) -> StorageError:
    """Build the `StorageError` of an operating system error number, with the general hint for that number.

    `err` may be negative, as io_uring and C code return it.
    """
    number = abs(err)
    return StorageError(
        action, errno=number, file=file, file_offset=file_offset, nbytes=nbytes, hint=hint_for(number)
    )


def _place(file: str | None, file_offset: int | None, nbytes: int | None) -> str:
    parts = [
        f" {file}" if file is not None else None,
        f" offset {file_offset}" if file_offset is not None else None,
        f" {nbytes} bytes" if nbytes is not None else None,
    ]
    known = ",".join(part for part in parts if part is not None)
    return f" ({known.strip()})" if known else ""


def _with_hint(message: str, hint: str | None) -> str:
    return f"{message}. Hint: {hint}" if hint else message
