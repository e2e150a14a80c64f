"""An OpenAI-style completion server whose KV cache outlives it: Starlette on uvicorn, SmolLM2-135M on the CPU.

python docs/examples/serve/server.py --help
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import uvicorn
from completions import Completer, Piece, text_pieces
from prefix_cache import PrefixCache
from sequence_slabs import SlabPool
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from aio_kv.cli.heartbeat import heartbeat, lag_of
from aio_kv.cli.language_model import LanguageModel, prepare_packages

__all__ = ["Settings", "application"]

_TOKENS_DEFAULT = 16  # of an answer, as in OpenAI's API
_WATCH_SECONDS_MAX = 60


@dataclass(frozen=True, slots=True)
class Settings:
    """What the server can be told; see `--help`."""

    directory: Path
    blocks: int = 512
    block_size: int = 16
    ram_mib: int = 256
    sequences: int = 4
    tokens_max: int = 2048
    grain: int = 16
    backend: str = "auto"

    def __post_init__(self) -> None:
        for name in ("blocks", "block_size", "ram_mib", "sequences", "tokens_max", "grain"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: must be at least 1")
        for name in ("tokens_max", "grain"):
            if getattr(self, name) % self.block_size:
                raise ValueError(
                    f"{name} is {getattr(self, name)}: must be a multiple of block_size, {self.block_size}"
                )


class BadRequest(Exception):
    """A request that cannot be served; `args` are the message and the parameter that it is about."""


@dataclass(frozen=True, slots=True)
class Order:
    """A completion that somebody wants, checked."""

    prompt: list[int]
    tokens_max: int
    is_streamed: bool
    use_cache: bool

    @classmethod
    def parse(cls, body: Any, model: LanguageModel, capacity: int) -> Order:
        """Check the body of a request. Raises `BadRequest`."""
        if not isinstance(body, dict):
            raise BadRequest("the body must be a JSON object", None)
        prompt = body.get("prompt")
        if isinstance(prompt, str):
            prompt = model.tokens_of(prompt)
        is_tokens = isinstance(prompt, list) and all(
            type(token) is int and 0 <= token < model.vocabulary_size for token in prompt
        )
        if not is_tokens or not prompt:
            raise BadRequest("prompt must be a text or a list of token numbers, and not empty", "prompt")
        tokens_max = body.get("max_tokens", _TOKENS_DEFAULT)
        if type(tokens_max) is not int or not 1 <= tokens_max <= capacity - len(prompt):
            raise BadRequest(
                f"max_tokens is {tokens_max!r} after a prompt of {len(prompt)} tokens: must be at least 1, "
                f"and both together at most {capacity}",
                "max_tokens",
            )
        if body.get("temperature", 0) != 0:
            raise BadRequest("temperature must be 0: this server only generates greedily", "temperature")
        flags = {name: body.get(name, default) for name, default in (("stream", False), ("kv_cache", True))}
        for name, value in flags.items():
            if type(value) is not bool:
                raise BadRequest(f"{name} is {value!r}: must be true or false", name)
        return cls(prompt, tokens_max, flags["stream"], flags["kv_cache"])


class Service:
    """The handlers, and what they share."""

    def __init__(self, model: LanguageModel, settings: Settings) -> None:
        self._model = model
        self._settings = settings
        self._cache: PrefixCache | None = None
        self._completer: Completer | None = None

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Open the cache before the first request, close it after the last one."""
        settings, model = self._settings, self._model
        layout = model.layout(num_blocks=settings.blocks, block_size=settings.block_size)
        slabs = SlabPool(layout, count=settings.sequences, capacity=settings.tokens_max, dtype=model.dtype)
        opening = PrefixCache.open(
            settings.directory,
            layout,
            memory=slabs.memory,
            namespace=f"{model.name} {model.dtype} {layout} grain {settings.grain}",
            ram_bytes=settings.ram_mib << 20,
            grain=settings.grain,
            backend=settings.backend,
        )
        async with opening as self._cache:
            self._completer = Completer(model, slabs, self._cache)
            await self._completer.warm_up()
            yield

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": [{"id": self._model.name, "object": "model"}]})

    async def statistics(self, request: Request) -> Response:
        """GET /statistics: what the cache did."""
        assert self._cache is not None
        cache, counts = self._cache, self._cache.kv.statistics()
        return JSONResponse(
            {
                "prompt_tokens": cache.asked,
                "restored_tokens": cache.hit,
                "hit_ratio": cache.hit / cache.asked if cache.asked else None,
                "groups_from_ram": counts.hits,
                "groups_from_disk": counts.misses,
                "rung": counts.backing.rung,
            }
        )

    async def lag(self, request: Request) -> Response:
        """GET /lag?seconds=2: watch the event loop for so long, and say how late it was."""
        try:
            seconds = float(request.query_params.get("seconds", "1"))
        except ValueError:
            seconds = 0.0
        if not 0 < seconds <= _WATCH_SECONDS_MAX:
            return _refusal(f"seconds must be a number above 0, at most {_WATCH_SECONDS_MAX}", "seconds")
        async with heartbeat() as lags:
            await anyio.sleep(seconds)
        return JSONResponse(asdict(lag_of(lags)))

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions: as in OpenAI's API, with `kv_cache: false` to compute everything."""
        assert self._completer is not None
        try:
            body = await request.json()
            # A long text takes milliseconds to become tokens.
            order = await anyio.to_thread.run_sync(Order.parse, body, self._model, self._settings.tokens_max)
        except ClientDisconnect:
            return Response(status_code=499)
        except json.JSONDecodeError as error:
            return _refusal(f"the body is not JSON: {error}", None)
        except BadRequest as error:
            return _refusal(*error.args)
        pieces = self._completer.complete(order.prompt, order.tokens_max, use_cache=order.use_cache)
        told = text_pieces(self._model, pieces)
        answer = _Answer(self._model.name, len(order.prompt))
        if order.is_streamed:
            return _Events(answer.events(told), media_type="text/event-stream")
        return JSONResponse(await answer.whole(told))


class _Events(StreamingResponse):  # type: ignore[misc] # followed or not, as it is installed
    """A stream that is closed, and has given its slab back, when the response ends in whatever way."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        events: Any = self.body_iterator
        async with aclosing(events):
            await super().__call__(scope, receive, send)


class _Answer:
    """The JSON of one completion, whole or as server-sent events."""

    def __init__(self, model: str, prompt_tokens: int) -> None:
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._prompt_tokens = prompt_tokens

    async def events(self, told: AsyncGenerator[tuple[str, Piece], None]) -> AsyncGenerator[str, None]:
        async with aclosing(told):
            async for text, piece in told:
                yield f"data: {json.dumps(self._body(text, piece.finish_reason, [piece]))}\n\n"
            yield "data: [DONE]\n\n"

    async def whole(self, told: AsyncGenerator[tuple[str, Piece], None]) -> dict[str, Any]:
        parts = [part async for part in told]
        pieces = [piece for _, piece in parts]
        body = self._body("".join(text for text, _ in parts), pieces[-1].finish_reason, pieces)
        count = len(pieces)
        usage = {"prompt_tokens": self._prompt_tokens, "completion_tokens": count}
        return {**body, "usage": {**usage, "total_tokens": self._prompt_tokens + count}}

    def _body(self, text: str, reason: str | None, pieces: list[Piece]) -> dict[str, Any]:
        choice = {
            "index": 0,
            "text": text,
            "finish_reason": reason,
            "token_ids": [piece.token for piece in pieces],
        }
        timing = pieces[0].timing
        return {**self._head, "choices": [choice], **({"timing": asdict(timing)} if timing else {})}


def _refusal(message: str, parameter: str | None) -> Response:
    error = {"message": message, "type": "invalid_request_error", "param": parameter, "code": None}
    return JSONResponse({"error": error}, status_code=400)


def application(model: LanguageModel, settings: Settings) -> Starlette:
    """The application, around a model that is loaded."""
    service = Service(model, settings)
    routes = [
        Route("/v1/completions", service.completions, methods=["POST"]),
        Route("/v1/models", service.models),
        Route("/statistics", service.statistics),
        Route("/lag", service.lag),
    ]
    return Starlette(routes=routes, lifespan=service.lifespan)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example: server.py --dir /mnt/nvme/kv --ram-mib 1024",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = Settings(Path("kv-serve"))
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    add("--port", type=int, default=8000, help="port to listen on (%(default)s)")
    add("--dir", type=Path, default=default.directory, help="where blocks and index are kept (%(default)s)")
    add("--blocks", type=int, default=default.blocks, help="blocks kept on disk (%(default)s)")
    add("--ram-mib", type=int, default=default.ram_mib, help="memory in front of the disk (%(default)s)")
    add("--sequences", type=int, default=default.sequences, help="requests at work at once (%(default)s)")
    add("--tokens", type=int, default=default.tokens_max, help="prompt and answer at most (%(default)s)")
    add(
        "--grain",
        type=int,
        default=default.grain,
        help="reuse prefixes in steps of so many tokens (%(default)s); with 256 every value is the very same "
        "to the last bit as without a cache",
    )
    add("--backend", default=default.backend, help="auto, uring or threads (%(default)s)")
    return parser


def main() -> None:
    """Load the model and serve until interrupted."""
    parser = _parser()
    options = parser.parse_args()
    prepare_packages()
    try:
        settings = Settings(
            options.dir,
            blocks=options.blocks,
            ram_mib=options.ram_mib,
            sequences=options.sequences,
            tokens_max=options.tokens,
            grain=options.grain,
            backend=options.backend,
        )
    except ValueError as error:
        parser.error(str(error))
    # Between two operations of torch the model's thread holds the interpreter, by default for up to 5 ms at a time.
    sys.setswitchinterval(0.0005)
    print("loading the model", flush=True)
    app = application(LanguageModel.load(), settings)
    uvicorn.run(app, host=options.host, port=options.port, log_level="warning", loop="asyncio")


if __name__ == "__main__":
    main()
