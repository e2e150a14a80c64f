"""`TracedBackend`: any asynchronous backend, with an OpenTelemetry span for each of its transfers.

A wrapper, so that whoever does not trace pays nothing. A span begins in the call, as a child of the caller's current
span, and ends with the transfer, whether that was awaited, cancelled or forgotten. Looking at how it ended is not
awaiting it: a failure that nobody awaited is still logged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable
from types import TracebackType
from typing import Any, Self

from aio_kv.errors import UnavailableError
from aio_kv.layout import GroupLayout
from aio_kv.protocols import AsyncStorageBackend, Priority, Read, Write
from aio_kv.transfer import LandingRegion, Outcome

__all__ = ["TracedBackend"]

_log = logging.getLogger("aio_kv")
_SCOPE = "aio_kv"
_CALLS = ("read", "read_groups", "read_block", "write", "write_groups", "write_block", "load", "save")


class TracedBackend:
    """Hands every call on to `backend`, which it opens if need be, owns, and closes.

    Spans are named `aio_kv.read`, `aio_kv.write`, `aio_kv.load` and `aio_kv.save`, with the attributes
    `aio_kv.groups`, `aio_kv.nbytes`, `aio_kv.priority`, `aio_kv.backend`, `aio_kv.rung` and, at the end,
    `aio_kv.outcome`: that of an `Outcome` ("done", ..., of a mix the first that was not), or "refused" where the call
    raised. Spans of what did not succeed have the status ERROR.

    Without a tracer provider the calls are the backend's own and nothing is recorded: set one before this is made.

    Args:
        backend: any `AsyncStorageBackend`; what it has beyond that protocol is reached through this one as well.
        tracer_provider: an OpenTelemetry `TracerProvider`; the one that is set for the process by default.

    Raises `UnavailableError` without opentelemetry-api.
    """

    def __init__(self, backend: AsyncStorageBackend, *, tracer_provider: Any = None) -> None:
        try:
            from opentelemetry import trace
        except ImportError as error:
            raise UnavailableError(
                "opentelemetry-api is not installed", hint="pip install 'aio-kv[metrics]'"
            ) from error
        self._backend: Any = backend
        provider = trace.get_tracer_provider() if tracer_provider is None else tracer_provider
        self._tracer = provider.get_tracer(_SCOPE)
        if isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
            self._step_aside()
        self._error_status = trace.Status(trace.StatusCode.ERROR)
        self._open_spans: dict[Any, None] = {}
        self._descriptions: dict[Priority, dict[str, str]] = {}

    def _step_aside(self) -> None:
        """Nobody collects spans: have the calls that make transfers go to the backend without a detour."""
        _log.info("no tracer provider is set: transfers of %s are not traced", type(self._backend).__name__)
        for name in _CALLS:
            call = getattr(self._backend, name, None)
            if call is not None:
                setattr(self, name, call)

    async def __aenter__(self) -> Self:
        if not getattr(self._backend, "is_open", True):
            await self._backend.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __await__(self) -> Generator[Any, Any, Self]:
        return self.__aenter__().__await__()

    def __getattr__(self, name: str) -> Any:
        # What the backend has beyond the protocol: its rung, its files, its device.
        if name == "_backend":  # not there yet: a copy or an unpickling, which would ask for ever
            raise AttributeError(name)
        return getattr(self._backend, name)

    @property
    def layout(self) -> GroupLayout:
        """The geometry of what is stored."""
        return self._backend.layout  # type: ignore[no-any-return]

    @property
    def backing(self) -> Any:
        """The backend whose transfers are traced."""
        return self._backend

    def read(
        self,
        requests: Iterable[Read],
        *,
        stream: Any = None,
        deadline: float | None = None,
        priority: Priority = Priority.DEMAND,
    ) -> Any:
        """See `AsyncStorageBackend.read`."""
        return self._call("aio_kv.read", self._backend.read, (requests,), stream, deadline, priority)

    def read_groups(
        self,
        group_ids: Any,
        into: Any,
        *,
        stream: Any = None,
        deadline: float | None = None,
        priority: Priority = Priority.DEMAND,
    ) -> Any:
        """See `AsyncStorageBackend.read_groups`."""
        arguments = (group_ids, into)
        return self._call("aio_kv.read", self._backend.read_groups, arguments, stream, deadline, priority)

    def read_block(
        self,
        layer: int,
        block: int,
        into: Any,
        *,
        stream: Any = None,
        deadline: float | None = None,
        priority: Priority = Priority.DEMAND,
    ) -> Any:
        """See `AsyncStorageBackend.read_block`."""
        arguments = (layer, block, into)
        return self._call("aio_kv.read", self._backend.read_block, arguments, stream, deadline, priority)

    def write(
        self,
        requests: Iterable[Write],
        *,
        stream: Any = None,
        deadline: float | None = None,
        priority: Priority = Priority.DEMAND,
    ) -> Any:
        """See `AsyncStorageBackend.write`."""
        return self._call("aio_kv.write", self._backend.write, (requests,), stream, deadline, priority)

    def write_groups(
        self,
        group_ids: Any,
        source: Any,
        *,
        stream: Any = None,
        deadline: float | None = None,
        priority: Priority = Priority.DEMAND,
    ) -> Any:
        """See `AsyncStorageBackend.write_groups`."""
        arguments = (group_ids, source)
        return self._call("aio_kv.write", self._backend.write_groups, arguments, stream, deadline, priority)

    def write_block(
        self,
        layer: int,
        block: int,
        source: Any,
        *,
        stream: Any = None,
        deadline: float | None = None,
        priority: Priority = Priority.DEMAND,
    ) -> Any:
        """See `AsyncStorageBackend.write_block`."""
        arguments = (layer, block, source)
        return self._call("aio_kv.write", self._backend.write_block, arguments, stream, deadline, priority)

    def load(
        self,
        region: LandingRegion,
        offsets: Any,
        into: Any,
        *,
        stream: Any = None,
        deadline: float | None = None,
        priority: Priority = Priority.DEMAND,
    ) -> Any:
        """See `EngineBackend.load`."""
        arguments = (region, offsets, into)
        return self._call("aio_kv.load", self._backend.load, arguments, stream, deadline, priority)

    def save(
        self,
        region: LandingRegion,
        offsets: Any,
        source: Any,
        *,
        stream: Any = None,
        deadline: float | None = None,
        priority: Priority = Priority.DEMAND,
    ) -> Any:
        """See `EngineBackend.save`."""
        arguments = (region, offsets, source)
        return self._call("aio_kv.save", self._backend.save, arguments, stream, deadline, priority)

    async def register_landing_region(self, memory: Any) -> Any:
        """See `AsyncStorageBackend.register_landing_region`."""
        return await self._backend.register_landing_region(memory)

    def record_event(self, stream: Any) -> Any:
        """See `AsyncStorageBackend.record_event`."""
        return self._backend.record_event(stream)

    async def wait_ready(self) -> None:
        """See `AsyncStorageBackend.wait_ready`."""
        await self._backend.wait_ready()

    async def flush(self) -> None:
        """See `AsyncStorageBackend.flush`."""
        await self._backend.flush()

    async def aclose(self) -> None:
        """Close the backend. Spans of transfers that a silent device has kept end here, without an outcome."""
        try:
            await self._backend.aclose()
        finally:
            left, self._open_spans = self._open_spans, {}
            for span in left:
                span.set_status(self._error_status)
                span.end()

    def statistics(self) -> Any:
        """The statistics of the backend."""
        return self._backend.statistics()

    def _call(
        self,
        name: str,
        start: Callable[..., Any],
        arguments: tuple[Any, ...],
        stream: Any,
        deadline: float | None,
        priority: Priority,
    ) -> Any:
        span = self._tracer.start_span(name, attributes=self._described(priority))
        if not span.is_recording():
            return start(*arguments, stream=stream, deadline=deadline, priority=priority)
        try:
            transfer = start(*arguments, stream=stream, deadline=deadline, priority=priority)
        except BaseException as error:
            span.record_exception(error)
            self._end(span, "refused")
            raise
        self._follow(span, transfer)
        return transfer

    def _described(self, priority: Any) -> dict[str, str]:
        """What is known before the call. The rung is there from the first call on, and stays."""
        found = self._descriptions.get(priority) if isinstance(priority, Priority) else None
        if found is None:
            found = {
                "aio_kv.backend": type(self._backend).__name__,
                "aio_kv.rung": _rung_of(self._backend),
                "aio_kv.priority": priority.name.lower()
                if isinstance(priority, Priority)
                else repr(priority),
            }
            if isinstance(priority, Priority):
                self._descriptions[priority] = found
        return found

    def _follow(self, span: Any, transfer: Any) -> None:
        groups = getattr(transfer, "request_count", None)
        if groups is not None:
            nbytes = groups * self._backend.layout.payload_nbytes
            span.set_attributes({"aio_kv.groups": groups, "aio_kv.nbytes": nbytes})
        if not hasattr(type(transfer), "worst_outcome"):  # of a backend whose transfers can only be awaited
            span.end()
        elif transfer.is_done:
            self._end(span, _outcome_of(transfer))
        else:
            self._open_spans[span] = None
            transfer.add_waiter(lambda: self._finish(span, transfer))

    def _finish(self, span: Any, transfer: Any) -> None:
        if span in self._open_spans:
            del self._open_spans[span]
            self._end(span, _outcome_of(transfer))

    def _end(self, span: Any, outcome: str) -> None:
        span.set_attribute("aio_kv.outcome", outcome)
        if outcome != "done":
            span.set_attribute("error.type", outcome)
            span.set_status(self._error_status)
        span.end()


def _outcome_of(transfer: Any) -> str:
    outcome: Outcome = transfer.worst_outcome
    return outcome.name.lower()


def _rung_of(backend: Any) -> str:
    """The rung of the backend that has one, this or one below."""
    while backend is not None:
        rung = getattr(backend, "rung", None)
        if rung is not None:
            return str(rung)
        backend = getattr(backend, "backing", None)
    return ""
