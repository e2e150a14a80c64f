"""`open_backend`: the best backend that works here, in one call."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal, overload

from aio_kv.backends.engine_backend import AutoBackend, EngineBackend, ThreadedBackend, UringBackend
from aio_kv.cascade import CascadeBackend
from aio_kv.cuda import Device
from aio_kv.engine.options import EngineOptions
from aio_kv.errors import LayoutError
from aio_kv.files import LayerFiles
from aio_kv.layout import GroupLayout

__all__ = ["open_backend"]

_BACKENDS: dict[str, type[EngineBackend]] = {
    "auto": AutoBackend,
    "uring": UringBackend,
    "threads": ThreadedBackend,
}


@overload
def open_backend(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | LayerFiles,
    layout: GroupLayout | None = None,
    *,
    backend: str = ...,
    device: int | Device | None = ...,
    create: bool = ...,
    ram_bytes: Literal[0] = 0,
    options: EngineOptions | None = ...,
) -> EngineBackend: ...


@overload
def open_backend(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | LayerFiles,
    layout: GroupLayout | None = None,
    *,
    backend: str = ...,
    device: int | Device | None = ...,
    create: bool = ...,
    ram_bytes: int,
    options: EngineOptions | None = ...,
) -> EngineBackend | CascadeBackend: ...


def open_backend(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | LayerFiles,
    layout: GroupLayout | None = None,
    *,
    backend: str = "auto",
    device: int | Device | None = None,
    create: bool = True,
    ram_bytes: int = 0,
    options: EngineOptions | None = None,
) -> EngineBackend | CascadeBackend:
    """Return a backend to be opened with `async with` or `await`.

    Args:
        path: a directory, several (layer l lives in path[l % n]), or open `LayerFiles`.
        layout: the geometry; may be left out with `LayerFiles`.
        backend: "auto" takes the best rung that works and logs once why it is not a better one; "uring" and
            "threads" raise `UnavailableError` at open where they do not work.
        device: GPU index (or an open `aio_kv.cuda.Device`) for device memory.
        create: make the files if there are none; what exists is checked and opened.
        ram_bytes: payload bytes that a `CascadeBackend` in front may hold in pinned memory, in slots of whole blocks;
            0 for none.
        options: sizes and bounds.

    Raises `LayoutError` for a wrong argument; everything else is raised when the backend opens.
    """
    if backend not in _BACKENDS:
        raise LayoutError(f"backend is {backend!r}: must be one of {', '.join(_BACKENDS)}")
    below = _BACKENDS[backend](path, layout, device=device, create=create, options=options)
    return CascadeBackend(below, capacity_bytes=ram_bytes) if ram_bytes else below
