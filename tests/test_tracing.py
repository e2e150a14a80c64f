"""Spans of transfers, through the OpenTelemetry SDK."""

from __future__ import annotations

import errno
import gc
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from backends import Make, make_backend
from loops import every_loop, on_one_loop

pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed")

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import StatusCode
from slow_devices import PADDED, filled, memory_backend, unaligned
from test_reports import FailGroups

from aio_kv import (
    AsyncStorageBackend,
    BusyError,
    CascadeBackend,
    GroupKey,
    GroupLayout,
    KvKind,
    Priority,
    Read,
    TransferError,
    UnavailableError,
    Write,
)
from aio_kv.testing import BACKEND_CHECKS, CallFault, FaultyBackend
from aio_kv.tracing import TracedBackend

PAYLOAD = PADDED.payload_nbytes


class Traces:
    """A provider of a test's own, and the spans that have ended."""

    def __init__(self, **options: Any) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False, **options)
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def ended(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()

    def outcomes(self) -> list[Any]:
        return [(span.attributes or {}).get("aio_kv.outcome") for span in self.ended()]


@pytest.fixture
def traces() -> Iterator[Traces]:
    made = Traces()
    yield made
    made.provider.shutdown()


def make_traced(make: Make, traces: Traces) -> Make:
    @asynccontextmanager
    async def made(layout: GroupLayout) -> AsyncIterator[Any]:
        async with make(layout) as backend, TracedBackend(backend, tracer_provider=traces.provider) as traced:
            yield traced

    return made


@on_one_loop
@pytest.mark.parametrize("check", BACKEND_CHECKS)
async def test_a_traced_backend_is_a_backend(check: str, tmp_path: Path, traces: Traces) -> None:
    """The conformance kit; and whatever it does, every span has ended, with an outcome."""
    with anyio.fail_after(30):
        await BACKEND_CHECKS[check](make_traced(make_backend("memory-shuffled", tmp_path), traces))
    assert set(traces.outcomes()) <= {"done", "failed", "cancelled", "late", "refused"}


@on_one_loop
@pytest.mark.parametrize("check", BACKEND_CHECKS)
async def test_a_cascade_stands_on_a_traced_backend_and_under_one(
    check: str, tmp_path: Path, traces: Traces
) -> None:
    inner = make_traced(make_backend("memory", tmp_path), traces)

    @asynccontextmanager
    async def made(layout: GroupLayout) -> AsyncIterator[Any]:
        capacity = 3 * layout.groups_per_block * layout.payload_nbytes
        async with inner(layout) as backing:
            cascade = CascadeBackend(backing, capacity_bytes=capacity, promote=True)
            async with TracedBackend(cascade, tracer_provider=traces.provider) as traced:
                yield traced

    with anyio.fail_after(30):
        await BACKEND_CHECKS[check](made)
    assert set(traces.outcomes()) <= {"done", "failed", "cancelled", "late", "refused"}


@every_loop
async def test_a_span_says_what_moved_and_how_it_ended(traces: Traces) -> None:
    traced = TracedBackend(memory_backend(PADDED), tracer_provider=traces.provider)
    assert isinstance(traced, AsyncStorageBackend)
    key, block = GroupKey(0, 0, 0, KvKind.K), PADDED.groups_per_block
    async with traced as kv:
        await kv.write_groups([1, 2, 3], unaligned(PADDED, 3), priority=Priority.BACKGROUND)
        await kv.read_groups([3, 1], unaligned(PADDED, 2), priority=Priority.PREFETCH)
        await kv.write([Write(key, bytes(PAYLOAD))])
        await kv.read([Read(key, bytearray(PAYLOAD))])
        await kv.write_block(0, 1, bytes(block * PAYLOAD))
        await kv.read_block(0, 1, bytearray(block * PAYLOAD))
    assert [
        (span.name, span.attributes["aio_kv.groups"], span.attributes["aio_kv.priority"])
        for span in traces.ended()
        if span.attributes
    ] == [
        ("aio_kv.write", 3, "background"),
        ("aio_kv.read", 2, "prefetch"),
        ("aio_kv.write", 1, "demand"),
        ("aio_kv.read", 1, "demand"),
        ("aio_kv.write", block, "demand"),
        ("aio_kv.read", block, "demand"),
    ]
    for span in traces.ended():
        assert span.attributes is not None
        assert span.attributes["aio_kv.nbytes"] == span.attributes["aio_kv.groups"] * PAYLOAD
        assert span.attributes["aio_kv.backend"] == "MemoryBackend"
        assert span.attributes["aio_kv.rung"] == "memory-buffered"
        assert span.attributes["aio_kv.outcome"] == "done"
        assert span.status.status_code is StatusCode.UNSET
        assert span.instrumentation_scope is not None
        assert span.instrumentation_scope.name == "aio_kv"


@every_loop
async def test_a_span_is_a_child_of_the_callers_and_lasts_as_long_as_the_transfer(traces: Traces) -> None:
    tracer = traces.provider.get_tracer("server")
    below = memory_backend(PADDED)
    async with TracedBackend(below, tracer_provider=traces.provider) as kv:
        below.pause()
        with tracer.start_as_current_span("request") as request:
            transfer = kv.read_groups([1], bytearray(PAYLOAD))
            assert trace.get_current_span() is request, "the caller's own work is not the transfer's"
        assert [span.name for span in traces.ended()] == ["request"]
        below.resume()
        await transfer
    child = traces.ended()[-1]
    assert child.name == "aio_kv.read"
    assert child.parent is not None
    assert child.parent.span_id == request.get_span_context().span_id


@every_loop
async def test_failures_cancellations_and_lateness_have_their_names(traces: Traces) -> None:
    below = memory_backend(PADDED, FailGroups({3: errno.EIO}), max_transfers=3)
    async with TracedBackend(below, tracer_provider=traces.provider) as kv:
        with pytest.raises(TransferError):
            await kv.read_groups([1, 3], unaligned(PADDED, 2))
        below.pause()
        kept = kv.write_groups([5], bytes(PAYLOAD))
        kv.read_groups([5], bytearray(PAYLOAD)).cancel()
        late = kv.read_groups([5], bytearray(PAYLOAD), deadline=anyio.current_time() - 1)
        with pytest.raises(TransferError):
            await late
        full = [kv.read_groups([1], bytearray(PAYLOAD)) for _ in range(2)]
        with pytest.raises(BusyError):
            kv.read_groups([1], bytearray(PAYLOAD))
        below.resume()
        for transfer in (kept, *full):
            await transfer
    assert traces.outcomes() == ["failed", "cancelled", "late", "refused", "done", "done", "done"]
    for span, outcome in zip(traces.ended(), traces.outcomes(), strict=True):
        assert span.attributes is not None
        assert span.attributes.get("error.type") == (None if outcome == "done" else outcome)
        assert (span.status.status_code is StatusCode.ERROR) == (outcome != "done")
    refused = traces.ended()[3]
    assert [event.name for event in refused.events] == ["exception"]
    assert refused.events[0].attributes is not None
    assert refused.events[0].attributes["exception.type"] == "aio_kv.errors.BusyError"


@every_loop
async def test_looking_at_the_outcome_is_not_awaiting_it(
    traces: Traces, caplog: pytest.LogCaptureFixture
) -> None:
    below = memory_backend(PADDED, FailGroups({3: errno.EIO}))
    async with TracedBackend(below, tracer_provider=traces.provider) as kv:
        kv.read_groups([3], bytearray(PAYLOAD))
        await kv.read_groups([2], bytearray(PAYLOAD))
        gc.collect()
    assert "never awaited" in caplog.text
    assert sorted(traces.outcomes()) == ["done", "failed"]


@every_loop
async def test_a_cascade_hit_is_a_span_and_its_rung_is_that_below(traces: Traces) -> None:
    cascade = CascadeBackend(memory_backend(PADDED), capacity_bytes=1 << 20)
    async with TracedBackend(cascade, tracer_provider=traces.provider) as kv:
        await kv.write_groups([1], bytes(PAYLOAD))
        await kv.read_groups([1], bytearray(PAYLOAD))
        mixed = await kv.read_groups([1, 9], unaligned(PADDED, 2))
        assert mixed.is_complete
    assert traces.outcomes() == ["done"] * 3
    for span in traces.ended():
        assert span.attributes is not None
        assert span.attributes["aio_kv.backend"] == "CascadeBackend"
        assert span.attributes["aio_kv.rung"] == "memory-buffered"


@every_loop
async def test_failures_below_a_cascade_are_its_own(traces: Traces) -> None:
    below = memory_backend(PADDED, FailGroups({3: errno.EIO}))
    cascade = CascadeBackend(below, capacity_bytes=1 << 20)
    async with TracedBackend(cascade, tracer_provider=traces.provider) as kv:
        await kv.write_groups([1], bytes(PAYLOAD))
        with pytest.raises(TransferError):
            await kv.read_groups([1, 3], unaligned(PADDED, 2))
    assert traces.outcomes() == ["done", "failed"]


@every_loop
async def test_transfers_that_can_only_be_awaited_end_their_span_at_once(traces: Traces) -> None:
    async with memory_backend(PADDED) as below:
        faulty = FaultyBackend(below, [CallFault(errno=errno.EIO)])
        async with TracedBackend(faulty, tracer_provider=traces.provider) as kv:
            with pytest.raises(TransferError):
                await kv.read_groups([1], bytearray(PAYLOAD))
    assert traces.outcomes() == [None]


@every_loop
async def test_a_span_that_a_silent_device_keeps_ends_with_the_backend(traces: Traces) -> None:
    below = memory_backend(PADDED, drain_timeout=0.03)
    async with TracedBackend(below, tracer_provider=traces.provider) as kv:
        below.pause()
        kv.read_groups([1], bytearray(PAYLOAD))
    assert traces.outcomes() == [None]
    assert traces.ended()[0].status.status_code is StatusCode.ERROR
    below.resume()
    assert below._engine is not None
    assert below._engine.close()
    assert len(traces.ended()) == 1


@every_loop
async def test_what_is_not_sampled_and_what_nobody_collects_is_not_looked_at() -> None:
    unsampled = Traces(sampler=ALWAYS_OFF)
    assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider), "a test has set one"
    for provider in (unsampled.provider, None, trace.NoOpTracerProvider()):
        async with TracedBackend(memory_backend(PADDED), tracer_provider=provider) as kv:
            rows = await filled(kv)  # type: ignore[arg-type]
            target = bytearray(PAYLOAD)
            transfer = kv.read_groups([7], target)
            assert (kv.read_groups == kv.backing.read_groups) == (provider is not unsampled.provider)
            assert not kv._open_spans
            assert not transfer._waiters
            await transfer
            assert target == rows[7].tobytes()
    assert not unsampled.ended()
    unsampled.provider.shutdown()


@every_loop
async def test_what_the_backend_has_beyond_the_protocol_is_there(traces: Traces) -> None:
    below = memory_backend(PADDED)
    kv = TracedBackend(below, tracer_provider=traces.provider)
    assert not kv.is_open
    assert await kv is kv
    assert below.is_open
    assert (kv.rung, kv.backing, kv.layout) == ("memory-buffered", below, PADDED)
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = kv.no_such_thing
    assert kv.statistics().transfers.transfers == 0
    await kv.aclose()
    assert not below.is_open


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(UnavailableError, match=r"pip install 'aio-kv\[metrics\]'"):
        TracedBackend(memory_backend(PADDED))
