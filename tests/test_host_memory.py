"""`allocate_host`: the memory that I/O is fastest with, and who frees it when."""

from __future__ import annotations

import ctypes
import gc
import mmap

import numpy as np
import pytest
from processes import has_huge_pages, in_child, mapping_at, needs_fork, needs_proc

from aio_kv import LayoutError, allocate_host
from aio_kv.engine import has_extension

HUGE = 2 << 20
NBYTES = 8 * HUGE

native_only = pytest.mark.skipif(not has_extension(), reason="the compiled extension is not installed")


def address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def test_is_writable_zeroed_and_as_long_as_asked() -> None:
    for nbytes in (1, 4096, HUGE + 1):
        view = allocate_host(nbytes)
        assert (view.nbytes, view.readonly, view.format, view.ndim) == (nbytes, False, "B", 1)
        assert not any(view[:: max(1, nbytes // 4096)])
        view[-1] = 7
        assert view[-1] == 7


@pytest.mark.parametrize("nbytes", [0, -1])
def test_refuses_no_bytes(nbytes: int) -> None:
    with pytest.raises(LayoutError, match="at least 1"):
        allocate_host(nbytes)


@native_only
def test_too_much_is_a_memory_error() -> None:
    with pytest.raises(MemoryError):
        allocate_host(1 << 47)


@native_only
@needs_proc
def test_lies_on_huge_pages() -> None:
    if not has_huge_pages():
        pytest.skip("huge pages are switched off on this system")
    view = allocate_host(NBYTES)
    address = address_of(view)
    assert address % HUGE == 0
    huge = [mapping_at(address + start)["AnonHugePages"] for start in range(0, NBYTES, HUGE)]
    assert sum(huge) > 0, "no huge page was given, although they are switched on"
    assert mapping_at(address)["Rss"] >= NBYTES, "not all of it has been touched"


@native_only
@needs_proc
def test_is_freed_with_the_last_view() -> None:
    view = allocate_host(NBYTES)
    address = address_of(view)
    array = np.frombuffer(view, np.uint8)[NBYTES - 4096 :]
    del view
    gc.collect()
    assert mapping_at(address)
    assert int(array[-1]) == 0
    del array
    gc.collect()
    assert not mapping_at(address)


@native_only
@needs_fork
@needs_proc
def test_a_forked_child_does_not_inherit_it() -> None:
    view = allocate_host(NBYTES)
    address = address_of(view)
    view[:] = b"\x05" * NBYTES

    def child() -> None:
        assert not any(mapping_at(address + start) for start in range(0, NBYTES, HUGE))

    in_child(child)
    assert view[:] == b"\x05" * NBYTES


@native_only
@needs_fork
def test_a_forked_child_frees_nothing_of_its_own() -> None:
    """At the address of memory that was not inherited the child may have something else by the time it lets go."""
    view = allocate_host(NBYTES)
    address = address_of(view)

    def child() -> None:
        nonlocal view
        own = map_at(address, NBYTES)
        ctypes.memset(own, 9, NBYTES)
        del view
        gc.collect()
        assert ctypes.string_at(own, NBYTES) == b"\x09" * NBYTES

    in_child(child)


def map_at(address: int, nbytes: int) -> int:
    fixed_noreplace = 0x100000
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype = ctypes.c_void_p
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed_noreplace
    found: int = call(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    assert found == address, ctypes.get_errno()
    return found
