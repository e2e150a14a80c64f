"""The tensors of a model in GGUF files: one file, or shards named `model-00001-of-00003.gguf`."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from aio_kv.errors import CorruptionError, LayoutError, StorageError
from aio_kv.experts.gguf_header import GgufShard, GgufTensor, GgufValue, read_gguf_header

__all__ = ["GgufIndex"]

_SHARD_NAME = re.compile(r"(?P<stem>.*)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)


@dataclass(frozen=True, slots=True)
class GgufIndex:
    """What the heads of a model's files say. Holds no file open.

    `metadata` is that of the first shard; `tensors` has those of all shards by name, in the order of the files.
    """

    shards: tuple[GgufShard, ...]
    metadata: Mapping[str, GgufValue]
    tensors: Mapping[str, GgufTensor]

    @classmethod
    def open(cls, paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> GgufIndex:
        """Read the heads of one file or of all shards of a model; of tensors not a byte is asked for.

        Of a split model, give the first shard alone, whose name leads to the others, or all of them in order. Raises
        `StorageError` for a file that is missing or cannot be opened, `LayoutError` for shards that are not in order
        or not all, and a kind of GGUF that is not supported, `CorruptionError` for a file that is not sound. Blocks.
        """
        given = [Path(paths)] if isinstance(paths, str | os.PathLike) else [Path(path) for path in paths]
        if not given:
            raise LayoutError("no GGUF file was given")
        first = read_gguf_header(given[0])
        if len(given) == 1:
            given = _siblings(first)
        shards = [first, *(_read_shard(path, number, first) for number, path in enumerate(given) if number)]
        if len(shards) > 1:
            _check_shards(shards)
        return cls(tuple(shards), first.metadata, MappingProxyType(_gathered(shards)))

    @property
    def architecture(self) -> str | None:
        """The name of the model's architecture, or None where the file does not say."""
        name = self.metadata.get("general.architecture")
        return name if isinstance(name, str) else None

    @property
    def paths(self) -> tuple[Path, ...]:
        """The file of each shard."""
        return tuple(shard.path for shard in self.shards)


def _split(shard: GgufShard) -> tuple[int, int]:
    """Return which shard this is, counted from 0, of how many; (0, 1) for a model in one file."""
    number, count = shard.metadata.get("split.no", 0), shard.metadata.get("split.count", 1)
    for key, value in (("split.no", number), ("split.count", count)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise CorruptionError(f"{key} is wrong", file=str(shard.path), expected="a count", found=value)
    assert isinstance(number, int)
    assert isinstance(count, int)
    if number >= max(1, count):
        raise CorruptionError(
            "split.no is wrong", file=str(shard.path), expected=f"0 to {max(1, count) - 1}", found=number
        )
    return number, max(1, count)


def _siblings(shard: GgufShard) -> list[Path]:
    """Return the paths of all shards of the model that begins with this one."""
    number, count = _split(shard)
    if count == 1:
        return [shard.path]
    match = _SHARD_NAME.fullmatch(shard.path.name)
    if match is None or (int(match["number"]), int(match["count"])) != (number + 1, count):
        raise LayoutError(
            f"{shard.path} is shard {number + 1} of {count}, and its name does not say so: give the paths of all "
            f"{count} shards in order"
        )
    names = [f"{match['stem']}-{index + 1:05}-of-{count:05}.gguf" for index in range(count)]
    if number:
        raise LayoutError(
            f"{shard.path} is shard {number + 1} of {count}: give the first one, {names[0]}, or all in order"
        )
    return [shard.path.with_name(name) for name in names]


def _read_shard(path: Path, number: int, first: GgufShard) -> GgufShard:
    try:
        return read_gguf_header(path, shard=number)
    except StorageError as error:
        if error.errno != errno.ENOENT:
            raise
        count = _split(first)[1]
        hint = (
            f"this is shard {number + 1} of {count} of the model: fetch it as well"
            if number < count
            else f"{first.path.name} is a model of {count} shard{'s' * (count > 1)}: give only those"
        )
        raise StorageError("open", errno=errno.ENOENT, file=str(path), hint=hint) from error


def _check_shards(shards: Sequence[GgufShard]) -> None:
    """Check that these are all the shards of one model, in order."""
    for place, shard in enumerate(shards):
        number, count = _split(shard)
        if count == 1:
            raise LayoutError(f"{shard.path} is no shard of a split model: open it alone")
        if count != len(shards):
            raise LayoutError(
                f"{shard.path} is shard {number + 1} of {count}, and {len(shards)} files were given: give all"
            )
        if number != place:
            raise LayoutError(
                f"{shard.path} is shard {number + 1} of {count} and was given as number {place + 1}: give the "
                "shards in order"
            )
    wanted = shards[0].metadata.get("split.tensors.count")
    found = sum(len(shard.tensors) for shard in shards)
    if wanted is not None and wanted != found:
        raise CorruptionError(
            "the shards do not have the tensors that the first one announces",
            file=str(shards[0].path),
            expected=wanted,
            found=found,
            hint="a shard may belong to another model: fetch them again",
        )


def _gathered(shards: Sequence[GgufShard]) -> dict[str, GgufTensor]:
    tensors: dict[str, GgufTensor] = {}
    for shard in shards:
        for tensor in shard.tensors:
            if tensor.name in tensors:
                first = shards[tensors[tensor.name].shard].path
                raise CorruptionError(
                    f"the tensor {tensor.name!r} is in two shards, this and {first}",
                    file=str(shard.path),
                    file_offset=tensor.file_offset,
                )
            tensors[tensor.name] = tensor
    return tensors
