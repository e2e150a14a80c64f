"""Giving the page cache back what buffered reads have put there, beside the event loop.

The advice that drops pages takes as long as it takes: a thread of its own gives it, in the order of the reads.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Iterable

from aio_kv.experts.segments import DirectSegment
from aio_kv.experts.shards import ShardFiles, drop_range

__all__ = ["PageCacheDropper"]

_log = logging.getLogger("aio_kv")


class PageCacheDropper:
    """A thread that drops ranges of shards from the page cache until it is closed."""

    def __init__(self, files: ShardFiles) -> None:
        self._fds = [
            os.dup(fd) for fd in files.fds()
        ]  # of its own: the last drops come when the files are closed
        self._queue: queue.SimpleQueue[tuple[DirectSegment, ...] | threading.Event | None] = (
            queue.SimpleQueue()
        )
        self._lock = threading.Lock()
        self._backlog_nbytes = 0
        self.nbytes_dropped = 0
        self._has_complained = False
        self._thread = threading.Thread(target=self._run, name="aio_kv-page-cache")
        self._thread.start()

    @property
    def backlog_nbytes(self) -> int:
        """Bytes that were read and not dropped yet."""
        with self._lock:
            return self._backlog_nbytes

    def drop(self, segments: Iterable[DirectSegment]) -> None:
        """Have ranges dropped soon; returns at once."""
        ranges = tuple(segments)
        with self._lock:
            self._backlog_nbytes += sum(segment.nbytes for segment in ranges)
        self._queue.put(ranges)

    def wait(self) -> None:
        """Block until everything handed over before is dropped."""
        reached = threading.Event()
        self._queue.put(reached)
        reached.wait()

    def close(self) -> None:
        """Drop what was handed over and end the thread. Blocks; again does nothing."""
        self._queue.put(None)
        self._thread.join()
        while self._fds:
            os.close(self._fds.pop())

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            if isinstance(job, threading.Event):
                job.set()
                continue
            for segment in job:
                self._drop(segment)

    def _drop(self, segment: DirectSegment) -> None:
        try:
            drop_range(self._fds[segment.shard], segment.file_offset, segment.nbytes)
        except OSError as error:  # the bytes are where they belong: this costs memory, not correctness
            if not self._has_complained:
                self._has_complained = True
                _log.warning("expert reads stay in the page cache: %s", error)
        with self._lock:
            self._backlog_nbytes -= segment.nbytes
            self.nbytes_dropped += segment.nbytes
