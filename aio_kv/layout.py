"""The geometry of a KV cache on disk: which bytes of which file hold which group.

A *group* is the unit of movement: the run of `block_size * head_dim * itemsize` bytes of one (layer, block,
kv_head, kind), padded up to `alignment`. The place of a group is computed, never stored:

    stride    = payload_nbytes rounded up to alignment
    offset    = ((block * num_kinds + kind) * num_kv_heads + kv_head) * stride        in the file of its layer
    group_id  = layer * groups_per_layer + (block * num_kinds + kind) * num_kv_heads + kv_head

`kind` is the index in `layout.kinds`. All heads and kinds of one block of a layer lie side by side, so a
block is one contiguous I/O. Everything here is pure: no I/O, no state.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum

import numpy as np

from aio_kv.errors import LayoutError
from aio_kv.integers import INT64_MAX, Int64Array, IntegerLike, check_axis, check_index, check_integers

__all__ = ["GroupKey", "GroupLayout", "KvKind"]

_ALIGNMENT_MIN = 512  # The smallest logical block of any disk; direct I/O below it is impossible.
_COUNTS = ("num_layers", "num_blocks", "num_kv_heads", "block_size", "head_dim", "itemsize")


class KvKind(Enum):
    """What a group holds: keys, values, or the joint latent of multi-head latent attention (MLA)."""

    K = "k"
    V = "v"
    LATENT = "latent"


@dataclass(frozen=True, slots=True)
class GroupKey:
    """The name of one group. Checked against a layout when it is used, not when it is made."""

    layer: int
    block: int
    kv_head: int
    kind: KvKind


def _derived() -> int:
    # A value computed once from the others: on the hot path an attribute is cheaper than a property.
    value: int = field(init=False, repr=False, compare=False, default=0)
    return value


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """Sizes and places of all groups of one KV cache.

    Args:
        num_layers: layers of the model; one file each.
        num_blocks: blocks per layer; a block is `block_size` tokens.
        num_kv_heads: key/value heads (1 for MLA).
        block_size: tokens per block.
        head_dim: elements per token and head.
        itemsize: bytes per element.
        kinds: what is kept per head, in file order.
        alignment: bytes, a power of two of at least 512; groups start at multiples of it. 4096 suits direct
            I/O on every common disk.

    Derived, in bytes: `payload_nbytes` (what callers see of a group), `stride` (what a group takes on disk),
    `block_nbytes`, `nbytes_per_layer` (the size of one file), `nbytes` (all files). Derived counts:
    `num_kinds`, `groups_per_block`, `groups_per_layer`, `num_groups`.

    Raises `LayoutError` naming the field for anything that is not a positive integer, a bad alignment,
    unknown or repeated kinds, or totals that do not fit in 63 bits.
    """

    num_layers: int
    num_blocks: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    itemsize: int
    _: KW_ONLY
    kinds: tuple[KvKind, ...] = (KvKind.K, KvKind.V)
    alignment: int = 4096
    num_kinds: int = _derived()
    payload_nbytes: int = _derived()
    stride: int = _derived()
    groups_per_block: int = _derived()
    groups_per_layer: int = _derived()
    num_groups: int = _derived()
    block_nbytes: int = _derived()
    nbytes_per_layer: int = _derived()
    nbytes: int = _derived()

    def __post_init__(self) -> None:
        for name in _COUNTS:
            self._set(name, check_index(getattr(self, name), what=name, first=1, limit=INT64_MAX))
        self._set("alignment", _check_alignment(self.alignment))
        kinds = _check_kinds(self.kinds)
        self._set("kinds", kinds)
        self._set("num_kinds", len(kinds))
        self._derive()
        # The number of groups cannot pass the number of bytes, so this bounds every identifier as well.
        if self.nbytes > INT64_MAX:
            raise LayoutError(f"the layout takes {self.nbytes} bytes: must be at most {INT64_MAX}")

    def _derive(self) -> None:
        self._set("payload_nbytes", self.block_size * self.head_dim * self.itemsize)
        self._set("stride", -(-self.payload_nbytes // self.alignment) * self.alignment)
        self._set("groups_per_block", self.num_kinds * self.num_kv_heads)
        self._set("groups_per_layer", self.num_blocks * self.groups_per_block)
        self._set("num_groups", self.num_layers * self.groups_per_layer)
        self._set("block_nbytes", self.groups_per_block * self.stride)
        self._set("nbytes_per_layer", self.groups_per_layer * self.stride)
        self._set("nbytes", self.num_layers * self.nbytes_per_layer)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # The dataclass is frozen for everyone else.

    def offset(self, key: GroupKey) -> int:
        """Return the byte offset of a group in the file of its layer. Raises `LayoutError` for a wrong key."""
        return self._index_in_layer(key) * self.stride

    def group_id(self, key: GroupKey) -> int:
        """Return the dense number of a group, in [0, num_groups). Raises `LayoutError` for a wrong key."""
        index = self._index_in_layer(key)
        return int(key.layer) * self.groups_per_layer + index

    def key(self, group_id: int) -> GroupKey:
        """Return the key of a group number: the inverse of `group_id`. Raises `LayoutError` out of range."""
        number = check_index(group_id, what="group_id", limit=self.num_groups)
        layer, in_layer = divmod(number, self.groups_per_layer)
        block, in_block = divmod(in_layer, self.groups_per_block)
        kind, kv_head = divmod(in_block, self.num_kv_heads)
        return GroupKey(layer, block, kv_head, self.kinds[kind])

    def block_group_id(self, layer: int, block: int) -> int:
        """Return the number of the first group of a block; the block's groups are the `groups_per_block` from it."""
        layer = check_index(layer, what="layer", limit=self.num_layers)
        block = check_index(block, what="block", limit=self.num_blocks)
        return layer * self.groups_per_layer + block * self.groups_per_block

    def group_ids(
        self,
        layers: IntegerLike,
        blocks: IntegerLike,
        kv_heads: IntegerLike,
        kinds: KvKind | Iterable[KvKind],
    ) -> Int64Array:
        """Return the numbers of every combination of the arguments, as a new one-dimensional int64 array.

        Each argument is one value or several (sequence, range, integer array). The order is file order: layer
        slowest, then block, then kind, then kv_head fastest; within an argument the given order is kept.
        Raises `LayoutError` naming the argument, the first bad value and the valid range.
        """
        layer = check_axis(layers, what="layers", limit=self.num_layers) * self.groups_per_layer
        block = check_axis(blocks, what="blocks", limit=self.num_blocks) * self.groups_per_block
        kind = self._kind_indices(kinds) * self.num_kv_heads
        kv_head = check_axis(kv_heads, what="kv_heads", limit=self.num_kv_heads)
        in_block = kind[:, None] + kv_head
        grid = (layer[:, None] + block)[:, :, None, None] + in_block
        return grid.reshape(-1)

    def check_ids(self, ids: object) -> Int64Array:
        """Return group numbers as a C-contiguous one-dimensional int64 array, all of them in range.

        An array already in that form is returned without a copy and stays the caller's. Anything but integers
        (floats, booleans, text), another number of dimensions, and values outside [0, num_groups) raise
        `LayoutError` naming the first bad value and its index; nothing is converted or wrapped silently.
        """
        return check_integers(ids, what="group_ids", limit=self.num_groups)

    def offsets(self, ids: object) -> Int64Array:
        """Return the byte offsets of groups in the files of their layers, as a new int64 array; checks `ids`."""
        checked = self.check_ids(ids)
        # NumPy's division by a scalar is vectorised and its remainder is not: this form is several times
        # faster.
        return (checked - checked // self.groups_per_layer * self.groups_per_layer) * self.stride

    def layers_of(self, ids: object) -> Int64Array:
        """Return the layer of each group, as a new int64 array; checks `ids`."""
        return self.check_ids(ids) // self.groups_per_layer

    def _index_in_layer(self, key: GroupKey) -> int:
        if not isinstance(key, GroupKey):
            raise LayoutError(f"key is {key!r} ({type(key).__name__}): must be a GroupKey")
        check_index(key.layer, what="key.layer", limit=self.num_layers)
        block = check_index(key.block, what="key.block", limit=self.num_blocks)
        kv_head = check_index(key.kv_head, what="key.kv_head", limit=self.num_kv_heads)
        kind = self._kind_index(key.kind, "key.kind")
        return (block * self.num_kinds + kind) * self.num_kv_heads + kv_head

    def _kind_index(self, kind: object, what: str) -> int:
        try:
            return self.kinds.index(kind)  # type: ignore[arg-type, unused-ignore]
        except ValueError:
            known = ", ".join(map(str, self.kinds))
            raise LayoutError(f"{what} is {kind!r}: must be one of {known}") from None

    def _kind_indices(self, kinds: object) -> Int64Array:
        if isinstance(kinds, KvKind):
            kinds = (kinds,)
        if isinstance(kinds, str) or not isinstance(kinds, Iterable):
            raise LayoutError(f"kinds is {kinds!r} ({type(kinds).__name__}): must be one or several KvKind")
        return np.array([self._kind_index(kind, "kinds") for kind in kinds], dtype=np.int64)


def _check_alignment(value: object) -> int:
    alignment = check_index(value, what="alignment", first=_ALIGNMENT_MIN, limit=2**62)
    if alignment & (alignment - 1):
        raise LayoutError(f"alignment is {alignment}: must be a power of two of at least {_ALIGNMENT_MIN}")
    return alignment


def _check_kinds(value: object) -> tuple[KvKind, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise LayoutError(f"kinds is {value!r} ({type(value).__name__}): must be a sequence of KvKind")
    kinds = tuple(value)
    for kind in kinds:
        if not isinstance(kind, KvKind):
            raise LayoutError(f"kinds holds {kind!r} ({type(kind).__name__}): must hold KvKind only")
    if not kinds or len(set(kinds)) != len(kinds):
        raise LayoutError(f"kinds is {kinds!r}: must hold at least one KvKind, and none twice")
    return kinds
