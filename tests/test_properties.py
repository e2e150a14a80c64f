"""The oracle and every asynchronous backend, driven with the same operations: every byte is compared.

Hypothesis makes up a layout and a list of reads and writes. The oracle does them one after the other. The backend is
given all of them without waiting, some awaited in between; then each read must have brought what the oracle's brought,
and the files must be the same to the last byte, padding included.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backends import KINDS, TMPFS, backend_on, open_files, require_kind, rung_of
from hypothesis import given, settings
from hypothesis import strategies as st
from loops import LOOPS, run_on

from aio_kv import GroupLayout, KvKind, LayerFiles, PosixBackend, Priority, Read, Scatter, Write
from aio_kv.backends.engine_backend import EngineBackend
from aio_kv.positional import aligned_buffer
from aio_kv.testing import MemoryBackend

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
CALLS = ("groups", "requests", "block")
PLACES = ("packed", "odd", "scattered", "scattered odd")


@dataclass
class Operation:
    """One call: what it moves, how its memory lies, and whether it is awaited before the next."""

    is_write: bool
    call: str
    ids: list[int]
    place: str
    seed: int
    is_awaited: bool
    priority: Priority
    # Filled in as it is carried out.
    memory: Any = None
    offsets: Any = None
    expected: Any = None
    transfer: Any = field(default=None, repr=False)

    def rows(self, layout: GroupLayout) -> Bytes:
        """What a write writes, one row per group."""
        random = np.random.default_rng(self.seed)
        return random.integers(1, 256, (len(self.ids), layout.payload_nbytes), dtype=np.uint8)

    def lay_out(self, layout: GroupLayout) -> None:
        """Take memory: where each group lies in it, and a pattern in every byte."""
        count, payload = len(self.ids), layout.payload_nbytes
        unit = (
            payload if self.place in ("packed", "odd") else layout.stride + (13 if "odd" in self.place else 0)
        )
        slots = np.arange(count)
        if self.place.startswith("scattered"):
            slots = np.random.default_rng(self.seed).permutation(count)
        shift = 1 if "odd" in self.place else 0
        self.offsets = shift + slots * unit
        self.memory = aligned_buffer(max(1, shift + count * unit + layout.stride))
        self.memory[:] = b"\xa5" * len(self.memory)

    def view(self, index: int, layout: GroupLayout) -> memoryview:
        """The memory of one group."""
        start = int(self.offsets[index])
        view: memoryview = self.memory[start : start + layout.payload_nbytes]
        return view

    def packed(self, layout: GroupLayout) -> memoryview:
        """The memory of all groups, which must be packed."""
        start = int(self.offsets[0]) if len(self.ids) else 0
        view: memoryview = self.memory[start : start + len(self.ids) * layout.payload_nbytes]
        return view


@st.composite
def layouts(draw: st.DrawFn) -> GroupLayout:
    """With and without padding, sectors and pages, one kind and two, below and above the largest I/O of the kinds."""
    payload = draw(st.sampled_from([105, 512, 1536, 4096, 5000, 8192, 20_000, 300_000]))
    kinds = draw(st.sampled_from([(KvKind.K, KvKind.V), (KvKind.LATENT,)]))
    blocks = 2 if payload > 100_000 else draw(st.integers(1, 6))
    return GroupLayout(
        draw(st.integers(1, 2)),
        blocks,
        draw(st.integers(1, 2)),
        1,
        payload,
        1,
        kinds=kinds,
        alignment=draw(st.sampled_from([512, 4096])),
    )


@st.composite
def operations(draw: st.DrawFn, layout: GroupLayout) -> Operation:
    call = draw(st.sampled_from(CALLS))
    is_write = draw(st.booleans())
    if call == "block":
        block = draw(st.integers(0, layout.num_layers * layout.num_blocks - 1))
        ids = list(range(block * layout.groups_per_block, (block + 1) * layout.groups_per_block))
    else:
        numbers = st.integers(0, layout.num_groups - 1)
        ids = draw(st.lists(numbers, min_size=0, max_size=10, unique=is_write))
    place = draw(st.sampled_from(PLACES[:2] if call == "block" else PLACES))
    priority = draw(st.sampled_from(Priority))
    return Operation(
        is_write, call, ids, place, draw(st.integers(0, 2**16)), draw(st.integers(0, 3)) == 0, priority
    )


@st.composite
def programs(draw: st.DrawFn) -> tuple[GroupLayout, list[Operation]]:
    layout = draw(layouts())
    return layout, draw(st.lists(operations(layout), min_size=1, max_size=12))


def do_with_the_oracle(oracle: PosixBackend, operation: Operation) -> None:
    """The bytes that a read must bring are noted in the operation."""
    layout = oracle.layout
    rows = operation.rows(layout)
    if operation.is_write:
        for group, row in zip(operation.ids, rows, strict=True):
            oracle.write_from_host(layout.key(group), row)
        return
    operation.expected = np.zeros_like(rows)
    oracle.read([Read(layout.key(g), operation.expected[i]) for i, g in enumerate(operation.ids)])


def start(backend: EngineBackend, operation: Operation) -> Any:
    """Make the call; returns the transfer."""
    layout, ids = backend.layout, operation.ids
    operation.lay_out(layout)
    if operation.is_write:
        for index, row in enumerate(operation.rows(layout)):
            operation.view(index, layout)[:] = row.tobytes()
    priority = operation.priority
    if operation.call == "block":
        layer, block = divmod(ids[0] // layout.groups_per_block, layout.num_blocks)
        method = backend.write_block if operation.is_write else backend.read_block
        return method(layer, block, operation.packed(layout), priority=priority)
    if operation.call == "requests":
        places = [(layout.key(group), operation.view(i, layout)) for i, group in enumerate(ids)]
        if operation.is_write:
            return backend.write([Write(key, view) for key, view in places], priority=priority)
        return backend.read([Read(key, view) for key, view in places], priority=priority)
    is_packed = operation.place in ("packed", "odd")
    memory = operation.packed(layout) if is_packed else Scatter(operation.memory, operation.offsets)
    if operation.is_write:
        return backend.write_groups(ids, memory, priority=priority)
    return backend.read_groups(ids, memory, priority=priority)


def check_memory(operation: Operation, layout: GroupLayout) -> None:
    """A read brought what the oracle's read brought, and touched nothing beside it; a write left its source alone."""
    wanted = np.full(len(operation.memory), 0xA5, np.uint8)
    rows = operation.rows(layout) if operation.is_write else operation.expected
    for index, row in enumerate(rows):
        begin = int(operation.offsets[index])
        wanted[begin : begin + layout.payload_nbytes] = row
    assert (np.frombuffer(operation.memory, np.uint8) == wanted).all(), operation


async def drive(backend: EngineBackend, program: list[Operation]) -> None:
    for operation in program:
        operation.transfer = start(backend, operation)
        if operation.is_awaited:
            await operation.transfer
    for operation in program:
        report = await operation.transfer
        assert report.loaded_prefix == len(operation.ids)
        check_memory(operation, backend.layout)
    await backend.flush()
    assert backend.statistics().engine.slots_leased == 0


def contents(files: LayerFiles | None, backend: EngineBackend, layout: GroupLayout) -> list[bytes]:
    """All bytes of every layer, as they lie on disk."""
    if isinstance(backend, MemoryBackend):
        return [bytes(backend.memory_files.layer(layer)) for layer in range(layout.num_layers)]
    assert files is not None
    return [Path(files.path_of(layer)).read_bytes() for layer in range(layout.num_layers)]


def compare(kind: str, loop: str, layout: GroupLayout, program: list[Operation], folder: Path) -> None:
    chosen = require_kind(kind)
    place = tempfile.mkdtemp(dir=folder)
    kept: list[EngineBackend] = []
    try:
        with PosixBackend(Path(place, "oracle"), layout, create=True) as oracle:
            for operation in program:
                do_with_the_oracle(oracle, operation)
            oracle.sync()
            wanted = [Path(oracle.files.path_of(layer)).read_bytes() for layer in range(layout.num_layers)]
        with open_files(chosen, Path(place), layout) as files, rung_of(chosen):

            async def main() -> None:
                async with backend_on(kind, files, layout) as backend:
                    kept.append(backend)
                    await drive(backend, program)

            run_on(loop, main)
            assert contents(files, kept[0], layout) == wanted
    finally:
        shutil.rmtree(place)


def folder_for(kind: str, tmp_path: Path) -> Path:
    """The real disk for those that are on it, memory for the rest."""
    is_on_disk = kind in ("uring", "threads", "python")
    return tmp_path if is_on_disk or not Path(TMPFS).is_dir() else Path(TMPFS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_is_that_of_the_oracle(kind: str, tmp_path: Path) -> None:
    folder = folder_for(kind, tmp_path)

    @settings(max_examples=40 if folder != tmp_path else 20)
    @given(programs())
    def run(program: tuple[GroupLayout, list[Operation]]) -> None:
        compare(kind, "asyncio", *program, folder)

    run()


@pytest.mark.slow
@pytest.mark.parametrize("loop", [loop for loop in LOOPS if loop != "asyncio"])
@pytest.mark.parametrize("kind", ["uring-tight", "threads-tight", "memory-shuffled"])
def test_on_the_other_loops(kind: str, loop: str, tmp_path: Path) -> None:
    folder = folder_for(kind, tmp_path)

    @settings(max_examples=12)
    @given(programs())
    def run(program: tuple[GroupLayout, list[Operation]]) -> None:
        compare(kind, loop, *program, folder)

    run()
