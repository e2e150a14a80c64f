"""The files that hold a KV cache: one preallocated file per layer, in one or several directories.

`LayerFiles` owns the descriptors and the lock of each directory. Backends borrow the descriptors, so that the
oracle and a fast backend can look at the same files in one process.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from aio_kv.creation import (
    DirectoryPlan,
    DirectoryState,
    complete_creation,
    make_directory,
    open_regular,
    orphaned,
    read_header,
)
from aio_kv.direct import DirectAlignment, probe_direct
from aio_kv.errors import (
    BusyError,
    ClosedError,
    CorruptionError,
    LayoutError,
    StorageError,
    UnavailableError,
    storage_error,
)
from aio_kv.header import Header
from aio_kv.integers import check_index
from aio_kv.layout import GroupLayout

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows: directories are not locked there.
    fcntl = None

__all__ = ["LayerFiles", "PathLike"]

PathLike = str | os.PathLike[str]


class LayerFiles:
    """The open files of one layout.

    Layer `l` is `layer_{l:05d}.kv` in `path[l % n]`, where `path` is one directory or a sequence of n of
    them. Opening takes an advisory lock on each directory (shared with `read_only`), checks header and file
    sizes, and opens every file twice where direct I/O works: through the page cache and past it.

    Args:
        path: existing directories. With `create`, a missing last component is made.
        layout: the geometry; must be what the files were made with.
        create: make the files where there are none, or go on with an interrupted creation. What exists is
            opened after the same checks.
        read_only: open for reading; several processes may then share the directories.
        model: free text that says which model and revision the state belongs to; must match as well.

    Raises:
        LayoutError: the directories hold another geometry, model, version or order, or files without a
            header.
        CorruptionError: a header or layer file is damaged, missing or of the wrong size.
        BusyError: another opener holds a directory.
        StorageError: the system refused something; ENOSPC appears here, at creation, and not in service.

    Whatever is raised, no descriptor stays open and no lock is held. Closing is up to the owner: use `with`.
    Not thread-safe against `close`: nobody may use a descriptor while or after it runs.
    """

    def __init__(
        self,
        path: PathLike | Sequence[PathLike],
        layout: GroupLayout,
        *,
        create: bool = False,
        read_only: bool = False,
        model: str = "",
    ) -> None:
        if not isinstance(layout, GroupLayout):
            raise LayoutError(f"layout is {layout!r:.80}: must be a GroupLayout")
        if create and read_only:
            raise LayoutError(
                "create and read_only are both set: files cannot be made read-only; set one of them"
            )
        self._layout = layout
        self._read_only = read_only
        self._directories = _as_directories(path, layout)
        self._lock_fds: list[int] = []
        self._buffered_fds: list[int] = []
        self._direct_fds: list[int] = []
        self._direct_alignment: DirectAlignment | None = None
        self._direct_refusal: str | None = None
        self._closed = False
        self._pid = os.getpid()
        try:
            self._open(self._plans(model), create)
        except BaseException:
            self.close()
            raise

    @property
    def layout(self) -> GroupLayout:
        """The geometry of the files."""
        return self._layout

    @property
    def read_only(self) -> bool:
        """Whether the files are open for reading only."""
        return self._read_only

    @property
    def directories(self) -> tuple[str, ...]:
        """The absolute paths of the directories, in the order given."""
        return self._directories

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def direct_alignment(self) -> DirectAlignment | None:
        """What direct I/O on these files asks for, found by trying; None where it does not work."""
        return self._direct_alignment

    @property
    def direct_refusal(self) -> str | None:
        """Why direct I/O does not work here, or None where it does."""
        return self._direct_refusal

    def path_of(self, layer: int) -> str:
        """Return the path of a layer's file. Raises `LayoutError` for a layer that does not exist."""
        return self._path(check_index(layer, what="layer", limit=self._layout.num_layers))

    def nbytes_of(self, layer: int) -> int:
        """Return the length of a layer's file. Raises `LayoutError` for a layer that does not exist."""
        check_index(layer, what="layer", limit=self._layout.num_layers)
        return self._layout.nbytes_per_layer

    def fd(self, layer: int, direct: bool = False) -> int:
        """Return the descriptor of a layer's file; it stays owned by this object.

        Raises `LayoutError` for a layer that does not exist, `ClosedError` after close, and
        `UnavailableError` where `direct` is asked for and direct I/O does not work.
        """
        return self._table(direct)[check_index(layer, what="layer", limit=self._layout.num_layers)]

    def fds(self, direct: bool = False) -> list[int]:
        """Return the descriptors of all layers in order, as a new list; raises as `fd` does."""
        return list(self._table(direct))

    def sync(self) -> None:
        """Make everything written so far durable (fdatasync on each file). Blocks. Raises `StorageError`."""
        sync = getattr(os, "fdatasync", os.fsync)
        for layer, fd in enumerate(self._table(direct=False)):
            try:
                sync(fd)
            except OSError as error:
                raise _translated(error, "sync", self._path(layer)) from error

    def drop_page_cache(self) -> None:
        """Push the files out of the page cache, so that the next read comes from the disk. Blocks.

        Dirty pages survive the kernel's advice, so they are written first. Does nothing on systems without
        it.
        """
        advise = getattr(os, "posix_fadvise", None)
        if not self._read_only:
            self.sync()
        for layer, fd in enumerate(self._table(direct=False)):
            if advise is None:
                return
            try:
                advise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            except OSError as error:
                raise _translated(error, "drop cache", self._path(layer)) from error

    def close(self) -> None:
        """Close every descriptor and release the locks; calling it again does nothing."""
        self._closed = True
        # The locks go last: nobody else may enter while a file is still open here.
        for table in (self._direct_fds, self._buffered_fds):
            while table:
                os.close(table.pop())
        while self._lock_fds:
            fd = self._lock_fds.pop()
            if fcntl is not None and os.getpid() == self._pid:
                # A forked child has the descriptor too, and with it the lock would live on.
                fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def __enter__(self) -> LayerFiles:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "read-only" if self._read_only else "open"
        return f"<LayerFiles {', '.join(self._directories)} ({state})>"

    def _path(self, layer: int) -> str:
        directory = self._directories[layer % len(self._directories)]
        return os.path.join(directory, f"layer_{layer:05d}.kv")

    def _table(self, direct: bool) -> list[int]:
        if self._closed:
            raise ClosedError(f"the files in {self._directories[0]} are closed")
        if direct and self._direct_alignment is None:
            hint = "use the buffered descriptors (direct=False)"
            raise UnavailableError(f"direct I/O does not work here: {self._direct_refusal}", hint=hint)
        return self._direct_fds if direct else self._buffered_fds

    def _plans(self, model: str) -> list[DirectoryPlan]:
        count = len(self._directories)
        return [
            DirectoryPlan(
                path=directory,
                header=Header(self._layout, model, directory_index=index, directory_count=count),
                files=tuple(self._path(layer) for layer in range(index, self._layout.num_layers, count)),
            )
            for index, directory in enumerate(self._directories)
        ]

    def _open(self, plans: list[DirectoryPlan], create: bool) -> None:
        with ExitStack() as undo:
            for plan in plans:
                if create:
                    make_directory(plan.path, undo)
                _lock_directory(plan.path, self._lock_fds, shared=self._read_only)
            if create:
                complete_creation(plans, undo)
            undo.pop_all()  # All made: from here on a failure leaves the files for the next opener.
        for plan in plans:
            _check_header(plan)
        self._open_files()

    def _open_files(self) -> None:
        flags = os.O_RDONLY if self._read_only else os.O_RDWR
        for layer in range(self._layout.num_layers):
            path = self._path(layer)
            self._buffered_fds.append(_open_layer(path, flags))
            found, wanted = os.fstat(self._buffered_fds[-1]).st_size, self._layout.nbytes_per_layer
            if found != wanted:
                raise CorruptionError(
                    "the layer file has the wrong size",
                    file=path,
                    expected=f"{wanted} bytes",
                    found=f"{found} bytes",
                )
        firsts = [self._path(index) for index in range(len(self._directories))]
        probe = probe_direct(firsts, alignment=self._layout.alignment)
        self._direct_alignment, self._direct_refusal = probe.alignment, probe.refusal
        if probe.alignment is not None:
            for layer in range(self._layout.num_layers):
                self._direct_fds.append(_open_layer(self._path(layer), flags | os.O_DIRECT))


def _as_directories(path: object, layout: GroupLayout) -> tuple[str, ...]:
    single = isinstance(path, str | os.PathLike)
    if not single and (isinstance(path, bytes) or not isinstance(path, Sequence)):
        raise LayoutError(f"path is {path!r:.80}: must be text, a path, or a sequence of them")
    paths: Sequence[Any] = [path] if single else path  # type: ignore[assignment]
    try:
        directories = tuple(os.path.abspath(os.fspath(one)) for one in paths)
    except TypeError as error:
        raise LayoutError(f"path holds something that is no path: {error}") from error
    if not 1 <= len(directories) <= layout.num_layers:
        raise LayoutError(
            f"{len(directories)} directories given: must be 1 to {layout.num_layers}, the layers"
        )
    if len({os.path.realpath(directory) for directory in directories}) != len(directories):
        raise LayoutError(f"a directory is given twice: {', '.join(directories)}")
    return directories


def _lock_directory(path: str, fds: list[int], *, shared: bool) -> None:
    """Open and lock a directory; the descriptor, which holds the lock, is appended to `fds`."""
    if fcntl is None:
        return
    try:
        # A descriptor of its own, since the lock belongs to the open file and ends with its last descriptor.
        fds.append(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        fcntl.flock(fds[-1], (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise BusyError(
            f"{path} is open elsewhere: close the other opener, share its LayerFiles within one process, or open "
            "both with read_only=True"
        ) from error
    except OSError as error:
        raise _translated(error, "open", path) from error


def _check_header(plan: DirectoryPlan) -> None:
    state = plan.state()
    if state is DirectoryState.COMPLETE:
        plan.header.check(read_header(plan.header_path), file=plan.header_path)
        return
    if state is DirectoryState.ORPHANED:
        raise orphaned(plan)
    hint = "create=True makes the files"
    if state is DirectoryState.INTERRUPTED:
        hint = "an earlier creation was interrupted: create=True with the same layout finishes it"
    raise StorageError("open", errno=errno.ENOENT, file=plan.header_path, hint=hint)


def _open_layer(path: str, flags: int) -> int:
    try:
        return open_regular(path, flags)
    except StorageError as error:
        if error.errno != errno.ENOENT:
            raise
        raise CorruptionError(
            "the layer file is missing", file=path, expected="a file", found="none"
        ) from error


def _translated(error: OSError, action: str, file: str) -> StorageError:
    return storage_error(error.errno or errno.EIO, action=action, file=file, file_offset=None, nbytes=None)
