"""`aio-kv experts verify`: what the asynchronous reader brings, byte by byte beside what the oracle brings."""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import anyio
import anyio.to_thread
import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from aio_kv.cli.examples import epilog_of
from aio_kv.cli.experts_arguments import AsJson, Model, Prefix
from aio_kv.cuda import Device, DeviceBuffer, DevicePointer
from aio_kv.engine.extension import allocate_host
from aio_kv.experts import ExpertMap, ExpertReader, PosixExpertReader

__all__ = ["Difference", "Verification", "register", "verify_experts"]

_AT_ONCE_NBYTES = 64 << 20
_DIFFERENCES_MAX = 20
_PER_THREAD_STREAM = 2


def register(group: typer.Typer) -> None:
    """Add the command to the group `experts`."""
    group.command("verify", epilog=epilog_of("experts verify"))(verify)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first byte of one expert that is not what the oracle has."""

    layer: int
    expert: int
    slot_offset: int
    expected: int
    found: int


@dataclass(slots=True)
class Verification:
    """What was compared. `differences` are the first few of `num_different` experts."""

    rung: str = ""
    target: str = "host"
    num_experts: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    num_different: int = 0
    differences: list[Difference] = field(default_factory=list)


def verify(
    model: Model,
    prefix: Prefix = "",
    direct: Annotated[str, typer.Option(metavar="WORD", help="auto, on or off.")] = "auto",
    backend: Annotated[str, typer.Option(metavar="NAME", help="auto, uring or threads.")] = "auto",
    device: Annotated[
        int | None, typer.Option(metavar="INDEX", help="Read into this GPU's memory. Default: host memory.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Read every expert of a model both ways and compare all bytes. Ends with status 1 if any differ."""
    experts = ExpertMap.open(model, prefix=prefix)
    console = Console(stderr=True)
    columns = (TextColumn("comparing"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, refresh_per_second=4) as progress:
        task = progress.add_task("", total=_nbytes_of(experts))

        async def run() -> Verification:
            reader = ExpertReader(experts, direct=direct, backend=backend, device=device)
            return await verify_experts(reader, lambda nbytes: progress.advance(task, nbytes))

        done = anyio.run(run)
    for one in done.differences:
        console.print(
            f"layer {one.layer}, expert {one.expert}: byte {one.slot_offset} of its slot is {one.found:#04x} and must "
            f"be {one.expected:#04x}",
            highlight=False,
        )
    console.print(
        f"{done.num_experts:,} experts, {done.nbytes / 1e9:.3f} GB through {done.rung} to {done.target} in "
        f"{done.seconds:.1f} s: {done.num_different or 'no'} differences",
        highlight=False,
        soft_wrap=True,
    )
    if as_json:
        sys.stderr.flush()
        print(json.dumps(asdict(done)), flush=True)
    if done.num_different:
        raise typer.Exit(1)


async def verify_experts(reader: ExpertReader, on_compared: Any = lambda nbytes: None) -> Verification:
    """Compare every expert that `reader`, which is not open yet, brings with the oracle's; opens and closes it.

    Raises what the readers raise; a file that is too short, say, is no difference.
    """
    started = time.perf_counter()
    done = Verification()
    experts = reader.experts
    slots = max(1, _AT_ONCE_NBYTES // experts.slot_nbytes_max)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(reader)
        oracle = stack.enter_context(PosixExpertReader(experts, direct="auto"))
        side = reader.session.device
        target = _Target(slots * experts.slot_nbytes_max, side.device if side is not None else None)
        stack.callback(target.close)
        wanted = memoryview(bytearray(experts.slot_nbytes_max))
        done.rung, done.target = reader.rung, target.name
        for layer, ids in _portions(experts, slots):
            slot_nbytes = experts.slot_nbytes(layer)
            await reader.read(layer, ids, target.part(len(ids) * slot_nbytes))
            image = await anyio.to_thread.run_sync(target.bytes_now, len(ids) * slot_nbytes)
            for index, expert in enumerate(ids):
                segments = experts.segments(layer, expert)
                await anyio.to_thread.run_sync(oracle.read_segments, segments, wanted)
                nbytes = sum(segment.nbytes for segment in segments)
                _compare(done, layer, expert, wanted[:nbytes], image[index * slot_nbytes :][:nbytes])
                on_compared(nbytes)
    done.seconds = time.perf_counter() - started
    return done


class _Target:
    """Where experts are read to: host memory, or GPU memory and a copy of it."""

    def __init__(self, nbytes: int, device: Device | None) -> None:
        self._host = allocate_host(nbytes)
        self._device = device
        self._buffer = DeviceBuffer(nbytes, device) if device is not None else None
        self.name = "host" if device is None else f"GPU {device.index}"

    def part(self, nbytes: int) -> Any:
        """The first bytes, to be read into."""
        if self._buffer is None:
            self._host[:nbytes] = bytes(
                nbytes
            )  # or what an earlier portion left might be taken for this one's
            return self._host[:nbytes]
        return DevicePointer(self._buffer.data_ptr(), nbytes)

    def bytes_now(self, nbytes: int) -> memoryview:
        """What is in them. Blocks while bytes come from a GPU."""
        if self._buffer is not None and self._device is not None:
            address = ctypes.addressof(ctypes.c_char.from_buffer(self._host))
            with self._device.activated():
                self._device.call(
                    "cuMemcpyDtoHAsync", address, self._buffer.data_ptr(), nbytes, _PER_THREAD_STREAM
                )
                self._device.call("cuStreamSynchronize", _PER_THREAD_STREAM)
        return self._host[:nbytes]

    def close(self) -> None:
        if self._buffer is not None:
            self._buffer.close()


def _portions(experts: ExpertMap, size: int) -> Iterator[tuple[int, list[int]]]:
    for layer in experts.layers:
        ids = range(experts.num_experts(layer))
        for start in range(0, len(ids), size):
            yield layer, list(ids[start : start + size])


def _nbytes_of(experts: ExpertMap) -> int:
    return sum(experts.slot_nbytes(layer) * experts.num_experts(layer) for layer in experts.layers)


def _compare(done: Verification, layer: int, expert: int, wanted: memoryview, found: memoryview) -> None:
    done.num_experts += 1
    done.nbytes += len(wanted)
    ours, theirs = np.frombuffer(found, np.uint8), np.frombuffer(wanted, np.uint8)
    if np.array_equal(ours, theirs):
        return
    done.num_different += 1
    if len(done.differences) < _DIFFERENCES_MAX:
        at = int(np.argmax(ours != theirs))
        done.differences.append(Difference(layer, expert, at, int(theirs[at]), int(ours[at])))
