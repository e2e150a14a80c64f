"""The header of a directory of layer files: what geometry, model and version its bytes were written with.

`layout.json` is JSON so that a person can read it. Its `crc32` covers the canonical form (sorted keys, no
spaces) of everything else. Two geometries whose files have the same size are common (swap heads and blocks),
so without the header a wrong layout would read another layout's bytes as its own.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from typing import Any

from aio_kv.errors import CorruptionError, LayoutError
from aio_kv.layout import GroupLayout

__all__ = ["CREATING_NAME", "HEADER_NAME", "HEADER_NBYTES_MAX", "Header"]

HEADER_NAME = "layout.json"
CREATING_NAME = "layout.json.creating"  # Becomes the header when every file has its space.
HEADER_NBYTES_MAX = 64 * 1024

_FORMAT = "aio_kv.layer_files"
_VERSION = 1
_MODEL_LENGTH_MAX = 4096
_GEOMETRY = (
    "num_layers",
    "num_blocks",
    "num_kv_heads",
    "block_size",
    "head_dim",
    "itemsize",
    "alignment",
)
_HINT = "the directory holds other data: use another directory, or open it with what it was made with"


@dataclass(frozen=True, slots=True)
class Header:
    """What one directory of layer files is; layers are dealt out over `directory_count` directories in turn."""

    layout: GroupLayout
    model: str
    directory_index: int
    directory_count: int

    def __post_init__(self) -> None:
        model: object = self.model  # Callers without a type checker can pass anything.
        if not isinstance(model, str) or len(model) > _MODEL_LENGTH_MAX:
            raise LayoutError(
                f"model is {self.model!r:.80}: must be text of at most {_MODEL_LENGTH_MAX} characters"
            )

    def encode(self) -> bytes:
        """Return the bytes of the header file."""
        fields = self._fields()
        text = json.dumps(fields | {"crc32": _checksum(fields)}, indent=2, sort_keys=True)
        return text.encode() + b"\n"

    def check(self, data: bytes, *, file: str) -> None:
        """Check that `data`, read from `file`, is a sound header that says the same as this one.

        Raises `CorruptionError` for damage and `LayoutError` naming the first field that differs.
        """
        found = _decode(data, file)
        if found.get("format") != _FORMAT:
            raise LayoutError(f"{file} has format {found.get('format')!r}, not {_FORMAT!r}: {_HINT}")
        version = found.get("version")
        if not isinstance(version, int) or version > _VERSION:
            raise LayoutError(
                f"{file} has version {version}, newer than {_VERSION}: update aio_kv to open it"
            )
        for name, wanted in self._fields().items():
            # The type is compared too, since True == 1 and 1.0 == 1 in Python.
            value = found.get(name)
            if value != wanted or type(value) is not type(wanted):
                raise LayoutError(f"{file} has {name} {value!r}, wanted {wanted!r}: {_HINT}")
        unknown = sorted(found.keys() - self._fields().keys())
        if unknown:
            raise LayoutError(f"{file} has unknown fields {unknown}: {_HINT}")

    def _fields(self) -> dict[str, Any]:
        geometry = {name: getattr(self.layout, name) for name in _GEOMETRY}
        return {
            "format": _FORMAT,
            "version": _VERSION,
            **geometry,
            "kinds": [kind.name for kind in self.layout.kinds],
            "model": self.model,
            "directory_index": self.directory_index,
            "directory_count": self.directory_count,
        }


def _decode(data: bytes, file: str) -> dict[str, Any]:
    """Return the fields of a header without its checksum, once that has been found right."""
    if len(data) > HEADER_NBYTES_MAX:
        raise _damaged("is too large", file, f"at most {HEADER_NBYTES_MAX} bytes", "more")
    try:
        fields = json.loads(data)
        # Deep nesting ends in RecursionError and every other fault in ValueError.
    except (ValueError, RecursionError) as error:
        raise _damaged("cannot be parsed", file, "JSON", error) from error
    if not isinstance(fields, dict):
        raise _damaged("cannot be parsed", file, "a JSON object", type(fields).__name__)
    stored = fields.pop("crc32", None)
    if stored != _checksum(fields):
        raise _damaged("has a wrong checksum", file, f"crc32 {_checksum(fields)}", stored)
    return fields


def _checksum(fields: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode())


def _damaged(what: str, file: str, expected: object, found: object) -> CorruptionError:
    hint = "restore the header from a copy, or move the directory away and create it anew"
    return CorruptionError(f"the header {what}", file=file, expected=expected, found=found, hint=hint)
