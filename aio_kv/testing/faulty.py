"""`FaultyBackend`: any asynchronous backend, with chosen calls going wrong.

It is for testing what stands above a backend. What goes wrong below the engine (short reads, a device that answers
late) is `aio_kv.engine.Fault`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import anyio
import numpy as np

from aio_kv.errors import AioKvError, LayoutError, TransferError, storage_error
from aio_kv.layout import GroupLayout
from aio_kv.protocols import AsyncStorageBackend, Read, Write
from aio_kv.transfer import Outcome, TransferReport

__all__ = ["CallFault", "FaultyBackend"]

_TRANSFERS = frozenset(("read", "read_groups", "read_block", "write", "write_groups", "write_block"))
_CALLS = _TRANSFERS | {"register_landing_region", "record_event", "wait_ready", "flush"}


@dataclass(frozen=True, slots=True)
class CallFault:
    """What goes wrong, and when: calls number `first`, `first + every`, ... of those it looks at, `times` at most.

    Args:
        call: the method it looks at; None for every method that returns a transfer.
        error: raised by the call itself, which then does nothing.
        errno: the transfer fails with it, although its bytes have moved: of a failed request nothing is certain.
        groups: the requests for these groups fail; None for all.
        delay: seconds by which the end of the transfer (or the call, where there is none) comes late. Its memory is
            no longer touched by then.

    Raises `LayoutError` for an unknown call.
    """

    call: str | None = None
    error: Exception | None = None
    errno: int = 0
    groups: Collection[int] | None = None
    delay: float = 0.0
    first: int = 0
    every: int = 1
    times: int = 2**32

    def __post_init__(self) -> None:
        if self.call is not None and self.call not in _CALLS:
            raise LayoutError(f"call is {self.call!r}: must be None or one of {', '.join(sorted(_CALLS))}")


class FaultyBackend:
    """Hands every call on to `backend`, which it owns from here on, except for what `faults` say.

    The first fault that applies to a call is the one that happens; `injected` counts them.
    """

    def __init__(self, backend: AsyncStorageBackend, faults: Sequence[CallFault] = ()) -> None:
        self.injected = 0
        self._backend = backend
        self._faults = tuple(faults)
        self._seen = [0] * len(self._faults)
        self._used = [0] * len(self._faults)

    async def __aenter__(self) -> FaultyBackend:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    @property
    def layout(self) -> GroupLayout:
        """The geometry of what is stored."""
        return self._backend.layout

    def read(self, requests: Iterable[Read], **options: Any) -> Any:
        """See `AsyncStorageBackend.read`."""
        listed = list(requests)
        return self._start("read", lambda: self._backend.read(listed, **options), lambda: self._ids(listed))

    def write(self, requests: Iterable[Write], **options: Any) -> Any:
        """See `AsyncStorageBackend.write`."""
        listed = list(requests)
        return self._start("write", lambda: self._backend.write(listed, **options), lambda: self._ids(listed))

    def read_groups(self, group_ids: Any, into: Any, **options: Any) -> Any:
        """See `AsyncStorageBackend.read_groups`."""
        return self._start(
            "read_groups",
            lambda: self._backend.read_groups(group_ids, into, **options),
            lambda: self.layout.check_ids(group_ids).tolist(),
        )

    def write_groups(self, group_ids: Any, source: Any, **options: Any) -> Any:
        """See `AsyncStorageBackend.write_groups`."""
        return self._start(
            "write_groups",
            lambda: self._backend.write_groups(group_ids, source, **options),
            lambda: self.layout.check_ids(group_ids).tolist(),
        )

    def read_block(self, layer: int, block: int, into: Any, **options: Any) -> Any:
        """See `AsyncStorageBackend.read_block`."""
        return self._start(
            "read_block",
            lambda: self._backend.read_block(layer, block, into, **options),
            lambda: self._block(layer, block),
        )

    def write_block(self, layer: int, block: int, source: Any, **options: Any) -> Any:
        """See `AsyncStorageBackend.write_block`."""
        return self._start(
            "write_block",
            lambda: self._backend.write_block(layer, block, source, **options),
            lambda: self._block(layer, block),
        )

    async def register_landing_region(self, memory: Any) -> Any:
        """See `AsyncStorageBackend.register_landing_region`."""
        await self._disturb("register_landing_region")
        return await self._backend.register_landing_region(memory)

    def record_event(self, stream: Any) -> Any:
        """See `AsyncStorageBackend.record_event`."""
        fault = self._next_fault("record_event")
        if fault is not None and fault.error is not None:
            raise fault.error
        return self._backend.record_event(stream)

    async def wait_ready(self) -> None:
        """See `AsyncStorageBackend.wait_ready`."""
        await self._disturb("wait_ready")
        await self._backend.wait_ready()

    async def flush(self) -> None:
        """See `AsyncStorageBackend.flush`."""
        await self._disturb("flush")
        await self._backend.flush()

    async def aclose(self) -> None:
        """Close the backend; never faulty, so that nothing leaks."""
        await self._backend.aclose()

    def statistics(self) -> Any:
        """The statistics of the backend."""
        return self._backend.statistics()

    def _ids(self, requests: Sequence[Read | Write]) -> list[int]:
        return [self.layout.group_id(request.key) for request in requests]

    def _block(self, layer: int, block: int) -> list[int]:
        first = self.layout.block_group_id(layer, block)
        return list(range(first, first + self.layout.groups_per_block))

    def _next_fault(self, call: str) -> CallFault | None:
        """Count a call against every fault that looks at it; the first one that applies."""
        found: CallFault | None = None
        for index, fault in enumerate(self._faults):
            if fault.call != call and not (fault.call is None and call in _TRANSFERS):
                continue
            number = self._seen[index] - fault.first
            self._seen[index] += 1
            is_due = number >= 0 and number % fault.every == 0 and self._used[index] < fault.times
            if is_due and found is None:
                self._used[index] += 1
                found = fault
        self.injected += found is not None
        return found

    async def _disturb(self, call: str) -> None:
        fault = self._next_fault(call)
        if fault is None:
            return
        if fault.delay:
            await anyio.sleep(fault.delay)
        if fault.error is not None:
            raise fault.error
        if fault.errno:
            raise storage_error(fault.errno, action=call, file="injected", file_offset=None, nbytes=None)

    def _start(self, call: str, start: Callable[[], Any], ids: Callable[[], list[int]]) -> Any:
        fault = self._next_fault(call)
        if fault is None:
            return start()
        if fault.error is not None:
            raise fault.error
        return _FaultyTransfer(start(), fault, ids(), call)


class _FaultyTransfer:
    """A transfer that ends late, or badly."""

    def __init__(self, transfer: Any, fault: CallFault, ids: list[int], call: str) -> None:
        self._transfer = transfer
        self._fault = fault
        self._call = call
        self._is_hit = np.ones(len(ids), dtype=bool)
        if fault.groups is not None:
            self._is_hit = np.isin(
                np.array(ids, dtype=np.int64), np.array(list(fault.groups), dtype=np.int64)
            )
        self._report: TransferReport | None = None
        self._error: TransferError | None = None

    def __await__(self) -> Generator[Any, Any, TransferReport]:
        return self._complete().__await__()

    async def _complete(self) -> TransferReport:
        report = await self.outcome()
        if self._error is not None:
            raise self._error
        await self._transfer  # raises what went wrong without our doing
        return report

    async def outcome(self) -> TransferReport:
        """See `Transfer.outcome`."""
        report: TransferReport = await self._transfer.outcome()
        if self._fault.delay:
            await anyio.sleep(self._fault.delay)
        if self._report is None:
            self._report = self._bend(report)
        return self._report

    async def enqueued(self) -> None:
        """See `Transfer.enqueued`."""
        await self._complete()

    def cancel(self) -> None:
        """See `Transfer.cancel`."""
        self._transfer.cancel()

    def _bend(self, report: TransferReport) -> TransferReport:
        if self._fault.errno == 0 or not self._is_hit.any():
            return report
        outcomes = np.where(self._is_hit, np.int8(Outcome.FAILED), report.outcomes).astype(np.int8)
        is_done = outcomes == Outcome.DONE
        cause: AioKvError = storage_error(
            self._fault.errno, action=self._call, file="injected", file_offset=None, nbytes=None
        )
        each = report.nbytes // max(1, int((report.outcomes == Outcome.DONE).sum()))
        bent = TransferReport(
            outcomes,
            loaded_prefix=len(outcomes) if is_done.all() else int(np.argmin(is_done)),
            nbytes=each * int(is_done.sum()),
            errors=(cause, *report.errors),
        )
        self._error = TransferError(
            f"{self._call} of {int((~is_done).sum())} of {len(outcomes)} requests",
            report=bent,
            errno=self._fault.errno,
            file="injected",
            hint=str(cause),
        )
        self._error.__cause__ = cause
        return bent
