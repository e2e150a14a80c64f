"""Running `aio-kv` in this process, as the console script does, and damaging what `aio-kv demo` has written."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from aio_kv import LayerFiles
from aio_kv.cli import main


@dataclass(frozen=True)
class Ran:
    """What a run of the command left."""

    status: int
    stdout: str
    stderr: str

    @property
    def report(self) -> dict[str, Any]:
        """The JSON in the last line."""
        report: dict[str, Any] = json.loads(self.stdout.splitlines()[-1])
        return report


def run_demo(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *arguments: str) -> Ran:
    """Run `aio-kv demo`."""
    return run_command(monkeypatch, capfd, "demo", *arguments)


def run_command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *words: object) -> Ran:
    """Run the program with these words behind its name, with stdout and stderr caught below Python."""
    monkeypatch.setattr(sys, "argv", ["aio-kv", *map(str, words)])
    capfd.readouterr()
    try:
        main()
    except SystemExit as ended:
        status = int(ended.code or 0)
    else:
        status = 0
    caught = capfd.readouterr()
    return Ran(status, caught.out, caught.err)


def flip_byte(files: LayerFiles, group_id: int, offset: int) -> None:
    """Change one byte of a group on the disk, `offset` bytes into it."""
    layout = files.layout
    layer, index = divmod(group_id, layout.groups_per_layer)
    with open(files.path_of(layer), "r+b", buffering=0) as file:
        place = index * layout.stride + offset
        byte = os.pread(file.fileno(), 1, place)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 0x10]), place)
        os.fsync(file.fileno())
