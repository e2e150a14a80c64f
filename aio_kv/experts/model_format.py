"""Telling the file formats of models apart, by name and first bytes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import Enum
from pathlib import Path

from aio_kv.creation import open_regular
from aio_kv.errors import LayoutError
from aio_kv.experts.packed_format import MAGIC
from aio_kv.positional import read_exactly

__all__ = ["ModelFormat", "model_format"]


class ModelFormat(Enum):
    """What a model's experts can be read from."""

    GGUF = "gguf"
    SAFETENSORS = "safetensors"
    PACKED = "packed"


def model_format(paths: Sequence[str | os.PathLike[str]]) -> ModelFormat:
    """Return the format of the first of a model's files.

    Raises `LayoutError` where it has none of them, and `StorageError` where it cannot be read. Blocks.
    """
    if not paths:
        raise LayoutError("no file of a model was given")
    path = Path(paths[0])
    fd = open_regular(os.path.realpath(path), os.O_RDONLY)
    try:
        data = bytearray(min(len(MAGIC), os.fstat(fd).st_size))
        read_exactly(fd, memoryview(data), 0, file=str(path))
    finally:
        os.close(fd)
    first = bytes(data)
    if first[:4] in (b"GGUF", b"FUGG"):
        return ModelFormat.GGUF
    if first == MAGIC:
        return ModelFormat.PACKED
    # The format has no magic: a length comes first. An index of shards is JSON.
    if path.name.endswith((".safetensors", ".safetensors.index.json")):
        return ModelFormat.SAFETENSORS
    raise LayoutError(
        f"{path} begins with {first!r}, which is neither GGUF nor a packed file, and is not named "
        "*.safetensors"
    )
