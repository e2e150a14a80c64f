"""Running one asynchronous test body on asyncio, uvloop and trio, and making sure that it did.

`@every_loop` turns a test into two collected functions: the one under its own name is run by pytest-asyncio, on
asyncio and on uvloop (the loop factories are in conftest.py); its twin `..._on_trio` is run by anyio's plugin. No test
carries both marks. Each of them compares the loop that runs with the one that was asked for, because a plugin that
quietly runs everything on asyncio would make the other versions worthless.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest
import sniffio
import trio

try:
    import uvloop
except ImportError:  # There is none for every system.
    uvloop = None

T = TypeVar("T")
Body = Callable[..., Awaitable[None]]

LOOP_FACTORIES: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.SelectorEventLoop}
if uvloop is not None:
    LOOP_FACTORIES["uvloop"] = uvloop.new_event_loop
LOOPS = (*LOOP_FACTORIES, "trio")


def running_loop() -> str:
    """The library and loop that run this coroutine: "asyncio", "uvloop" or "trio"."""
    library = sniffio.current_async_library()
    if library != "asyncio":
        return library
    module = type(asyncio.get_running_loop()).__module__
    return "uvloop" if module.startswith("uvloop") else library


def every_loop(body: Body) -> Body:
    """Collect an async test once per loop. Goes on top of all other decorators."""
    on_trio = _asserting(body, f"{body.__name__}_on_trio")
    on_trio = pytest.mark.anyio(pytest.mark.parametrize("anyio_backend", ["trio"])(on_trio))
    module = inspect.getmodule(body)
    assert module is not None
    setattr(module, on_trio.__name__, on_trio)
    return pytest.mark.asyncio(_asserting(body, body.__name__))


def on_asyncio(body: Body) -> Body:
    """Collect an async test for asyncio and uvloop only: for what exists there only, such as native cancellation."""
    return pytest.mark.asyncio(_asserting(body, body.__name__))


def on_one_loop(body: Body) -> Body:
    """Collect an async test once, on plain asyncio: for what costs time and has nothing to do with the loop."""
    return pytest.mark.asyncio(loop_factories=["asyncio"])(_asserting(body, body.__name__))


def on_trio(body: Body) -> Body:
    """Collect an async test for trio only."""
    test = _asserting(body, body.__name__)
    return pytest.mark.anyio(pytest.mark.parametrize("anyio_backend", ["trio"])(test))


def _asserting(body: Body, name: str) -> Body:
    """The body, as a test that asks for the fixture `expected_loop` and checks it first."""

    @functools.wraps(body)
    async def test(expected_loop: str, **arguments: Any) -> None:
        assert running_loop() == expected_loop
        await body(**arguments)

    signature = inspect.signature(body)
    asked = inspect.Parameter("expected_loop", inspect.Parameter.KEYWORD_ONLY)
    test.__signature__ = signature.replace(parameters=[*signature.parameters.values(), asked])  # type: ignore[attr-defined]
    del test.__wrapped__  # type: ignore[attr-defined] # so that the signature above is the one that pytest sees
    test.__name__ = test.__qualname__ = name
    return test


def run_on(loop: str, main: Callable[[], Awaitable[T]]) -> T:
    """Run a coroutine function to its end on a loop of its own, for tests that are not async themselves."""

    async def checked() -> T:
        assert running_loop() == loop
        return await main()

    if loop == "trio":
        return trio.run(checked)
    with asyncio.Runner(loop_factory=LOOP_FACTORIES[loop]) as runner:
        return runner.run(checked())
