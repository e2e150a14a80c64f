"""Uses an installed aio_kv, in an empty directory: python smoke.py

Writes groups and reads them back through every backend that there is, compares them with the oracle, runs the command
line, and looks at what the installation holds. Ends with status 0 and one line that says what was in force.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import aio_kv
from aio_kv import GroupLayout, PosixBackend, Read
from aio_kv.engine import has_extension

LAYOUT = GroupLayout(num_layers=2, num_blocks=16, num_kv_heads=4, block_size=16, head_dim=128, itemsize=2)


async def round_trip(backend: str, ram_bytes: int = 0) -> str:
    """Write through one backend, read through it and through the oracle; returns the rung."""
    ids = LAYOUT.group_ids(layers=[0, 1], blocks=[3, 1], kv_heads=range(4), kinds=LAYOUT.kinds)
    source = os.urandom(len(ids) * LAYOUT.payload_nbytes)
    folder = f"kv-{backend}-{ram_bytes}"
    async with aio_kv.open_backend(folder, LAYOUT, backend=backend, ram_bytes=ram_bytes) as kv:
        await kv.write_groups(ids, source)
        target = bytearray(len(source))
        await kv.read_groups(ids, target)
        assert target == source, f"{backend}: other bytes came back"
        await kv.flush()
        rung = getattr(kv, "rung", "") or kv.backing.rung
    with PosixBackend(folder, LAYOUT) as oracle:
        for index, group in enumerate(ids.tolist()):
            one = bytearray(LAYOUT.payload_nbytes)
            oracle.read([Read(LAYOUT.key(group), one)])
            at = index * LAYOUT.payload_nbytes
            assert one == source[at : at + LAYOUT.payload_nbytes], f"{backend}: the oracle sees other bytes"
    return str(rung)


def command(*arguments: str) -> str:
    """Run a command to its end and return what it printed."""
    done = subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=60)
    return done.stdout


def check_installation() -> None:
    """The files that a wheel easily forgets, the version, and nothing from the checkout."""
    package = Path(aio_kv.__file__).parent
    assert Path(sys.prefix) in package.parents, f"{package} is not in this environment"
    for name in ("py.typed", "cuda/kernels.cu", "cli/data/moving_attention.txt"):
        assert (package / name).is_file(), f"{name} was not installed"
    version = importlib.metadata.version("aio-kv")
    assert aio_kv.__version__ == version, f"__version__ is {aio_kv.__version__}, the metadata say {version}"
    tops = {str(path).split("/")[0] for path in importlib.metadata.files("aio-kv") or ()}
    assert not tops & {"tests", "native", "docs", "scripts"}, f"installed beside the package: {tops}"


def check_commands() -> None:
    """The script, the module, and shell completion."""
    script = str(Path(sys.executable).parent / "aio-kv")
    assert "doctor" in command(script, "--help")
    said = json.loads(command(sys.executable, "-m", "aio_kv", "doctor", "--json").splitlines()[-1])
    assert said["rung"], "the doctor says no rung"
    os.environ.update(_AIO_KV_COMPLETE="complete_bash", COMP_WORDS="aio-kv do", COMP_CWORD="1")
    assert command(script).split() == ["doctor"]


def main() -> None:
    """Check everything."""
    check_installation()
    if sys.platform == "linux":
        assert has_extension(), "the compiled extension is missing"
    rungs = [asyncio.run(round_trip("auto")), asyncio.run(round_trip("threads"))]
    rungs.append(asyncio.run(round_trip("auto", 1 << 20)) + " under a cascade")
    check_commands()
    sys.stdout.write(", ".join(rungs) + "\n")


if __name__ == "__main__":
    main()
