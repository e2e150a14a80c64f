"""The cascade and the oracle, driven with the same operations: every byte is compared, above and below.

The programs are those of `test_properties`: reads and writes of all kinds, some awaited in between. The cascade has
from one slot up, and after every awaited operation its book must be in order.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from backends import backend_on, open_files, require_kind, rung_of
from hypothesis import given, settings
from hypothesis import strategies as st
from loops import run_on
from test_properties import Operation, check_memory, contents, do_with_the_oracle, folder_for, programs, start

from aio_kv import CascadeBackend, GroupLayout, PosixBackend
from aio_kv.backends.engine_backend import EngineBackend
from aio_kv.policy import POLICY_NAMES


@st.composite
def sizes(draw: st.DrawFn) -> dict[str, Any]:
    """How large a cascade is, and by which rules it goes."""
    return {
        "slots": draw(st.integers(1, 12)),
        "slot": draw(st.sampled_from(["block", "group"])),
        "policy": draw(st.sampled_from(POLICY_NAMES)),
        "promote": draw(st.booleans()),
        "dirty_limit": draw(st.sampled_from([0, 0.4, 1])),
    }


async def drive(backend: EngineBackend, program: list[Operation], size: dict[str, Any]) -> None:
    layout = backend.layout
    rules = {name: value for name, value in size.items() if name != "slots"}
    per_slot = layout.groups_per_block if size["slot"] == "block" else 1
    capacity = size["slots"] * per_slot * layout.payload_nbytes
    async with CascadeBackend(backend, capacity_bytes=capacity, **rules) as cascade:
        assert cascade._session is not None
        cache = cascade._session.cache
        for operation in program:
            operation.transfer = start(cascade, operation)  # type: ignore[arg-type]
            if operation.is_awaited:
                await operation.transfer
                cache.check_invariants()
        for operation in program:
            report = await operation.transfer
            assert report.loaded_prefix == len(operation.ids)
            check_memory(operation, layout)
        await cascade.flush()
        assert cache.dirty_count == 0
        assert cache.counts().leases == 0
        cache.check_invariants()


def compare(
    kind: str, layout: GroupLayout, program: list[Operation], size: dict[str, Any], folder: Path
) -> None:
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
                    await drive(backend, program, size)

            run_on("asyncio", main)
            assert contents(files, kept[0], layout) == wanted
    finally:
        shutil.rmtree(place)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "examples"),
    [
        ("memory-shuffled", 60),
        ("memory", 40),
        ("uring-tight", 25),
        ("threads-tight", 20),
        ("python-tight", 15),
    ],
)
def test_every_byte_is_that_of_the_oracle(kind: str, examples: int, tmp_path: Path) -> None:
    folder = folder_for(kind, tmp_path)

    @settings(max_examples=examples)
    @given(programs(), sizes())
    def run(program: tuple[GroupLayout, list[Operation]], size: dict[str, Any]) -> None:
        compare(kind, *program, size, folder)

    run()
