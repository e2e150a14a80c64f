"""What every part of a benchmark works with: settings, a scratch directory, the report, and the progress bar."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.progress import Progress

from aio_kv.blockdevice import block_device_of
from aio_kv.cli.benches.measure import Contender, ContenderFailed, alternating
from aio_kv.cli.benches.peers.setup import Peer
from aio_kv.cli.benches.results import Report, Rounds
from aio_kv.cli.benches.settings import DiskSettings
from aio_kv.cli.heartbeat import heartbeat, idle_lag, lag_of

__all__ = ["IDLE", "Desk", "name_of"]

IDLE = "idle"
_LAG_SHARE = 0.4


class Desk:
    """The state of one benchmark run."""

    def __init__(self, settings: DiskSettings, scratch: str, progress: Progress) -> None:
        self.settings = settings
        self.report = Report()
        self.device = block_device_of(scratch)
        self.has_fio = False
        self.peers: Sequence[Peer] = ()
        self._scratch = scratch
        self._progress = progress
        self._task = progress.add_task("looking around", total=None)

    def say(self, text: str) -> None:
        """Show what is going on."""
        # Refreshed by hand: a thread that draws ten times a second would be measured along with the rest.
        self._progress.update(self._task, description=text, refresh=True)

    def expect(self, sets: int) -> None:
        """Tell how many sets of rounds there will be."""
        self._progress.update(self._task, total=sets * self.settings.rounds, refresh=True)

    def advance(self) -> None:
        """Count a round."""
        self._progress.update(self._task, advance=1, refresh=True)

    @contextmanager
    def scratch_directory(self, name: str) -> Iterator[str]:
        """A directory below the scratch directory, removed at the end of the context: files are large."""
        path = os.path.join(self._scratch, name)
        os.mkdir(path)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    async def run_rounds(
        self, contenders: Sequence[Contender], title: str, *, has_lags: bool = False
    ) -> Rounds:
        """Run every contender once per round, in alternating order; then, apart from that, measure loop lags.

        Lags are apart because the heartbeat takes a few percent of a core, which is more than the fastest contenders.
        One that fails is remarked on and left out, in all rounds.
        """
        result, failed = Rounds(), set[str]()
        for number in range(self.settings.rounds):
            self.say(f"{title}, round {number + 1} of {self.settings.rounds}")
            ordered = [one for one in alternating(contenders, number) if one.name not in failed]
            for contender in ordered:
                try:
                    sample = await contender.drive(self.settings.seconds * contender.share)
                except ContenderFailed as failure:
                    self.report.remark(f"no {contender.name} row of {title}: {failure}")
                    failed.add(contender.name)
                    result.samples.pop(contender.name, None)
                else:
                    result.add(contender.name, sample)
            if has_lags:
                await self._measure_lags([one for one in ordered if one.name not in failed], result)
            self.advance()
        return result

    async def _measure_lags(self, contenders: Sequence[Contender], result: Rounds) -> None:
        seconds = self.settings.seconds * _LAG_SHARE
        result.add_lag(IDLE, (await idle_lag(seconds)).p50_ms)
        for contender in contenders:
            if contender.is_on_loop:
                async with heartbeat() as lags:
                    await contender.drive(seconds * contender.share)
                result.add_lag(contender.name, lag_of(lags).p50_ms)


def name_of(nbytes: int) -> str:
    """A number of bytes in words."""
    for unit, step in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes % step == 0 and nbytes:
            return f"{nbytes // step} {unit}"
    return f"{nbytes} bytes"
