"""The bytes of a packed file: experts one after the other, each in one piece that direct I/O can read.

    head         64 bytes: magic, version, alignment, where the rest is, checksums
    directory    JSON: what the layers hold and where their records begin
    records      one for each expert of a layer, all of one size and aligned: payload, trailer, zeros

The payload of a record is the slot image of the expert: the bytes of its tensors, unchanged, without gaps. The trailer
follows at once and says whose payload it is and what its checksum is. Numbers are little-endian, checksums CRC-32 as
zlib has it, which finds damage and not intent. `docs/reference/packed-experts.md` describes all of it, with an example.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from struct import Struct

from aio_kv.errors import CorruptionError, LayoutError

__all__ = [
    "HEAD_NBYTES",
    "MAGIC",
    "TRAILER_NBYTES",
    "PackedHead",
    "RecordTrailer",
    "aligned_up",
    "check_alignment",
    "check_record",
]

MAGIC = b"AIOKVEXP"
_VERSION = 1
# magic, version, alignment, length and CRC-32 of the directory, 4 zeros, start of the records, length of the file, 12
# zeros; then the CRC-32 of all that.
_HEAD = Struct("<8sIIQI4xQQ12x")
_CHECKSUM = Struct("<I")
HEAD_NBYTES = _HEAD.size + _CHECKSUM.size
# magic, layer, expert, CRC-32 of the payload, length of the payload, 4 zeros; then the CRC-32 of all that.
_TRAILER = Struct("<4sIIIQ4x")
_TRAILER_MAGIC = b"XREC"
TRAILER_NBYTES = _TRAILER.size + _CHECKSUM.size

_ALIGNMENT_MIN, _ALIGNMENT_MAX = 512, 1 << 21
_DIRECTORY_NBYTES_MAX = 100_000_000


def aligned_up(nbytes: int, alignment: int) -> int:
    """Return the next multiple of `alignment`."""
    return -(-nbytes // alignment) * alignment


def check_alignment(alignment: int) -> None:
    """Raise `LayoutError` unless `alignment` (bytes) is one that records may have."""
    if not _is_alignment(alignment):
        raise LayoutError(
            f"alignment is {alignment}: must be a power of two from {_ALIGNMENT_MIN} to {_ALIGNMENT_MAX}"
        )


def _is_alignment(alignment: int) -> bool:
    return _ALIGNMENT_MIN <= alignment <= _ALIGNMENT_MAX and not alignment & (alignment - 1)


@dataclass(frozen=True, slots=True)
class PackedHead:
    """The first bytes of a packed file. `data_start` is where the first record begins; sizes in bytes."""

    alignment: int
    directory_nbytes: int
    directory_crc32: int
    data_start: int
    file_nbytes: int

    def encode(self) -> bytes:
        """Return the `HEAD_NBYTES` bytes of the head."""
        data = _HEAD.pack(
            MAGIC,
            _VERSION,
            self.alignment,
            self.directory_nbytes,
            self.directory_crc32,
            self.data_start,
            self.file_nbytes,
        )
        return data + _CHECKSUM.pack(zlib.crc32(data))

    @classmethod
    def decode(cls, data: bytes, *, file: str, file_nbytes: int) -> PackedHead:
        """Return the head in `data`, the first bytes of `file`, which has `file_nbytes`.

        Raises `CorruptionError` where it is not sound or the file has another length than it says, and `LayoutError`
        for a version that is not known.
        """
        magic = data[: len(MAGIC)]
        if magic != MAGIC or len(data) < HEAD_NBYTES:
            raise CorruptionError(
                "not a file of packed experts", file=file, file_offset=0, expected=MAGIC, found=magic
            )
        _check_sum(data[:HEAD_NBYTES], "the head", file=file, file_offset=0)
        _, version, *fields = _HEAD.unpack_from(data)
        if version != _VERSION:
            raise LayoutError(f"{file} has version {version} of the packed format, and {_VERSION} is known")
        head = cls(*fields)
        if not _is_alignment(head.alignment) or head.directory_nbytes > _DIRECTORY_NBYTES_MAX:
            raise CorruptionError("the head is wrong", file=file, file_offset=0, found=head)
        start = aligned_up(HEAD_NBYTES + head.directory_nbytes, head.alignment)
        if head.data_start != start:
            raise CorruptionError(
                "the head contradicts itself", file=file, file_offset=0, expected=start, found=head.data_start
            )
        if head.file_nbytes != file_nbytes:
            raise CorruptionError(
                "the file of packed experts has a wrong length",
                file=file,
                file_offset=min(head.file_nbytes, file_nbytes),
                expected=f"{head.file_nbytes} bytes",
                found=file_nbytes,
                hint="it is cut short, or damaged: pack it again",
            )
        return head


@dataclass(frozen=True, slots=True)
class RecordTrailer:
    """What follows the payload of a record: whose it is, and its CRC-32 and length in bytes."""

    layer: int
    expert: int
    payload_crc32: int
    payload_nbytes: int

    def encode(self) -> bytes:
        """Return the `TRAILER_NBYTES` bytes of the trailer."""
        data = _TRAILER.pack(_TRAILER_MAGIC, self.layer, self.expert, self.payload_crc32, self.payload_nbytes)
        return data + _CHECKSUM.pack(zlib.crc32(data))


def check_record(record: memoryview, wanted: RecordTrailer, *, file: str, file_offset: int) -> None:
    """Check that `record`, read from `file_offset` of `file`, is the sound record of the expert that is `wanted`.

    Of `wanted` the checksum is not looked at: it is that of the payload that is there. `record` holds payload and
    trailer and is borrowed for the call. Raises `CorruptionError`.
    """
    payload = record[: wanted.payload_nbytes]
    trailer = bytes(record[wanted.payload_nbytes :][:TRAILER_NBYTES])
    place = file_offset + wanted.payload_nbytes
    whose = f"the record of layer {wanted.layer}, expert {wanted.expert}"
    if len(trailer) < TRAILER_NBYTES or trailer[:4] != _TRAILER_MAGIC:
        raise CorruptionError(
            f"{whose} has no trailer",
            file=file,
            file_offset=place,
            expected=_TRAILER_MAGIC,
            found=trailer[:4],
        )
    _check_sum(trailer, f"the trailer of {whose}", file=file, file_offset=place)
    found = RecordTrailer(*_TRAILER.unpack_from(trailer)[1:])
    real = RecordTrailer(wanted.layer, wanted.expert, zlib.crc32(payload), wanted.payload_nbytes)
    if found != real:
        raise CorruptionError(
            f"{whose} is damaged", file=file, file_offset=file_offset, expected=found, found=real
        )


def _check_sum(data: bytes, what: str, *, file: str, file_offset: int) -> None:
    (stored,) = _CHECKSUM.unpack(data[-_CHECKSUM.size :])
    real = zlib.crc32(data[: -_CHECKSUM.size])
    if stored != real:
        raise CorruptionError(
            f"{what} has a wrong checksum", file=file, file_offset=file_offset, expected=stored, found=real
        )
