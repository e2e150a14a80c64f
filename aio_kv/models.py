"""Layouts of well-known models, by name, for demonstrations, benchmarks and first steps.

The figures are those of the `config.json` that each model's publisher ships with the weights:
`num_hidden_layers`, `num_key_value_heads` and `head_dim` (or `hidden_size / num_attention_heads` where that
key is absent). All of them keep the cache in 16-bit elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from aio_kv.errors import LayoutError
from aio_kv.layout import GroupLayout, KvKind

__all__ = ["NAMED_LAYOUTS", "ModelShape", "named_layout"]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The part of a layout that a model fixes; `itemsize` is in bytes."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    itemsize: int = 2
    kinds: tuple[KvKind, ...] = (KvKind.K, KvKind.V)


NAMED_LAYOUTS: Mapping[str, ModelShape] = MappingProxyType(
    {
        # meta-llama/Meta-Llama-3-8B: 32 layers, 8 KV heads, 4096 / 32 attention heads = 128.
        "llama3-8b": ModelShape(num_layers=32, num_kv_heads=8, head_dim=128),
        # Qwen/Qwen3-30B-A3B: 48 layers, 4 KV heads, head_dim 128 (given, not 2048 / 32).
        "qwen3-30b-a3b": ModelShape(num_layers=48, num_kv_heads=4, head_dim=128),
        # deepseek-ai/DeepSeek-V3: 61 layers; MLA keeps kv_lora_rank 512 + qk_rope_head_dim 64 per token,
        # once.
        "deepseek-v3": ModelShape(num_layers=61, num_kv_heads=1, head_dim=576, kinds=(KvKind.LATENT,)),
        # HuggingFaceTB/SmolLM2-135M: 30 layers, 3 KV heads, 576 / 9 attention heads = 64.
        "smollm2-135m": ModelShape(num_layers=30, num_kv_heads=3, head_dim=64),
    }
)


def named_layout(name: str, *, num_blocks: int, block_size: int = 16) -> GroupLayout:
    """Return the layout of a model in `NAMED_LAYOUTS`, with `num_blocks` blocks of `block_size` tokens per
    layer.

    Raises `LayoutError` listing the known names.
    """
    shape = NAMED_LAYOUTS.get(name)
    if shape is None:
        raise LayoutError(f"no layout is named {name!r}: known are {', '.join(sorted(NAMED_LAYOUTS))}")
    return GroupLayout(
        shape.num_layers,
        num_blocks,
        shape.num_kv_heads,
        block_size,
        shape.head_dim,
        shape.itemsize,
        kinds=shape.kinds,
    )
