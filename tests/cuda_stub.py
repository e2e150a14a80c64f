"""A CUDA driver of Python functions that does nothing but answer: for tests of what is asked of a driver."""

import ctypes
from typing import Any

from aio_kv.cuda import table as table_module
from aio_kv.cuda.table import ENTRIES, DriverTable, Entry

__all__ = ["CONTEXTS", "StubDriver"]

CONTEXTS = {0: 0xA000, 1: 0xB000}
TEXTS = {
    1: (b"CUDA_ERROR_INVALID_VALUE", b"invalid argument"),
    2: (b"CUDA_ERROR_OUT_OF_MEMORY", b"out of memory"),
    700: (b"CUDA_ERROR_ILLEGAL_ADDRESS", b"an illegal memory access was encountered"),
}


def put(pointer: int, kind: Any, value: int) -> None:
    kind.from_address(pointer).value = value


class StubDriver:
    """Answers driver calls; `codes` makes a function fail, `hidden` leaves it out, `calls` lists what was called."""

    def __init__(self) -> None:
        self.codes: dict[str, int] = {}
        self.hidden: set[str] = set()
        self.calls: list[str] = []
        self.devices = 2
        self.current = 0x99
        self.mode = 0
        self.capturing: set[int] = set()
        self.stream_contexts: dict[int, int] = {}
        self.pending: set[int] = set()
        self.registered: dict[int, int] = {}
        self.foreign: set[int] = set()
        self.memory = {0x7000_0000: (0x1000, 2, 0)}  # address: nbytes, type, device
        self.made = 0x500
        self._texts = {code: [ctypes.create_string_buffer(t) for t in both] for code, both in TEXTS.items()}
        self._callbacks = {name: self._callback(name, entry) for name, entry in ENTRIES.items()}

    def lookup(self, name: str, entry: Entry) -> int:
        if name in self.hidden:
            return 0
        return ctypes.cast(self._callbacks[name], ctypes.c_void_p).value or 0

    def table(self) -> DriverTable:
        return DriverTable(self.lookup, is_fake=True)

    def count(self, name: str) -> int:
        return self.calls.count(name)

    def _callback(self, name: str, entry: Entry) -> Any:
        def answer(*arguments: Any) -> int:
            self.calls.append(name)
            if self.codes.get(name):
                return self.codes[name]
            handler = getattr(self, name, None)
            return (handler(*(a or 0 for a in arguments)) or 0) if handler else 0

        kinds = (table_module._TYPES[letter] for letter in entry.arguments)
        return ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(answer)

    def new(self, out: int) -> None:
        self.made += 1
        put(out, ctypes.c_uint64, self.made)

    def text(self, code: int, out: int, which: int) -> int:
        if code not in self._texts:
            return 1
        put(out, ctypes.c_uint64, ctypes.addressof(self._texts[code][which]))
        return 0

    def cuGetErrorName(self, code: int, out: int) -> int:
        return self.text(code, out, 0)

    def cuGetErrorString(self, code: int, out: int) -> int:
        return self.text(code, out, 1)

    def cuDeviceGetCount(self, out: int) -> None:
        put(out, ctypes.c_int, self.devices)

    def cuDeviceGet(self, out: int, index: int) -> None:
        put(out, ctypes.c_int, index)

    def cuDeviceGetName(self, out: int, length: int, device: int) -> None:
        ctypes.memmove(out, b"Stub GPU\0", 9)

    def cuDeviceTotalMem(self, out: int, device: int) -> None:
        put(out, ctypes.c_size_t, 80 << 30)

    def cuDeviceGetAttribute(self, out: int, attribute: int, device: int) -> None:
        put(out, ctypes.c_int, {16: 132, 75: 9, 76: 0}[attribute])

    def cuDevicePrimaryCtxRetain(self, out: int, device: int) -> None:
        put(out, ctypes.c_uint64, CONTEXTS[device])

    def cuCtxGetCurrent(self, out: int) -> None:
        put(out, ctypes.c_uint64, self.current)

    def cuCtxSetCurrent(self, context: int) -> None:
        self.current = context

    def cuCtxGetDevice(self, out: int) -> None:
        put(out, ctypes.c_int, {context: index for index, context in CONTEXTS.items()}[self.current])

    def cuThreadExchangeStreamCaptureMode(self, mode: int) -> None:
        old, self.mode = self.mode, ctypes.c_int.from_address(mode).value
        put(mode, ctypes.c_int, old)

    def cuStreamCreate(self, out: int, flags: int) -> None:
        self.new(out)

    def cuStreamCreateWithPriority(self, out: int, flags: int, priority: int) -> None:
        self.new(out)

    def cuCtxGetStreamPriorityRange(self, lowest: int, highest: int) -> None:
        put(lowest, ctypes.c_int, 0)
        put(highest, ctypes.c_int, -5)

    def cuStreamGetCtx(self, stream: int, out: int) -> None:
        put(out, ctypes.c_uint64, self.stream_contexts.get(stream, CONTEXTS[0]))

    def cuStreamIsCapturing(self, stream: int, out: int) -> None:
        put(out, ctypes.c_int, 1 if stream in self.capturing else 0)

    def cuEventCreate(self, out: int, flags: int) -> int:
        self.new(out)
        return 0 if self.current == CONTEXTS[0] and flags == 2 else 201

    def cuEventRecord(self, event: int, stream: int) -> int:
        return 0 if self.current == CONTEXTS[0] else 400

    def cuEventQuery(self, event: int) -> int:
        return 900 if self.mode != 2 else 600 if event in self.pending else 0

    def cuMemAlloc(self, out: int, nbytes: int) -> None:
        put(out, ctypes.c_uint64, 0x7000_0000)

    def cuPointerGetAttribute(self, out: int, attribute: int, address: int) -> int:
        for start, (nbytes, kind, device) in self.memory.items():
            if start <= address < start + nbytes:
                answers = {2: (ctypes.c_uint, kind), 9: (ctypes.c_int, device), 13: (ctypes.c_int, 1)}
                answers |= {11: (ctypes.c_uint64, start), 12: (ctypes.c_size_t, nbytes)}
                put(out, *answers[attribute])
                return 0
        return 1

    def cuPointerGetAttributes(self, count: int, attributes: int, places: int, address: int) -> None:
        for index in range(count):
            attribute = ctypes.c_int.from_address(attributes + 4 * index).value
            self.cuPointerGetAttribute(
                ctypes.c_uint64.from_address(places + 8 * index).value, attribute, address
            )

    def cuMemHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert flags == 3
        if address in self.foreign:
            return 712
        self.registered[address] = nbytes
        return 0

    def cuMemHostUnregister(self, address: int) -> int:
        return 0 if self.registered.pop(address, 0) else 713

    def cuMemHostGetDevicePointer(self, out: int, address: int, flags: int) -> None:
        put(out, ctypes.c_uint64, address + 0x1_0000_0000)

    def cuModuleLoadData(self, out: int, image: int) -> None:
        self.new(out)

    def cuModuleGetFunction(self, out: int, module: int, name: int) -> int:
        self.new(out)
        return 0 if ctypes.string_at(name) in (b"akv_gather", b"akv_scatter") else 500
