"""The slab's copies, by the extension and by NumPy, against one row after the other."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aio_kv.cascade.slab import Slab, numpy_row_copier
from aio_kv.engine.extension import has_extension, row_copier

needs_extension = pytest.mark.skipif(not has_extension(), reason="the compiled extension is not built")
COPIERS = [
    pytest.param(row_copier, marks=needs_extension, id="extension"),
    pytest.param(numpy_row_copier, id="numpy"),
]
ROWS = 23


def random_bytes(random: np.random.Generator, nbytes: int) -> np.ndarray:
    return random.integers(0, 256, nbytes, np.uint8)


def address_of(array: np.ndarray) -> int:
    return int(array.ctypes.data)


@pytest.mark.parametrize("make", COPIERS)
@given(
    payload=st.sampled_from([1, 8, 63, 64, 1000, 4096, 300_000]),
    count=st.integers(0, ROWS),
    gap=st.sampled_from([0, 1, 7]),
    inward=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_rows_go_where_they_belong_and_nowhere_else(
    make: object, payload: int, count: int, gap: int, inward: bool, seed: int
) -> None:
    random = np.random.default_rng(seed)
    memory = random_bytes(random, ROWS * payload + 5)  # not quite another row
    outside = random_bytes(random, ROWS * (payload + gap) + 1)
    rows = random.permutation(ROWS)[:count]
    starts = random.permutation(ROWS)[:count] * (payload + gap) + 1
    expected_memory, expected_outside = memory.copy(), outside.copy()
    for row, start in zip(rows.tolist(), starts.tolist(), strict=True):
        inside = slice(row * payload, (row + 1) * payload)
        if inward:
            expected_memory[inside] = outside[start : start + payload]
        else:
            expected_outside[start : start + payload] = memory[inside]
    copy = make(memoryview(memory)[: ROWS * payload], payload)
    copy(rows, address_of(outside) + starts, inward)
    assert (memory == expected_memory).all()
    assert (outside == expected_outside).all()


@needs_extension
@pytest.mark.parametrize("wrong", [ROWS, -1, 2**62])
def test_a_row_outside_of_the_memory_copies_nothing(wrong: int) -> None:
    memory, outside = np.zeros(ROWS * 8, np.uint8), np.full(16, 7, np.uint8)
    copy = row_copier(memoryview(memory), 8)
    places = address_of(outside) + np.array([0, 8])
    for inward in (False, True):
        with pytest.raises(IndexError, match="outside of 23"):
            copy(np.array([0, wrong]), places, inward)
    with pytest.raises(ValueError, match="2 rows and 1 places"):
        copy(np.array([0, 1]), places[:1], False)
    with pytest.raises(ValueError, match="1 rows and 2 places"):  # half as wide: C would read past its end
        copy(np.array([0, 1], np.int32), places, False)
    assert (outside == 7).all()
    assert not memory.any()


def test_rows_are_copied_inside_a_slab() -> None:
    slab = Slab(ROWS, 40)
    for row in range(ROWS):
        slab.row(row)[:] = bytes([row + 1]) * 40
    slab.copy_within(np.array([3, 0, 3]), np.array([5, 22, 7]))
    slab.copy_within(np.empty(0, np.int64), np.empty(0, np.int64))
    moved = {5: 3, 22: 0, 7: 3}
    for row in range(ROWS):
        assert bytes(slab.row(row)) == bytes([moved.get(row, row) + 1]) * 40, row
