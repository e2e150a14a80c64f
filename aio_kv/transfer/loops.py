"""Which binding the running event loop wants."""

from __future__ import annotations

import sniffio

from aio_kv.transfer.binding import LoopBinding

__all__ = ["current_binding"]


def current_binding(drain_timeout: float) -> LoopBinding:
    """The binding of the loop that is running. Raises RuntimeError outside of one."""
    try:
        library = sniffio.current_async_library()
    except sniffio.AsyncLibraryNotFoundError:
        raise RuntimeError(
            "a backend is opened inside a running asyncio, uvloop or trio event loop"
        ) from None
    if library == "trio":
        from aio_kv.transfer.trio_loop import TrioBinding

        return TrioBinding(drain_timeout)
    from aio_kv.transfer.asyncio_loop import AsyncioBinding

    return AsyncioBinding(drain_timeout)
