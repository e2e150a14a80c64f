"""Builds the C extension, where there can be one; everything else is declared in pyproject.toml.

Two environment variables are read here and nowhere else:

AIO_KV_NO_EXTENSION=1            build a pure-Python package (the wheel is tagged py3-none-any)
AIO_KV_SANITIZE=address,undefined | thread
                                 build the extension with these sanitizers, unoptimised enough to be read

The extension exists on Linux under CPython. It is built against the limited API, so that one wheel serves
CPython 3.11 and all later ones; free-threaded interpreters have no limited API and get a wheel of their own.
"""

from __future__ import annotations

import os
import platform
import sys
import sysconfig
import tempfile
from pathlib import Path

from setuptools import setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError

INSTALL_COMPILER = "apt-get install gcc libc6-dev   |   dnf install gcc"
INSTALL_HEADERS = "apt-get install python3-dev   |   dnf install python3-devel"
INSTALL_LIBURING = (
    "apt-get install liburing-dev   |   dnf install liburing-devel   |   zypper install liburing-devel"
)
STATIC_HINT = (
    "aio_kv links liburing.a, the static library. Where a distribution packages only liburing.so, or an older\n"
    "release (before Debian 12 and Ubuntu 24.04, say), build liburing from its sources, `make install` it, and\n"
    "name the place with CFLAGS=-I... and LDFLAGS=-L..."
)

# Each step is one small source that must compile and link exactly as the extension will; the first that fails names
# the missing piece. Nothing is decided by version numbers: the last step calls what liburing 2.3 introduced.
PROBES = (
    ("int probe(void) { return 0; }", f"no working C compiler was found.\n  {INSTALL_COMPILER}"),
    ("#include <Python.h>", f"the header Python.h of this interpreter was not found.\n  {INSTALL_HEADERS}"),
    (
        "#include <liburing.h>\nint probe(struct io_uring *ring) { return io_uring_queue_init(2, ring, 0); }",
        f"liburing (headers and static library) was not found.\n  {INSTALL_LIBURING}\n{STATIC_HINT}",
    ),
    (
        "#include <liburing.h>\n"
        "int probe(struct io_uring *ring) { return io_uring_register_sync_cancel(ring, 0); }",
        f"liburing is older than 2.3.\n  {INSTALL_LIBURING}\n{STATIC_HINT}",
    ),
)


def has_extension() -> bool:
    """Whether this build has the C extension; says why when it has not."""
    if os.environ.get("AIO_KV_NO_EXTENSION", "0") not in ("", "0"):
        print("aio_kv: AIO_KV_NO_EXTENSION is set: installing without the C extension", file=sys.stderr)
        return False
    if sys.platform != "linux" or platform.python_implementation() != "CPython":
        system = f"{platform.system()} {platform.python_implementation()}"
        print(
            f"aio_kv: the C extension needs Linux and CPython, this is {system}: installing without it. "
            "Host memory is served by the Python thread pool.",
            file=sys.stderr,
        )
        return False
    return True


class BuildExtension(build_ext):
    """Checks for the compiler and liburing first, so that the failure is a sentence and not a page of gcc."""

    def build_extensions(self) -> None:
        sanitizers = os.environ.get("AIO_KV_SANITIZE", "")
        for extension in self.extensions:
            if sanitizers:
                flags = [f"-fsanitize={sanitizers}", "-g", "-O1", "-fno-omit-frame-pointer", "-UNDEBUG"]
                extension.extra_compile_args = [*extension.extra_compile_args, *flags]
                extension.extra_link_args = [flags[0], *extension.extra_link_args]
            for source, advice in PROBES:
                self.check_builds(source, advice, extension.extra_link_args)
        super().build_extensions()

    def check_builds(self, source: str, advice: str, link_args: list[str]) -> None:
        with tempfile.TemporaryDirectory(prefix="aio_kv-probe-") as folder:
            path = Path(folder, "probe.c")
            path.write_text(source + "\n")
            # A sanitized object leaves its runtime to be found at load, which -z defs would call undefined.
            complete = [] if any("-fsanitize" in argument for argument in link_args) else ["-Wl,-z,defs"]
            try:
                objects = self.compiler.compile([str(path)], output_dir=folder)
                self.compiler.link_shared_object(
                    objects, str(path.with_suffix(".so")), extra_postargs=[*link_args, *complete]
                )
            except (CompileError, LinkError) as error:
                raise SystemExit(
                    f"\naio_kv cannot build its C extension: {advice}\n"
                    "Or install without it (no io_uring, no GPU, slower): AIO_KV_NO_EXTENSION=1 pip install ...\n"
                    f"({error})"
                ) from None


def extension_options() -> dict[str, object]:
    if not has_extension():
        return {}
    options: dict[str, object] = {
        "cffi_modules": ["native/build_ffi.py:ffibuilder"],
        "cmdclass": {"build_ext": BuildExtension},
    }
    if not sysconfig.get_config_var("Py_GIL_DISABLED"):
        options["options"] = {"bdist_wheel": {"py_limited_api": "cp311"}}
    return options


setup(**extension_options())
