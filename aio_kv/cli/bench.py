"""`aio-kv bench`: what this machine gives, beside the usual ways of getting it."""

from __future__ import annotations

import json

import typer
from rich.console import Console

from aio_kv.cli import bench_cascade, bench_gpu, bench_report
from aio_kv.cli.examples import epilog_of

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    group = typer.Typer(
        name="bench", help="Measure this machine.", no_args_is_help=True, epilog=epilog_of("bench")
    )
    group.command("disk", epilog=epilog_of("bench disk"))(disk)
    bench_gpu.register(group)
    bench_cascade.register(group)
    bench_report.register(group)
    app.add_typer(group)


# Numbers arrive as text: they are checked in one place, which answers a wrong one in one line.
def disk(
    directory: str = typer.Option(".", "--dir", metavar="DIR", help="Where the temporary files go."),
    size: str = typer.Option(None, metavar="MB", help="MiB per file, one file at a time. (default 1024)"),
    seconds: str = typer.Option(None, metavar="S", help="Length of one run. (default 1)"),
    pairs: str = typer.Option(None, metavar="N", help="Rounds; figures are medians over them. (default 5)"),
    sizes: str = typer.Option(
        None, metavar="BYTES,...", help="Block sizes. (default 4096,65536,262144,1048576)"
    ),
    modes: str = typer.Option(None, metavar="MODE,...", help="direct, warm. (default direct,warm)"),
    loop: str = typer.Option("asyncio", metavar="LOOP", help="asyncio or uvloop."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object on one line, the last of stdout."),
    quick: bool = typer.Option(False, "--quick", help="Small file, one short round: shows that it works."),
    against: str = typer.Option(
        None,
        metavar="NAME,...",
        help="Other libraries in the same rounds: kvikio, aiofiles, anyio, caio, deepspeed, torch.",
    ),
) -> None:
    """Compare aio_kv with fio, thread pools and plain reads on the disk that holds DIR.

    Figures are only comparable within one run. fio, aiofiles and uvloop take part if they are installed.
    """
    from aio_kv.cli.benches.disk import run_disk_benchmark
    from aio_kv.cli.benches.settings import parse_settings
    from aio_kv.cli.benches.tables import print_report

    settings = parse_settings(
        directory=directory,
        size=size,
        seconds=seconds,
        pairs=pairs,
        sizes=sizes,
        modes=modes,
        loop=loop,
        is_quick=quick,
        against=against,
    )
    report = run_disk_benchmark(settings, Console(stderr=True))
    if as_json:
        print_report(report, Console(stderr=True))
        print(json.dumps(report.as_json()), flush=True)
    else:
        print_report(report, Console())
