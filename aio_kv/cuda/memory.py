"""Memory on the GPU and memory that the GPU can reach, with whom it belongs to.

Freeing is explicit. After a fault that the context does not survive nothing is freed or unregistered any more, and
what it lies in is kept for ever: the hardware may still read or write it.
"""

from __future__ import annotations

import bisect
import ctypes
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

from aio_kv.cuda.device import Device
from aio_kv.errors import ClosedError, DeviceError, LayoutError
from aio_kv.memory import host_address, host_view

__all__ = ["DeviceBuffer", "DevicePointer", "PinnedBuffer", "PinnedPiece"]

_PAGE = 4096
_PIECE_NBYTES_MAX = 1 << 30  # io_uring takes no larger buffer, and both should know the same pieces
_PORTABLE_AND_MAPPED = 1 | 2  # CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP
_ALREADY_REGISTERED = 712

# Host memory that hardware may still touch after a fault: never given back.
_leaked: list[object] = []


@dataclass(frozen=True, slots=True)
class DevicePointer:
    """`nbytes` bytes of GPU memory at `address`, on the caller's word. It stays the caller's, who keeps it alive."""

    address: int
    nbytes: int

    def __post_init__(self) -> None:
        for name, value in (("address", self.address), ("nbytes", self.nbytes)):
            if value.__class__ is not int or not 0 <= value < 1 << 64:
                raise LayoutError(f"DevicePointer.{name} is {value!r:.80}: must be an integer, 0 or more")

    def data_ptr(self) -> int:
        """Return the device address."""
        return self.address

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return _array_interface(self.address, self.nbytes)


class DeviceBuffer:
    """`nbytes` bytes of GPU memory, owned until `close`. A context manager, and a destination as it is.

    Its bytes are undefined at first. Close it when nothing uses it any more: freeing waits for the device. Raises
    `LayoutError` for a bad length, `DeviceError` when the GPU has no room.
    """

    def __init__(self, nbytes: int, device: Device) -> None:
        if nbytes.__class__ is not int or nbytes < 1:
            raise LayoutError(f"nbytes is {nbytes!r:.80}: must be an integer, 1 or more")
        device.check_usable()
        self.nbytes = nbytes
        self.device = device
        address = ctypes.c_uint64()
        with device.activated(), device.relaxed():
            device.call("cuMemAlloc", ctypes.byref(address), nbytes)
        self._address = address.value

    def data_ptr(self) -> int:
        """Return the device address. Raises `ClosedError` after `close`."""
        if not self._address:
            raise ClosedError("this DeviceBuffer is closed: make a new one")
        return self._address

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return _array_interface(self.data_ptr(), self.nbytes)

    def close(self) -> None:
        """Free the memory; again does nothing. Raises `DeviceError`. After a fault the memory is leaked."""
        address, self._address = self._address, 0
        # With the context gone, its memory is gone as well.
        if address and self.device.fault is None and not self.device.is_closed:
            with self.device.activated(), self.device.relaxed():
                self.device.call("cuMemFree", address)

    def __enter__(self) -> DeviceBuffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class PinnedPiece(NamedTuple):
    """One registered stretch of host memory and where the device sees it. `is_ours`: we unregister it."""

    address: int
    nbytes: int
    device_address: int
    is_ours: bool


class PinnedBuffer:
    """Host memory that the GPU reads and writes directly, registered until `close`. A context manager.

    Args:
        memory: writable host memory, page aligned, such as `aio_kv.allocate_host` returns. It stays the caller's and
            is kept, and kept from being resized, until `close`.
        device: the GPU to register with; the memory is then pinned for all GPUs.

    Registering takes milliseconds per GiB and touches every page: do it at open, on a worker thread. Memory that
    someone else registered before counts as registered and stays so at close. Raises `LayoutError`, `DeviceError`.
    """

    def __init__(self, memory: Any, device: Device) -> None:
        device.check_usable()
        host = host_address(memory, writable=True, what="memory")
        if host.nbytes == 0 or host.address % _PAGE:
            raise LayoutError(
                f"memory is {host.nbytes} bytes at {host.address:#x}: must be at least 1 byte, aligned to {_PAGE}; "
                "aio_kv.allocate_host gives such memory"
            )
        self.device = device
        self.address = host.address
        self.nbytes = host.nbytes
        self._owner: object = host.owner
        self._pieces: list[PinnedPiece] = []
        try:
            with device.activated(), device.relaxed():
                for start in range(0, host.nbytes, _PIECE_NBYTES_MAX):
                    nbytes = min(_PIECE_NBYTES_MAX, host.nbytes - start)
                    self._pieces.append(_register(device, host.address + start, nbytes))
        except BaseException:
            self.close()
            raise

    @property
    def pieces(self) -> tuple[PinnedPiece, ...]:
        """The registered stretches, in order; none after `close`."""
        return tuple(self._pieces)

    @property
    def view(self) -> memoryview:
        """The bytes. Raises `ClosedError` after `close`."""
        self._check_open()
        return host_view(self._owner, writable=True, what="memory")

    def device_address(self, offset: int = 0) -> int:
        """Where the device sees the byte at `offset`; contiguous within a piece only.

        Raises `LayoutError` for an offset outside, `ClosedError`.
        """
        self._check_open()
        if not 0 <= offset < self.nbytes:
            raise LayoutError(f"offset is {offset}: must be 0 to {self.nbytes - 1}")
        wanted = self.address + offset
        piece = self._pieces[bisect.bisect_right(self._pieces, wanted, key=lambda found: found.address) - 1]
        return piece.device_address + (wanted - piece.address)

    def close(self) -> None:
        """Unregister what was registered here; again does nothing. Close it when no copy uses it any more.

        Raises `DeviceError` for the first piece that could not be unregistered; memory that is still registered, or
        that a fault left in use, is kept for ever rather than freed.
        """
        pieces, self._pieces = self._pieces, []
        owner, self._owner = self._owner, None
        ours = [piece for piece in pieces if piece.is_ours]
        if ours and (self.device.is_closed or self.device.fault is not None):
            _leaked.append(owner)
            return
        refusal: DeviceError | None = None
        for piece in ours:
            try:
                with self.device.activated(), self.device.relaxed():
                    self.device.call("cuMemHostUnregister", piece.address)
            except DeviceError as error:
                refusal = refusal or error
        if refusal is not None:
            _leaked.append(owner)
            raise refusal

    def __enter__(self) -> PinnedBuffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if not self._pieces:
            raise ClosedError("this PinnedBuffer is closed: make a new one")


def _register(device: Device, address: int, nbytes: int) -> PinnedPiece:
    code = device.table.function("cuMemHostRegister")(address, nbytes, _PORTABLE_AND_MAPPED)
    if code not in (0, _ALREADY_REGISTERED):
        raise device.failure("cuMemHostRegister", code)
    try:
        first = _device_address(device, address)
        # Someone else's registration may cover a part only, which copies would notice too late.
        if code and _device_address(device, address + nbytes - 1) - first != nbytes - 1:
            raise DeviceError(
                f"{nbytes} bytes of host memory at {address:#x} are registered with CUDA in pieces already",
                hint="unregister them, or hand over memory that nobody has registered",
            )
    except BaseException:
        if not code:
            device.table.function("cuMemHostUnregister")(address)
        raise
    return PinnedPiece(address, nbytes, first, is_ours=not code)


def _device_address(device: Device, address: int) -> int:
    found = ctypes.c_uint64()
    device.call("cuMemHostGetDevicePointer", ctypes.byref(found), address, 0)
    return found.value


def _array_interface(address: int, nbytes: int) -> dict[str, Any]:
    return {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3}
