"""Compiles the fake CUDA driver in `fake_cuda/` when a test asks for it, and keeps the result for the next run."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "fake_cuda"
FLAGS = ["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread"]
# Its own names come first: a real driver in the same process must not answer in its place.
LINK_FLAGS = ["-Wl,-Bsymbolic"]


@cache
def compiler() -> str | None:
    """The C compiler, or None."""
    return shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")


def skip_reason() -> str | None:
    """Why the fake cannot be built here, or None when it can; for `pytest.mark.skipif` and `pytest.skip`."""
    if os.name != "posix" or os.uname().sysname != "Linux":
        return "the fake CUDA driver is for Linux"
    return None if compiler() else "no C compiler to build the fake CUDA driver with"


def _folder() -> Path:
    """A folder of this user's alone: what lies there will be loaded."""
    folder = Path(tempfile.gettempdir()) / f"aio-kv-fake-cuda-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if folder.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o022:
        return Path(tempfile.mkdtemp(prefix="aio-kv-fake-cuda-"))
    return folder


@cache
def build(*, sanitize: str = "") -> Path:
    """Path of the shared object, compiled if its sources or flags have changed.

    Args:
        sanitize: `address`, `undefined` or `thread` to instrument the fake too. Not needed to load it into a process
            that runs under a sanitizer.

    Raises:
        RuntimeError: there is no compiler (ask `skip_reason` first), or the sources do not compile.
    """
    if reason := skip_reason():
        raise RuntimeError(reason)
    flags = [*FLAGS, *([f"-fsanitize={sanitize}"] if sanitize else [])]
    sources = sorted(SOURCES.glob("*.c"))
    digest = hashlib.sha256(" ".join([str(compiler()), *flags, *LINK_FLAGS]).encode())
    for path in [*sources, *sorted(SOURCES.glob("*.h"))]:
        digest.update(path.name.encode() + path.read_bytes())
    target = _folder() / f"fake_cuda-{digest.hexdigest()[:20]}.so"
    if not target.exists():
        _compile([str(compiler()), *flags, *map(str, sources), *LINK_FLAGS], target)
    return target


def _compile(command: list[str], target: Path) -> None:
    """Written under another name and renamed, so that two runs at once do not see half a file."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / "fake.so"
        # A sanitizer that is preloaded into this process has no business in the compiler.
        environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        result = subprocess.run(
            [*command, "-o", str(made)], capture_output=True, text=True, check=False, env=environment
        )
        if result.returncode:
            raise RuntimeError(f"the fake CUDA driver does not compile:\n{result.stderr}")
        os.replace(made, target)
