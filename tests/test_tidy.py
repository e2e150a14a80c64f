"""Size and naming limits for the package and the C code, so that every file can be read top to bottom."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}

# A line in the first column that has a parameter list and is not the start of a type.
C_SIGNATURE = re.compile(r"(?!typedef\b|(?:struct|enum|union)\b[^(]*\{)[A-Za-z_].*?(?P<name>\w+)\(")

PYTHON_FILES = sorted((ROOT / "aio_kv").rglob("*.py"))
C_FILES = sorted(path for path in (ROOT / "native").rglob("*") if path.suffix in {".c", ".h"})
DOCS_FILES = sorted((ROOT / "docs").rglob("*.py"))
TEXT_FILES = [
    *PYTHON_FILES,
    *C_FILES,
    *DOCS_FILES,
    *sorted((ROOT / "tests").rglob("*.py")),
    ROOT / "setup.py",
]


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def python_functions(source: str) -> Iterator[tuple[str, int]]:
    """Name and length in lines of each function; decorators are not counted."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def c_functions(source: str) -> Iterator[tuple[str, int]]:
    """Name and length in lines of each function.

    This reads layout, not grammar: nothing inside a function starts in the first column, and a function runs from
    the line in the first column that names it to the next line that starts with a closing brace.
    """
    start, name, is_open = 0, "", False
    for number, line in enumerate(without_c_comments(source).splitlines(), start=1):
        if not name and (match := C_SIGNATURE.match(line)):
            start, name, is_open = number, match["name"], False
        is_closed = line.startswith("}") or (number == start and "}" in line)
        is_open = is_open or "{" in line
        if name and is_open and is_closed:
            yield name, number - start + 1
        if is_closed or (not is_open and line.rstrip().endswith(";")):
            name = ""  # complete, or only a declaration


def without_c_comments(source: str) -> str:
    """The same lines without comments and string contents, whose braces and parentheses mean nothing."""
    pattern = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"', re.DOTALL)
    return pattern.sub(lambda match: "\n" * match[0].count("\n"), source)


def test_there_is_something_to_check() -> None:
    assert PYTHON_FILES, "aio_kv holds no Python files"


@pytest.mark.parametrize("path", TEXT_FILES, ids=relative)
def test_file_is_short_enough_to_read(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= FILE_LINES_MAX, f"{relative(path)} has {lines} lines, {FILE_LINES_MAX} at most"


@pytest.mark.parametrize("path", [*PYTHON_FILES, *DOCS_FILES, *C_FILES], ids=relative)
def test_functions_are_short_enough_to_read(path: Path) -> None:
    functions = c_functions if path.suffix in {".c", ".h"} else python_functions
    long = [f"{name}: {lines}" for name, lines in functions(path.read_text()) if lines > FUNCTION_LINES_MAX]
    assert not long, f"{relative(path)}: functions above {FUNCTION_LINES_MAX} lines: {long}"


@pytest.mark.parametrize("path", TEXT_FILES, ids=relative)
def test_name_says_what_is_inside(path: Path) -> None:
    names = (*path.relative_to(ROOT).parent.parts, path.stem)
    vague = VAGUE_NAMES.intersection(name.lower() for name in names)
    assert not vague, f"{relative(path)}: {vague} says nothing about the content"


@pytest.mark.parametrize("path", [*PYTHON_FILES, *DOCS_FILES], ids=relative)
def test_python_file_starts_with_what_it_is(path: Path) -> None:
    source = path.read_text()
    first = next(tokenize.generate_tokens(io.StringIO(source).readline))
    starts_with_comment = first.type == tokenize.COMMENT and not first.string.startswith("#!")
    assert starts_with_comment or ast.get_docstring(ast.parse(source)), f"{relative(path)} starts with code"


@pytest.mark.parametrize("path", C_FILES, ids=relative)
def test_c_file_starts_with_what_it_is(path: Path) -> None:
    assert path.read_text().startswith(("/*", "//")), f"{relative(path)} starts with code"


def test_the_c_rule_sees_functions() -> None:
    body = "    work(); /* } */\n" * 80
    source = (
        "/* header */\n"
        "typedef struct {\n    int a;\n} thing;\n"
        "static const struct row rows[] = {\n    {1},\n};\n"
        "int declared(int a);\n"
        "static int declared_wide(int a,\n                         int b);\n"
        "#define CALL(x) \\\n    f(x)\n"
        f"static int long_one(int a,\n                    int b)\n{{\n{body}}}\n"
        'int short_one(void) {\n    return puts("}{(");\n}\n'
        "int one_line(void) { return 0; }\n"
        f"void *last(void)\n{{\n{body}}}\n"
    )
    assert dict(c_functions(source)) == {"long_one": 84, "short_one": 3, "one_line": 1, "last": 83}
