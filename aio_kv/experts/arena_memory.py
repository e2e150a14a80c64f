"""The memory of an arena: one slab, pinned host memory or GPU memory, cut into slots of equal size."""

from __future__ import annotations

from typing import Protocol

from aio_kv.cuda import Device, DeviceBuffer, DevicePointer
from aio_kv.engine.extension import allocate_host
from aio_kv.experts.reader import ExpertReader, ReaderSession
from aio_kv.memory import DeviceMemory, HostMemory, host_address
from aio_kv.transfer import LandingRegion

__all__ = ["ArenaMemory", "DeviceSlots", "HostSlots"]

# Slabs that hardware may still read or write, because a device did not answer: never given back.
_leaked: list[object] = []


class ArenaMemory(Protocol):
    """A slab cut into slots. Its bytes are the arena's; users get views for as long as they have a lease."""

    def target(self, slot: int) -> HostMemory | DeviceMemory:
        """The memory of a slot, to be read into."""

    def view(self, slot: int, nbytes: int) -> memoryview | DevicePointer:
        """The first bytes of a slot, for a user."""

    async def aclose(self, session: ReaderSession) -> None:
        """Give the slab back; nothing may use it any more."""

    def leak(self) -> None:
        """Keep the slab for ever instead."""


class HostSlots:
    """Host memory on huge pages, registered with the ring and, where there is a device, pinned."""

    def __init__(self, memory: memoryview, region: LandingRegion, slot_nbytes: int) -> None:
        self._memory = memory
        self._region = region
        self._slot_nbytes = slot_nbytes
        self._base = host_address(memory, writable=True, what="arena").address

    @classmethod
    async def open(cls, reader: ExpertReader, slots: int, slot_nbytes: int) -> HostSlots:
        """Take the memory in a thread, since that touches all of it, and register it. Raises MemoryError."""
        binding = reader.session.binding
        memory, cancelled = await binding.run_in_thread(lambda: allocate_host(slots * slot_nbytes))
        if cancelled is not None:
            raise cancelled
        return cls(memory, await reader.register_landing_region(memory), slot_nbytes)

    def target(self, slot: int) -> HostMemory:
        """See `ArenaMemory.target`."""
        return HostMemory(self._base + slot * self._slot_nbytes, self._slot_nbytes, self._memory)

    def view(self, slot: int, nbytes: int) -> memoryview:
        """See `ArenaMemory.view`. Read-only: an expert is shared by all that have it."""
        start = slot * self._slot_nbytes
        return self._memory[start : start + nbytes].toreadonly()

    async def aclose(self, session: ReaderSession) -> None:
        """See `ArenaMemory.aclose`. The memory itself goes with the last view of it."""
        await self._region.aclose()

    def leak(self) -> None:
        """See `ArenaMemory.leak`."""
        self._region.abandon()
        _leaked.append(self)


class DeviceSlots:
    """GPU memory."""

    def __init__(self, buffer: DeviceBuffer, slot_nbytes: int) -> None:
        self._buffer = buffer
        self._slot_nbytes = slot_nbytes
        self._base = buffer.data_ptr()

    @classmethod
    async def open(cls, reader: ExpertReader, device: Device, slots: int, slot_nbytes: int) -> DeviceSlots:
        """Take the memory in a thread. Raises `DeviceError` when the GPU has no room."""
        nbytes = slots * slot_nbytes
        buffer, cancelled = await reader.session.binding.run_in_thread(lambda: DeviceBuffer(nbytes, device))
        if cancelled is not None:
            buffer.close()
            raise cancelled
        return cls(buffer, slot_nbytes)

    def target(self, slot: int) -> DeviceMemory:
        """See `ArenaMemory.target`."""
        return DeviceMemory(self._base + slot * self._slot_nbytes, self._slot_nbytes, self._buffer)

    def view(self, slot: int, nbytes: int) -> DevicePointer:
        """See `ArenaMemory.view`."""
        return DevicePointer(self._base + slot * self._slot_nbytes, nbytes)

    async def aclose(self, session: ReaderSession) -> None:
        """See `ArenaMemory.aclose`. Freeing waits for the GPU, and so happens in a thread."""
        _, cancelled = await session.binding.run_in_thread(self._buffer.close)
        if cancelled is not None:
            raise cancelled

    def leak(self) -> None:
        """See `ArenaMemory.leak`."""
        _leaked.append(self)
