"""The worked example in the reference of the packed format is a file that we read, and the one that we write."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path

import pytest

from aio_kv.experts import ExpertMap, PackedFile

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "packed-experts.md"
FILE_NBYTES = 2048


def blocks(language: str) -> list[str]:
    """The fenced blocks of the page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """The file that the page shows, put together from its text alone."""
    file = bytearray(FILE_NBYTES)
    for line in "".join(blocks("hexdump")).splitlines():
        match = re.fullmatch(r"([0-9a-f]{4})  ((?:[0-9a-f]{2} ){16}) (.{16})", line)
        assert match is not None, line
        start, row, shown = int(match[1], 16), bytes.fromhex(match[2]), match[3]
        assert shown == "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        file[start : start + len(row)] = row
    (shown_directory,) = blocks("json")
    directory = re.sub(r"\n *", "", shown_directory).encode()
    file[64 : 64 + len(directory)] = directory
    path = tmp_path / "example.experts"
    path.write_bytes(file)
    return path


def test_the_file_on_the_page_is_sound(example: Path) -> None:
    packed = PackedFile.open(example)
    packed.check_records()
    assert (packed.head.alignment, packed.head.file_nbytes) == (512, FILE_NBYTES)
    assert [(source.name, source.nbytes) for source in packed.directory.sources] == [
        ("example.safetensors", 461)
    ]
    experts = ExpertMap.from_packed(packed)
    data = example.read_bytes()
    for expert in range(2):
        (segment,) = experts.segments(7, expert)
        payload = data[segment.file_offset : segment.file_offset + segment.nbytes]
        assert payload == f"up{expert}...down{expert}.".encode()


def test_the_file_on_the_page_is_what_we_write(example: Path, tmp_path: Path) -> None:
    names = [
        f"model.layers.7.mlp.experts.{e}.{role}_proj.weight" for e in range(2) for role in ("up", "down")
    ]
    entries = {
        name: {"dtype": "U8", "shape": [2, 3], "data_offsets": [6 * place, 6 * place + 6]}
        for place, name in enumerate(names)
    }
    text = json.dumps(entries).encode()
    model = tmp_path / "example.safetensors"
    model.write_bytes(struct.pack("<Q", len(text)) + text + b"up0...down0.up1...down1.")
    ExpertMap.from_safetensors(model).pack(tmp_path / "again", alignment=512)
    assert (tmp_path / "again").read_bytes() == example.read_bytes()
