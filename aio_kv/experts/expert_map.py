"""Which bytes of which files make up one expert."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from aio_kv.errors import LayoutError
from aio_kv.experts.segments import DirectSegment
from aio_kv.experts.slot_image import LayerExperts, SlotPart
from aio_kv.integers import check_index

__all__ = ["ExpertMap"]


class ExpertMap:
    """For each (layer, expert) the reads that fill a slot with it. Immutable; it opens no file and reads nothing.

    A slot holds the tensors of one expert one after the other, without gaps: the slot offsets of its segments begin
    at 0, and each follows from the one before. `parts` says which tensor is where. All experts of one layer hold the
    same tensors in the same order.
    """

    def __init__(self, paths: tuple[Path, ...], experts: Mapping[int, LayerExperts]) -> None:
        self._paths = paths
        self._experts = dict(sorted(experts.items()))
        self._slot_nbytes = {layer: found.slot_nbytes for layer, found in self._experts.items()}
        if not self._experts:
            raise LayoutError(f"{_names(paths)}: no experts, so there is nothing to map")

    @property
    def paths(self) -> tuple[Path, ...]:
        """The file of each shard, as given by the caller: model caches give symbolic links, which are followed."""
        return self._paths

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
