"""The oracle, against a model that is a dictionary, and the bytes on disk read by other means."""

import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aio_kv import (
    ClosedError,
    GroupKey,
    GroupLayout,
    KvKind,
    LayerFiles,
    LayoutError,
    PosixBackend,
    Read,
    Scatter,
    ShortReadError,
    StorageBackend,
    StorageError,
    UnavailableError,
)
from aio_kv.memory import DeviceMemory

K, V = KvKind.K, KvKind.V
LAYOUT = GroupLayout(2, 3, 2, 3, 7, 5, alignment=4096)  # A payload of 105 bytes: far from any alignment.
PAYLOAD = 105
KEY = GroupKey(1, 2, 1, V)


@pytest.fixture(params=[False, None], ids=["buffered", "direct"])
def backend(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[PosixBackend]:
    with PosixBackend(tmp_path / "kv", LAYOUT, create=True, direct=request.param) as backend:
        yield backend


def payload(seed: int, groups: int = 1) -> bytes:
    return np.random.default_rng(seed).bytes(groups * PAYLOAD)


def read(backend: PosixBackend, key: GroupKey) -> bytes:
    into = bytearray(PAYLOAD)
    backend.read([Read(key, into)])
    return bytes(into)


class Device:
    """Memory that says it is on a GPU, and a copy that moves bytes into it."""

    def __init__(self, nbytes: int) -> None:
        self.bytes = bytearray(nbytes)
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (1 << 40, False)}

    @staticmethod
    def copy(destination: DeviceMemory, source: memoryview, stream: Any) -> None:
        assert stream == "stream"
        owner = destination.owner
        assert isinstance(owner, Device)
        start = destination.data_ptr() - (1 << 40)
        owner.bytes[start : start + destination.nbytes] = source


group_numbers = st.lists(st.integers(0, LAYOUT.num_groups - 1), max_size=6)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("write"), group_numbers.filter(lambda ids: len(set(ids)) == len(ids))),
        st.tuples(st.just("write_one"), st.integers(0, LAYOUT.num_groups - 1)),
        st.tuples(st.just("write_block"), st.tuples(st.integers(0, 1), st.integers(0, 2))),
        st.tuples(st.just("read"), group_numbers),
        st.tuples(st.just("read_scatter"), group_numbers),
        st.tuples(st.just("read_block"), st.tuples(st.integers(0, 1), st.integers(0, 2))),
        st.tuples(st.just("drop"), st.none()),
    ),
    max_size=12,
)


class Model:
    """What the backend should hold: payloads by group number, zeros where nothing was written."""

    def __init__(self) -> None:
        self.groups: dict[int, bytes] = {}
        self.seed = 0

    def write(self, ids: list[int]) -> bytes:
        self.seed += 1
        data = payload(self.seed, len(ids))
        self.groups |= {group: data[i * PAYLOAD : (i + 1) * PAYLOAD] for i, group in enumerate(ids)}
        return data

    def read(self, ids: list[int]) -> bytes:
        return b"".join(self.groups.get(group, bytes(PAYLOAD)) for group in ids)


def block_ids(place: tuple[int, int]) -> list[int]:
    return LAYOUT.group_ids(place[0], place[1], range(2), LAYOUT.kinds).tolist()


def apply(backend: PosixBackend, model: Model, name: str, argument: Any) -> None:
    if name == "write":
        backend.write_groups(argument, model.write(argument))
    elif name == "write_one":
        backend.write_from_host(LAYOUT.key(argument), model.write([argument]))
    elif name == "write_block":
        backend.write_block(*argument, model.write(block_ids(argument)))
    elif name == "read":
        into = bytearray(len(argument) * PAYLOAD)
        backend.read_groups(argument, into)
        assert into == model.read(argument)
    elif name == "read_scatter":
        check_scattered(backend, model, argument)
    elif name == "read_block":
        into = bytearray(4 * PAYLOAD)
        backend.read_block(*argument, into)
        assert into == model.read(block_ids(argument))
    else:
        backend.drop_page_cache()


def check_scattered(backend: PosixBackend, model: Model, ids: list[int]) -> None:
    memory = np.full((7, 200), 0xEE, dtype=np.uint8)
    rows = np.arange(len(ids))[::-1]
    backend.read_groups(ids, Scatter(memory, rows * 200 + 9))
    for row, group in zip(rows, ids, strict=True):
        assert memory[row, 9 : 9 + PAYLOAD].tobytes() == model.read([group])
        assert (memory[row, :9] == 0xEE).all()
        assert (memory[row, 9 + PAYLOAD :] == 0xEE).all()
    assert (memory[len(ids) :] == 0xEE).all()


@pytest.mark.slow
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(history=operations)
def test_agrees_with_the_model(backend: PosixBackend, history: list[tuple[str, Any]]) -> None:
    model = Model()
    for layer, block in itertools.product(range(2), range(3)):
        backend.write_block(layer, block, bytes(4 * PAYLOAD))
    for name, argument in history:
        apply(backend, model, name, argument)
    for key in map(LAYOUT.key, range(LAYOUT.num_groups)):
        assert read(backend, key) == model.read([LAYOUT.group_id(key)])


def test_what_was_written_is_there_after_reopening(tmp_path: Path) -> None:
    for is_new in (True, False):
        with PosixBackend(tmp_path / "kv", LAYOUT, create=is_new) as backend:
            assert read(backend, KEY) == (bytes(PAYLOAD) if is_new else payload(1))
            backend.write_from_host(KEY, payload(1))


def test_is_a_storage_backend(backend: PosixBackend) -> None:
    assert isinstance(backend, StorageBackend)
    assert backend.layout == LAYOUT


def test_groups_lie_where_the_formula_says_with_zeros_behind(backend: PosixBackend) -> None:
    backend.write_from_host(GroupKey(1, 2, 0, V), payload(1))  # Leaves other bytes in the bounce buffer.
    backend.write_from_host(KEY, b"\xff" * PAYLOAD)
    backend.sync()
    data = Path(backend.files.path_of(1)).read_bytes()
    start = ((2 * 2 + 1) * 2 + 1) * 4096
    assert data[start : start + PAYLOAD] == b"\xff" * PAYLOAD
    assert data[start + PAYLOAD : start + 4096] == bytes(4096 - PAYLOAD)
    assert not any(data[: start - 4096])


def test_the_padding_is_zero_whatever_the_bounce_buffer_held(backend: PosixBackend) -> None:
    with PosixBackend(backend.files, direct=False) as plain:
        start = LAYOUT.offset(KEY)
        os.pwrite(plain.files.fd(1), b"\xee" * 4096, start)
        for one in (backend, plain):
            assert read(one, KEY) == b"\xee" * PAYLOAD
            one.write_from_host(KEY, payload(1))
            assert os.pread(plain.files.fd(1), 4096, start) == payload(1) + bytes(4096 - PAYLOAD)
            os.pwrite(plain.files.fd(1), b"\xee" * 4096, start)


def test_blocks_are_their_groups_in_order(backend: PosixBackend) -> None:
    data = payload(3, 4)
    backend.write_block(0, 1, data)
    keys = [GroupKey(0, 1, head, kind) for kind in (K, V) for head in (0, 1)]
    assert b"".join(read(backend, key) for key in keys) == data


def test_requests_may_be_an_iterator_and_repeat(backend: PosixBackend) -> None:
    backend.write_from_host(KEY, payload(1))
    targets = [bytearray(PAYLOAD), np.zeros((3, 7, 5), dtype=np.uint8), np.zeros(PAYLOAD, dtype=np.int8)]
    backend.read(Read(KEY, target) for target in targets)
    assert all(bytes(target) == payload(1) for target in targets)
    backend.read([])
    backend.read_groups([], bytearray())


def test_direct_and_buffered_backends_share_files(tmp_path: Path) -> None:
    with LayerFiles(tmp_path / "kv", LAYOUT, create=True) as files:
        if files.direct_alignment is None:
            pytest.skip(f"no direct I/O here: {files.direct_refusal}")
        with PosixBackend(files, direct=True) as fast, PosixBackend(files, LAYOUT, direct=False) as plain:
            assert (fast.is_direct, plain.is_direct) == (True, False)
            fast.write_from_host(KEY, payload(1))
            assert read(plain, KEY) == payload(1)
            plain.write_from_host(KEY, payload(2))
            assert read(fast, KEY) == payload(2)
        assert not files.closed


@pytest.mark.parametrize(
    ("into", "message"),
    [
        (bytearray(PAYLOAD - 1), "into has 104 bytes: must be exactly 105"),
        (bytearray(4096), "into has 4096 bytes"),
        (bytearray(), "into has 0 bytes"),
        (bytes(PAYLOAD), "into is read-only"),
        (np.zeros((PAYLOAD, 2), dtype=np.uint8)[:, 0], "not C-contiguous"),
        (None, "into is of type NoneType"),
    ],
)
def test_unfit_destinations_are_refused(backend: PosixBackend, into: Any, message: str) -> None:
    first = bytearray(PAYLOAD)
    backend.write_from_host(KEY, payload(1))
    with pytest.raises(LayoutError, match=message):
        backend.read([Read(KEY, first), Read(KEY, into)])
    assert first == bytes(PAYLOAD), "something was read although a request was bad"


@pytest.mark.parametrize(
    "source", [bytes(104), bytes(106), bytes(4096), b"", "x" * PAYLOAD, None, Device(PAYLOAD)]
)
def test_unfit_sources_are_refused(backend: PosixBackend, source: Any) -> None:
    backend.write_from_host(KEY, payload(1))
    with pytest.raises(LayoutError, match="source"):
        backend.write_from_host(KEY, source)
    assert read(backend, KEY) == payload(1)


BAD_CALLS: list[tuple[str, tuple[Any, ...], str]] = [
    ("read", ([(KEY, bytearray(PAYLOAD))],), "must be a Read"),
    ("read", ([Read((1, 2, 1, V), bytearray(PAYLOAD))],), "must be a GroupKey"),  # type: ignore[arg-type]
    ("read", ([Read(GroupKey(2, 0, 0, K), bytearray(PAYLOAD))],), "key.layer is 2"),
    ("write_from_host", (3, bytes(PAYLOAD)), "must be a GroupKey"),
    ("read_groups", ([24], bytearray(PAYLOAD)), r"group_ids\[0\] is 24"),
    ("read_groups", ([0, 1], bytearray(PAYLOAD)), "into has 105 bytes: must be exactly 210"),
    ("read_groups", ([0], Scatter(bytearray(200), [96])), r"Scatter.offsets\[0\] is 96"),  # type: ignore[arg-type]
    ("read_groups", ([0], Scatter(bytearray(200), [1, 2])), "2 offsets for 1 groups"),  # type: ignore[arg-type]
    ("read_groups", ([0], Scatter(bytes(200), [1])), "Scatter.memory is read-only"),  # type: ignore[arg-type]
    ("write_groups", ([3, 1, 3], bytes(3 * PAYLOAD)), "group 3 is given twice"),
    ("write_groups", ([3], bytes(3 * PAYLOAD)), "source has 315 bytes"),
    ("write_groups", ([3], Scatter(bytes(200), [2**62])), r"Scatter.offsets\[0\]"),  # type: ignore[arg-type]
    ("read_block", (0, 3, bytearray(4 * PAYLOAD)), "block is 3"),
    ("read_block", (0, 2, bytearray(4 * 4096)), "into has 16384 bytes"),
    ("write_block", (2, 0, bytes(4 * PAYLOAD)), "layer is 2"),
    ("write_block", (0, 0, bytes(PAYLOAD)), "source has 105 bytes"),
]


@pytest.mark.parametrize(("name", "arguments", "message"), BAD_CALLS)
def test_bad_calls_are_refused(
    backend: PosixBackend, name: str, arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        getattr(backend, name)(*arguments)


def test_device_destinations_need_a_copy(backend: PosixBackend) -> None:
    with pytest.raises(UnavailableError, match="device memory"):
        backend.read([Read(KEY, Device(PAYLOAD))])
    with pytest.raises(UnavailableError, match="device memory"):
        backend.read_groups([0], Scatter(Device(PAYLOAD), np.array([0])))


def test_device_destinations_are_reached_through_the_copy(tmp_path: Path) -> None:
    with PosixBackend(tmp_path / "kv", LAYOUT, create=True, device=0, copy=Device.copy) as backend:
        backend.write_block(0, 0, payload(1, 4))
        one, block, pool = Device(PAYLOAD), Device(4 * PAYLOAD), Device(500)
        backend.read([Read(GroupKey(0, 0, 0, K), one)], stream="stream")
        backend.read_block(0, 0, block, stream="stream")
        backend.read_groups([1, 0], Scatter(pool, np.array([0, 300])), stream="stream")
        assert one.bytes == payload(1, 4)[:PAYLOAD]
        assert block.bytes == payload(1, 4)
        assert pool.bytes[:PAYLOAD] == payload(1, 4)[PAYLOAD : 2 * PAYLOAD]
        assert pool.bytes[300 : 300 + PAYLOAD] == one.bytes
        with pytest.raises(LayoutError, match="into has 500 bytes"):
            backend.read([Read(KEY, pool)], stream="stream")


def test_closing_ends_everything(tmp_path: Path) -> None:
    backend = PosixBackend(tmp_path / "kv", LAYOUT, create=True)
    backend.close()
    backend.close()
    assert backend.files.closed
    calls = [
        lambda: read(backend, KEY),
        lambda: backend.write_from_host(KEY, bytes(PAYLOAD)),
        lambda: backend.read_block(0, 0, bytearray(4 * PAYLOAD)),
        lambda: backend.write_block(0, 0, bytes(4 * PAYLOAD)),
        backend.drop_page_cache,
        backend.sync,
    ]
    for call in calls:
        with pytest.raises(ClosedError):
            call()


def test_files_closed_by_their_owner_end_the_backend(tmp_path: Path) -> None:
    files = LayerFiles(tmp_path / "kv", LAYOUT, create=True)
    backend = PosixBackend(files)
    files.close()
    with pytest.raises(ClosedError):
        read(backend, KEY)
    with pytest.raises(ClosedError):
        PosixBackend(files)


def test_the_layout_must_agree(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="layout is missing"):
        PosixBackend(tmp_path)
    other = GroupLayout(1, 1, 1, 1, 1, 1)
    with (
        LayerFiles(tmp_path / "kv", LAYOUT, create=True) as files,
        pytest.raises(LayoutError, match="make them agree"),
    ):
        PosixBackend(files, other)


def test_read_only_files_are_not_written(tmp_path: Path) -> None:
    LayerFiles(tmp_path / "kv", LAYOUT, create=True).close()
    with LayerFiles(tmp_path / "kv", LAYOUT, read_only=True) as files, PosixBackend(files) as backend:
        assert read(backend, KEY) == bytes(PAYLOAD)
        backend.drop_page_cache()
        for call in (lambda: backend.write_from_host(KEY, bytes(PAYLOAD)), backend.sync):
            with pytest.raises(StorageError, match="EROFS"):
                call()


def test_a_file_truncated_while_open_is_noticed(backend: PosixBackend) -> None:
    path = backend.files.path_of(1)
    os.truncate(path, LAYOUT.offset(KEY) + 512)
    with pytest.raises(ShortReadError) as caught:
        read(backend, KEY)
    assert (caught.value.file, caught.value.file_offset) == (path, LAYOUT.offset(KEY))
    assert caught.value.arrived == 512


def test_threads_take_turns(backend: PosixBackend) -> None:
    wrong = []

    def work(block: int) -> None:
        for seed in range(block * 100, block * 100 + 20):
            backend.write_block(0, block, payload(seed, 4))
            into = bytearray(4 * PAYLOAD)
            backend.read_block(0, block, into)
            if into != payload(seed, 4):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(block,)) for block in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
