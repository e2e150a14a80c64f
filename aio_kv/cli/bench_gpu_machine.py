"""The facts about a machine and its GPU that the figures depend on."""

from __future__ import annotations

import ctypes
import importlib.metadata
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from aio_kv.cli.benches.machine import machine_facts
from aio_kv.cuda import Device, DevicePath

__all__ = ["gpu_machine_facts"]

_PCI_BUS, _PCI_DEVICE, _PCI_DOMAIN = 33, 34, 50  # CUdevice_attribute


def gpu_machine_facts(directory: str, path: DevicePath) -> dict[str, Any]:
    """The machine, its disk below `directory`, its GPU and drivers, in plain values; None for what is not known."""
    device = path.device
    facts = machine_facts(directory, loop="asyncio", fio=None)
    del facts["fio"]  # takes no part here
    return {
        "gpu": device.name,
        "gpu_index": device.index,
        "gpu_memory_nbytes": device.memory_nbytes,
        "gpu_architecture": device.architecture,
        "driver": _driver_version(),
        "cuda_driver": _cuda_version(device),
        "cuda_bindings": _version("cuda-bindings"),
        "pcie": _pcie(device),
        "kernels": "in force" if path.kernels is not None else path.kernels_refusal,
        "batch_copies": path.has_batch_copies,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **facts,
    }


def _driver_version() -> str | None:
    found = re.search(r"\s(\d+\.\d+(?:\.\d+)*)\s", _text(Path("/proc/driver/nvidia/version")))
    return found[1] if found else None


def _cuda_version(device: Device) -> str:
    """The newest CUDA that the driver knows."""
    number = ctypes.c_int()
    device.call("cuDriverGetVersion", ctypes.byref(number))
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def _pcie(device: Device) -> str | None:
    """Speed and width of the GPU's link, as the kernel tells them; many virtual machines do not."""
    if device.table.is_fake:
        return None
    domain, bus, slot = (_attribute(device, number) for number in (_PCI_DOMAIN, _PCI_BUS, _PCI_DEVICE))
    folder = Path(f"/sys/bus/pci/devices/{domain:04x}:{bus:02x}:{slot:02x}.0")
    speed, width = _text(folder / "current_link_speed").strip(), _text(folder / "current_link_width").strip()
    return f"{speed} x{width}" if speed and width else None


def _attribute(device: Device, number: int) -> int:
    handle, value = ctypes.c_int(), ctypes.c_int()
    device.call("cuDeviceGet", ctypes.byref(handle), device.index)
    device.call("cuDeviceGetAttribute", ctypes.byref(value), number, handle)
    return value.value


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
