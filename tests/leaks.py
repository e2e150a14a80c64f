"""What a process holds: descriptors, threads, engines. A test must leave as much as it found."""

from __future__ import annotations

import gc
import os
import threading
import time
from dataclasses import dataclass

from aio_kv.engine import native

# A thread that was joined is gone from Python's view a moment before the kernel has taken its entry away, and there
# is nothing to wait for but the entry itself.
_SETTLE_SECONDS = 5.0


@dataclass(frozen=True)
class Holdings:
    """Everything that could leak, by name."""

    fds: frozenset[str]
    threads: frozenset[str]
    engines: frozenset[str]

    def beyond(self, earlier: Holdings) -> dict[str, list[str]]:
        """What is here and was not there."""
        pairs = {
            "descriptors": self.fds - earlier.fds,
            "threads": self.threads - earlier.threads,
            "engines": self.engines - earlier.engines,
        }
        return {what: sorted(more) for what, more in pairs.items() if more}


def holdings() -> Holdings:
    """What this process holds now."""
    return Holdings(_open_fds(), _threads(), _running_engines())


def leaked_since(before: Holdings) -> dict[str, list[str]]:
    """What a test left behind, after garbage and dying threads have had their time."""
    found = holdings().beyond(before)
    if found:
        gc.collect()
    until = time.monotonic() + _SETTLE_SECONDS
    while (found := holdings().beyond(before)) and time.monotonic() < until:
        time.sleep(0.001)
    return found


def _open_fds() -> frozenset[str]:
    if not os.path.isdir("/proc/self/fd"):
        return frozenset()
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{fd} -> {os.readlink(f'/proc/self/fd/{fd}')}")
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
    return frozenset(found)


def _threads() -> frozenset[str]:
    # trio keeps the threads of its guest mode, in which anyio's plugin runs it, for ten seconds: not ours to count.
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    spared = {str(number) for number, name in names.items() if name.startswith("Trio thread")}
    found = {
        f"Python thread {name} ({number})" for number, name in names.items() if str(number) not in spared
    }
    if os.path.isdir("/proc/self/task"):
        found |= {f"kernel thread {task}" for task in os.listdir("/proc/self/task") if task not in spared}
    return frozenset(found)


def _running_engines() -> frozenset[str]:
    return frozenset(f"engine {id(engine):#x}" for engine in list(native._engines) if not engine.is_closed)
