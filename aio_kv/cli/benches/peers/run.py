"""Peers in the rounds: which of them can run, checked bytes, the best of their setups, and runs of it."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from aio_kv.backends.posix import PosixBackend
from aio_kv.cli.benches.desk import Desk, name_of
from aio_kv.cli.benches.measure import ContenderFailed, Sample, for_batches, for_seconds, keep_in_flight
from aio_kv.cli.benches.peers.aiofiles_peer import AiofilesPeer
from aio_kv.cli.benches.peers.anyio_peer import AnyioPeer
from aio_kv.cli.benches.peers.caio_peer import CaioPeer
from aio_kv.cli.benches.peers.deepspeed_peer import DeepspeedPeer
from aio_kv.cli.benches.peers.kvikio_peer import KvikioPeer
from aio_kv.cli.benches.peers.setup import Peer, Setup, all_of, version_of
from aio_kv.cli.benches.peers.torch_peer import TorchPeer
from aio_kv.cli.benches.workload import Shape, Workload
from aio_kv.errors import AioKvError
from aio_kv.files import LayerFiles

__all__ = ["PEERS", "PeerRun", "best_run", "check_bytes", "peers_to_run", "why_not"]

PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (KvikioPeer(), AiofilesPeer(), AnyioPeer(), CaioPeer(), DeepspeedPeer(), TorchPeer())
}
_READ_AROUND_NBYTES = 128 << 10  # the kernel's read-ahead where nobody has changed it
_CHECKED = Shape(batch=8, in_flight=2, depth=16)


class PeerRun:
    """Batches through one setup of a peer; opened anew for every run, which is not measured."""

    latency_of = "batch"
    is_on_loop = True
    share = 1.0

    def __init__(
        self, name: str, setup: Setup, path: str, workload: Workload, drop_cache: Callable[[], None]
    ) -> None:
        self.name = name
        self.note = setup.note
        self.cache = "past it (O_DIRECT)" if setup.is_direct else "emptied before each run"
        self._setup = setup
        self._path = path
        self._workload = workload
        self._drop_cache = drop_cache

    async def drive(self, seconds: float) -> Sample:
        """Run for about `seconds`; buffered reads end before much of the file is in the page cache.

        Raises `ContenderFailed` for whatever the library raises.
        """
        if self._setup.is_direct:
            return await self._run(for_seconds(seconds))
        in_time, has_left = for_seconds(seconds), for_batches(_cold_batches(self._workload))
        self._drop_cache()
        try:
            return await self._run(lambda: in_time() and has_left())
        finally:
            self._drop_cache()  # direct reads of others are slower where pages are cached

    async def _run(self, goes_on: Callable[[], bool]) -> Sample:
        with _failures_of(self.name):
            async with self._setup.opened(self._path, self._workload) as reader:
                return await keep_in_flight(self._workload, reader.read, goes_on)


def _cold_batches(workload: Workload) -> int:
    """How many batches may be read from an empty page cache, so that few of their blocks are found in it.

    With each block the kernel may read what is around it. All of that together may be half of the file.
    """
    around = workload.block + _READ_AROUND_NBYTES
    wanted = workload.layout.nbytes_per_layer // 2 // (around * workload.shape.batch)
    return max(workload.shape.in_flight, wanted)


def peers_to_run(desk: Desk) -> list[Peer]:
    """Load the peers that were asked for; those that cannot be loaded are remarked on, with the reason."""
    able = []
    for name in desk.settings.against:
        desk.say(f"loading {name}, which may have to compile something first")
        reason = why_not(PEERS[name])
        if reason is None:
            able.append(PEERS[name])
            desk.report.machine[name] = version_of(PEERS[name].module)
        else:
            desk.report.remark(f"no {name} rows: {reason}")
    return able


def why_not(peer: Peer) -> str | None:
    """Why a peer cannot be loaded here, in a line; None where it was loaded."""
    try:
        with _stdout_aside(), _failures_of(peer.name):
            peer.load()
    except ContenderFailed as failure:
        if isinstance(failure.__cause__, ModuleNotFoundError):
            return f"{failure.__cause__}; {peer.install}"
        return _with_needs(peer, failure)
    return None


async def best_run(
    desk: Desk, peer: Peer, files: LayerFiles, workload: Workload, seconds: float
) -> PeerRun | None:
    """The fastest of a peer's setups, each tried three times for `seconds` after its bytes were checked.

    None where none of them works: the reason is remarked, once for all block sizes where it is the same.
    """
    path, drop = files.path_of(0), files.drop_page_cache
    desk.say(f"reads of {name_of(workload.block)}: looking for the best setup of {peer.name}")
    runs: dict[PeerRun, float] = {}
    problems: list[ContenderFailed] = []
    for setup in peer.setups(workload):
        try:
            await check_bytes(peer.name, setup, files)
        except ContenderFailed as failure:
            problems.append(failure)
        else:
            runs[PeerRun(peer.name, setup, path, workload, drop)] = 0.0
            if desk.settings.is_quick:
                break
    order = list(runs)
    for run in (*order, *reversed(order), *order):
        if runs[run] < 0:
            continue
        try:
            # The best of its tries: what else the machine does only makes one slower.
            runs[run] = max(runs[run], (await run.drive(seconds)).gb_s)
        except ContenderFailed as failure:
            problems.append(failure)
            runs[run] = -math.inf
    best = max(runs, key=lambda run: runs[run], default=None)
    if best is None or runs[best] <= 0:
        if problems:
            reason = _with_needs(peer, problems[0])
        else:
            reason = f"it read nothing within {seconds:.2g} s" if order else "it offers no way to read here"
        desk.report.remark(f"no {peer.name} rows: {reason}")
        return None
    best.note += f" (best of {len(order)})"
    return best


async def check_bytes(name: str, setup: Setup, files: LayerFiles) -> None:
    """Read two batches with one setup and with the oracle. Raises `ContenderFailed` where a byte differs."""
    workload = Workload(files.layout, shape=_CHECKED, is_spread=True)
    batches = workload.batches[: _CHECKED.in_flight]
    with _failures_of(name):
        async with setup.opened(files.path_of(0), workload) as reader:
            await all_of(reader.read(lane, batch) for lane, batch in enumerate(batches))
            found = [[bytes(place) for place in lane] for lane in reader.places]
    oracle, wanted = PosixBackend(files), np.empty(workload.block, dtype=np.uint8)
    for batch, blocks in zip(batches, found, strict=True):
        for group, offset, block in zip(batch.ids.tolist(), batch.offsets, blocks, strict=True):
            oracle.read_groups([group], wanted)
            if block != wanted.tobytes():
                raise ContenderFailed(f"{name} ({setup.note}) read wrong bytes at offset {offset}")


def _with_needs(peer: Peer, failure: ContenderFailed) -> str:
    return f"{failure}; {peer.needs}" if peer.needs else str(failure)


@contextmanager
def _failures_of(name: str) -> Iterator[None]:
    """Whatever a library raises, as a `ContenderFailed` in one line; errors of ours pass."""
    try:
        yield
    except (AioKvError, ContenderFailed):
        raise
    except Exception as error:
        said = " ".join(str(_first_of(error)).split())
        raise ContenderFailed(f"{name} failed: {type(_first_of(error)).__name__}: {said}") from error


def _first_of(error: Exception) -> BaseException:
    first: BaseException = error
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first


@contextmanager
def _stdout_aside() -> Iterator[None]:
    """Have what is printed meanwhile, by compilers too, go to stderr: stdout is for the result."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
