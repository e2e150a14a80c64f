"""`aio-kv demo --model`: the KV cache of a real language model goes to disk and comes back, and nothing changes.

A text is read once (prefill). The keys and values of every layer are written as groups, forgotten, and restored into
fresh memory. The model then goes on from the restored cache, and must say what it says from its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from importlib.resources import files
from pathlib import Path

import anyio
from rich.console import Console

from aio_kv.cli.demo_offload import Offload, Offloaded
from aio_kv.cli.demo_report import ModelReport
from aio_kv.cli.language_model import LanguageModel

__all__ = ["run_model", "text"]

_QUESTION = "Summarize this text in two sentences."
_WARM_UP_TOKENS = 16
_NEW_TOKENS = 32


def text() -> str:
    """Return the text that the model reads."""
    return (files("aio_kv.cli") / "data" / "moving_attention.txt").read_text(encoding="utf-8")


def run_model(
    directory: Path, *, backend: str, console: Console, model: LanguageModel | None = None
) -> ModelReport:
    """Run the demonstration in an empty directory; loads the model if none is given.

    Raises `AioKvError` where it cannot be run.
    """
    if model is None:
        with _telling(console, "loading the model"):
            model = LanguageModel.load()
    *prefix, last = model.prompt(text(), _QUESTION)
    with _telling(console, f"reading {len(prefix):,} tokens, and going on for {_NEW_TOKENS}"):
        model.prefill(prefix[:_WARM_UP_TOKENS])  # The first call sets up kernels, which is not what is timed.
        started = time.perf_counter()
        cache = model.prefill(prefix)
        prefill_s = time.perf_counter() - started
        offload = Offload(model.layers_of(cache))
        expected = model.continue_from(cache, last, _NEW_TOKENS)
        # From here on the offload alone holds what the model computed, and overwrites it once it is saved.
        del cache
    with _telling(console, "its keys and values to disk, back, and through the oracle"):
        offloaded: Offloaded = anyio.run(partial(offload.run, directory, model=model, backend=backend))
    with _telling(console, f"going on for {_NEW_TOKENS} tokens from what came back"):
        continued = model.continue_from(offloaded.cache, last, _NEW_TOKENS)
    return ModelReport(
        **asdict(offloaded.report),
        model=model.name,
        tokens=len(prefix),
        prefill_ms=round(prefill_s * 1e3, 2),
        restore_ms=round(offloaded.restore_s * 1e3, 2),
        identical_tokens=continued == expected,
        identical_bytes=offloaded.is_identical,
        continuation=model.text_of(continued),
    )


@contextmanager
def _telling(console: Console, what: str) -> Iterator[None]:
    """Say what goes on, and how long it took once it is over."""
    started = time.perf_counter()
    with console.status(f"{what} ..."):
        yield
    console.print(f"{what}: {time.perf_counter() - started:.1f} s", highlight=False)
