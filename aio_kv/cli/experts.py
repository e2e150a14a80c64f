"""`aio-kv experts`: the expert weights of a MoE model, where they lie and how to have them lie better."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from aio_kv.cli import experts_bench, experts_verify
from aio_kv.cli.examples import epilog_of
from aio_kv.cli.expert_models import FORMS, MODEL_SHAPES, ensure_expert_model
from aio_kv.cli.experts_arguments import AsJson, Model, Prefix
from aio_kv.cli.experts_listing import list_experts, table_of
from aio_kv.errors import LayoutError
from aio_kv.experts import ExpertMap

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    group = typer.Typer(
        name="experts",
        help="Expert weights of MoE models.",
        no_args_is_help=True,
        epilog=epilog_of("experts"),
    )
    group.command("ls", epilog=epilog_of("experts ls"))(ls)
    group.command("pack", epilog=epilog_of("experts pack"))(pack)
    group.command("make", epilog=epilog_of("experts make"))(make)
    experts_verify.register(group)
    experts_bench.register(group)
    app.add_typer(group)


def ls(model: Model, prefix: Prefix = "", as_json: AsJson = False) -> None:
    """Show a model's experts: sizes, encodings, how many reads each takes, and what direct reads bring too much."""
    listing = list_experts(ExpertMap.open(model, prefix=prefix))
    Console(stderr=as_json).print(table_of(listing))
    if as_json:
        _print_json(asdict(listing))


@dataclass(frozen=True, slots=True)
class _Packing:
    """What `pack` did. Sizes in bytes."""

    target: str
    num_experts: int
    experts_nbytes: int
    file_nbytes: int
    alignment: int
    seconds: float
    is_checked: bool


def pack(
    model: Model,
    target: Annotated[
        Path | None,
        typer.Option("--to", metavar="FILE", help="What to write. Default: MODEL.experts, beside the model."),
    ] = None,
    alignment: Annotated[
        int, typer.Option(metavar="BYTES", help="Of every record: a power of two from 512 to 2097152.")
    ] = 4096,
    prefix: Prefix = "",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace FILE if it exists.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Read it back and compare every record with its checksum.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write all experts of a model into one file, each in one aligned piece: one read per expert instead of three.

    FILE appears when it is whole. The experts' bytes are not changed; the rest of the model is not copied.
    """
    last = model[-1]
    if len(model) > 1 and last.suffix == ".experts" and not last.exists():  # meant as what to write
        raise LayoutError(
            f"{last} does not exist: MODEL are the files of one model; give what to write as --to FILE"
        )
    experts = ExpertMap.open(model, prefix=prefix)
    path = _default_target(model[0]) if target is None else target
    console = Console(stderr=True)
    started = time.perf_counter()
    owed = sum(experts.slot_nbytes(layer) * experts.num_experts(layer) for layer in experts.layers)
    # The records are a little longer than what they hold, so the bar ends a little late.
    with _progress(console, "packing", owed) as advance:
        packed = experts.pack(path, alignment=alignment, overwrite=overwrite, on_written=advance)
    seconds = time.perf_counter() - started
    if check:
        with _progress(console, "checking", packed.head.file_nbytes - packed.head.data_start) as advance:
            packed.check_records(on_checked=advance)
    done = _Packing(
        target=str(path),
        num_experts=sum(layer.num_experts for layer in packed.directory.layers),
        experts_nbytes=packed.directory.payload_nbytes,
        file_nbytes=packed.head.file_nbytes,
        alignment=alignment,
        seconds=seconds,
        is_checked=check,
    )
    _say(console, done)
    if as_json:
        _print_json(asdict(done))


def make(
    path: Annotated[
        Path, typer.Argument(metavar="FILE", help="A GGUF file; of shards, what they are named after.")
    ],
    shape: Annotated[str, typer.Option(metavar="NAME", help=f"One of {', '.join(MODEL_SHAPES)}.")] = "tiny",
    layers: Annotated[int | None, typer.Option(metavar="N", help="Fewer layers than the model has.")] = None,
    experts: Annotated[int | None, typer.Option(metavar="N", help="Fewer experts per layer.")] = None,
    form: Annotated[str | None, typer.Option(metavar="NAME", help=f"One of {', '.join(FORMS)}.")] = None,
    matrix_type: Annotated[
        str | None, typer.Option("--type", metavar="NAME", help="Encoding of gate and up.")
    ] = None,
    down_type: Annotated[str | None, typer.Option(metavar="NAME", help="Encoding of down.")] = None,
    alignment: Annotated[
        int | None, typer.Option(metavar="BYTES", help="Of the tensors in the file.")
    ] = None,
    shards: Annotated[int | None, typer.Option(metavar="N", help="Number of files.")] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Of the random weights.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make a model of random weights, really quantised, to try and measure things on. Needs the package gguf.

    A model that is there already, made the same way, is kept.
    """
    if shape not in MODEL_SHAPES:
        raise LayoutError(f"--shape is {shape!r}: must be one of {', '.join(MODEL_SHAPES)}")
    asked: dict[str, Any] = {
        "num_layers": layers,
        "num_experts": experts,
        "form": form,
        "matrix_type": matrix_type,
        "down_type": down_type,
        "alignment": alignment,
        "shards": shards,
        "seed": seed,
    }
    model = replace(
        MODEL_SHAPES[shape], **{name: value for name, value in asked.items() if value is not None}
    )
    console = Console(stderr=True)
    with _progress(console, "writing", model.experts_nbytes) as advance:
        paths = ensure_expert_model(path, model, on_written=advance)
    listing = list_experts(ExpertMap.from_gguf(paths))
    Console(stderr=as_json).print(table_of(listing))
    if as_json:
        _print_json(asdict(listing))


def _default_target(path: Path) -> Path:
    """Return `model.experts` beside a model whose (first) file is `model.gguf` or `model-00001-of-00003.gguf`."""
    stem = re.sub(r"-[0-9]{5}-of-[0-9]{5}$", "", path.name.removesuffix(".index.json").rpartition(".")[0])
    return path.with_name((stem or path.name) + ".experts")


@contextmanager
def _progress(console: Console, what: str, total: int) -> Iterator[Any]:
    columns = (TextColumn("{task.description:<12}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, refresh_per_second=4) as progress:
        task = progress.add_task(what, total=total)

        def advance(nbytes: int) -> None:
            progress.advance(task, nbytes)

        yield advance


def _say(console: Console, done: _Packing) -> None:
    checked = ", every record checked" if done.is_checked else ""
    rate = done.experts_nbytes / done.seconds / 1e9
    console.print(
        f"{done.target}: {done.num_experts:,} experts of {done.experts_nbytes / 1e9:.3f} GB in "
        f"{done.file_nbytes / 1e9:.3f} GB, {rate:.2f} GB/s{checked}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _print_json(fields: dict[str, Any]) -> None:
    sys.stderr.flush()
    print(json.dumps(fields), flush=True)
