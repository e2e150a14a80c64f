"""The head of one safetensors file: where its tensors lie, without touching a byte of them.

    u64 length of the header, little-endian; the header, JSON; the data
    {"NAME": {"dtype": "BF16", "shape": [4, 8], "data_offsets": [BEGIN, END]}, ..., "__metadata__": {"KEY": "VALUE"}}

Offsets count from the end of the header; the tensors fill the data without holes or overlaps, row after row. Source:
the format's description in the safetensors repository, and the checks of its reader, which is the oracle in the tests.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from aio_kv.creation import open_regular
from aio_kv.errors import CorruptionError
from aio_kv.experts.header_cursor import HeaderCursor

__all__ = ["SafetensorsTensor", "parse_json", "read_safetensors_header"]

# The limit of the reference reader.
HEADER_NBYTES_MAX = 100_000_000
_DIMENSIONS_MAX = 64
_NAME_LENGTH_MAX = 1024
# Source: `enum Dtype` of the Rust crate, 0.8. Of a type that is not here the size is taken from the offsets alone.
_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}


@dataclass(frozen=True, slots=True)
class SafetensorsTensor:
    """Where a tensor lies: `nbytes` at `file_offset` from the start of its file. `shape` as in NumPy, slowest first."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file_offset: int
    nbytes: int


def read_safetensors_header(path: Path) -> tuple[SafetensorsTensor, ...]:
    """Read the head of the file at `path` and return its tensors in the order of the file.

    Raises `StorageError` where the file cannot be opened, `CorruptionError` where it is not sound. Blocks.
    """
    fd = open_regular(os.path.realpath(path), os.O_RDONLY)
    try:
        nbytes = os.fstat(fd).st_size
        cursor = HeaderCursor(fd, file=str(path), nbytes=nbytes, limit_nbytes=8 + HEADER_NBYTES_MAX)
        length = cursor.u64("the length of the header")
        if length > min(HEADER_NBYTES_MAX, nbytes - 8):
            limit = f"at most {min(HEADER_NBYTES_MAX, nbytes - 8)}"
            raise cursor.damaged(
                "not a safetensors file, or cut short: the header is too long",
                file_offset=0,
                expected=limit,
                found=length,
            )
        header = cursor.take(length, "the header")
    finally:
        os.close(fd)
    return _tensors(parse_json(header, file=str(path), file_offset=8), path, 8 + length, nbytes)


def parse_json(data: bytes, *, file: str, file_offset: int) -> dict[str, Any]:
    """Return the JSON object in `data`. Raises `CorruptionError` where it is none, or says something twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) != len(pairs):
            raise ValueError("a name is there twice")
        return fields

    try:
        fields = json.loads(data, object_pairs_hook=unique)
        # Deep nesting ends in RecursionError and every other fault in ValueError.
    except (ValueError, RecursionError) as error:
        raise CorruptionError(
            "the header cannot be parsed", file=file, file_offset=file_offset, expected="JSON", found=error
        ) from error
    if not isinstance(fields, dict):
        found = type(fields).__name__
        raise CorruptionError(
            "the header is wrong", file=file, file_offset=file_offset, expected="an object", found=found
        )
    return fields


def _tensors(
    fields: dict[str, Any], path: Path, data_start: int, file_nbytes: int
) -> tuple[SafetensorsTensor, ...]:
    fields.pop("__metadata__", None)
    tensors = [_tensor(name, entry, path, data_start) for name, entry in fields.items()]
    tensors.sort(key=lambda tensor: (tensor.file_offset, tensor.nbytes))
    end = data_start
    for tensor in tensors:
        if tensor.file_offset != end:
            raise CorruptionError(
                f"tensor {tensor.name!r} does not begin where the one before it ends",
                file=str(path),
                file_offset=tensor.file_offset,
                expected=end,
                found=tensor.file_offset,
            )
        end += tensor.nbytes
    if end != file_nbytes:
        raise CorruptionError(
            "the tensors do not end where the file does",
            file=str(path),
            file_offset=min(end, file_nbytes),
            expected=f"{end} bytes",
            found=f"{file_nbytes}",
            hint="the file is cut short, or damaged: fetch it again",
        )
    return tuple(tensors)


def _tensor(name: str, entry: Any, path: Path, data_start: int) -> SafetensorsTensor:
    if len(name) > _NAME_LENGTH_MAX:
        raise _wrong(name[:40] + "...", path, f"a name of at most {_NAME_LENGTH_MAX} characters", len(name))
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise _wrong(name, path, "dtype, shape and two data_offsets", entry) from error
    is_shape = isinstance(shape, list) and len(shape) <= _DIMENSIONS_MAX and all(map(_is_count, shape))
    if not (isinstance(dtype, str) and is_shape and _is_count(begin) and _is_count(end) and begin <= end):
        raise _wrong(name, path, "a name, a list of sizes, and offsets that ascend", entry)
    bits = _BITS.get(dtype)
    if bits is not None and (end - begin) * 8 != prod(shape) * bits:
        raise _wrong(name, path, f"{prod(shape) * bits / 8:g} bytes of {dtype} for {shape}", end - begin)
    return SafetensorsTensor(name, dtype, tuple(shape), data_start + begin, end - begin)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _wrong(name: str, path: Path, expected: str, found: object) -> CorruptionError:
    shown = f"{found!r:.120}"
    return CorruptionError(
        f"the entry of tensor {name!r} is wrong",
        file=str(path),
        file_offset=8,
        expected=expected,
        found=shown,
    )
