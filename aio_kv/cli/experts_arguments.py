"""Arguments that the commands of `aio-kv experts` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["AsJson", "Model", "Prefix"]

Model = Annotated[
    list[Path],
    typer.Argument(
        metavar="MODEL...",
        help="A GGUF, safetensors or packed file, the first of several shards, or all of them in order.",
        show_default=False,
    ),
]
Prefix = Annotated[
    str,
    typer.Option(metavar="TEXT", help="How tensors are named, where safetensors files hold several models."),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on one line, the last of stdout.")]
