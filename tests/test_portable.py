"""The oracle on systems that lack what Linux has: each piece is taken away before aio_kv is imported."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, sys
for name in sys.argv[2:]:
    if name == "fcntl":
        sys.modules["fcntl"] = None
    elif hasattr(os, name):
        delattr(os, name)

from aio_kv import GroupKey, GroupLayout, KvKind, LayerFiles, PosixBackend, Read, positional

layout = GroupLayout(2, 3, 2, 3, 7, 5)
with PosixBackend(sys.argv[1], layout, create=True) as backend:
    for group in range(layout.num_groups):
        backend.write_from_host(layout.key(group), bytes([group]) * 105)
    backend.sync()
    backend.drop_page_cache()
    if "preadv" in sys.argv or "O_DIRECT" in sys.argv:
        assert not backend.is_direct and backend.files.direct_refusal
with PosixBackend(sys.argv[1], layout, create=True) as backend:
    for group in range(layout.num_groups):
        into = bytearray(105)
        backend.read([Read(layout.key(group), into)])
        assert into == bytes([group]) * 105, group
print(positional._read_once.__name__, positional._write_once.__name__)
"""
EXTRAS = ["fcntl", "posix_fallocate", "posix_fadvise", "fdatasync", "O_DIRECT", "O_NOFOLLOW", "O_DIRECTORY"]
MISSING = [
    (["O_DIRECT"], "_preadv _pwritev"),
    (["preadv", "pwritev"], "_pread _pwrite"),
    (
        [*EXTRAS, "preadv", "pwritev", "pread", "pwrite", "statvfs", "fchmod"],
        "_seek_and_read _seek_and_write",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("missing", "calls"), MISSING, ids=["no direct", "no vectors", "bare"])
def test_round_trip_without(tmp_path: Path, missing: list[str], calls: str) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "kv"), *missing]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == calls
