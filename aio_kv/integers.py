"""Checking integers that callers hand in: single indices and whole arrays of them.

Python and NumPy both turn booleans, floats and oversized integers into *some* int64 when asked nicely. A
wrong group id reads another sequence's state, so here nothing is converted that is not an integer already,
and nothing wraps. Arrays are checked in one vectorised pass.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Sequence
from typing import Any, NoReturn, TypeAlias, TypeGuard

import numpy as np
from numpy.typing import NDArray

from aio_kv.errors import LayoutError

__all__ = [
    "INT64_MAX",
    "Int64Array",
    "IntegerLike",
    "check_axis",
    "check_index",
    "check_integers",
    "without_repeats",
]

INT64_MAX = 2**63 - 1
_INT64 = np.dtype(np.int64)
_FEW = 16  # up to here values are looked at one by one

Int64Array: TypeAlias = NDArray[np.int64]
IntegerLike: TypeAlias = "int | np.integer[Any] | Sequence[int] | range | NDArray[np.integer[Any]]"


def check_index(value: object, *, what: str, limit: int, first: int = 0) -> int:
    """Return `value` as an int if it is an integer from `first` to `limit - 1`.

    Raises `LayoutError` naming `what`, the value and the valid range. Booleans and floats are refused.
    """
    if type(value) is int and first <= value < limit:
        return value  # The usual case, on the path of every single key.
    number = _as_int(value)
    if number is None:
        raise LayoutError(f"{what} is {value!r} ({type(value).__name__}): must be an integer")
    if not first <= number < limit:
        raise LayoutError(f"{what} is {number}: must be {first} to {limit - 1}")
    return number


def check_axis(values: object, *, what: str, limit: int) -> Int64Array:
    """Like `check_integers`, and a single integer is taken as an array of one."""
    is_scalar = isinstance(values, int | np.integer) or (isinstance(values, np.ndarray) and values.ndim == 0)
    if is_scalar:
        return np.array([check_index(values, what=what, limit=limit)], dtype=np.int64)
    return check_integers(values, what=what, limit=limit)


def check_integers(values: object, *, what: str, limit: int) -> Int64Array:
    """Return `values` as a C-contiguous, aligned, one-dimensional int64 array, every element in [0, limit).

    `limit` is at most 2**63 - 1. An array that already has that form is returned as it is, not copied: the
    caller still owns it. Raises `LayoutError` naming the first bad value, its index and the valid range.
    """
    if values.__class__ is np.ndarray and _is_plain(values) and _are_below(values, limit):
        return values  # the usual case, at a third of the price of asking everything
    if values.__class__ is list and len(values) <= _FEW and _are_plain(values, limit):
        return np.array(values, np.int64)
    array = _as_integer_array(values, what, limit)
    if array.ndim != 1:
        raise LayoutError(f"{what} must be one-dimensional, not {array.ndim}-dimensional: use .ravel()")
    wide = np.ascontiguousarray(array, dtype=np.int64)
    if not wide.flags.aligned:
        wide = wide.copy()
    # Seen as unsigned, a negative number is at least 2**63, and so is a uint64 that wrapped on conversion:
    # one maximum finds everything that is out of range.
    unsigned = wide.view(np.uint64)
    if wide.size and unsigned.max() >= np.uint64(limit):
        index = int(np.argmax(unsigned >= np.uint64(limit)))
        _refuse_range(what, index, int(array[index]), limit)
    return wide


def _are_below(values: Int64Array, limit: int) -> bool:
    if values.size > _FEW:
        return bool(np.maximum.reduce(values.view(np.uint64)) < limit)
    return _are_plain(values.tolist(), limit)


def _are_plain(values: list[Any], limit: int) -> bool:
    for value in values:  # noqa: SIM110 - without a generator, for the shortest calls
        if value.__class__ is not int or not 0 <= value < limit:
            return False
    return True


def _is_plain(array: NDArray[Any]) -> TypeGuard[Int64Array]:
    return array.dtype == _INT64 and array.ndim == 1 and array.flags.carray  # read-only ones take longer


def _as_integer_array(values: object, what: str, limit: int) -> NDArray[Any]:
    if isinstance(values, np.ndarray):
        array = values
    elif isinstance(values, range):
        return _from_range(values, what, limit)
    elif isinstance(values, str | bytes):
        raise LayoutError(f"{what} is {values[:40]!r}: must be integers")
    elif isinstance(values, Sequence | deque) and not isinstance(values, memoryview | bytearray):
        return _from_sequence(list(values), what)
    else:
        array = _from_exporter(values, what)
    if array.dtype.kind not in "iu":
        shown = f", first value {array.flat[0]!r} at index 0" if array.size else ""
        raise LayoutError(f"{what} has dtype {array.dtype}{shown}: must be integers")
    return array


def _from_exporter(values: object, what: str) -> NDArray[Any]:
    try:
        return np.asarray(values)
    except Exception as error:
        raise LayoutError(f"{what} cannot be read as an array ({type(values).__name__}): {error}") from error


def _from_range(values: range, what: str, limit: int) -> NDArray[Any]:
    # The ends bound all that lies between. Checking them first keeps `range(10**15)` from filling the memory.
    if not values:
        return np.empty(0, dtype=np.int64)
    for value in (values[0], values[-1]):
        if not 0 <= value < limit:
            _refuse_range(what, (value - values.start) // values.step, value, limit)
    return np.arange(len(values), dtype=np.int64) * values.step + values.start


def _from_sequence(values: list[Any], what: str) -> NDArray[Any]:
    # The set of types is small even for long lists, so the usual list of ints costs one quick pass here.
    if set(map(type, values)) - {int}:
        values = [_element(value, index, what) for index, value in enumerate(values)]
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError as error:
        index = next(i for i, value in enumerate(values) if not -INT64_MAX - 1 <= value <= INT64_MAX)
        raise LayoutError(f"{what}[{index}] is {values[index]}: does not fit in 64 bits") from error


def _element(value: object, index: int, what: str) -> int:
    number = _as_int(value)
    if number is None:
        raise LayoutError(f"{what}[{index}] is {value!r} ({type(value).__name__}): must be an integer")
    return number


def _as_int(value: object) -> int | None:
    if isinstance(value, bool | np.bool_):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def without_repeats(values: Int64Array) -> Int64Array:
    """Return `values` without those that are like their neighbour in front."""
    is_first = np.ones(len(values), np.bool_)
    np.not_equal(values[1:], values[:-1], out=is_first[1:])
    return values[is_first]


def _refuse_range(what: str, index: int, value: int, limit: int) -> NoReturn:
    raise LayoutError(f"{what}[{index}] is {value}: must be 0 to {limit - 1}")
