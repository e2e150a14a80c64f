"""What a process does to itself so that the kernel treats it as a container would. Not to be undone: for programs run
by `processes.run_program` only.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import resource
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from aio_kv import EngineOptions, GroupLayout, LayerFiles, PosixBackend, Read, Scatter, Write, open_backend
from aio_kv.layout import GroupKey

# The numbers of these calls are the same on every architecture.
URING_CALLS = {"setup": 425, "enter": 426, "register": 427}
OPTIONS = EngineOptions(
    staging_nbytes=4 << 20, threads=3, queue_depth=32, op_nbytes_max=256 << 10, bulk_nbytes=1 << 20
)
LAYOUTS = (
    GroupLayout(2, 8, 2, 16, 64, 2, alignment=4096),
    GroupLayout(1, 6, 2, 32, 64, 1),
    GroupLayout(2, 4, 1, 5, 70, 2),
)

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _PR_CAPBSET_DROP = 38, 22, 24
_SECCOMP_MODE_FILTER, _SECCOMP_RET_ERRNO, _SECCOMP_RET_ALLOW = 2, 0x00050000, 0x7FFF0000
_CAP_IPC_LOCK = 14
_CAPABILITY_VERSION_3 = 0x20080522
_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: Any) -> None:
    if getattr(_libc, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def refuse_calls(numbers: list[int], error_number: int) -> None:
    """Have these system calls answered with an errno from here on, as a container's seccomp profile does."""
    # Classic BPF: load the call's number; compare with each, jumping to the refusal at the end; allow.
    load = struct.pack("HBBI", 0x20, 0, 0, 0)
    tests = [
        struct.pack("HBBI", 0x15, len(numbers) - index, 0, number) for index, number in enumerate(numbers)
    ]
    allow = struct.pack("HBBI", 0x06, 0, 0, _SECCOMP_RET_ALLOW)
    refuse = struct.pack("HBBI", 0x06, 0, 0, _SECCOMP_RET_ERRNO | error_number)
    code = ctypes.create_string_buffer(b"".join([load, *tests, allow, refuse]))
    program = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(numbers) + 3, ctypes.addressof(code)), 16
    )
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _call("prctl", _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0)


def refuse_uring(error_number: int, *calls: str) -> None:
    """Refuse io_uring, or only some of its calls."""
    refuse_calls([URING_CALLS[call] for call in calls or URING_CALLS], error_number)


def limit_locked_memory(nbytes: int) -> None:
    """Lower RLIMIT_MEMLOCK, and give up the capability that lets root ignore it."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (nbytes, nbytes))
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    data = ctypes.create_string_buffer(24)
    _call("capget", header, data)
    words = list(struct.unpack("6I", data.raw))
    for index in range(3):
        words[index] &= ~(1 << _CAP_IPC_LOCK)
    _call("capset", header, struct.pack("6I", *words))


def content_of(layout: GroupLayout, group: int, version: int) -> bytes:
    return np.random.default_rng([group, version]).bytes(layout.payload_nbytes)


async def round_trip(
    folder: Path, layout: GroupLayout, backend: str, options: EngineOptions
) -> dict[str, Any]:
    """Every call of a backend once, compared with the oracle; returns what the backend says of itself."""
    payload, every = layout.payload_nbytes, np.arange(layout.num_groups)
    with LayerFiles(folder, layout, create=True) as files:
        async with open_backend(files, backend=backend, options=options) as kv:
            source = b"".join(content_of(layout, group, 1) for group in every.tolist())
            await kv.write_groups(every, source)
            await kv.write([Write(GroupKey(0, 1, 0, layout.kinds[0]), content_of(layout, 0, 2))])
            block = b"".join(content_of(layout, group, 3) for group in range(layout.groups_per_block))
            await kv.write_block(0, 2, block)
            await kv.flush()
            packed = bytearray(len(source))
            await kv.read_groups(every, packed)
            offsets = 64 + every[::-1] * payload
            scattered = bytearray(len(source) + 64)
            await kv.read_groups(every, Scatter(scattered, offsets))
            one = bytearray(layout.groups_per_block * payload)
            await kv.read_block(0, 2, one)
            assert bytes(one) == block
            cancelled = kv.read_groups(every, bytearray(len(source)))
            cancelled.cancel()
            await cancelled.outcome()
            statistics = kv.statistics()
            said = {
                "rung": kv.rung,
                "refusals": [[refusal.rung, refusal.reason, refusal.hint] for refusal in kv.refusals],
                "staging_nbytes": statistics.staging_nbytes,
                "registered_nbytes": statistics.registered_nbytes,
                "fixed_ops": statistics.engine.fixed_ops,
            }
        with PosixBackend(files) as oracle:
            for group in every.tolist():
                wanted = bytearray(payload)
                oracle.read([Read(layout.key(group), wanted)])
                assert packed[group * payload :][:payload] == wanted, group
                assert scattered[offsets[group] :][:payload] == wanted, group
    return said


def say_round_trips(folder: str, backend: str = "auto", **changes: Any) -> None:
    """Do a round trip for several layouts and print what the backend said, one JSON object per layout."""
    options = replace(OPTIONS, **changes)
    for index, layout in enumerate(LAYOUTS):
        print(json.dumps(asyncio.run(round_trip(Path(folder) / str(index), layout, backend, options))))
