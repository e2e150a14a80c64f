"""Errors say what was tried and what to do, belong to the builtins they refine, and survive pickling."""

import copy
import errno
import pickle

import pytest

from aio_kv import errors
from aio_kv.errors import (
    AioKvError,
    CorruptionError,
    DeadlineError,
    LayoutError,
    ShortReadError,
    StorageError,
    TransferError,
    UnavailableError,
    storage_error,
)

EXAMPLES = [
    LayoutError("block is 9: must be 0 to 7"),
    errors.ClosedError("closed"),
    errors.BusyError("busy"),
    UnavailableError("no ring", hint="use threads"),
    StorageError(
        "read", errno=errno.EIO, file="/kv/layer_00000.kv", file_offset=4096, nbytes=512, hint="look"
    ),
    ShortReadError(arrived=100, file="/kv/layer_00001.kv", file_offset=0, nbytes=4096),
    CorruptionError("wrong size", file="/kv/f", file_offset=3, expected=10, found=5, hint="restore it"),
    errors.DeviceError("launch failed"),
    errors.PeerError("gone"),
    DeadlineError("too late"),
    errors.NotDurableError(group_ids=(3, 4), errno=errno.ENOSPC, file="/kv/f", hint="free space"),
    TransferError(report=[1, 2], errno=errno.ENOSPC, file="/kv/f"),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_survives_pickling_and_copying(error: AioKvError) -> None:
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is type(error)
        assert str(other) == str(error)
        assert vars(other) == vars(error)
        assert other.args == error.args
        assert getattr(other, "errno", None) == getattr(error, "errno", None)


def test_every_role_is_exemplified() -> None:
    roles = {
        value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, AioKvError)
    }
    assert roles - {AioKvError} == {type(error) for error in EXAMPLES}


def test_refines_builtins() -> None:
    assert issubclass(LayoutError, ValueError)
    assert issubclass(StorageError, OSError)
    assert issubclass(TransferError, StorageError)
    assert issubclass(ShortReadError, StorageError)
    assert issubclass(DeadlineError, TimeoutError)


def test_storage_error_says_everything() -> None:
    error = storage_error(-errno.ENOSPC, action="create", file="/kv/f", file_offset=8192, nbytes=77)
    assert (error.errno, error.file, error.file_offset, error.nbytes) == (errno.ENOSPC, "/kv/f", 8192, 77)
    assert error.hint is not None
    for part in ("create", "/kv/f", "8192", "77", "ENOSPC", error.hint):
        assert part in str(error)


def test_unknown_number_has_no_hint() -> None:
    error = storage_error(4095, action="read", file="f", file_offset=None, nbytes=None)
    assert error.hint is None
    assert "4095" in str(error)


@pytest.mark.parametrize(
    "name", ["ENOSPC", "EIO", "EINVAL", "ENOMEM", "EPERM", "ENOSYS", "EMFILE", "EROFS", "EDQUOT", "EFBIG"]
)
def test_common_numbers_have_hints(name: str) -> None:
    assert errors.hint_for(getattr(errno, name))


def test_short_read_counts_what_arrived() -> None:
    error = ShortReadError(arrived=100, file="f", file_offset=0, nbytes=4096)
    assert error.arrived == 100
    assert "only 100 bytes arrived" in str(error)
    assert "truncated" in str(error)


def test_corruption_names_both_sides() -> None:
    text = str(CorruptionError("wrong size", file="f", expected=10, found=0, hint="restore it"))
    assert "expected 10, found 0" in text
    assert "restore it" in text
