"""The GGUF parser on files that nobody thought of: it answers soundly or refuses, and agrees with the gguf package."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_bytes import ARRAY, STRING, U8, U32, Info, array, gguf_bytes, key_value, text
from hypothesis import given, settings
from hypothesis import strategies as st

from aio_kv import CorruptionError, LayoutError
from aio_kv.experts import GgufIndex
from aio_kv.experts.gguf_header import GgufArray

SEED = gguf_bytes(
    key_values=[
        key_value("general.alignment", U32, 64),
        key_value("general.architecture", STRING, "llama"),
        key_value("words", ARRAY, array(STRING, 3, text("a") + text("bc") + text(""))),
        key_value("nested", ARRAY, array(ARRAY, 1, array(U8, 3, b"abc"))),
    ],
    infos=[Info("a", (32, 2), type_number=8), Info("b", (4, 2, 2), offset=128)],
    alignment=64,
    data=bytes(range(192)),
)


def check_sound(path: Path, data: bytes) -> None:
    """Open `data` as a file: what is accepted lies inside it, in order, and apart."""
    path.write_bytes(data)
    try:
        index = GgufIndex.open(path)
    except CorruptionError as refused:
        place = (refused.file, refused.file_offset is None)
        assert place == (str(path), False) or "split." in str(refused)  # noqa: PT017
        return
    except LayoutError:
        return
    end = index.shards[0].data_start
    for tensor in sorted(index.tensors.values(), key=lambda tensor: tensor.file_offset):
        assert tensor.nbytes == 0 or tensor.file_offset >= end
        end = tensor.file_offset + (tensor.nbytes or 0)
        assert end <= len(data)
    for value in index.metadata.values():
        assert not isinstance(value, GgufArray) or value.file_offset + value.nbytes <= len(data)


@given(data=st.binary(max_size=300), version=st.sampled_from([2, 3]))
def test_random_bytes(tmp_path: Path, data: bytes, version: int) -> None:
    check_sound(tmp_path / "m.gguf", b"GGUF" + version.to_bytes(4, "little") + data)


@settings(max_examples=1000)
@given(data=st.data())
def test_a_sound_file_with_damage(tmp_path: Path, data: st.DataObject) -> None:
    damaged = bytearray(SEED)
    numbers = st.sampled_from([0, 1, 2, 8, 9, 31, 255, 2**16, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1])
    for _ in range(data.draw(st.integers(1, 3), label="damages")):
        at = data.draw(st.integers(8, len(damaged) - 8), label="at")
        how = data.draw(st.sampled_from(["flip", "number", "cut", "insert", "drop"]), label="how")
        if how == "flip":
            damaged[at] ^= 1 << data.draw(st.integers(0, 7))
        elif how == "number":
            damaged[at : at + 8] = data.draw(numbers).to_bytes(8, "little")
        elif how == "cut":
            del damaged[max(at, 32) :]
        elif how == "insert":
            damaged[at:at] = data.draw(st.binary(min_size=1, max_size=9))
        elif len(damaged) > 64:
            del damaged[at : at + data.draw(st.integers(1, 9))]
    check_sound(tmp_path / "m.gguf", bytes(damaged))


NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4)
TYPES = st.sampled_from([np.float32, np.float16, np.float64, np.int8, np.int16, np.int32, np.int64])
VALUES = st.one_of(
    st.booleans(),
    st.integers(0, 2**32 - 1),
    st.text(st.characters(codec="utf-8"), min_size=1),
    st.lists(st.text(st.characters(codec="utf-8"), max_size=5), min_size=1, max_size=5),
    st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=5),
)


def add_value(writer: Any, key: str, value: object) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


@settings(max_examples=60)
@given(
    values=st.dictionaries(NAMES.map("key.{}".format), VALUES, max_size=5),
    tensors=st.dictionaries(NAMES, st.tuples(SHAPES, TYPES), max_size=5),
    alignment=st.sampled_from([None, 1 << 3, 1 << 5, 1 << 12]),
)
def test_files_of_the_gguf_package(
    tmp_path: Path, values: dict[str, Any], tensors: dict[str, Any], alignment: int | None
) -> None:
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for key, value in values.items():
        add_value(writer, key, value)
    for name, (shape, dtype) in tensors.items():
        writer.add_tensor(name, np.ones(shape, dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    index, oracle = GgufIndex.open(path), gguf.GGUFReader(path)
    assert index.shards[0].alignment == oracle.alignment
    assert [(t.name, t.file_offset, t.nbytes, t.dims) for t in index.tensors.values()] == [
        (t.name, t.data_offset, t.n_bytes, tuple(int(n) for n in t.shape)) for t in oracle.tensors
    ]
    for key, value in values.items():
        found = index.metadata[key]
        assert found.count == len(value) if isinstance(found, GgufArray) else found == value


@pytest.mark.slow
def test_coverage_guided(tmp_path: Path) -> None:
    if importlib.util.find_spec("atheris") is None:
        pytest.skip("the package atheris is not installed")
    (tmp_path / "seed").write_bytes(SEED)
    program = Path(__file__).with_name("fuzz_gguf.py")
    arguments = [sys.executable, str(program), "-runs=20000", "-seed=1", "-max_len=1024", str(tmp_path)]
    result = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-4000:]
