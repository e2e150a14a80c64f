"""What a demonstration has found, as a table for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import shorten

from rich.markup import escape
from rich.table import Table

from aio_kv.backends.engine_backend import EngineBackend
from aio_kv.cli.heartbeat import Lag

__all__ = ["DemoReport", "Measured", "ModelReport", "report_of", "table_of"]

_TEXT_WIDTH = 50  # The table then fits in 80 columns.


@dataclass(frozen=True, slots=True)
class Measured:
    """What both demonstrations measure. Times are in seconds, for the same groups each; sizes are without padding."""

    groups: int
    group_nbytes: int
    mismatches: int
    read_s: float
    oracle_s: float
    lag: Lag
    idle: Lag

    @property
    def nbytes(self) -> int:
        """Payload that was moved one way."""
        return self.groups * self.group_nbytes


@dataclass(frozen=True, slots=True)
class DemoReport:
    """The findings of `aio-kv demo`; the names of the fields are the keys of its JSON. GB are 10**9 bytes."""

    backend: str
    rung: str
    refusals: tuple[str, ...]
    layout: str
    groups: int
    group_nbytes: int
    nbytes: int
    mismatches: int
    read_gb_s: float
    oracle_gb_s: float
    speedup: float
    loop_lag_ms_p50: float
    loop_lag_ms_p99: float
    idle_lag_ms_p50: float

    @property
    def is_good(self) -> bool:
        """Whether every byte was what it had to be."""
        return self.mismatches == 0


@dataclass(frozen=True, slots=True)
class ModelReport(DemoReport):
    """The findings of `aio-kv demo --model`."""

    model: str
    tokens: int
    prefill_ms: float
    restore_ms: float
    identical_tokens: bool
    identical_bytes: bool
    continuation: str

    @property
    def is_good(self) -> bool:
        """Whether every byte and every token was what it had to be."""
        return self.mismatches == 0 and self.identical_tokens and self.identical_bytes


def report_of(kv: EngineBackend, layout: str, measured: Measured) -> DemoReport:
    """Return the report of what was measured on an open backend; `layout` says what was moved."""
    return DemoReport(
        backend=kv.rung.split("-")[0],
        rung=kv.rung,
        refusals=tuple(f"{refusal.rung}: {refusal.reason}" for refusal in kv.refusals),
        layout=layout,
        groups=measured.groups,
        group_nbytes=measured.group_nbytes,
        nbytes=measured.nbytes,
        mismatches=measured.mismatches,
        read_gb_s=round(measured.nbytes / measured.read_s / 1e9, 3),
        oracle_gb_s=round(measured.nbytes / measured.oracle_s / 1e9, 3),
        speedup=round(measured.oracle_s / measured.read_s, 2),
        loop_lag_ms_p50=round(measured.lag.p50_ms, 4),
        loop_lag_ms_p99=round(measured.lag.p99_ms, 4),
        idle_lag_ms_p50=round(measured.idle.p50_ms, 4),
    )


def table_of(report: DemoReport) -> Table:
    """Return the report as a table."""
    table = Table(show_header=False, title=f"aio_kv demo: {_subject(report)}", title_justify="left")
    for name, value in (*_first_rows(report), *_common_rows(report)):
        table.add_row(name, value)
    return table


def _subject(report: DemoReport) -> str:
    if isinstance(report, ModelReport):
        return f"the KV cache of {report.model}, {report.tokens:,} tokens"
    return f"generated groups in the shape of {report.layout}"


def _first_rows(report: DemoReport) -> Iterator[tuple[str, str]]:
    if not isinstance(report, ModelReport):
        return
    ratio = report.prefill_ms / report.restore_ms
    yield "prefill (computed)", f"{report.prefill_ms:,.0f} ms"
    yield "restore (from disk)", f"{report.restore_ms:,.1f} ms, {ratio:,.0f} times faster than computing it"
    yield "continuation", escape(shorten(report.continuation, _TEXT_WIDTH, placeholder=" ..."))
    yield "same tokens as without", _yes(report.identical_tokens)
    yield "same bytes as computed", _yes(report.identical_bytes)


def _common_rows(report: DemoReport) -> Iterator[tuple[str, str]]:
    yield "rung", report.rung
    for refusal in report.refusals:
        yield "  not", escape(refusal)
    megabytes = f"{report.nbytes / 1e6:,.0f} MB each way"
    yield "moved", f"{report.groups:,} groups of {report.group_nbytes:,} bytes, {megabytes}"
    yield "read, aio_kv", f"{report.read_gb_s:.2f} GB/s"
    yield "read, oracle", f"{report.oracle_gb_s:.2f} GB/s (one synchronous read per group)"
    yield "speedup", f"{report.speedup:.1f} x"
    lag = f"p50 {report.loop_lag_ms_p50:.2f} ms, p99 {report.loop_lag_ms_p99:.2f} ms"
    yield "loop lag while reading", f"{lag} (idle p50 {report.idle_lag_ms_p50:.2f} ms)"
    if report.mismatches == 0:
        yield "verified", "[green]every byte compared, none differs[/]"
    else:
        yield "verified", f"[red]{report.mismatches:,} GROUPS DIFFER[/]"


def _yes(value: bool) -> str:
    return "[green]yes[/]" if value else "[red]NO[/]"
