"""Packed files: the same bytes in one aligned piece per expert, made whole or not at all, and damage is found."""

from __future__ import annotations

import errno
import json
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from moe_models import MODELS, all_experts, slot_bytes
from page_cache import make_cold, resident_nbytes
from processes import needs_fork

from aio_kv import BusyError, CorruptionError, LayoutError, ShortReadError, StorageError
from aio_kv.cli.expert_models import ExpertModel, write_expert_model
from aio_kv.experts import ExpertMap, PackedFile, packed_file
from aio_kv.experts.packed_format import HEAD_NBYTES, TRAILER_NBYTES
from aio_kv.experts.slot_image import ExpertTensor, LayerExperts

pytest.importorskip("gguf")


def plain(folder: Path, *, layers: int = 2, num_experts: int = 3, seed: int = 0) -> ExpertMap:
    """Experts of random bytes and uneven sizes in a file without a format."""
    rng = np.random.default_rng(seed)
    path, start, found = folder / "plain", 0, {}
    with path.open("wb") as file:
        for layer in range(layers):
            sizes = [tuple(int(n) for n in rng.integers(1, 3000, num_experts)) for _ in range(2)]
            tensors = []
            for role, nbytes in zip(("up", "down"), sizes, strict=True):
                starts = [start + sum(nbytes[:expert]) for expert in range(num_experts)]
                names = tuple(f"{layer}.{expert}.{role}" for expert in range(num_experts))
                tensors.append(ExpertTensor(role, "U8", names, (0,) * num_experts, tuple(starts), nbytes))
                start += sum(nbytes)
                file.write(rng.bytes(sum(nbytes)))
            found[3 * layer + 1] = LayerExperts(num_experts, tuple(tensors))
    return ExpertMap((path,), found, model="plain")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("alignment", [512, 4096])
def test_the_same_bytes_in_one_aligned_segment(tmp_path: Path, name: str, alignment: int) -> None:
    model = MODELS[name]
    experts = ExpertMap.from_gguf(write_expert_model(tmp_path / "m.gguf", model))
    written: list[int] = []
    experts.pack(tmp_path / "m.experts", alignment=alignment, on_written=written.append)
    packed = ExpertMap.from_packed(tmp_path / "m.experts")
    assert (packed.layers, packed.model) == (experts.layers, model.architecture)
    for layer, expert in all_experts(experts):
        assert slot_bytes(packed, layer, expert) == slot_bytes(experts, layer, expert)
        (segment,) = packed.segments(layer, expert)
        assert segment.file_offset % alignment == 0
        assert segment.nbytes == experts.slot_nbytes(layer) == packed.slot_nbytes(layer)
        for ours, theirs in zip(packed.parts(layer, expert), experts.parts(layer, expert), strict=True):
            assert (ours.role, ours.type_name, ours.name) == (theirs.role, theirs.type_name, theirs.name)
            assert (ours.slot_offset, ours.nbytes) == (theirs.slot_offset, theirs.nbytes)
    found = PackedFile.open(tmp_path / "m.experts")
    assert sum(written) == found.head.file_nbytes - found.head.data_start
    found.check_records()


@given(layers=st.integers(1, 3), num_experts=st.integers(1, 4), seed=st.integers(0, 100))
def test_experts_of_uneven_sizes(tmp_path: Path, layers: int, num_experts: int, seed: int) -> None:
    experts = plain(tmp_path, layers=layers, num_experts=num_experts, seed=seed)
    packed = ExpertMap.from_packed(experts.pack(tmp_path / "p", alignment=512, overwrite=True))
    assert packed.layers == experts.layers
    for place in all_experts(experts):
        assert slot_bytes(packed, *place) == slot_bytes(experts, *place)
        assert len(packed.segments(*place)) == 1


def test_packing_is_repeatable_and_repacking_changes_nothing_but_the_source(tmp_path: Path) -> None:
    experts = plain(tmp_path)
    first = experts.pack(tmp_path / "a")
    experts.pack(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    again = ExpertMap.from_packed(first).pack(tmp_path / "c")
    assert again.directory.layers == first.directory.layers
    assert [source.name for source in again.directory.sources] == ["a"]


def test_open_tells_formats_apart(tmp_path: Path) -> None:
    paths = write_expert_model(tmp_path / "m.gguf", MODELS["shards"])
    packed = ExpertMap.open(paths[0]).pack(tmp_path / "packed")
    assert ExpertMap.open(packed.path).slot_nbytes_max == ExpertMap.open(list(paths)).slot_nbytes_max
    with pytest.raises(LayoutError, match="open it alone"):
        ExpertMap.open([packed.path, packed.path])
    (tmp_path / "x").write_bytes(b"PK")
    with pytest.raises(LayoutError, match=r"x begins with b'PK', which is neither"):
        ExpertMap.open(tmp_path / "x")
    with pytest.raises(LayoutError, match="no file"):
        ExpertMap.open([])
    with pytest.raises(StorageError, match="nothing"):
        ExpertMap.open(tmp_path / "nothing")


# --- whole or not at all ---------------------------------------------------------------------------------------------


def test_a_target_that_exists_is_kept(tmp_path: Path) -> None:
    experts = plain(tmp_path)
    target = tmp_path / "target"
    target.write_bytes(b"mine")
    with pytest.raises(StorageError, match="allow overwriting") as caught:
        experts.pack(target)
    assert (caught.value.errno, caught.value.file) == (errno.EEXIST, str(target))
    assert target.read_bytes() == b"mine"
    experts.pack(target, overwrite=True)
    assert ExpertMap.from_packed(target).layers == experts.layers


def test_a_file_of_the_model_is_never_the_target(tmp_path: Path) -> None:
    experts = plain(tmp_path)
    (tmp_path / "link").symlink_to("plain")
    for target in ("plain", "link"):
        with pytest.raises(LayoutError, match="is a file of the model itself"):
            experts.pack(tmp_path / target, overwrite=True)


@pytest.mark.parametrize("alignment", [0, 256, 768, 4 << 20, -4096])
def test_alignments_that_cannot_be(tmp_path: Path, alignment: int) -> None:
    with pytest.raises(LayoutError, match=f"alignment is {alignment}: must be a power of two"):
        plain(tmp_path).pack(tmp_path / "target", alignment=alignment)


def failing_after(count: int, error: BaseException) -> Callable[[int], None]:
    written: list[int] = []

    def count_down(nbytes: int) -> None:
        written.append(nbytes)
        if len(written) == count:
            raise error

    return count_down


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "full"), ValueError()])
def test_a_failure_leaves_what_was_there(tmp_path: Path, error: BaseException) -> None:
    experts = plain(tmp_path)
    target = tmp_path / "target"
    target.write_bytes(b"mine")
    wanted = StorageError if isinstance(error, OSError) else type(error)
    with pytest.raises(wanted):
        experts.pack(target, overwrite=True, on_written=failing_after(4, error))
    assert target.read_bytes() == b"mine"
    assert sorted(os.listdir(tmp_path)) == ["plain", "target"]


def test_what_an_interrupted_packing_left_is_taken_over(tmp_path: Path) -> None:
    left = tmp_path / "target.packing"
    left.write_bytes(b"\xff" * 1_000_000)
    plain(tmp_path).pack(tmp_path / "target")
    PackedFile.open(tmp_path / "target").check_records()
    assert not left.exists()


def test_what_gets_the_real_name_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = plain(tmp_path)
    calls: list[str] = []

    def record(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def recorded(*arguments: Any, **options: Any) -> Any:
            calls.append(name)
            return real(*arguments, **options)

        monkeypatch.setattr(owner, name, recorded)

    record(packed_file, "write_all")
    record(os, "fsync")
    record(os, "replace")
    experts.pack(tmp_path / "target")
    records = len(all_experts(experts))
    assert calls == ["write_all"] * (1 + records) + ["fsync", "replace", "fsync"]


def test_packing_leaves_the_page_cache_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_file, "_SYNC_NBYTES", 4 << 20)
    model = ExpertModel("qwen3moe", 1, 16, 1024, 512, "Q8_0", "Q8_0")
    (path,) = write_expert_model(tmp_path / "m.gguf", model)
    experts = ExpertMap.from_gguf(path)
    make_cold(path)
    most: list[int] = []
    experts.pack(
        tmp_path / "target",
        on_written=lambda nbytes: most.append(resident_nbytes(tmp_path / "target.packing")),
    )
    assert resident_nbytes(tmp_path / "target") == 0
    # A record more than is synced at a time; what the kernel read ahead of the last expert stays with the model.
    record = PackedFile.open(tmp_path / "target").directory.layers[0].record_nbytes
    assert 0 < max(most) <= (4 << 20) + 2 * record
    assert resident_nbytes(path) < 2 << 20 < path.stat().st_size // 8


def test_two_packers_of_one_target(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    experts = plain(tmp_path)
    refused: list[BusyError] = []

    def also(nbytes: int) -> None:
        with pytest.raises(BusyError, match=r"target\.packing is being written elsewhere") as caught:
            experts.pack(tmp_path / "target")
        refused.append(caught.value)

    experts.pack(tmp_path / "target", on_written=also).check_records()
    assert len(refused) == len(all_experts(experts))


def test_a_target_that_was_finished_while_we_waited_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other packer renames its file between our opening it and our lock."""
    fcntl = pytest.importorskip("fcntl")
    experts = plain(tmp_path)
    unfinished, target = tmp_path / "target.packing", tmp_path / "target"
    unfinished.write_bytes(b"whole")

    class Late:
        LOCK_EX, LOCK_NB = fcntl.LOCK_EX, fcntl.LOCK_NB

        @staticmethod
        def flock(fd: int, how: int) -> None:
            unfinished.rename(target)

    monkeypatch.setattr(packed_file, "fcntl", Late)
    with pytest.raises(BusyError):
        experts.pack(target)
    assert target.read_bytes() == b"whole"


def test_a_full_disk_is_known_before_anything_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, start: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    written: list[int] = []
    with pytest.raises(StorageError) as caught:
        plain(tmp_path).pack(tmp_path / "target", on_written=written.append)
    assert caught.value.errno == errno.ENOSPC
    assert not written
    assert sorted(os.listdir(tmp_path)) == ["plain"]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"none/target\.packing"):
        plain(tmp_path).pack(tmp_path / "none" / "target")


def test_a_model_that_shrinks_or_changes_meanwhile(tmp_path: Path) -> None:
    experts = plain(tmp_path)

    def touch(nbytes: int) -> None:
        os.utime(tmp_path / "plain", ns=(1, 1))

    with pytest.raises(CorruptionError, match="the model changed while it was packed"):
        experts.pack(tmp_path / "target", on_written=touch)
    with pytest.raises(ShortReadError) as caught:
        experts.pack(tmp_path / "target", on_written=lambda nbytes: os.truncate(tmp_path / "plain", 10))
    assert caught.value.file == str(tmp_path / "plain")
    assert not (tmp_path / "target").exists()


@needs_fork
def test_a_killed_packer_leaves_no_target(tmp_path: Path) -> None:
    experts = plain(tmp_path)
    pid = os.fork()
    if pid == 0:
        try:
            experts.pack(tmp_path / "target", on_written=lambda nbytes: os._exit(9))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert not (tmp_path / "target").exists()
    experts.pack(tmp_path / "target").check_records()


# --- damage ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def packed(tmp_path: Path) -> PackedFile:
    return plain(tmp_path, num_experts=2).pack(tmp_path / "p", alignment=512)


def test_every_byte_before_the_records_is_covered(packed: PackedFile) -> None:
    sound = packed.path.read_bytes()
    for place in range(HEAD_NBYTES + packed.head.directory_nbytes):
        damaged = bytearray(sound)
        damaged[place] ^= 0x40
        packed.path.write_bytes(damaged)
        with pytest.raises(CorruptionError) as caught:
            PackedFile.open(packed.path)
        assert caught.value.file == str(packed.path)
        assert caught.value.file_offset is not None


def test_every_byte_of_a_record_is_covered(packed: PackedFile) -> None:
    layer = packed.directory.layers[0]
    sound = packed.path.read_bytes()
    nbytes = layer.payload_nbytes(1)
    start = packed.head.data_start + layer.record_nbytes
    for place in [0, 1, nbytes // 2, nbytes - 1, *range(nbytes, nbytes + TRAILER_NBYTES)]:
        damaged = bytearray(sound)
        damaged[start + place] ^= 1
        packed.path.write_bytes(damaged)
        with pytest.raises(CorruptionError, match="layer 1, expert 1") as caught:
            PackedFile.open(packed.path).check_records()
        assert caught.value.file_offset in (start, start + nbytes)


def test_records_that_changed_places_are_noticed(tmp_path: Path) -> None:
    experts = ExpertMap.from_gguf(write_expert_model(tmp_path / "m.gguf", MODELS["fused"]))
    packed = experts.pack(tmp_path / "p")
    layer = packed.directory.layers[0]
    start, size = packed.head.data_start, layer.record_nbytes
    data = packed.path.read_bytes()
    swapped = data[:start] + data[start + size :][:size] + data[start:][:size] + data[start + 2 * size :]
    packed.path.write_bytes(swapped)
    with pytest.raises(CorruptionError, match="layer 0, expert 0 is damaged"):
        PackedFile.open(packed.path).check_records()


def test_every_truncation_is_noticed(packed: PackedFile) -> None:
    sound = packed.path.read_bytes()
    for nbytes in [*range(200), len(sound) - 1, len(sound) + 1]:
        packed.path.write_bytes((sound + b"\0")[:nbytes])
        with pytest.raises(CorruptionError):
            PackedFile.open(packed.path)


def resealed(head: bytes, **changes: int) -> bytes:
    """A head with other fields and a right checksum."""
    names = ("version", "alignment", "directory_nbytes", "directory_crc32", "data_start", "file_nbytes")
    fields = dict(zip(names, struct.unpack_from("<8xIIQI4xQQ", head), strict=True)) | changes
    data = struct.pack("<8sIIQI4xQQ12x", head[:8], *fields.values())
    return data + struct.pack("<I", zlib.crc32(data))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"version": 2}, LayoutError, "has version 2 of the packed format, and 1 is known"),
        ({"alignment": 0}, CorruptionError, "the head is wrong"),
        ({"alignment": 1000}, CorruptionError, "the head is wrong"),
        ({"directory_nbytes": 1 << 60}, CorruptionError, "the head is wrong"),
        ({"data_start": 64}, CorruptionError, "the head contradicts itself"),
        ({"file_nbytes": 1 << 60}, CorruptionError, "wrong length"),
    ],
)
def test_a_head_that_is_sealed_and_wrong(
    packed: PackedFile, changes: dict[str, int], error: type[Exception], message: str
) -> None:
    data = packed.path.read_bytes()
    packed.path.write_bytes(resealed(data[:HEAD_NBYTES], **changes) + data[HEAD_NBYTES:])
    with pytest.raises(error, match=message):
        PackedFile.open(packed.path)


def edit(fields: dict[str, Any], path: str, value: Any) -> None:
    """Set what a path such as "layers/0/parts" leads to; `KeyError` as a value takes it away."""
    *way, last = [int(step) if step.isdigit() else step for step in path.split("/")]
    place: Any = fields
    for step in way:
        place = place[step]
    if value is KeyError:
        del place[last]
    else:
        place[last] = value


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *[(key, KeyError) for key in ("format", "model", "sources", "layers")],
        *[("format", "other"), ("model", 3), ("sources", 3), ("sources/0/name", 3), ("sources/0/nbytes", -1)],
        *[("layers", []), ("layers", None), ("layers/0", None)],
        *[("layers/0/layer", bad) for bad in (-1, 1 << 40, "1", True, 1.0, KeyError)],
        *[("layers/1/layer", bad) for bad in (0, 1)],
        *[("layers/0/num_experts", bad) for bad in (0, 1, 3, 1 << 17, None)],
        *[("layers/0/record_offset", bad) for bad in (512, -512, 1 << 63)],
        *[("layers/0/record_nbytes", bad) for bad in (0, 512, 1 << 20)],
        *[("layers/0/parts", bad) for bad in ([], None, 3)],
        *[("layers/0/parts/0/role", 3), ("layers/0/parts/0/type", None), ("layers/0/parts/0/name", ["a"])],
        *[("layers/0/parts/0/nbytes", bad) for bad in (0, -1, [1], [1, -1], 1 << 62, "1")],
    ],
)
def test_a_directory_that_is_sealed_and_wrong(packed: PackedFile, path: str, value: Any) -> None:
    data = packed.path.read_bytes()
    fields = json.loads(data[HEAD_NBYTES:][: packed.head.directory_nbytes])
    edit(fields, path, value)
    # Padded to the old length where it can be, so that only what the directory says is wrong.
    directory = json.dumps(fields, separators=(",", ":")).encode().ljust(packed.head.directory_nbytes)
    start = -(-(HEAD_NBYTES + len(directory)) // 512) * 512
    records = data[packed.head.data_start :]
    head = resealed(
        data[:HEAD_NBYTES],
        directory_nbytes=len(directory),
        directory_crc32=zlib.crc32(directory),
        data_start=start,
        file_nbytes=start + len(records),
    )
    packed.path.write_bytes((head + directory).ljust(start, b"\0") + records)
    with pytest.raises(CorruptionError, match="the directory is wrong") as caught:
        PackedFile.open(packed.path)
    assert caught.value.file_offset == HEAD_NBYTES


def test_a_record_that_is_missing_at_the_end(packed: PackedFile) -> None:
    """The file is shorter and its head says so, too; only the directory knows better."""
    data = packed.path.read_bytes()[: -packed.directory.layers[-1].record_nbytes]
    packed.path.write_bytes(resealed(data[:HEAD_NBYTES], file_nbytes=len(data)) + data[HEAD_NBYTES:])
    with pytest.raises(CorruptionError, match="records end at"):
        PackedFile.open(packed.path)


def test_the_way_to_seal_a_directory_is_right(packed: PackedFile) -> None:
    data = packed.path.read_bytes()
    fields = json.loads(data[HEAD_NBYTES:][: packed.head.directory_nbytes])
    edit(fields, "model", "other")
    directory = json.dumps(fields, separators=(",", ":")).encode().ljust(packed.head.directory_nbytes)
    head = resealed(data[:HEAD_NBYTES], directory_crc32=zlib.crc32(directory))
    packed.path.write_bytes(head + directory + data[HEAD_NBYTES + len(directory) :])
    assert PackedFile.open(packed.path).directory.model == "other"
