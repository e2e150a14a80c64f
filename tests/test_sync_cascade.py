"""The synchronous cascade: the conformance kit, and every byte compared with its backing alone."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aio_kv import GroupLayout, LayoutError, NotDurableError, PosixBackend, Read, StorageError
from aio_kv.cascade import SyncCascade
from aio_kv.policy import POLICY_NAMES
from aio_kv.testing import SYNC_BACKEND_CHECKS

LAYOUT = GroupLayout(2, 4, 2, 1, 600, 1, alignment=512)
TMPFS = "/dev/shm"


def folder_for(tmp_path: Path) -> str:
    return tempfile.mkdtemp(dir=TMPFS if Path(TMPFS).is_dir() else tmp_path)


@pytest.mark.parametrize("check", SYNC_BACKEND_CHECKS)
@pytest.mark.parametrize(("slots", "slot"), [(1, "group"), (3, "block")])
def test_conformance(check: str, slots: int, slot: str, tmp_path: Path) -> None:
    def make(layout: GroupLayout) -> SyncCascade:
        per_slot = layout.groups_per_block if slot == "block" else 1
        backing = PosixBackend(tempfile.mkdtemp(dir=tmp_path), layout, create=True)
        return SyncCascade(backing, capacity_bytes=slots * per_slot * layout.payload_nbytes, slot=slot)

    SYNC_BACKEND_CHECKS[check](make)


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["read", "write", "read_block", "write_block", "flush"]), st.integers(0, 31)),
    max_size=30,
)


@settings(max_examples=60)
@given(
    OPERATIONS,
    st.integers(1, 9),
    st.sampled_from(["block", "group"]),
    st.sampled_from(POLICY_NAMES),
    st.booleans(),
    st.sampled_from([0, 0.3, 1.0]),
)
def test_every_byte_is_that_of_the_backing_alone(
    tmp_path: Path,
    operations: list[tuple[str, int]],
    slots: int,
    slot: str,
    policy: str,
    promote: bool,
    dirty_limit: float,
) -> None:
    payload, per_block = LAYOUT.payload_nbytes, LAYOUT.groups_per_block
    capacity = slots * payload * (per_block if slot == "block" else 1)
    places = [folder_for(tmp_path) for _ in range(2)]
    with PosixBackend(places[0], LAYOUT, create=True) as bare:
        backing = PosixBackend(places[1], LAYOUT, create=True)
        with SyncCascade(
            backing,
            capacity_bytes=capacity,
            slot=slot,
            policy=policy,
            promote=promote,
            dirty_limit=dirty_limit,
        ) as cascade:
            for turn, (what, group) in enumerate(operations):
                layer, block = divmod(group // per_block, LAYOUT.num_blocks)
                results = []
                for backend in (bare, cascade):
                    memory = np.random.default_rng(turn).integers(
                        0, 256, payload * (per_block if "block" in what else 1), np.uint8
                    )
                    if what == "read":
                        backend.read([Read(LAYOUT.key(group), memory)])
                    elif what == "write":
                        backend.write_from_host(LAYOUT.key(group), memory)
                    elif what == "read_block":
                        backend.read_block(layer, block, memory)
                    elif what == "write_block":
                        backend.write_block(layer, block, memory)
                    results.append(memory.tobytes())
                if what == "flush":
                    cascade.flush()
                    assert cascade.cache.dirty_count == 0
                assert results[0] == results[1]
                cascade.cache.check_invariants()
        for layer in range(LAYOUT.num_layers):
            name = Path(bare.files.path_of(layer)).name
            assert Path(places[0], name).read_bytes() == Path(places[1], name).read_bytes()


class FailingBackend(PosixBackend):
    failing: frozenset[int] = frozenset()

    def write_from_host(self, key: object, source: object) -> None:
        if self.layout.group_id(key) in self.failing:  # type: ignore[arg-type]
            raise StorageError("write", errno=errno.EIO, file="injected")
        super().write_from_host(key, source)  # type: ignore[arg-type]


def failing_cascade(tmp_path: Path, slots: int) -> tuple[FailingBackend, SyncCascade]:
    backing = FailingBackend(folder_for(tmp_path), LAYOUT, create=True)
    return backing, SyncCascade(
        backing, capacity_bytes=slots * LAYOUT.payload_nbytes, slot="group", dirty_limit=1
    )


def test_flush_and_close_name_what_is_not_durable(tmp_path: Path) -> None:
    backing, cascade = failing_cascade(tmp_path, 8)
    rows = np.arange(4 * LAYOUT.payload_nbytes, dtype=np.uint8).reshape(4, -1)
    for group in range(4):
        cascade.write_from_host(LAYOUT.key(group), rows[group])
    backing.failing = frozenset({1, 2})
    with pytest.raises(NotDurableError, match=r"2 groups are not durable \(1, 2\)") as caught:
        cascade.flush()
    assert caught.value.group_ids == (1, 2)
    assert caught.value.errno == errno.EIO
    found = np.empty_like(rows[1])
    cascade.read([Read(LAYOUT.key(1), found)])
    assert (found == rows[1]).all(), "what could not be flushed is still here"
    backing.failing = frozenset({2})
    with pytest.raises(NotDurableError, match=r"close: 1 groups"):
        cascade.close()
    cascade.close()


def test_a_write_that_needs_room_fails_with_the_flush(tmp_path: Path) -> None:
    backing, cascade = failing_cascade(tmp_path, 1)
    payload = bytes(LAYOUT.payload_nbytes)
    cascade.write_from_host(LAYOUT.key(0), b"\1" * len(payload))
    backing.failing = frozenset({0})
    with pytest.raises(StorageError, match="injected"):
        cascade.write_from_host(LAYOUT.key(1), payload)
    found = bytearray(len(payload))
    cascade.read([Read(LAYOUT.key(0), found)])
    assert found == b"\1" * len(payload)
    backing.failing = frozenset()
    cascade.write_from_host(LAYOUT.key(1), b"\2" * len(payload))
    cascade.close()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"capacity_bytes": 599}, "at least one slot, 600 bytes"),
        ({"capacity_bytes": 600, "slot": "block"}, "at least one slot, 2400 bytes"),
        ({"capacity_bytes": 1 << 60}, "this machine has"),
        ({"capacity_bytes": 6e9}, "must be an integer"),
        ({"policy": "mru"}, "must be one of lru, arc, s3fifo"),
        ({"slot": "layer"}, "must be one of block, group"),
        ({"dirty_limit": 1.5}, "from 0 to 1"),
        ({"dirty_limit": "half"}, "from 0 to 1"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], complaint: str, tmp_path: Path) -> None:
    with PosixBackend(tmp_path / "kv", LAYOUT, create=True) as backing:
        given: dict[str, object] = {"capacity_bytes": 6000, "slot": "group", **options}
        with pytest.raises(LayoutError, match=complaint):
            SyncCascade(backing, **given)  # type: ignore[arg-type]
