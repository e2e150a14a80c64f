"""The example server end to end: a real uvicorn, a real client, the real model."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from loops import on_one_loop

try:
    import httpx
    import torch
    import transformers  # noqa: F401
    import uvicorn
except ImportError as error:
    pytest.skip(f"{error}: pip install 'aio-kv[model,serve]'", allow_module_level=True)

from completions import Completer, passes_of
from load import ask, connected
from prefix_cache import PrefixCache
from sequence_slabs import SlabPool
from server import Settings, application

from aio_kv.cli.language_model import LanguageModel

pytestmark = [pytest.mark.model, pytest.mark.slow]
ROOT = Path(__file__).resolve().parent.parent
PREFIX = "A model leaves notes for itself in a warehouse by the sea, and a clerk fetches them. " * 8


@asynccontextmanager
async def serving(model: LanguageModel, directory: Path, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A server on a port of its own, in this process so that the model is loaded once, and a client of it."""
    settings = Settings(
        directory, **{"blocks": 64, "ram_mib": 64, "tokens_max": 512, "sequences": 2, **options}
    )
    config = uvicorn.Config(application(model, settings), port=0, log_level="warning", lifespan="on")
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve())
    while not server.started and not running.done():  # noqa: ASYNC110 # uvicorn has no event for it
        await asyncio.sleep(0.01)
    if running.done():
        await running
        raise AssertionError("the server did not start")
    try:
        port = server.servers[0].sockets[0].getsockname()[1]
        async with connected(f"http://127.0.0.1:{port}") as client:
            yield client
    finally:
        server.should_exit = True
        await running


async def statistics(client: httpx.AsyncClient) -> dict[str, Any]:
    found: dict[str, Any] = (await client.get("/statistics")).json()
    return found


@on_one_loop
async def test_tokens_are_the_same_computed_restored_and_after_a_restart(
    model: LanguageModel, tmp_path: Path
) -> None:
    prompts = [PREFIX + question for question in ("What is in it?", "Who fetches them, and why?")]
    async with serving(model, tmp_path) as client:
        expected = [await ask(client, prompt, 6, kv_cache=False) for prompt in prompts]
        assert (await statistics(client))["prompt_tokens"] == 0
        first = await ask(client, prompts[0], 6)
        again = [await ask(client, prompt, 6) for prompt in prompts]
        told = await statistics(client)
    count = len(model.tokens_of(prompts[0]))
    assert first.restored_tokens == 0
    assert again[0].restored_tokens == (count - 1) // 16 * 16
    assert 100 < again[1].restored_tokens < len(model.tokens_of(prompts[1]))
    assert told["restored_tokens"] == again[0].restored_tokens + again[1].restored_tokens
    assert told["groups_from_disk"] == 0
    assert told["groups_from_ram"] == told["restored_tokens"] // 16 * 30 * 2 * 3
    async with serving(model, tmp_path) as client:
        restarted = [await ask(client, prompt, 6) for prompt in prompts]
        told = await statistics(client)
    assert restarted[0].restored_tokens == again[0].restored_tokens
    assert told["groups_from_ram"] == 0
    assert told["groups_from_disk"] == told["restored_tokens"] // 16 * 30 * 2 * 3
    for answers in (again, restarted):
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
    assert first.tokens == expected[0].tokens


@on_one_loop
async def test_others_stream_while_a_prompt_is_restored_and_read(
    model: LanguageModel, tmp_path: Path
) -> None:
    alone: list[list[int]] = []
    async with serving(model, tmp_path) as client:
        for prompt in (PREFIX, "Once upon a time"):
            alone.append((await ask(client, prompt, 4)).tokens)
        together = await asyncio.gather(ask(client, PREFIX, 4), ask(client, "Once upon a time", 4))
    assert [answer.tokens for answer in together] == alone


@on_one_loop
async def test_a_client_that_leaves_gives_its_place_back(model: LanguageModel, tmp_path: Path) -> None:
    async with serving(model, tmp_path, sequences=1) as client:
        body = {"prompt": "Once upon a time", "max_tokens": 400, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            await anext(response.aiter_lines())
        answer = await ask(client, "Once upon a time", 2)  # there is one place: it must be free again
    assert len(answer.tokens) == 2


@on_one_loop
async def test_the_api_is_that_of_openai(model: LanguageModel, tmp_path: Path) -> None:
    async with serving(model, tmp_path) as client:
        body = {"model": model.name, "prompt": "One, two, three,", "max_tokens": 4}
        whole = (await client.post("/v1/completions", json=body)).json()
        streamed = await client.post("/v1/completions", json={**body, "stream": True})
        refusals = [
            await client.post("/v1/completions", json=bad)
            for bad in (
                [],
                {"prompt": ""},
                {"prompt": [10**9]},
                {"prompt": "x", "max_tokens": 10**6},
                {"prompt": "x", "temperature": 0.7},
                {"prompt": "x", "stream": "yes"},
            )
        ]
        models = (await client.get("/v1/models")).json()
        lag = (await client.get("/lag?seconds=0.05")).json()
    assert whole["object"] == "text_completion"
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == 4
    *lines, last = [line for line in streamed.text.splitlines() if line]
    assert last == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert "".join(event["choices"][0]["text"] for event in events) == whole["choices"][0]["text"]
    assert [refusal.status_code for refusal in refusals] == [400] * 6
    assert refusals[1].json()["error"]["param"] == "prompt"
    assert models["data"][0]["id"] == model.name
    assert lag["beats"] > 0


@on_one_loop
async def test_blocks_that_cannot_be_read_are_computed(model: LanguageModel, tmp_path: Path) -> None:
    async with serving(model, tmp_path) as client:
        expected = await ask(client, PREFIX, 4)
    async with serving(model, tmp_path) as client:
        os.truncate(next((tmp_path / "blocks").glob("layer_00007.kv")), 0)
        answer = await ask(client, PREFIX, 4)
    assert answer.restored_tokens == 0
    assert answer.tokens == expected.tokens


async def said_and_left(
    completer: Completer, pool: SlabPool, prompt: list[int], *, use_cache: bool = True
) -> tuple[list[int], Any]:
    """Two tokens after a prompt, and the bytes of the slabs after that, which were zeros before."""
    values = torch.frombuffer(pool.memory, dtype=torch.uint8)
    values.zero_()
    async with aclosing(completer.complete(prompt, 2, use_cache=use_cache)) as pieces:
        said = [piece.token async for piece in pieces]
    return said, values.clone()


@on_one_loop
async def test_with_whole_passes_every_value_is_the_same_to_the_last_bit(
    model: LanguageModel, tmp_path: Path
) -> None:
    layout = model.layout(num_blocks=32, block_size=16)
    pool = SlabPool(layout, count=1, capacity=512, dtype=model.dtype)
    begin = model.tokens_of(PREFIX * 2)[:260]
    first, second = [*begin, *range(300, 340)], [*begin, *range(400, 420)]
    opening = PrefixCache.open(
        tmp_path, layout, memory=pool.memory, namespace="test", ram_bytes=64 << 20, grain=256
    )

    async with opening as cache:
        completer = Completer(model, pool, cache)
        tokens, computed = await said_and_left(completer, pool, second, use_cache=False)
        await said_and_left(completer, pool, first)
        again, restored = await said_and_left(completer, pool, second)
        assert cache.hit == 256
    assert again == tokens
    assert torch.equal(restored, computed)


@on_one_loop
async def test_a_long_prompt_that_comes_again_is_restored_but_for_its_last_token(
    model: LanguageModel, tmp_path: Path
) -> None:
    """Also the rest behind its last whole block, and the values are those that were computed, to the last bit."""
    layout = model.layout(num_blocks=64, block_size=16)
    pool = SlabPool(layout, count=1, capacity=512, dtype=model.dtype)
    prompt = model.tokens_of(PREFIX * 3)[:283]
    longer = [*prompt[:-1], *range(300, 330)]
    opening = PrefixCache.open(
        tmp_path, layout, memory=pool.memory, namespace="test", ram_bytes=64 << 20, grain=16
    )

    async with opening as cache:
        completer = Completer(model, pool, cache)
        said, computed = await said_and_left(completer, pool, prompt, use_cache=False)
        assert (await said_and_left(completer, pool, prompt))[0] == said
        assert cache.hit == 0
        again, restored = await said_and_left(completer, pool, prompt)
        assert cache.hit == 282
        assert again == said
        slab = (1, layout.num_layers, 2, layout.num_kv_heads, 512, -1)
        assert torch.equal(restored.view(slab)[..., :284, :], computed.view(slab)[..., :284, :])
        # Another prompt that goes on from there shares the whole blocks, and not the part of one.
        await said_and_left(completer, pool, longer)
        assert cache.hit == 282 + 272


@on_one_loop
async def test_the_load_script_drives_a_running_server(model: LanguageModel, tmp_path: Path) -> None:
    async with serving(model, tmp_path) as client:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(ROOT / "docs/examples/serve/load.py"), "--url", str(client.base_url)),
            *("--rounds", "2", "--tokens", "2", "--characters", "600", "--json"),
            stdout=subprocess.PIPE,
        )
        output, _ = await process.communicate()
    found = json.loads(output)
    assert process.returncode == 0
    assert found["identical_tokens"] is True
    assert found["restored"]["restored_tokens"] > 100
    assert found["computed"]["restored_tokens"] == 0
    assert 0 < found["hit_ratio"] < 1


@pytest.mark.parametrize(
    ("start", "kept", "count", "expected"),
    [
        (0, 0, 5, [(0, 5)]),
        (0, 592, 600, [(0, 256), (256, 512), (512, 592), (592, 600)]),
        (592, 592, 600, [(592, 600)]),
        (528, 592, 600, [(528, 592), (592, 600)]),
        (256, 512, 513, [(256, 512), (512, 513)]),
    ],
)
def test_passes_end_at_the_same_places_whatever_was_restored(
    start: int, kept: int, count: int, expected: list[tuple[int, int]]
) -> None:
    assert [(chunk.start, chunk.stop) for chunk in passes_of(start, kept, count)] == expected
