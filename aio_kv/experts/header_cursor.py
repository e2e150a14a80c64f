"""Reading the head of a model file forwards, in chunks, without ever believing a length in it.

Nothing is read that does not lie before `limit`, nothing is allocated by a number from the file before that many bytes
were found to be there, and whatever is wrong is a `CorruptionError` with the name of the file and the offset.
"""

from __future__ import annotations

from struct import Struct

from aio_kv.errors import CorruptionError
from aio_kv.positional import read_exactly

__all__ = ["HeaderCursor"]

# A read ahead reaches at most this far past what is asked for.
_CHUNK_NBYTES = 64 << 10
_U32, _U64 = Struct("<I"), Struct("<Q")


class HeaderCursor:
    """A place in an open file, moving forward. Blocks; for one thread. The caller owns `fd` and closes it.

    `nbytes` is the size of the file. Numbers are little-endian. `limit_nbytes` bounds how far the cursor may go.
    """

    def __init__(self, fd: int, *, file: str, nbytes: int, limit_nbytes: int) -> None:
        self._fd = fd
        self._file = file
        self._nbytes = nbytes
        self._limit = min(nbytes, limit_nbytes)
        self._chunk = b""
        self._chunk_start = 0
        self._at = 0

    @property
    def offset(self) -> int:
        """Where the next byte comes from, in bytes from the start of the file."""
        return self._chunk_start + self._at

    @property
    def remaining(self) -> int:
        """Bytes that may still be read."""
        return self._limit - self.offset

    def damaged(
        self,
        what: str,
        *,
        file_offset: int | None = None,
        expected: object = None,
        found: object = None,
        hint: str | None = None,
    ) -> CorruptionError:
        """Return the error for something wrong in this file, at `file_offset` or at the cursor."""
        place = self.offset if file_offset is None else file_offset
        return CorruptionError(
            what, file=self._file, file_offset=place, expected=expected, found=found, hint=hint
        )

    def u32(self, what: str) -> int:
        """Read an unsigned number of 4 bytes."""
        value: int = _U32.unpack(self.take(4, what))[0]
        return value

    def u64(self, what: str) -> int:
        """Read an unsigned number of 8 bytes."""
        value: int = _U64.unpack(self.take(8, what))[0]
        return value

    def take(self, nbytes: int, what: str) -> bytes:
        """Read `nbytes` bytes, which `what` names in the error for a file that ends before them."""
        start = self._at
        end = start + nbytes
        if end > len(self._chunk):
            self._refill(nbytes, what)
            start, end = 0, nbytes
        self._at = end
        return self._chunk[start:end]

    def skip(self, nbytes: int, what: str) -> None:
        """Go on by `nbytes` bytes without reading them."""
        self._require(nbytes, what)
        self._at += nbytes

    def skip_strings(self, count: int, what: str) -> None:
        """Go past `count` strings of 8 bytes of length and then that many bytes, the contents unread.

        A vocabulary has some hundred thousand of them, so this loop does nothing but add.
        """
        if count * 8 > self.remaining:
            raise self._beyond(count * 8, what)
        length_at = _U64.unpack_from
        while count:
            chunk, at = self._chunk, self._at
            last = len(chunk) - 8
            while count and at <= last:
                at += 8 + length_at(chunk, at)[0]
                count -= 1
            # The last string may reach past the chunk, and a wrong length past the end of the file.
            self.skip(at - self._at, what)
            if count:
                self._refill(8, what)

    def _refill(self, nbytes: int, what: str) -> None:
        """Read the chunk anew from the cursor, so that it holds at least `nbytes`."""
        self._require(nbytes, what)
        start = self.offset
        chunk = bytearray(min(max(nbytes, _CHUNK_NBYTES), self._limit - start))
        read_exactly(self._fd, memoryview(chunk), start, file=self._file)
        self._chunk, self._chunk_start, self._at = bytes(chunk), start, 0

    def _require(self, nbytes: int, what: str) -> None:
        if nbytes > self.remaining:
            raise self._beyond(nbytes, what)

    def _beyond(self, nbytes: int, what: str) -> CorruptionError:
        end = self.offset + nbytes
        if self._limit < self._nbytes and end <= self._nbytes:
            return self.damaged(
                f"the head of the file is too long: {what} ends at {end}, {self._limit} bytes are allowed"
            )
        return self.damaged(
            f"the file ends inside {what}",
            expected=f"{nbytes} more bytes",
            found=f"{max(0, self._nbytes - self.offset)} of {self._nbytes}",
            hint="the file is cut short, or damaged: fetch it again",
        )
