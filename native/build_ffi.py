"""Describes the extension `aio_kv.engine._akv` to cffi (API mode): declarations, sources, flags.

setup.py runs this through cffi's setuptools hook, with the repository root as the working directory. All paths are
relative to it, because that is what setuptools wants of a distribution's sources.
"""

import sysconfig
from pathlib import Path

from cffi import FFI

# exclude-libs keeps liburing's symbols to ourselves: another extension in the process may carry its own copy.
LINK_ARGS = ["-Wl,-Bstatic", "-luring", "-Wl,-Bdynamic", "-Wl,--exclude-libs,ALL", "-lpthread"]
COMPILE_ARGS = ["-O2", "-std=gnu11", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unused-parameter"]

sources = sorted(str(path) for path in Path("native/src").glob("*.c"))
headers = sorted(str(path) for path in Path("native").rglob("*.h"))
if not sources:
    raise SystemExit(
        "aio_kv: native/src holds no C files; run the build from the root of a complete source tree"
    )

ffibuilder = FFI()
ffibuilder.cdef(Path("native/akv.cdef.h").read_text())
ffibuilder.set_source(
    "aio_kv.engine._akv",
    '#include "akv.h"',
    sources=sources,
    depends=headers,
    include_dirs=["native/include", "native/src"],
    extra_compile_args=COMPILE_ARGS,
    extra_link_args=LINK_ARGS,
    py_limited_api=not sysconfig.get_config_var("Py_GIL_DISABLED"),
)
