"""The public surface: every exported name exists, is documented, and is exported and defined in one place."""

import ast
import importlib
import inspect
import pkgutil
import types
from collections import Counter
from pathlib import Path

import pytest

import aio_kv

# The public sub-packages. What they export, the top level does not export again.
PUBLIC_PACKAGES = [
    f"aio_kv.{name}"
    for name in ("cuda", "engine", "experts", "integrations", "metrics", "testing", "tracing")
    if name in {module.name for module in pkgutil.iter_modules(aio_kv.__path__)}
]


def exports_of(module: types.ModuleType) -> list[str]:
    return list(getattr(module, "__all__", ()))


def has_own_docstring(exported: object) -> bool:
    """Whether someone wrote it: not inherited from a base, not made up by dataclass from the fields."""
    if inspect.isclass(exported):
        text = vars(exported).get("__doc__")
        return bool(text) and not text.startswith(f"{exported.__name__}(")
    return bool(getattr(exported, "__doc__", None))


def is_documentable(exported: object) -> bool:
    """Constants and type aliases carry a comment at their definition instead."""
    return inspect.isclass(exported) or inspect.isroutine(exported) or inspect.ismodule(exported)


def definitions(package: Path) -> Counter[str]:
    """How many modules define a class or function of each name at their top level."""
    found: Counter[str] = Counter()
    for path in package.rglob("*.py"):
        body = ast.parse(path.read_text()).body
        found.update(
            {
                node.name
                for node in body
                if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            }
        )
    return found


def test_the_surface_is_declared() -> None:
    assert exports_of(aio_kv), "aio_kv has no __all__"


@pytest.mark.parametrize("module_name", ["aio_kv", *PUBLIC_PACKAGES])
def test_exported_names_exist_and_are_documented(module_name: str) -> None:
    module = importlib.import_module(module_name)
    names = exports_of(module)
    missing = [name for name in names if not hasattr(module, name)]
    assert not missing, f"in {module_name}.__all__ but not there: {missing}"
    exported = {name: getattr(module, name) for name in names}
    bare = [
        name for name, value in exported.items() if is_documentable(value) and not has_own_docstring(value)
    ]
    assert not bare, f"{module_name}: exported without a docstring: {bare}"


@pytest.mark.parametrize("module_name", ["aio_kv", *PUBLIC_PACKAGES])
def test_names_are_listed_once_and_have_no_aliases(module_name: str) -> None:
    module = importlib.import_module(module_name)
    names = exports_of(module)
    assert len(names) == len(set(names)), [name for name, count in Counter(names).items() if count > 1]
    objects = Counter(id(value) for name in names if is_documentable(value := getattr(module, name)))
    aliases = [name for name in names if objects[id(getattr(module, name))] > 1]
    assert not aliases, f"{module_name}: several names for one thing: {aliases}"


@pytest.mark.parametrize("module_name", PUBLIC_PACKAGES)
def test_public_name_has_one_home(module_name: str) -> None:
    twice = set(exports_of(importlib.import_module(module_name))).intersection(exports_of(aio_kv))
    assert not twice, f"exported by aio_kv and by {module_name}: {twice}"


def test_public_name_has_one_definition() -> None:
    found = definitions(Path(aio_kv.__file__).parent)
    twice = [name for name in exports_of(aio_kv) if found[name] > 1]
    assert not twice, f"defined in several modules: {twice}"


def test_the_docstring_rule_notices_what_nobody_wrote() -> None:
    from dataclasses import dataclass

    @dataclass
    class Generated:
        field: int

    class Inherited(ValueError):
        pass

    class Written:
        """A sentence."""

    assert not has_own_docstring(Generated)
    assert not has_own_docstring(Inherited)
    assert has_own_docstring(Written)
