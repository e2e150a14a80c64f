"""The experts of a model, numbered through: what policies and slots know them by."""

from __future__ import annotations

import bisect
from typing import Any

from aio_kv.experts.expert_map import ExpertMap
from aio_kv.experts.segments import DirectSegment
from aio_kv.integers import check_axis

__all__ = ["ExpertKeys"]


class ExpertKeys:
    """From (layer, expert) to a key and back. A key is a number below the count of all experts."""

    def __init__(self, experts: ExpertMap) -> None:
        self._experts = experts
        self._firsts: list[int] = []
        count = 0
        for layer in experts.layers:
            self._firsts.append(count)
            count += experts.num_experts(layer)
        self._first_of = dict(zip(experts.layers, self._firsts, strict=True))
        self._nbytes = [-1] * count

    def keys(self, layer: int, ids: Any) -> tuple[int, ...]:
        """The keys of experts of one layer. Raises `LayoutError` for what is not there."""
        count = self._experts.num_experts(layer)
        first = self._first_of[int(layer)]
        ids = check_axis(ids, what=f"experts of layer {layer}", limit=count)
        return tuple(first + expert for expert in ids.tolist())

    def expert(self, key: int) -> tuple[int, int]:
        """The (layer, expert) behind a key."""
        index = bisect.bisect_right(self._firsts, key) - 1
        return self._experts.layers[index], key - self._firsts[index]

    def segments(self, key: int) -> tuple[DirectSegment, ...]:
        """Where the expert lies."""
        return self._experts.segments(*self.expert(key))

    def nbytes(self, key: int) -> int:
        """How many bytes it has."""
        if self._nbytes[key] < 0:
            self._nbytes[key] = sum(segment.nbytes for segment in self.segments(key))
        return self._nbytes[key]
