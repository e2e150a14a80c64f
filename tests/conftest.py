"""Fixtures for the whole suite: which loop runs, and what a test leaves behind."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from leaks import holdings, leaked_since
from loops import LOOP_FACTORIES

from aio_kv import UnavailableError
from aio_kv.cli.language_model import LanguageModel, prepare_packages, weights_file
from aio_kv.cuda import Device, DevicePath

# Read by the driver when a context is made: as many hardware queues as there are, since tests hold streams back.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

# The same examples in every run: a failure in CI is one that a developer sees too. Time limits would make a busy
# machine fail at random.
settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("repeatable")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run what is marked for pytest-asyncio once per asyncio loop."""
    return LOOP_FACTORIES


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the model's tests last: a gigabyte of weights in the process changes what forks and memory maps look like."""
    items.sort(key=lambda item: item.get_closest_marker("model") is not None)


@pytest.fixture
def expected_loop(request: pytest.FixtureRequest) -> str:
    """The loop that this version of a test was collected for; the test compares it with the one that runs."""
    marks = {mark.name for mark in request.node.iter_markers()} & {"asyncio", "anyio"}
    assert len(marks) == 1, f"a test is run by one plugin, and this one is marked for {sorted(marks)}"
    parameters: dict[str, Any] = request.node.callspec.params
    if marks == {"anyio"}:
        return str(parameters["anyio_backend"])
    factory = parameters["_asyncio_loop_factory"]
    return next(name for name, made in LOOP_FACTORIES.items() if made is factory)


@pytest.fixture(scope="session", autouse=True)
def loops_have_been_used() -> None:
    """Have what a loop keeps for the life of the process (uvloop: a pipe for signals) before anything is counted."""
    for make in LOOP_FACTORIES.values():
        with asyncio.Runner(loop_factory=make) as runner:
            runner.run(asyncio.sleep(0))


@pytest.fixture(scope="session", autouse=True)
def a_gpu_has_been_used() -> Iterator[None]:
    """Have the CUDA driver open what it keeps for the life of the process, and hold its context, before counting."""
    try:
        device = Device(0)
    except UnavailableError:
        yield
        return
    with device, DevicePath(device):
        yield


@pytest.fixture(scope="session")
def model() -> LanguageModel:
    """The demo model. Loading it takes longer than all tests with it together. Skips where it is not installed."""
    try:
        prepare_packages()
        weights_file()
    except UnavailableError as error:
        pytest.skip(str(error))
    import torch

    # Threads that wait for each other crawl on a machine that is busy with other tests. Also, torch keeps them, and no
    # test is to be blamed for having left them behind.
    torch.set_num_threads(1)
    return LanguageModel.load()


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """Fail a test after which there are more descriptors, threads or running engines than before."""
    before = holdings()
    yield
    leaked = leaked_since(before)
    assert not leaked, f"left behind: {leaked}"
