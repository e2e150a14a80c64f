"""Imports go down the layers, never round in a circle, and each outside dependency is used from one place.

An import inside a function or under TYPE_CHECKING counts like any other: hiding a dependency does not remove it.
One thing is allowed: inside one part, a module may name the type of the module that holds it.
"""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "aio_kv"
LAYERS = {
    9: {"cli", "integrations", "__main__"},
    8: {"store", "experts", "metrics", "testing", "open", "tracing"},
    7: {"backends", "cascade"},
    6: {"transfer"},
    5: {"engine", "cuda"},
    4: {"files", "blockdevice", "creation", "direct", "positional"},
    2: {"protocols"},
    1: {"flags", "header", "integers", "layout", "models", "memory", "plan", "policy"},
    0: {"errors"},
}
LAYER_OF = {part: layer for layer, parts in LAYERS.items() for part in parts}

# What only one part may import, and what the pure layers may not import at all.
OWNER_OF = {"cffi": "engine", "_cffi_backend": "engine", "aio_kv.engine._akv": "engine", "cuda": "cuda"}
PURE_LAYER_MAX = 2
IMPURE = {
    *("asyncio", "anyio", "trio", "cffi", "cuda", "torch"),
    *("io", "mmap", "fcntl", "socket", "select", "selectors", "subprocess", "shutil", "tempfile"),
    *("threading", "concurrent", "multiprocessing"),
}
# What a pure module may use of `os`: these look at values, not at the system.
PURE_OS_NAMES = {"PathLike", "fspath", "fsdecode", "fsencode", "strerror"}


def name_of(path: Path, package: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(module: str) -> str:
    """The name that the table of layers knows: `aio_kv.cuda.stream` belongs to `cuda`, `aio_kv` itself to nothing."""
    return module.split(".")[1] if "." in module else ""


def imported_names(tree: ast.Module, module: str, is_package: bool) -> Iterator[tuple[str, int]]:
    """Each absolute name that an import statement mentions, with its line; `from a import b` gives `a.b`."""
    here = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((f"{prefix}.{alias.name}", node.lineno) for alias in node.names)


def impure_os_names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Each use of `os` that reaches the system, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            if node.attr not in PURE_OS_NAMES:
                yield f"os.{node.attr}", node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module == "os" and not node.level:
            names = {alias.name for alias in node.names} - PURE_OS_NAMES
            yield from ((f"os.{name}", node.lineno) for name in names)


def violations_of(module: str, name: str) -> Iterator[str]:
    """What is wrong with `module` importing `name`, both absolute."""
    part, layer = part_of(module), LAYER_OF[part_of(module)]
    for foreign, owner in OWNER_OF.items():
        if (name + ".").startswith(foreign + ".") and part != owner:
            yield f"only aio_kv.{owner} may import {foreign}"
    root = name.split(".")[0]
    if layer <= PURE_LAYER_MAX and root in IMPURE:
        yield f"layer {layer} is pure and may not import {root}"
    if root == "aio_kv":
        target = part_of(name)
        if target not in LAYER_OF:
            yield f"{name} is taken from the top of the package: import it from the module that defines it"
        elif LAYER_OF[target] > layer:
            yield f"layer {layer} may not import aio_kv.{target} of layer {LAYER_OF[target]}"


def check_package(package: Path) -> Iterator[str]:
    """Every broken rule, as `file:line: what`."""
    for path in sorted(package.rglob("*.py")):
        module = name_of(path, package)
        if module == "aio_kv":
            continue  # the public surface gathers names from all layers
        if part_of(module) not in LAYER_OF:
            yield f"{module}: has no place in the table of layers"
            continue
        tree = ast.parse(path.read_text())
        place = path.relative_to(package.parent)
        for name, line in imported_names(tree, module, path.name == "__init__.py"):
            yield from (f"{place}:{line}: {violation}" for violation in violations_of(module, name))
        if LAYER_OF[part_of(module)] <= PURE_LAYER_MAX:
            yield from (
                f"{place}:{line}: a pure layer may not use {name}" for name, line in impure_os_names(tree)
            )


class TypeImportRemover(ast.NodeTransformer):
    """Leaves out what stands under `if TYPE_CHECKING:`."""

    def visit_If(self, node: ast.If) -> ast.AST:
        if "TYPE_CHECKING" in ast.unparse(node.test):
            return ast.Pass()
        return self.generic_visit(node)


def module_graph(package: Path, *, with_types: bool) -> dict[str, set[str]]:
    """For each module the modules of the package that it imports by name (of a package: its __init__)."""
    files = {name_of(path, package): path for path in package.rglob("*.py")}
    modules = files.keys() | OWNER_OF.keys()  # the compiled module has no source file
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        tree = ast.parse(path.read_text())
        if not with_types:
            TypeImportRemover().visit(tree)
        names = imported_names(tree, module, path.name == "__init__.py")
        found = {name if name in modules else name.rpartition(".")[0] for name, _ in names}
        graph[module] = found.intersection(files) - {module}
    return graph


def cycle_in(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_imports_go_down_the_layers() -> None:
    assert not list(check_package(PACKAGE))


def test_no_module_imports_itself_through_others() -> None:
    assert not cycle_in(module_graph(PACKAGE, with_types=False))


def test_parts_of_one_layer_do_not_depend_on_each_other_both_ways() -> None:
    parts: dict[str, set[str]] = {part: set() for part in LAYER_OF}
    for module, imported in module_graph(PACKAGE, with_types=True).items():
        if part_of(module) in LAYER_OF:
            targets = {part_of(name) for name in imported} - {part_of(module), ""}
            parts[part_of(module)].update(targets)
    assert not cycle_in(parts)


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        ("layout.py", "from .files import LayerFiles", "layer 1 may not import aio_kv.files"),
        ("files.py", "def late():\n    import aio_kv.store", "layer 4 may not import aio_kv.store"),
        (
            "engine/ring.py",
            "from ..backends.uring import UringBackend",
            "layer 5 may not import aio_kv.backends",
        ),
        (
            "backends/uring.py",
            "from aio_kv.engine import _akv",
            "only aio_kv.engine may import aio_kv.engine._akv",
        ),
        (
            "backends/uring.py",
            "from ..engine._akv import lib",
            "only aio_kv.engine may import aio_kv.engine._akv",
        ),
        ("transfer.py", "import cffi", "only aio_kv.engine may import cffi"),
        ("engine/ring.py", "from cuda.bindings import driver", "only aio_kv.cuda may import cuda"),
        ("plan.py", "import asyncio", "layer 1 is pure and may not import asyncio"),
        ("protocols.py", "from os import pread", "a pure layer may not use os.pread"),
        ("layout.py", "import os\nos.close(3)", "a pure layer may not use os.close"),
        ("cli.py", "from aio_kv import open_backend", "is taken from the top of the package"),
        ("mystery.py", "", "has no place in the table of layers"),
    ],
)
def test_each_rule_notices_its_violation(tmp_path: Path, file: str, source: str, complaint: str) -> None:
    path = tmp_path / "aio_kv" / file
    path.parent.mkdir(parents=True)
    path.write_text(source + "\n")
    assert [found for found in check_package(tmp_path / "aio_kv") if complaint in found]


@pytest.mark.parametrize(
    ("back", "is_cycle"),
    [
        ("def late():\n    from .layout import GroupLayout", True),
        ("if TYPE_CHECKING:\n    from .layout import GroupLayout", False),
    ],
)
def test_a_cycle_is_noticed(tmp_path: Path, back: str, is_cycle: bool) -> None:
    package = tmp_path / "aio_kv"
    package.mkdir()
    (package / "layout.py").write_text("from . import plan\n")
    (package / "plan.py").write_text(back + "\n")
    assert bool(cycle_in(module_graph(package, with_types=False))) == is_cycle
    assert set(cycle_in(module_graph(package, with_types=True))) == {"aio_kv.layout", "aio_kv.plan"}
