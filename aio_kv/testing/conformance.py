"""The conformance kit: what a backend must do, as functions that anybody may run against theirs.

    async def test_mine(tmp_path):
        await check_backend(lambda layout: MyBackend(tempfile.mkdtemp(dir=tmp_path), layout))

With pytest, one test per check names what fails:

    @pytest.mark.parametrize("check", BACKEND_CHECKS.values(), ids=BACKEND_CHECKS)
    async def test_mine(tmp_path, check):
        await check(lambda layout: MyBackend(tempfile.mkdtemp(dir=tmp_path), layout))

The kit needs a running event loop that anyio knows (asyncio, uvloop, trio) and nothing else.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, TypeAlias

import anyio

from aio_kv.errors import LayoutError
from aio_kv.testing import checks_bytes, checks_lifetime, checks_order, checks_refusals, checks_sync
from aio_kv.testing.model import ConformanceError, MakeBackend, MakeSyncBackend

__all__ = ["BACKEND_CHECKS", "SYNC_BACKEND_CHECKS", "check_backend", "check_sync_backend"]

Check: TypeAlias = Callable[[MakeBackend], Awaitable[None]]
SyncCheck: TypeAlias = Callable[[MakeSyncBackend], None]

# Name and function of every check, in the order in which they are run.
BACKEND_CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        check.__name__: check
        for module in (checks_bytes, checks_order, checks_refusals, checks_lifetime)
        for check in module.CHECKS
    }
)
SYNC_BACKEND_CHECKS: Mapping[str, SyncCheck] = MappingProxyType(
    {check.__name__: check for check in checks_sync.CHECKS}
)


async def check_backend(
    make: MakeBackend, *, skip: Collection[str] = (), timeout: float = 60.0
) -> tuple[str, ...]:
    """Run every check of `BACKEND_CHECKS` against backends of `make`; return the names of those that passed.

    Args:
        make: called with a `GroupLayout`, several times; each time returns an async context manager, or an awaitable,
            that gives an `AsyncStorageBackend` in which nothing has been written. Directories are its own affair.
        skip: names of checks to leave out.
        timeout: seconds for each check, so that a hang is a failure with a name.

    Raises an `ExceptionGroup` of one `ConformanceError` per failed check, the check's own exception being its cause;
    `LayoutError` for an unknown name in `skip`. Cancellation ends the check that is running.
    """
    failures: list[Exception] = []
    passed: list[str] = []
    for name, check in _chosen(BACKEND_CHECKS, skip).items():
        with _collecting(name, failures, passed):
            with anyio.fail_after(timeout):
                await check(make)
    _raise(failures)
    return tuple(passed)


def check_sync_backend(make: MakeSyncBackend, *, skip: Collection[str] = ()) -> tuple[str, ...]:
    """Run every check of `SYNC_BACKEND_CHECKS` against `StorageBackend`s of `make`; see `check_backend`.

    `make` returns an open backend, which the kit closes.
    """
    failures: list[Exception] = []
    passed: list[str] = []
    for name, check in _chosen(SYNC_BACKEND_CHECKS, skip).items():
        with _collecting(name, failures, passed):
            check(make)
    _raise(failures)
    return tuple(passed)


def _chosen(checks: Mapping[str, Any], skip: Collection[str]) -> dict[str, Any]:
    unknown = sorted(set(skip) - set(checks))
    if unknown:
        raise LayoutError(f"skip names {', '.join(unknown)}: known checks are {', '.join(checks)}")
    return {name: check for name, check in checks.items() if name not in skip}


@contextmanager
def _collecting(name: str, failures: list[Exception], passed: list[str]) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # Not swallowed: it is raised as the cause of one error for all checks.
        failure = ConformanceError(f"{name}: {error!r}")
        failure.check = name
        failure.__cause__ = error
        failures.append(failure)
    else:
        passed.append(name)


def _raise(failures: list[Exception]) -> None:
    if failures:
        raise ExceptionGroup(f"{len(failures)} checks of the conformance kit failed", failures)
