"""Files, memories and destinations that the tests of the device path have in common."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from gpu_support import Bytes, layer_files, oracle_write

from aio_kv import GroupLayout, KvKind, LayerFiles
from aio_kv.cuda import DeviceBuffer
from aio_kv.engine import Kind, native
from aio_kv.engine.options import Fault, FaultAction
from aio_kv.transfer import region

LATENT = (KvKind.LATENT,)
LAYOUT = GroupLayout(1, 64, 1, 16, 128, 2, kinds=LATENT)  # 64 groups of 4096 bytes
OLD, NEW, OTHER, SENTINEL = 0x11, 0x22, 0x33, 0xE7
LOST = 719  # CUDA_ERROR_LAUNCH_FAILED, which a context does not survive


@contextmanager
def filled(folder: Path, layout: GroupLayout = LAYOUT, value: int = NEW) -> Iterator[LayerFiles]:
    """Files whose groups all hold one byte."""
    with layer_files(folder, layout) as files:
        ids = np.arange(layout.num_groups)
        oracle_write(files, ids, np.full((len(ids), layout.payload_nbytes), value, np.uint8))
        yield files


def is_all(data: Bytes, value: int) -> bool:
    """Whether every byte is `value`."""
    return bool((data == value).all())


def apart(count: int) -> Any:
    """Groups no two of which touch, so that each is an I/O of its own."""
    return 2 * np.arange(count)


def some(layout: GroupLayout, count: int, seed: int = 0) -> Any:
    """The same, drawn and shuffled."""
    return 2 * np.random.default_rng(seed).permutation(layout.num_groups // 2)[:count]


def delayed(microseconds: int) -> tuple[Fault, ...]:
    """Faults that have every read take so much longer."""
    return (Fault(FaultAction.DELAY, microseconds, kind=Kind.READ),)


class Owner:
    """A destination of which a test can tell whether somebody still keeps it."""

    def __init__(self, buffer: DeviceBuffer) -> None:
        self.__cuda_array_interface__ = buffer.__cuda_array_interface__


def owned(buffer: DeviceBuffer) -> tuple[Any, Callable[[], bool]]:
    """A destination over the buffer, and whether it is alive once the caller has dropped it."""
    owner = Owner(buffer)
    reference = weakref.ref(owner)

    def is_alive() -> bool:
        gc.collect()
        return reference() is not None

    return owner, is_alive


@contextmanager
def expecting_a_lost_device() -> Iterator[None]:
    """What is leaked in the block is forgotten at its end, as the fake machine that could touch it goes as well."""
    lists = (native._leaked, region._leaked)
    before = [len(leaked) for leaked in lists]
    yield
    for leaked, length in zip(lists, before, strict=True):
        del leaked[length:]
