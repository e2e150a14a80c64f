"""The compiled extension: whether it is there, memory from it, and its structs from Python's options.

Together with `native` the only user of cffi.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aio_kv.engine.options import EngineOptions
from aio_kv.errors import LayoutError, UnavailableError
from aio_kv.integers import Int64Array
from aio_kv.plan import IoLimits
from aio_kv.positional import aligned_buffer

__all__ = [
    "akv",
    "allocate_host",
    "device_struct",
    "extension_error",
    "has_extension",
    "host_function",
    "options_struct",
    "require_extension",
    "row_copier",
]

akv: Any = None
import_error: str | None = None
try:
    akv = importlib.import_module("aio_kv.engine._akv")
except ImportError as missing:
    import_error = str(missing)


def has_extension() -> bool:
    """Whether the compiled extension is there."""
    return akv is not None


def extension_error() -> str | None:
    """Why the compiled extension is not there, or None."""
    return import_error


def allocate_host(nbytes: int) -> memoryview:
    """Return new private memory on huge pages where there are any, aligned to 2 MiB, as a writable memoryview.

    This is the memory that I/O is fastest with; hand it to `register_landing_region` once. It is freed with the last
    view of it, and a forked child does not inherit it. Without the extension it is only aligned to 4096 bytes and
    inherited like any other memory. Raises MemoryError, `LayoutError`.
    """
    if nbytes <= 0:
        raise LayoutError(f"nbytes is {nbytes}: must be at least 1")
    if akv is None:
        return aligned_buffer(nbytes)
    pointer = akv.lib.akv_slab_new(nbytes)
    if not pointer:
        raise MemoryError(f"cannot allocate {nbytes} bytes of host memory")
    free, getpid, pid = akv.lib.akv_slab_free, os.getpid, os.getpid()

    def release(slab: Any) -> None:
        # A forked child never had the memory: what lies at its address there is somebody else's.
        if getpid() == pid:
            free(slab, nbytes)

    return memoryview(akv.ffi.buffer(akv.ffi.gc(pointer, release, nbytes), nbytes))


def row_copier(memory: memoryview, row_nbytes: int) -> Callable[[Int64Array, Int64Array, bool], None]:
    """Return `copy(rows, places, inward)`: rows of `memory` to, or inward from, as many addresses of `row_nbytes` each.

    It keeps `memory` alive, and nothing else: the places are the caller's, and are trusted. Raises IndexError for a row
    outside of the memory and ValueError for arrays that differ in length, before a byte has moved.
    """
    require_extension()
    export, array = akv.ffi.from_buffer, akv.ffi.typeof("int64_t[]")
    base, nbytes, copy_rows = export(memory), len(memory), akv.lib.akv_copy_rows

    def copy(rows: Int64Array, places: Int64Array, inward: bool) -> None:
        # Their own lengths and not those of the arrays: C reads as many numbers of 64 bits as it is told.
        listed, placed = export(array, rows), export(array, places)
        if len(listed) != len(placed):
            raise ValueError(f"{len(listed)} rows and {len(placed)} places")
        if copy_rows(base, nbytes, row_nbytes, listed, placed, len(listed), inward):
            raise IndexError(f"a row outside of {nbytes // row_nbytes}, or a place at 0")

    return copy


def host_function() -> int:
    """The address of a CUDA host function that writes the eventfd it is given. For the benchmark."""
    require_extension()
    return int(akv.ffi.cast("uintptr_t", akv.ffi.addressof(akv.lib, "akv_host_function")))


def require_extension() -> None:
    """Raise `UnavailableError` where the compiled extension is not there."""
    if akv is None:
        raise UnavailableError(
            f"the compiled extension is not installed ({import_error})",
            hint="install aio_kv on Linux with liburing-dev present, without AIO_KV_NO_EXTENSION",
        )


def options_struct(source: int, fds: Sequence[int], limits: IoLimits, options: EngineOptions) -> Any:
    ffi, lib = akv.ffi, akv.lib
    faults = ffi.new("akv_fault[]", max(1, len(options.faults)))
    for target, fault in zip(faults, options.faults, strict=False):
        target.kind = -1 if fault.kind is None else fault.kind
        target.action, target.value = fault.action, fault.value
        target.every, target.phase, target.times = fault.every, fault.phase, fault.times
    table = ffi.new("int[]", list(fds))
    flags = 0 if options.register_buffers else lib.AKV_NO_FIXED
    flags |= lib.AKV_SCHED_BATCH if options.sched_batch else 0
    struct = ffi.new(
        "akv_options *",
        {
            "source": source,
            "flags": flags,
            "rings": options.rings,
            "queue_depth": options.queue_depth,
            "threads": options.threads,
            "max_batches": min(65536, 4 * options.max_transfers),
            "max_requests": options.max_requests,
            "small_nbytes": min(options.small_nbytes, limits.op_nbytes_max),
            "max_op_nbytes": limits.op_nbytes_max,
            "memory_alignment": limits.memory_alignment,
            "offset_alignment": limits.offset_alignment,
            "spin_us": options.spin_us,
            "bulk_nbytes": options.bulk_nbytes,
            "staging_nbytes": options.staging_nbytes,
            "fds": table,
            "fd_count": len(fds),
            "fault_count": len(options.faults),
            "faults": faults,
            "fault_seed": options.fault_seed,
        },
    )
    return struct, table, faults  # the struct points into the other two


def device_struct(fields: Mapping[str, int]) -> Any:
    """An akv_device from its fields as integers; every field of the struct must be named."""
    struct = akv.ffi.new("akv_device *")
    kinds = dict(akv.ffi.typeof("akv_device").fields)
    if set(fields) != set(kinds) - {"reserved"}:
        raise LayoutError(f"device has fields {sorted(fields)}: must be those of akv_device")
    for name, value in fields.items():
        kind = kinds[name].type
        setattr(struct, name, value if kind.kind == "primitive" else akv.ffi.cast(kind, value))
    return struct
