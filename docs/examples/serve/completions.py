"""Greedy completions, one token at a time, for any number of requests at once.

All forward passes are made in one worker thread, one at a time and in turn: a long prompt is read in passes of
`PASS_TOKENS`, and between them every other request gets its next token. The event loop only hands over and waits.

Passes begin at the same positions whether a prefix was restored or not, as far as its blocks allow: the last digits of
a matrix product depend on how many rows it has.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import anyio
import anyio.to_thread
from prefix_cache import PrefixCache
from sequence_slabs import Slab, SlabPool

from aio_kv.cli.language_model import LanguageModel

__all__ = ["Completer", "Piece", "Timing", "passes_of", "text_pieces"]

PASS_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Timing:
    """Where the time to the first token went, and how many tokens of the prompt were restored, not computed."""

    wait_ms: float
    restore_ms: float
    forward_ms: float
    restored_tokens: int


@dataclass(frozen=True, slots=True)
class Piece:
    """One generated token; the first one brings the timing, the last one the reason for the end."""

    token: int
    timing: Timing | None = None
    finish_reason: str | None = None


def passes_of(start: int, kept: int, count: int) -> Iterator[range]:
    """The passes that read tokens `start` to `count` of a prompt of which `kept` can be kept in the cache.

    They end at multiples of `PASS_TOKENS`, at `kept`, and at `count`.
    """
    ends = {*range(PASS_TOKENS, count, PASS_TOKENS), kept, count}
    for begin, end in pairwise(sorted({start, *(end for end in ends if end > start)})):
        yield range(begin, end)


class Completer:
    """Generates with a model, slabs, and a prefix cache."""

    def __init__(self, model: LanguageModel, slabs: SlabPool, cache: PrefixCache) -> None:
        self._model = model
        self._slabs = slabs
        self._cache = cache
        self._one_at_a_time = anyio.CapacityLimiter(1)

    async def warm_up(self) -> None:
        """Make a first pass, which takes torch seconds to set up, before somebody waits for it."""
        async with self._slabs.lease() as slab:
            await self._in_thread(self._model.next_token, slab.cache, [0] * 16)

    async def complete(
        self, prompt: Sequence[int], tokens_max: int, *, use_cache: bool = True
    ) -> AsyncGenerator[Piece, None]:
        """Generate up to `tokens_max` tokens after `prompt`, which together fit in a slab.

        To be closed (`aclosing`) by whoever does not go on to the end. Cancelled, it first waits for the pass at work.
        """
        begin = time.perf_counter()
        async with self._slabs.lease() as slab:
            token, timing = await self._first_token(slab, prompt, begin, use_cache)
            yield self._piece(token, is_last=tokens_max == 1, timing=timing)
            if use_cache:
                await self._cache.save(slab, prompt)
            for left in range(tokens_max - 1, 0, -1):
                if token == self._model.end_token:
                    return
                token = await self._in_thread(self._model.next_token, slab.cache, [token])
                yield self._piece(token, is_last=left == 1)

    async def _first_token(
        self, slab: Slab, prompt: Sequence[int], begin: float, use_cache: bool
    ) -> tuple[int, Timing]:
        got_slab = time.perf_counter()
        restored = await self._cache.restore(slab, prompt) if use_cache else 0
        restored_at = time.perf_counter()
        *passes, last = passes_of(restored, self._cache.kept_tokens(prompt), len(prompt))
        for chunk in passes:
            await self._in_thread(self._model.read_on, slab.cache, prompt[chunk.start : chunk.stop])
        token = await self._in_thread(self._model.next_token, slab.cache, prompt[last.start : last.stop])
        moments = (begin, got_slab, restored_at, time.perf_counter())
        waited, restoring, forward = (round((b - a) * 1e3, 3) for a, b in pairwise(moments))
        return token, Timing(waited, restoring, forward, restored)

    def _piece(self, token: int, *, is_last: bool, timing: Timing | None = None) -> Piece:
        reason = "stop" if token == self._model.end_token else "length" if is_last else None
        return Piece(token, timing, reason)

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        # Not abandoned when cancelled: the pass would go on writing to a slab that has been given to someone else.
        return await anyio.to_thread.run_sync(function, *arguments, limiter=self._one_at_a_time)


async def text_pieces(
    model: LanguageModel, pieces: AsyncGenerator[Piece, None]
) -> AsyncGenerator[tuple[str, Piece], None]:
    """Each piece with the text that it adds: the tokens of one character may come one by one, and are held back."""
    tokens: list[int] = []
    said = ""
    async with aclosing(pieces):
        async for piece in pieces:
            tokens.append(piece.token)
            text = model.text_of(tokens)
            if text.endswith("�") and piece.finish_reason is None:
                yield "", piece
                continue
            yield text[len(said) :], piece
            said = text
