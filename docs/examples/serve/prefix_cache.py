"""The prefix cache: blocks of keys and values in a `CascadeBackend` over an engine backend, restored with `await`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
from prefix_index import PrefixIndex, digests_of
from sequence_slabs import Slab

from aio_kv import CascadeBackend, GroupLayout, NotDurableError, TransferError, open_backend

__all__ = ["PrefixCache"]

_INDEX_FILE = "prefix-index.json"
_BLOCKS_AT_ONCE = 96
# In tokens: reading a shorter prompt takes too little for a pass of the last token alone to pay.
_TAIL_FROM = 256


class PrefixCache:
    """Keeps blocks of prompts, at most as many as the layout has. Counts tokens: `asked`, and `hit` of them.

    Only the first `grain`-fold tokens of a prompt are kept and looked for; `grain` is a multiple of the block size.
    With the block size itself, the rest of a long prompt is kept as well, as a part of a block: the same prompt again
    is restored but for its last token, from which the model starts.
    """

    def __init__(self, kv: Any, index: PrefixIndex, *, namespace: str, grain: int) -> None:
        self.kv = kv
        self.asked = self.hit = 0
        self._index = index
        self._layout: GroupLayout = kv.layout
        self._namespace = namespace
        self._grain = grain

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        directory: Path,
        layout: GroupLayout,
        *,
        memory: memoryview,
        namespace: str,
        ram_bytes: int,
        grain: int,
        backend: str = "auto",
    ) -> AsyncIterator[PrefixCache]:
        """Open the cache in a directory for as long as the block runs; what it holds is found again the next time.

        `memory`, of the slabs, is the caller's, and is lent to the ring meanwhile.
        """
        directory.mkdir(parents=True, exist_ok=True)
        below = open_backend(directory / "blocks", layout, backend=backend)
        async with CascadeBackend(below, capacity_bytes=ram_bytes) as kv:
            # Only now, since the backend has checked that the files are for this layout, and nobody else has them.
            index = PrefixIndex.open(directory / _INDEX_FILE, layout.num_blocks)
            async with await kv.register_landing_region(memory):
                yield cls(kv, index, namespace=namespace, grain=grain)
                try:
                    await kv.flush()
                except NotDurableError:
                    return  # Without an index file the next start begins empty, which is right if slow.
                index.write(directory / _INDEX_FILE)

    def kept_tokens(self, tokens: Sequence[int]) -> int:
        """How many tokens of a prompt can be kept. The last one never is: the model needs one to start from."""
        before_last = len(tokens) - 1
        if self._grain == self._layout.block_size and before_last >= _TAIL_FROM:
            return before_last
        return before_last // self._grain * self._grain

    async def restore(self, slab: Slab, tokens: Sequence[int]) -> int:
        """Fill an empty slab with the longest prefix of `tokens` that is kept; gives its length in tokens.

        Blocks that cannot be read are forgotten, and count as not kept. Cancelled, it has let go of the slab.
        """
        digests = self._digests(tokens)
        self.asked += len(tokens)
        with self._index.lease(digests) as slots:
            size, kept = self._layout.block_size, self.kept_tokens(tokens)
            found = kept if len(slots) == len(digests) else len(slots) * size // self._grain * self._grain
            blocks = -(-found // size)
            try:
                await self._move(self.kv.read_groups, slab, range(blocks), slots[:blocks])
            except TransferError:
                self._index.forget(digests[:blocks])
                return 0
        slab.length = found
        self.hit += found
        return slab.length

    async def save(self, slab: Slab, tokens: Sequence[int]) -> None:
        """Keep the blocks of a prompt, whose tokens are in the slab, that are not kept yet. They need not all fit."""
        digests = self._digests(tokens)
        reserved = self._index.reserve(digests)
        blocks = [number for number, digest in enumerate(digests) if digest in reserved]
        try:
            await self._move(self.kv.write_groups, slab, blocks, list(reserved.values()))
        except BaseException as error:
            self._index.give_up(reserved)
            if not isinstance(error, TransferError):
                raise
        else:
            self._index.publish(reserved, digests)

    def _digests(self, tokens: Sequence[int]) -> list[str]:
        kept = tokens[: self.kept_tokens(tokens)]
        return digests_of(kept, block_size=self._layout.block_size, namespace=self._namespace)

    async def _move(self, start: Any, slab: Slab, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Transfers of a layer's next few blocks, all in flight, each started in a turn of its own.

        Others run in between: hits in memory are copied in the call.
        """
        transfers: list[Any] = []
        parts = [slice(first, first + _BLOCKS_AT_ONCE) for first in range(0, len(blocks), _BLOCKS_AT_ONCE)]
        try:
            for layer, part in product(range(self._layout.num_layers), parts):
                await self.kv.wait_ready()
                transfers.append(start(*slab.groups(layer, blocks[part], slots[part])))
                await anyio.lowlevel.checkpoint()
            for transfer in transfers:
                await transfer
        except BaseException:
            await _end(transfers)
            raise


async def _end(transfers: Iterable[Any]) -> None:
    """See to it that nothing uses the memory of these transfers any more."""
    with anyio.CancelScope(shield=True):
        for transfer in transfers:
            transfer.cancel()
        for transfer in transfers:
            await transfer.outcome()
