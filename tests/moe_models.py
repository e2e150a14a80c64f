"""Small MoE models in files, and reading experts out of them in the plainest way there is."""

from __future__ import annotations

from pathlib import Path

from aio_kv.cli.expert_models import ExpertModel
from aio_kv.experts import ExpertMap

__all__ = ["MODELS", "all_experts", "slot_bytes"]

# Every form, encoding, alignment and number of files, each with several of the others.
MODELS = {
    "separate": ExpertModel("qwen3moe", 3, 4, 256, 512, "Q4_K", "Q6_K", num_dense_layers=1),
    "fused": ExpertModel("llama4", 2, 3, 256, 256, "Q8_0", "F16", form="fused", alignment=4096),
    "single": ExpertModel("llama", 2, 4, 256, 256, "Q4_K", "Q6_K", form="single"),
    "biases": ExpertModel("gpt-oss", 2, 4, 96, 96, "MXFP4", "MXFP4", has_biases=True),
    "shards": ExpertModel("deepseek2", 4, 5, 64, 96, "Q8_0", "F16", num_dense_layers=2, shards=3),
    "aligned shards": ExpertModel("qwen2moe", 3, 8, 256, 256, "Q4_K", "Q6_K", alignment=4096, shards=4),
    "one expert": ExpertModel("llama", 1, 1, 32, 32, "F16", "Q8_0"),
}


def slot_bytes(experts: ExpertMap, layer: int, expert: int) -> bytes:
    """What a slot holds once every segment has been read."""
    slot = bytearray()
    for segment in experts.segments(layer, expert):
        assert segment.slot_offset == len(slot)
        with Path(experts.paths[segment.shard]).open("rb") as file:
            file.seek(segment.file_offset)
            slot += file.read(segment.nbytes)
        assert segment.slot_offset + segment.nbytes == len(slot), "the file is long enough"
    return bytes(slot)


def all_experts(experts: ExpertMap) -> list[tuple[int, int]]:
    """Every layer and expert."""
    return [(layer, expert) for layer in experts.layers for expert in range(experts.num_experts(layer))]
