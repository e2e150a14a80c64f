"""What `mkdocs build` runs while it makes the site: the reference of the command line, state diagrams, and one check.

The command line is described by the program itself, so that the page cannot fall behind. State diagrams are drawn by
GitHub from Mermaid text; a browser would need Mermaid's script from elsewhere for that, so here they become tables. And
no page may load anything from elsewhere.
"""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

from mkdocs.exceptions import PluginError

COMMANDS_MARK = "<!-- commands -->"
_EXAMPLES = re.compile(r"^(Examples?:)\n\n((?:aio-kv .*\n+)+)", re.MULTILINE)
_STATE_DIAGRAM = re.compile(r"^```mermaid\nstateDiagram-v2\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_TRANSITION = re.compile(r"^\s*(\S+) --> (\S+?)(?:\s*:\s*(.+))?$")
# What a browser fetches by itself when it shows a page; links that a reader may follow are not among it.
_LOADED = re.compile(
    r"<(?:script|img|iframe|source|link)\b[^>]*?\b(?:src|href)=[\"']?((?:https?:)?//[^\"'\s>]+)"
)


def command_line_reference() -> str:
    """Every command with its options, as typer describes them, in Markdown without the first heading."""
    command = [sys.executable, "-m", "typer", "aio_kv.cli", "utils", "docs", "--name", "aio-kv"]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    return _EXAMPLES.sub(examples_as_code, text.partition("\n")[2])


def examples_as_code(match: re.Match[str]) -> str:
    """Examples, each a paragraph, as one block of commands."""
    lines = "\n".join(f"$ {line}" for line in match[2].split("\n") if line)
    return f"{match[1]}\n\n```console\n{lines}\n```\n\n"


def transitions_as_table(match: re.Match[str]) -> str:
    """A Mermaid state diagram as a table of its transitions."""
    rows = ["| from | on | to |", "|---|---|---|"]
    for line in match[1].splitlines():
        transition = _TRANSITION.match(line)
        if transition is None:
            raise PluginError(f"state diagram: {line!r} is not a transition")
        source, target, event = transition.groups()
        names = [(name if name != "[*]" else "(start)") for name in (source, target)]
        rows.append(f"| {names[0]} | {event or ''} | {names[1]} |")
    return "\n".join(rows)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in what is generated."""
    if COMMANDS_MARK in markdown:
        markdown = markdown.replace(COMMANDS_MARK, command_line_reference())
    return _STATE_DIAGRAM.sub(transitions_as_table, markdown)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Refuse a page that would load something from elsewhere."""
    loaded = _LOADED.findall(output)
    if loaded or 'class="mermaid"' in output:
        raise PluginError(
            f"{page.file.src_path} would load {loaded or 'the script of Mermaid'} from elsewhere"
        )
    return output
