"""Which bytes of which files make up one expert."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from aio_kv.errors import LayoutError
from aio_kv.experts.gguf_experts import gguf_experts
from aio_kv.experts.gguf_index import GgufIndex
from aio_kv.experts.model_format import ModelFormat, model_format
from aio_kv.experts.packed_file import PackedFile, write_packed
from aio_kv.experts.safetensors_experts import safetensors_experts, safetensors_paths
from aio_kv.experts.segments import DirectSegment
from aio_kv.experts.slot_image import LayerExperts, SlotPart
from aio_kv.integers import check_index

__all__ = ["ExpertMap"]


class ExpertMap:
    """For each (layer, expert) the reads that fill a slot with it. Immutable; it keeps no file open.

    A slot holds the tensors of one expert one after the other, without gaps: the slot offsets of its segments begin
    at 0, and each follows from the one before. `parts` says which tensor is where. All experts of one layer hold the
    same tensors in the same order.
    """

    @classmethod
    def from_gguf(
        cls, model: GgufIndex | str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
    ) -> ExpertMap:
        """Map the experts of a GGUF model: an index, or paths as `GgufIndex.open` takes them.

        Stacked tensors, gate and up fused or not, and old tensors per expert, with their biases and scales. Raises
        `LayoutError` for a dense model and for a quantisation that is not known, `CorruptionError` where tensors
        contradict one another, and what `GgufIndex.open` raises. Blocks, unless `model` is an index.
        """
        index = model if isinstance(model, GgufIndex) else GgufIndex.open(model)
        return cls(index.paths, gguf_experts(index), model=index.architecture)

    @classmethod
    def from_safetensors(
        cls, paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], *, prefix: str = ""
    ) -> ExpertMap:
        """Map the experts of a model in safetensors files.

        `paths` is one file, the first of several shards, their index (`model.safetensors.index.json`), or all of them.
        Where they hold several models, `prefix` says how the names of the tensors of one begin. An expert's tensors
        lie in a slot in the order in which they do in the file, and neighbours are one segment. Raises `LayoutError`,
        `CorruptionError` or `StorageError`. Blocks.
        """
        found = safetensors_paths(paths)
        return cls(found, safetensors_experts(found, prefix=prefix))

    @classmethod
    def from_packed(cls, packed: PackedFile | str | os.PathLike[str]) -> ExpertMap:
        """Map the experts of a packed file: every one is a single aligned segment.

        The checksums of head and directory are checked, and those of the experts are not: `PackedFile.check_records`
        does that. Raises `CorruptionError`, `StorageError`, or `LayoutError` for a version that is not known. Blocks,
        unless `packed` is open already.
        """
        found = packed if isinstance(packed, PackedFile) else PackedFile.open(packed)
        return cls((found.path,), found.experts(), model=found.directory.model)

    @classmethod
    def open(
        cls, paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], *, prefix: str = ""
    ) -> ExpertMap:
        """Map the experts of a model in whichever of the formats its first file is. Blocks.

        Raises `LayoutError` for a file that is none of them, and what `from_gguf`, `from_safetensors` (which takes
        `prefix`) and `from_packed` raise.
        """
        given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
        kind = model_format(given)
        if kind is ModelFormat.GGUF:
            return cls.from_gguf(given)
        if kind is ModelFormat.PACKED:
            if len(given) > 1:
                raise LayoutError(f"{given[0]} is a packed file, and a model has one of them: open it alone")
            return cls.from_packed(given[0])
        return cls.from_safetensors(given, prefix=prefix)

    def __init__(
        self, paths: tuple[Path, ...], experts: Mapping[int, LayerExperts], *, model: str | None = None
    ) -> None:
        if not experts:
            raise LayoutError(f"{_names(paths)}: no experts, so there is nothing to map")
        self._paths = paths
        self._model = model
        self._experts = dict(sorted(experts.items()))
        self._slot_nbytes = {layer: found.slot_nbytes for layer, found in self._experts.items()}

    @property
    def paths(self) -> tuple[Path, ...]:
        """The file of each shard, as given by the caller: model caches give symbolic links, which are followed."""
        return self._paths

    @property
    def model(self) -> str | None:
        """The name of the model's architecture, where the files say it."""
        return self._model

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that have experts, ascending. Dense layers are not among them."""
        return tuple(self._experts)

    def num_experts(self, layer: int) -> int:
        """Return how many experts `layer` has. Raises `LayoutError` for a layer without experts."""
        return self._layer(layer).num_experts

    def segments(self, layer: int, expert: int) -> tuple[DirectSegment, ...]:
        """Return the reads that fill a slot with this expert, in slot order.

        Raises `LayoutError` for a layer without experts, or an expert that the layer does not have.
        """
        return self._layer(layer).segments(self._expert(layer, expert))

    def parts(self, layer: int, expert: int) -> tuple[SlotPart, ...]:
        """Return the tensors of this expert and where each lies in its slot, in slot order. Raises as `segments`."""
        return self._layer(layer).parts(self._expert(layer, expert))

    def slot_nbytes(self, layer: int) -> int:
        """Return the bytes of a slot for this layer. Raises `LayoutError` for a layer without experts."""
        self._layer(layer)
        return self._slot_nbytes[layer]

    @property
    def slot_nbytes_max(self) -> int:
        """Bytes of a slot that any expert of any layer fits in."""
        return max(self._slot_nbytes.values())

    def pack(
        self,
        target: str | os.PathLike[str],
        *,
        alignment: int = 4096,
        overwrite: bool = False,
        on_written: Callable[[int], None] = lambda nbytes: None,
    ) -> PackedFile:
        """Write every expert into `target`, one aligned record each, and return what it is; see `from_packed`.

        `target` appears when it is complete, and not before; a failure leaves what was there. `alignment` is a power
        of two from 512 bytes to 2 MiB. `on_written` is told of the bytes of each record. Raises `StorageError` for
        what the system refuses, a lack of space before anything is copied, and for a target that exists unless
        `overwrite`; `LayoutError` for a wrong alignment or a target that is a file of the model; `CorruptionError`
        where the model changes meanwhile; `BusyError` where someone else packs into `target`. Blocks.
        """
        return write_packed(
            Path(target),
            self._paths,
            self._experts,
            model=self._model,
            alignment=alignment,
            overwrite=overwrite,
            on_written=on_written,
        )

    def _layer(self, layer: int) -> LayerExperts:
        found = self._experts.get(layer) if type(layer) is int else None
        if found is None:
            number = check_index(layer, what="layer", limit=max(self._experts) + 1)
            if number not in self._experts:
                raise LayoutError(f"layer is {number}, which has no experts: {_spans(self.layers)} have")
            found = self._experts[number]
        return found

    def _expert(self, layer: int, expert: int) -> int:
        return check_index(expert, what=f"expert of layer {layer}", limit=self._layer(layer).num_experts)


def _names(paths: tuple[Path, ...]) -> str:
    return ", ".join(str(path) for path in paths) or "no files"


def _spans(layers: tuple[int, ...]) -> str:
    """Say numbers that ascend in few words: "layers 0, 3 to 26"."""
    spans: list[list[int]] = []
    for layer in layers:
        if spans and layer == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], layer]
        else:
            spans.append([layer])
    return "layers " + ", ".join(" to ".join(str(end) for end in span) for span in spans)
