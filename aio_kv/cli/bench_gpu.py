"""`aio-kv bench gpu`: what the GPU path gives on this machine, beside the plain driver calls that it replaces."""

from __future__ import annotations

import json

import typer
from rich.console import Console

from aio_kv.cli.examples import epilog_of

__all__ = ["gpu", "register"]


def register(group: typer.Typer) -> None:
    """Add the command to the group `bench`."""
    group.command("gpu", epilog=epilog_of("bench gpu"))(gpu)


# Numbers arrive as text: they are checked in one place, which answers a wrong one in one line.
def gpu(
    device: str = typer.Option("0", metavar="INDEX", help="Which GPU, as nvidia-smi -L counts them."),
    directory: str = typer.Option(".", "--dir", metavar="DIR", help="Where the temporary files go."),
    size: str = typer.Option(
        None, metavar="MB", help="MiB of pinned memory, of GPU memory and of a file. Default: 512."
    ),
    pairs: str = typer.Option(None, metavar="N", help="Rounds; figures are medians over them. Default: 5."),
    quick: bool = typer.Option(False, "--quick", help="Little memory, one short round: shows that it works."),
    ram_disk: bool = typer.Option(
        False,
        "--ram-disk",
        help="Also read from a block device in memory. Root only: it is made, formatted, mounted, and removed again.",
    ),
    as_json: bool = typer.Option(False, "--json", help="One JSON object on one line, the last of stdout."),
) -> None:
    """Compare aio_kv with plain driver calls, the copy engine and the synchronous oracle on one GPU.

    Figures are only comparable within one run. Nothing else should use the GPU meanwhile.
    """
    from aio_kv.cli.bench_gpu_report import print_gpu_report
    from aio_kv.cli.bench_gpu_run import run_gpu_benchmark
    from aio_kv.cli.bench_gpu_settings import parse_gpu_settings

    settings = parse_gpu_settings(
        device=device, directory=directory, size=size, pairs=pairs, is_quick=quick, wants_ram_disk=ram_disk
    )
    report = run_gpu_benchmark(settings, Console(stderr=True))
    if as_json:
        print_gpu_report(report, Console(stderr=True))
        print(json.dumps(report.as_json()), flush=True)
    else:
        print_gpu_report(report, Console())
