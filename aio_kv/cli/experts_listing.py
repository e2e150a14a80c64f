"""What `aio-kv experts ls` tells about a model: its experts, how they lie in the files, and what direct reads cost."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

from aio_kv.direct import probe_direct
from aio_kv.experts import DirectSegment, ExpertMap
from aio_kv.experts.windows import window_of

__all__ = ["LayerListing", "Listing", "PartListing", "list_experts", "table_of"]

# What direct I/O is taken to ask for where it cannot be tried.
_BLOCK_NBYTES = 4096


@dataclass(frozen=True, slots=True)
class PartListing:
    """One tensor of the slot: what it is, its encoding, its bytes for expert 0."""

    role: str
    type: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class LayerListing:
    """One layer. `slot_nbytes` is that of its largest expert, `reads` the most segments that one of them takes.

    `alignment` is the largest power of two that divides every offset and length of a read. `over_read_nbytes` is what
    direct reads of all experts of the layer bring beyond the experts themselves.
    """

    layer: int
    num_experts: int
    slot_nbytes: int
    reads: int
    alignment: int
    over_read_nbytes: int
    parts: tuple[PartListing, ...]


@dataclass(frozen=True, slots=True)
class Listing:
    """A whole model. `block_nbytes` is the alignment of direct reads; `is_direct` says that they work here."""

    paths: tuple[str, ...]
    model: str | None
    file_nbytes: int
    num_experts: int
    experts_nbytes: int
    over_read_nbytes: int
    block_nbytes: int
    is_direct: bool
    layers: tuple[LayerListing, ...]


def list_experts(experts: ExpertMap) -> Listing:
    """Look at every expert. Raises `StorageError` where a file is gone."""
    real = [os.path.realpath(path) for path in experts.paths]
    alignment = probe_direct(real, alignment=_BLOCK_NBYTES).alignment
    block_nbytes = alignment.offset if alignment else _BLOCK_NBYTES
    layers = tuple(_layer(experts, layer, block_nbytes) for layer in experts.layers)
    owed = sum(segment.nbytes for layer in experts.layers for segment in _segments(experts, layer))
    return Listing(
        paths=tuple(map(str, experts.paths)),
        model=experts.model,
        file_nbytes=sum(os.stat(path).st_size for path in real),
        num_experts=sum(layer.num_experts for layer in layers),
        experts_nbytes=owed,
        over_read_nbytes=sum(layer.over_read_nbytes for layer in layers),
        block_nbytes=block_nbytes,
        is_direct=alignment is not None,
        layers=layers,
    )


def table_of(listing: Listing) -> Table:
    """Return what a person wants to see; layers that are alike are one row."""
    owed, over = listing.experts_nbytes, listing.over_read_nbytes
    files = f"{len(listing.paths)} file{'s' if len(listing.paths) > 1 else ''}"
    share = f"{owed:,} of {listing.file_nbytes:,} bytes"
    title = f"{escape(listing.model or 'model')}: {listing.num_experts:,} experts, {share} in {files}"
    kind = f"direct reads in blocks of {listing.block_nbytes}: {over / owed:.2%} too much"
    table = Table(
        title=title, title_justify="left", caption=kind, caption_justify="left", box=SIMPLE, padding=0
    )
    for heading in ("layers", "experts", "bytes each", "reads", "aligned", "over-read"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("each holds", no_wrap=True)
    for run in _alike(listing.layers):
        over_read = sum(layer.over_read_nbytes for layer in run) / sum(layer.num_experts for layer in run)
        table.add_row(
            _span(run),
            str(run[0].num_experts),
            f"{max(layer.slot_nbytes for layer in run):,}",
            str(run[0].reads),
            f"{min(layer.alignment for layer in run):,}",
            f"{over_read:,.0f}",
            escape("\n".join(f"{part.role} {part.type} {part.nbytes:,}" for part in run[0].parts)),
        )
    return table


def _layer(experts: ExpertMap, layer: int, block_nbytes: int) -> LayerListing:
    count = experts.num_experts(layer)
    bits, over_read = 0, 0
    for segment in _segments(experts, layer):
        start, end = window_of(segment, block_nbytes)
        bits |= segment.file_offset | segment.nbytes
        over_read += end - start - segment.nbytes
    return LayerListing(
        layer=layer,
        num_experts=count,
        slot_nbytes=experts.slot_nbytes(layer),
        reads=max(len(experts.segments(layer, expert)) for expert in range(count)),
        alignment=bits & -bits,
        over_read_nbytes=over_read,
        parts=tuple(PartListing(part.role, part.type_name, part.nbytes) for part in experts.parts(layer, 0)),
    )


def _segments(experts: ExpertMap, layer: int) -> Iterator[DirectSegment]:
    for expert in range(experts.num_experts(layer)):
        yield from experts.segments(layer, expert)


def _alike(layers: tuple[LayerListing, ...]) -> Iterator[list[LayerListing]]:
    """Give each run of neighbouring layers whose experts are alike, wherever in the files they lie."""
    for _, group in groupby(layers, key=lambda layer: (layer.num_experts, layer.reads, layer.parts)):
        yield list(group)


def _span(run: list[LayerListing]) -> str:
    first, last = run[0].layer, run[-1].layer
    if len(run) == 1:
        return str(first)
    is_gapless = last - first == len(run) - 1
    return f"{first} to {last}" if is_gapless else f"{len(run)} of {first} to {last}"
