"""A client that measures the server: time to first token computed, restored from memory, restored from disk; loop lag.

python docs/examples/serve/load.py --help
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from aio_kv.cli.workspace import workspace

__all__ = ["Answer", "ask", "main"]

_SERVER = Path(__file__).with_name("server.py")
_START_SECONDS_MAX = 180
_QUESTION = "\n\nQuestion {}: what does the text say about memory?\nAnswer:"


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for one prompt; times in milliseconds. HTTP is what the server's own parts leave of the TTFT."""

    tokens: list[int]
    ttft_ms: float
    restore_ms: float
    forward_ms: float
    restored_tokens: int

    @property
    def http_ms(self) -> float:
        """Sockets, JSON, two event loops; and waiting for room on the server."""
        return self.ttft_ms - self.restore_ms - self.forward_ms


async def ask(client: httpx.AsyncClient, prompt: str, tokens_max: int, *, kv_cache: bool = True) -> Answer:
    """Ask for a streamed completion and time it."""
    body = {"prompt": prompt, "max_tokens": tokens_max, "stream": True, "kv_cache": kv_cache}
    tokens: list[int] = []
    sent_at = time.perf_counter()
    first_at = None
    timing: dict[str, Any] = {}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise SystemExit(f"the server refused: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                first_at = first_at or time.perf_counter()
                event = json.loads(line.removeprefix("data: "))
                tokens += event["choices"][0]["token_ids"]
                timing |= event.get("timing", {})
    if first_at is None:
        raise SystemExit("the server sent no token")
    return Answer(
        tokens,
        ttft_ms=(first_at - sent_at) * 1e3,
        restore_ms=timing["restore_ms"],
        forward_ms=timing["forward_ms"],
        restored_tokens=timing["restored_tokens"],
    )


@asynccontextmanager
async def started(directory: Path, port: int) -> AsyncIterator[httpx.AsyncClient]:
    """A server process of our own on `directory`, and a client of it; the server is ended in an orderly way."""
    command = (sys.executable, str(_SERVER), "--dir", str(directory), "--port", str(port))
    server = await asyncio.create_subprocess_exec(*command, stdout=sys.stderr)
    try:
        async with connected(f"http://127.0.0.1:{port}") as client:
            for _ in range(_START_SECONDS_MAX * 10):
                if server.returncode is not None:
                    raise SystemExit(f"the server ended with status {server.returncode}")
                try:
                    await client.get("/v1/models")
                    break
                except httpx.TransportError:
                    await asyncio.sleep(0.1)
            yield client
    finally:
        if server.returncode is None:
            server.terminate()
        await server.wait()


def connected(url: str) -> httpx.AsyncClient:
    """A client of a server that runs. Proxies of the environment are none of its business."""
    return httpx.AsyncClient(base_url=url, timeout=None, trust_env=False)


class Load:
    """Prompts that share a long beginning, and what is asked about them."""

    def __init__(self, prefix: str, rounds: int, tokens_max: int) -> None:
        self._prefix = prefix
        self._rounds = rounds
        self._tokens_max = tokens_max

    def prompt(self, number: int) -> str:
        """The prefix and another question."""
        return self._prefix + _QUESTION.format(number)

    async def answers(self, client: httpx.AsyncClient, *, kv_cache: bool) -> list[Answer]:
        """One answer after the other, nothing else at work."""
        return [
            await ask(client, self.prompt(number), self._tokens_max, kv_cache=kv_cache)
            for number in range(self._rounds)
        ]

    async def lag(self, client: httpx.AsyncClient, seconds: float, *, kv_cache: bool) -> dict[str, Any]:
        """Two streams, and long prompts one after the other, restored or computed."""
        over = asyncio.Event()

        async def stream(number: int) -> None:
            while not over.is_set():
                await ask(client, f"Stream {number}. Once upon a time", 16, kv_cache=False)

        async def repeat() -> None:
            while not over.is_set():
                await ask(client, self.prompt(0), 1, kv_cache=kv_cache)

        async with asyncio.TaskGroup() as tasks:
            for number in range(2):
                tasks.create_task(stream(number))
            tasks.create_task(repeat())
            found: dict[str, Any] = (await client.get("/lag", params={"seconds": seconds})).json()
            over.set()
        return found


def medians_of(answers: list[Answer]) -> dict[str, float]:
    """The medians of each part of the time to first token."""
    parts = ("ttft_ms", "restore_ms", "forward_ms", "http_ms")
    found = {part: round(median(getattr(answer, part) for answer in answers), 2) for part in parts}
    return {**found, "restored_tokens": median(answer.restored_tokens for answer in answers)}


async def measure(load: Load, directory: Path, port: int, seconds: float, rounds: int) -> dict[str, Any]:
    """The whole comparison, on a server that is started twice."""
    say = partial(print, file=sys.stderr, flush=True)
    async with started(directory, port) as client:
        say(f"{rounds} prompts, computed")
        computed = await load.answers(client, kv_cache=False)
        say("the same, kept, then restored from memory")
        await load.answers(client, kv_cache=True)  # the first of these computes and saves
        from_ram = await load.answers(client, kv_cache=True)
        lags: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
        for number in range(rounds):
            say(f"loop lag, round {number + 1} of {rounds}")
            for kv_cache in (False, True) if number % 2 else (True, False):
                lags[kv_cache].append(await load.lag(client, seconds, kv_cache=kv_cache))
        before = (await client.get("/statistics")).json()
    async with started(directory, port) as client:  # memory is empty now, and what is read is not brought up
        say("the same prompts after a restart, restored from disk")
        from_disk = await load.answers(client, kv_cache=True)
        after = (await client.get("/statistics")).json()
    expected = [answer.tokens for answer in computed]
    ways = {"computed": computed, "ram": from_ram, "disk": from_disk}
    found: dict[str, Any] = {way: medians_of(answers) for way, answers in ways.items()}
    for way in ("ram", "disk"):
        found[f"speedup_{way}"] = round(found["computed"]["ttft_ms"] / found[way]["ttft_ms"], 1)
    found["identical_tokens"] = all([a.tokens for a in answers] == expected for answers in ways.values())
    for name, is_restoring in (("without", False), ("with", True)):
        found[f"lag_p99_ms_{name}_restores"] = round(median(lag["p99_ms"] for lag in lags[is_restoring]), 3)
    found["hit_ratio"] = round(before["hit_ratio"], 3)
    found["hit_ratio_after_restart"] = round(after["hit_ratio"], 3)
    found["rung"] = after["rung"]
    return found


async def drive(load: Load, url: str) -> dict[str, Any]:
    """The comparison on a server that runs already: without a restart there are no reads from disk."""
    async with connected(url) as client:
        computed = await load.answers(client, kv_cache=False)
        await load.answers(client, kv_cache=True)
        restored = await load.answers(client, kv_cache=True)
        statistics = (await client.get("/statistics")).json()
    return {
        "computed": medians_of(computed),
        "restored": medians_of(restored),
        "identical_tokens": [a.tokens for a in computed] == [a.tokens for a in restored],
        "hit_ratio": round(statistics["hit_ratio"], 3),
        "rung": statistics["rung"],
    }


def show(found: dict[str, Any]) -> None:
    """Print the findings for people."""
    print(f"{'':12}{'TTFT ms':>10}{'restore':>10}{'forward':>10}{'HTTP':>8}{'restored tokens':>18}")
    for way, row in found.items():
        if isinstance(row, dict):
            parts = f"{row['restore_ms']:>10.1f}{row['forward_ms']:>10.1f}{row['http_ms']:>8.1f}"
            print(f"{way:12}{row['ttft_ms']:>10.1f}{parts}{row['restored_tokens']:>18.0f}")
    for name, value in found.items():
        if not isinstance(value, dict):
            print(f"{name:28}{value}")


def main() -> None:
    """Measure and print; the status is 1 if a token differed."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example: load.py --rounds 5          starts servers of its own\n"
        "         load.py --url http://127.0.0.1:8000",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--url", help="a server that runs; without it one is started, and restarted")
    add("--port", type=int, default=8765, help="port of the server that is started (%(default)s)")
    add("--dir", type=Path, help="where that server's files go for the time; default: a disk found here")
    add("--rounds", type=int, default=5, help="figures are medians of so many (%(default)s)")
    add("--tokens", type=int, default=8, help="tokens of each answer (%(default)s)")
    add("--characters", type=int, default=4800, help="length of the common prefix (%(default)s)")
    add("--seconds", type=float, default=5.0, help="length of each look at the event loop (%(default)s)")
    add("--json", action="store_true", help="one JSON object on one line")
    options = parser.parse_args()
    text = (files("aio_kv.cli") / "data" / "moving_attention.txt").read_text(encoding="utf-8")
    load = Load(text[: options.characters], options.rounds, options.tokens)
    if options.url:
        found = asyncio.run(drive(load, options.url))
    else:
        with workspace(options.dir) as directory:
            found = asyncio.run(measure(load, directory, options.port, options.seconds, options.rounds))
    if options.json:
        print(json.dumps(found))
    else:
        show(found)
    raise SystemExit(0 if found["identical_tokens"] else 1)


if __name__ == "__main__":
    main()
