"""The head of one GGUF file: key-values and tensor infos, without touching a byte of the tensors.

    magic "GGUF", u32 version, u64 number of tensors, u64 number of key-values
    each key-value:   string key, u32 type, value      (a string is u64 length + UTF-8; an array is u32 type, u64 count)
    each tensor info: string name, u32 number of dimensions, u64 each, u32 type, u64 offset from the start of the data
    the data starts at the next multiple of `general.alignment` (a key, else 32)

All little-endian. Source: `docs/gguf.md` of the ggml project, and its reader `gguf.cpp` for what that leaves open.
Files come from strangers: every count, length, nesting, alignment and offset is checked against the size of the file
and the bounds below before it is used.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from struct import Struct
from types import MappingProxyType

from aio_kv.creation import open_regular
from aio_kv.errors import LayoutError
from aio_kv.experts.gguf_types import TENSOR_TYPES
from aio_kv.experts.header_cursor import HeaderCursor
from aio_kv.integers import INT64_MAX

__all__ = ["GgufArray", "GgufShard", "GgufTensor", "GgufValue", "read_gguf_header"]

# Bounds far above any real file: 150,000 tokens with their merges take 6 MB, 61 layers of 256 experts 47,000 tensors.
_HEAD_NBYTES_MAX = 256 << 20
_KEY_VALUES_MAX = 1 << 16
_TENSORS_MAX = 1 << 20
_KEY_NBYTES_MAX = (1 << 16) - 1
_STRING_NBYTES_MAX = 16 << 20
_NAME_NBYTES_MAX = 1024
_DIMENSIONS_MAX = 4
_NESTING_MAX = 4
# The least that one can take: an empty string and a value of one byte; an empty string and no dimensions.
_KEY_VALUE_NBYTES_MIN = 8 + 4 + 1
_TENSOR_INFO_NBYTES_MIN = 8 + 4 + 4 + 8
_ALIGNMENT_DEFAULT = 32

_U32_TYPE, _BOOL_TYPE, _STRING_TYPE, _ARRAY_TYPE = 4, 7, 8, 9
_SCALARS = {
    number: Struct("<" + code) for number, code in enumerate(["B", "b", "H", "h", "I", "i", "f", "B"])
} | {10: Struct("<Q"), 11: Struct("<q"), 12: Struct("<d")}


@dataclass(frozen=True, slots=True)
class GgufArray:
    """An array among the key-values, which is not read: where its `count` elements of a type lie, in bytes."""

    element_type: int
    count: int
    file_offset: int
    nbytes: int


GgufValue = int | float | bool | str | GgufArray


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies. `dims` has the fastest dimension first, as in the file; NumPy's shape is its reverse.

    `file_offset` counts from the start of shard `shard`. `nbytes` is None where the type is one that this version does
    not know.
    """

    name: str
    type_number: int
    dims: tuple[int, ...]
    shard: int
    file_offset: int
    nbytes: int | None

    @property
    def type_name(self) -> str:
        """The name of the tensor's type, such as "Q4_K"."""
        known = TENSOR_TYPES.get(self.type_number)
        return known.name if known else f"type {self.type_number}"


@dataclass(frozen=True, slots=True)
class GgufShard:
    """What the head of one file says. `nbytes` is the size of the file, `data_start` where tensors begin, in bytes."""

    path: Path
    nbytes: int
    version: int
    alignment: int
    data_start: int
    metadata: Mapping[str, GgufValue]
    tensors: tuple[GgufTensor, ...]


def read_gguf_header(path: Path, *, shard: int = 0) -> GgufShard:
    """Read the head of the file at `path`; `shard` is the number that its tensors get.

    At most 64 KiB beyond the tensor infos are read. Raises `StorageError` where the file cannot be opened,
    `CorruptionError` where it is not sound, `LayoutError` for a kind of GGUF that is not supported. Blocks.
    """
    # A model cache gives links to its files.
    fd = open_regular(os.path.realpath(path), os.O_RDONLY)
    try:
        nbytes = os.fstat(fd).st_size
        cursor = HeaderCursor(fd, file=str(path), nbytes=nbytes, limit_nbytes=_HEAD_NBYTES_MAX)
        return _parse(cursor, path, nbytes, shard)
    finally:
        os.close(fd)


def _parse(cursor: HeaderCursor, path: Path, nbytes: int, shard: int) -> GgufShard:
    version = _version(cursor, path)
    tensor_count = _count(cursor, "tensors", _TENSORS_MAX, _TENSOR_INFO_NBYTES_MIN)
    key_value_count = _count(cursor, "key-values", _KEY_VALUES_MAX, _KEY_VALUE_NBYTES_MIN)
    metadata: dict[str, GgufValue] = {}
    alignment = _ALIGNMENT_DEFAULT
    for _ in range(key_value_count):
        start = cursor.offset
        key = _string(cursor, "a key", _KEY_NBYTES_MAX)
        if key in metadata:
            raise cursor.damaged(f"the key {key!r} is there twice", file_offset=start)
        type_number = cursor.u32(f"the type of {key!r}")
        metadata[key] = _value(cursor, key, type_number)
        if key == "general.alignment":
            alignment = _alignment(cursor, metadata[key], type_number, start)
    infos = [_tensor_info(cursor) for _ in range(tensor_count)]
    data_start = -(-cursor.offset // alignment) * alignment
    tensors = tuple(_placed(cursor, info, data_start, alignment, nbytes, shard) for info in infos)
    _check_apart(cursor, tensors)
    return GgufShard(path, nbytes, version, alignment, data_start, MappingProxyType(metadata), tensors)


def _version(cursor: HeaderCursor, path: Path) -> int:
    magic = cursor.take(4, "the magic")
    if magic == b"FUGG":
        raise _big_endian(path)
    if magic != b"GGUF":
        raise cursor.damaged("not a GGUF file", file_offset=0, expected=b"GGUF", found=magic)
    version = cursor.u32("the version")
    if version in (2, 3):
        return version
    if version in (2 << 24, 3 << 24):
        raise _big_endian(path)
    advice = "convert the model again" if version < 2 else "update aio_kv to open it"
    raise LayoutError(f"{path} is GGUF version {version}, and 2 and 3 can be read: {advice}")


def _big_endian(path: Path) -> LayoutError:
    return LayoutError(
        f"{path} is a big-endian GGUF file, and only little-endian ones can be read: convert it with "
        "gguf_convert_endian of the gguf package"
    )


def _count(cursor: HeaderCursor, what: str, most: int, nbytes_min: int) -> int:
    start = cursor.offset
    count = cursor.u64(f"the number of {what}")
    if count > min(most, cursor.remaining // nbytes_min):
        limit = f"at most {min(most, cursor.remaining // nbytes_min)}"
        raise cursor.damaged(f"too many {what} for the file", file_offset=start, expected=limit, found=count)
    return count


def _string(cursor: HeaderCursor, what: str, nbytes_max: int, *, errors: str = "strict") -> str:
    start = cursor.offset
    nbytes = cursor.u64(f"the length of {what}")
    if nbytes > nbytes_max:
        expected = f"at most {nbytes_max} bytes"
        raise cursor.damaged(f"{what} is too long", file_offset=start, expected=expected, found=nbytes)
    try:
        return cursor.take(nbytes, what).decode(errors=errors)
    except UnicodeDecodeError as error:
        raise cursor.damaged(f"{what} is not UTF-8", file_offset=start, found=error.reason) from error


def _value(cursor: HeaderCursor, key: str, type_number: int) -> GgufValue:
    what = f"the value of {key!r}"
    if type_number == _STRING_TYPE:
        # Texts for people, a model's description for one, come in whatever encoding their author had.
        return _string(cursor, what, _STRING_NBYTES_MAX, errors="replace")
    if type_number == _ARRAY_TYPE:
        return _array(cursor, what, depth=1)
    scalar = _SCALARS.get(type_number)
    if scalar is None:
        raise cursor.damaged(f"{what} has an unknown type", expected="0 to 12", found=type_number)
    value: int | float = scalar.unpack(cursor.take(scalar.size, what))[0]
    return bool(value) if type_number == _BOOL_TYPE else value


def _array(cursor: HeaderCursor, what: str, *, depth: int) -> GgufArray:
    """Go past an array. Its elements are counted, and its strings' lengths followed, but nothing is kept."""
    if depth > _NESTING_MAX:
        raise cursor.damaged(f"{what} is nested too deep", expected=f"at most {_NESTING_MAX} arrays")
    element_type = cursor.u32(what)
    count = cursor.u64(what)
    start = cursor.offset
    if element_type == _STRING_TYPE:
        cursor.skip_strings(count, what)
    elif element_type == _ARRAY_TYPE:
        if count * 12 > cursor.remaining:
            raise cursor.damaged(f"{what} has more arrays than fit the file", found=count)
        for _ in range(count):
            _array(cursor, what, depth=depth + 1)
    elif element_type in _SCALARS:
        cursor.skip(count * _SCALARS[element_type].size, what)
    else:
        raise cursor.damaged(
            f"{what} has elements of an unknown type", expected="0 to 12", found=element_type
        )
    return GgufArray(element_type, count, start, cursor.offset - start)


def _alignment(cursor: HeaderCursor, value: GgufValue, type_number: int, start: int) -> int:
    # Far more than any device asks for; beyond it a file would be mostly holes.
    if (
        type_number != _U32_TYPE
        or not isinstance(value, int)
        or not 0 < value <= 1 << 30
        or value & (value - 1)
    ):
        raise cursor.damaged(
            "general.alignment is wrong", file_offset=start, expected="a u32 power of two", found=value
        )
    return value


@dataclass(frozen=True, slots=True)
class _TensorInfo:
    """A tensor info as it is in the file, and where it is: `file_offset` is its own, `offset` that of the data."""

    file_offset: int
    name: str
    dims: tuple[int, ...]
    type_number: int
    offset: int


def _tensor_info(cursor: HeaderCursor) -> _TensorInfo:
    start = cursor.offset
    name = _string(cursor, "the name of a tensor", _NAME_NBYTES_MAX)
    what = f"the info of tensor {name!r}"
    num_dims = cursor.u32(what)
    if num_dims > _DIMENSIONS_MAX:
        expected = f"at most {_DIMENSIONS_MAX}"
        raise cursor.damaged(
            f"tensor {name!r} has too many dimensions",
            file_offset=start,
            expected=expected,
            found=num_dims,
        )
    dims = tuple(cursor.u64(what) for _ in range(num_dims))
    if prod(dims) > INT64_MAX:
        raise cursor.damaged(f"tensor {name!r} is too large", file_offset=start, found=f"dimensions {dims}")
    type_number = cursor.u32(what)
    return _TensorInfo(start, name, dims, type_number, cursor.u64(what))


def _placed(
    cursor: HeaderCursor, info: _TensorInfo, data_start: int, alignment: int, file_nbytes: int, shard: int
) -> GgufTensor:
    nbytes = _tensor_nbytes(cursor, info)
    if info.offset % alignment:
        raise cursor.damaged(
            f"tensor {info.name!r} is not aligned",
            file_offset=info.file_offset,
            expected=f"a multiple of {alignment}",
            found=f"offset {info.offset}",
        )
    start = data_start + info.offset
    if start + (nbytes or 0) > file_nbytes:
        raise cursor.damaged(
            f"tensor {info.name!r} lies past the end of the file",
            file_offset=start,
            expected=f"{nbytes if nbytes is not None else 'some'} bytes there",
            found=f"a file of {file_nbytes} bytes",
            hint="the file is cut short, or damaged: fetch it again",
        )
    return GgufTensor(info.name, info.type_number, info.dims, shard, start, nbytes)


def _tensor_nbytes(cursor: HeaderCursor, info: _TensorInfo) -> int | None:
    known = TENSOR_TYPES.get(info.type_number)
    if known is None:
        return None
    row = info.dims[0] if info.dims else 1
    if row % known.block_elements:
        raise cursor.damaged(
            f"the rows of tensor {info.name!r} are not whole blocks of {known.name}",
            file_offset=info.file_offset,
            expected=f"a multiple of {known.block_elements} elements",
            found=row,
        )
    return prod(info.dims) // known.block_elements * known.block_nbytes


def _check_apart(cursor: HeaderCursor, tensors: tuple[GgufTensor, ...]) -> None:
    """Refuse two tensors of one name, or that share bytes: one of them would be read as the other."""
    names: set[str] = set()
    end, last = 0, ""
    for tensor in sorted(tensors, key=lambda tensor: tensor.file_offset):
        if tensor.name in names:
            raise cursor.damaged(f"the tensor {tensor.name!r} is there twice", file_offset=tensor.file_offset)
        names.add(tensor.name)
        if tensor.file_offset < end and tensor.nbytes != 0:
            raise cursor.damaged(
                f"tensors {last!r} and {tensor.name!r} overlap", file_offset=tensor.file_offset
            )
        if tensor.nbytes:
            end, last = tensor.file_offset + tensor.nbytes, tensor.name
