"""GGUF files put together byte by byte, sound ones and ones that no writer would write."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["ARRAY", "STRING", "U8", "U16", "U32", "U64", "Info", "array", "gguf_bytes", "key_value", "text"]

U8, U16, U32, STRING, ARRAY, U64 = 0, 2, 4, 8, 9, 10
_CODES = {U8: "B", U16: "H", U32: "I", U64: "Q"}


def text(value: str | bytes) -> bytes:
    """A string: length and bytes."""
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def key_value(key: str | bytes, type_number: int, value: int | str | bytes) -> bytes:
    """A key-value; bytes are taken as they are."""
    if isinstance(value, int):
        value = struct.pack("<" + _CODES[type_number], value)
    elif isinstance(value, str):
        value = text(value)
    return text(key) + struct.pack("<I", type_number) + value


def array(element_type: int, count: int, elements: bytes) -> bytes:
    """The value of an array."""
    return struct.pack("<IQ", element_type, count) + elements


@dataclass(frozen=True)
class Info:
    """A tensor info: type 0 is F32."""

    name: str | bytes = "t"
    dims: Sequence[int] = (4,)
    type_number: int = 0
    offset: int = 0

    def encode(self) -> bytes:
        dims = struct.pack(f"<I{len(self.dims)}Q", len(self.dims), *self.dims)
        return text(self.name) + dims + struct.pack("<IQ", self.type_number, self.offset)


def gguf_bytes(
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    tensor_count: int | None = None,
    key_value_count: int | None = None,
    key_values: Sequence[bytes] = (),
    infos: Sequence[Info] = (),
    alignment: int = 32,
    data: bytes = b"",
) -> bytes:
    """A file; the counts are those of what is in it unless they are given. `alignment` is that of the data."""
    tensors = len(infos) if tensor_count is None else tensor_count
    keys = len(key_values) if key_value_count is None else key_value_count
    head = magic + struct.pack("<IQQ", version, tensors, keys) + b"".join(key_values)
    head += b"".join(info.encode() for info in infos)
    return head + bytes(-len(head) % alignment) + data
