"""Work in a forked child, programs in a process of their own, and what the kernel tells of a process's memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
_CHILD_SECONDS = 30

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="this system has no /proc")


def in_child(work: Callable[[], None]) -> None:
    """Run `work` in a forked child; fail with its traceback if it raises, dies or does not end."""
    with living_child(work):
        pass


@contextmanager
def living_child(work: Callable[[], None]) -> Iterator[int]:
    """Run `work` in a forked child beside the body; the child is waited for at the end of it."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _be_child(work, reader, writer)
    os.close(writer)
    try:
        yield pid
    finally:
        with os.fdopen(reader) as pipe:
            said = pipe.read()
        _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, said or f"the child ended with status {status:#x}"


def _be_child(work: Callable[[], None], reader: int, writer: int) -> None:
    code = 1
    try:
        os.close(reader)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_CHILD_SECONDS)  # a child that hangs must not hang the parent
        work()
        code = 0
    except BaseException:
        os.write(writer, traceback.format_exc().encode())
    finally:
        os._exit(code)


def run_program(program: str, *arguments: str, timeout: float = 60) -> str:
    """Run Python source in a new interpreter that finds this package and the tests' modules; return its stdout."""
    paths = os.pathsep.join([str(TESTS), *(path for path in sys.path if path)])
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"{done.stderr}\n{done.stdout}"
    return done.stdout


def mapping_at(address: int) -> dict[str, int]:
    """The numbers that /proc/self/smaps tells of the mapping that holds an address, in bytes; empty: there is none."""
    found: dict[str, int] = {}
    is_here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            first, last = (int(number, 16) for number in name.split("-"))
            is_here = first <= address < last
        elif is_here and rest.endswith("kB"):
            found[name[:-1]] = int(rest.split()[0]) * 1024
    return found


def resident_nbytes() -> int:
    """How much memory of this process is in RAM."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS:"))


def has_huge_pages() -> bool:
    """Whether memory that asks for huge pages may get them."""
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return path.exists() and "[never]" not in path.read_text()


def require_locked_memory(nbytes: int) -> None:
    """Skip where not even the hard limit allows so much: a test can lower a limit, not raise it."""
    import resource  # there is none on Windows

    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if hard != resource.RLIM_INFINITY and hard < nbytes:
        pytest.skip(f"the hard limit of locked memory is {hard} bytes")
