"""Coverage-guided fuzzing of the GGUF parser: `python tests/fuzz_gguf.py [-runs=N] [FOLDER WITH FILES]`.

Needs the package atheris, which is no dependency: it has wheels for few interpreters. The options are libFuzzer's.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["aio_kv.experts"]):
    from aio_kv.errors import CorruptionError, LayoutError
    from aio_kv.experts.gguf_header import read_gguf_header

# One file, written again and again, in memory where there is such a folder.
_FOLDER = tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
_PATH = Path(_FOLDER.name) / "fuzzed.gguf"


def try_one(data: bytes) -> None:
    """Anything but a sound answer or one of the two refusals is found by the fuzzer."""
    _PATH.write_bytes(data)
    try:
        shard = read_gguf_header(_PATH)
    except (CorruptionError, LayoutError):
        return
    for tensor in shard.tensors:
        assert shard.data_start <= tensor.file_offset
        assert tensor.file_offset + (tensor.nbytes or 0) <= len(data)


if __name__ == "__main__":
    atheris.Setup(sys.argv, try_one)
    atheris.Fuzz()
