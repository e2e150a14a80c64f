"""What became of a transfer, request by request."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aio_kv.engine import CUDA_ERROR
from aio_kv.errors import (
    AioKvError,
    DeadlineError,
    DeviceError,
    ShortReadError,
    TransferError,
    storage_error,
)

__all__ = ["Outcome", "TransferReport", "error_of", "summary_of"]


class Outcome(IntEnum):
    """The end of one request. Everything but DONE means that its bytes must not be used."""

    DONE = 0
    FAILED = 1
    CANCELLED = 2
    LATE = 3


@dataclass(frozen=True, slots=True)
class TransferReport:
    """The outcomes of a transfer.

    Attributes:
        outcomes: int8 array of `Outcome` values, one per request, in the order of the call.
        loaded_prefix: how many requests from the first on are DONE without a gap.
        nbytes: payload bytes of the DONE requests.
        errors: the first few failures, in the order of the call.
    """

    outcomes: NDArray[np.int8]
    loaded_prefix: int
    nbytes: int
    errors: tuple[AioKvError, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether every request is DONE."""
        return self.loaded_prefix == len(self.outcomes)


def outcomes_of(codes: NDArray[Any]) -> NDArray[np.int8]:
    """Translate engine codes (0 or -errno) to outcomes."""
    outcomes = np.full(len(codes), Outcome.FAILED, dtype=np.int8)
    outcomes[codes == 0] = Outcome.DONE
    outcomes[codes == -errno.ECANCELED] = Outcome.CANCELLED
    outcomes[codes == -errno.ETIME] = Outcome.LATE
    return outcomes


def error_of(
    code: int, *, action: str, file: str, file_offset: int | None, nbytes: int, arrived: int
) -> AioKvError:
    """The exception that says what an engine code means for one I/O; no offset where there is no file."""
    place = file if file_offset is None else f"{file}, offset {file_offset}"
    if code == -errno.ETIME:
        return DeadlineError(f"{action} of {place}, {nbytes} bytes: not begun before its deadline")
    if code <= -CUDA_ERROR:
        number = -code - CUDA_ERROR
        return DeviceError(f"{action} of {place}, {nbytes} bytes: CUDA error {number}", code=number)
    if code == -errno.ENODATA:
        return ShortReadError(action, arrived=arrived, file=file, file_offset=file_offset, nbytes=nbytes)
    return storage_error(code, action=action, file=file, file_offset=file_offset, nbytes=nbytes)


def summary_of(report: TransferReport, first: AioKvError, failed: int, *, action: str) -> TransferError:
    """The error of a transfer in which `failed` requests failed; where and why are those of `first`, its cause."""
    number = errno.ETIME if isinstance(first, DeadlineError) else getattr(first, "errno", None)
    error = TransferError(
        f"{action} of {failed} of {len(report.outcomes)} requests",
        report=report,
        errno=number or errno.EIO,
        file=getattr(first, "file", None),
        file_offset=getattr(first, "file_offset", None),
        nbytes=getattr(first, "nbytes", None),
        hint=getattr(first, "hint", None) or str(first),
    )
    error.__cause__ = first
    return error
