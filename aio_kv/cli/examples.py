"""Examples at the end of each command's help."""

from __future__ import annotations

__all__ = ["EXAMPLES", "epilog_of"]

# By the words behind `aio-kv`. Every line is a command as a shell takes it.
EXAMPLES: dict[str, tuple[str, ...]] = {
    "": (
        "aio-kv doctor",
        "aio-kv demo",
        "aio-kv bench disk --dir /mnt/nvme",
    ),
    "demo": (
        "aio-kv demo",
        "aio-kv demo --dir /mnt/nvme --size 2048 --layout qwen3-30b-a3b",
        "aio-kv demo --model --json",
    ),
    "doctor": (
        "aio-kv doctor",
        "aio-kv doctor --dir /mnt/nvme --json",
    ),
    "bench": (
        "aio-kv bench disk --quick",
        "aio-kv bench disk --json > disk.jsonl",
        "aio-kv bench report disk.jsonl --output bench.html",
    ),
    "bench disk": (
        "aio-kv bench disk --dir /mnt/nvme",
        "aio-kv bench disk --quick --sizes 4096 --modes direct",
        "aio-kv bench disk --against aiofiles,anyio,caio --json > disk.jsonl",
    ),
    "bench gpu": (
        "aio-kv bench gpu --dir /mnt/nvme",
        "aio-kv bench gpu --device 1 --quick",
        "aio-kv bench gpu --ram-disk --json > gpu.jsonl",
    ),
    "bench cascade": (
        "aio-kv bench cascade --dir /mnt/nvme",
        "aio-kv bench cascade --device 0 --json > cascade.jsonl",
        "aio-kv bench cascade --trace conversation.jsonl",
    ),
    "bench report": (
        "aio-kv bench report disk.jsonl gpu.jsonl --output bench.html",
        "aio-kv bench report disk.jsonl --output disk.png --title 'NVMe of host 7'",
    ),
    "experts": (
        "aio-kv experts ls model.gguf",
        "aio-kv experts pack model.gguf --to model.experts --check",
        "aio-kv experts verify model.experts",
    ),
    "experts ls": (
        "aio-kv experts ls model-00001-of-00003.gguf",
        "aio-kv experts ls model.safetensors --json",
    ),
    "experts pack": (
        "aio-kv experts pack model.gguf",
        "aio-kv experts pack model.gguf --to /mnt/nvme/model.experts --check",
    ),
    "experts make": (
        "aio-kv experts make tiny.gguf",
        "aio-kv experts make big.gguf --shape qwen3-30b-a3b --layers 4 --shards 2",
    ),
    "experts verify": (
        "aio-kv experts verify model.gguf",
        "aio-kv experts verify model.experts --device 0 --json",
    ),
    "experts bench": (
        "aio-kv experts bench model.gguf --packed model.experts",
        "aio-kv experts bench model.gguf --depth 16 --device 0 --json > experts.jsonl",
    ),
}


def epilog_of(command: str) -> str:
    """The examples of a command as the last paragraph of its help."""
    title = "Examples:" if len(EXAMPLES[command]) > 1 else "Example:"
    return "\n\n".join([title, *EXAMPLES[command]])
