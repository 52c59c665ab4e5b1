"""What MkDocs does to the pages before it renders them: tables from the code, and files of the repository.

A page asks by a comment on a line of its own: ``<!-- generated: NAME -->``, with a name of GENERATED, or
``<!-- include: FILE -->``. tests/docs/test_generated.py calls the same functions, so that a variable without an explanation
fails there and not only where MkDocs is installed.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]
DOCS = REPOSITORY / "docs"

#: A row of the table in config.c: kind, name, the variable read in its place, field, default, what is allowed.
_ROW = re.compile(r'^    X\((\w+), "(TMS_\w+)", (NULL|"\w+"), (\w+), "([^"]*)", (\w+|"[^"]*")\)', re.MULTILINE)
_STRING = re.compile(r'^#define (\w+) "([^"]*)"$', re.MULTILINE)
#: A field of the struct in config.h, and the comment that explains it.
_FIELD = re.compile(r"^ {4}\S.*?\b(\w+); +/\* (TMS_\w+): (.*?) \*/$", re.MULTILINE | re.DOTALL)
_SIMULATED = re.compile(r"^ \*   (TMS_SIMULATED_\w+) +(.+(?:\n \* {10,}.+)*)", re.MULTILINE)
_COMMAND = re.compile(r"^    ([a-z]+) ", re.MULTILINE)

_REQUEST = re.compile(r"^<!-- (generated|include): (\S+) -->$", re.MULTILINE)
_LINK = re.compile(r"\[([^\]\n]+)\]\(([^)\s]+)\)")
_ROLE = re.compile(r":(?:attr|class|func|meth|mod):(?=<code>)")
_ELSEWHERE = re.compile(r"https?:|#")

#: Where this documentation shows a file of the repository.
_PAGES = {
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "index.md",
}


class Variable(NamedTuple):
    """One environment variable."""

    name: str
    meaning: str
    allowed: str
    default: str


def variables() -> list[Variable]:
    """Every variable of the package: those of the native code, then those of the Python code."""
    return [*native_variables(), *python_variables()]


def python_variables() -> list[Variable]:
    """The variables that the Python code reads, from the table in variables.py, which is read and not imported."""
    source = (REPOSITORY / "torch_memory_saver/_engine/variables.py").read_text(encoding="utf-8")
    tables = [
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "PYTHON_VARIABLES"
    ]
    (table,) = (value for value in tables if isinstance(value, ast.Tuple))
    rows = [[ast.literal_eval(text) for text in row.args] for row in table.elts if isinstance(row, ast.Call)]
    return [Variable(*row) for row in rows]


def native_variables() -> list[Variable]:
    """The variables of the native code: names, defaults and what is allowed from config.c, meanings from config.h."""
    source = (REPOSITORY / "csrc/base/config.c").read_text(encoding="utf-8")
    header = (REPOSITORY / "csrc/base/config.h").read_text(encoding="utf-8")
    strings = dict(_STRING.findall(source))
    meanings = {name: _one_line(text) for _, name, text in _FIELD.findall(header)}
    rows = []
    for _, name, instead, _, default, allowed in _ROW.findall(source):
        text = strings[allowed] if allowed in strings else allowed.strip('"')
        initial = f"`{default}`" if default else "none"
        if instead != "NULL":
            initial = f"`{instead.strip(chr(34))}`, else {initial}"
        rows.append(Variable(name, meanings[name], text, initial))
    return rows


def simulated_variables() -> list[tuple[str, str]]:
    """The variables of the simulated GPU, from its manual."""
    manual = (REPOSITORY / "csrc/simulator/simulator.h").read_text(encoding="utf-8")
    return [(name, _one_line(text.removesuffix("*/"))) for name, text in _SIMULATED.findall(manual)]


@functools.cache
def commands() -> list[tuple[str, str]]:
    """Every command, and what it prints for ``--help``: "" is the program itself."""
    overview = _help([])
    names = _COMMAND.findall(overview)
    return [("", overview), *((name, _help([name])) for name in names)]


def _help(arguments: list[str]) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TMS_")}
    environment |= {"COLUMNS": "100", "NO_COLOR": "1", "TMPDIR": "/tmp"}
    if any((REPOSITORY / "torch_memory_saver").glob("_core.*.so")):  # built in the tree: otherwise the installed package
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), environment.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "torch_memory_saver", *arguments, "--help"]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True, cwd=DOCS).stdout


def _one_line(text: str) -> str:
    return " ".join(re.sub(r"\n *\*? *", " ", text).split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _environment() -> str:
    lines = ["| variable | meaning | value | default |", "| --- | --- | --- | --- |"]
    lines += [f"| `{row.name}` | {_cell(row.meaning)} | {_cell(row.allowed)} | {row.default} |" for row in variables()]
    return "\n".join(lines)


def _simulated() -> str:
    lines = ["| variable | meaning |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| `{name}` | {_cell(text)} |" for name, text in simulated_variables())])


def _command_line() -> str:
    parts = []
    for name, text in commands():
        parts += [f"### {name}\n"] if name else []
        parts.append(f"```text\n{text.rstrip()}\n```\n")
    return "\n".join(parts)


GENERATED: dict[str, Callable[[], str]] = {
    "environment": _environment,
    "simulated": _simulated,
    "command-line": _command_line,
}


def _include(name: str, link: Callable[[str], str | None]) -> str:
    """A file of the repository without its title. Links to other files lead to their pages; of a link to a file without
    a page only the text stays."""
    text = (REPOSITORY / name).read_text(encoding="utf-8")
    text = re.sub(r"\A# .*\n+", "", text)

    def follow(match: re.Match[str]) -> str:
        label, target = match.groups()
        address = target if _ELSEWHERE.match(target) else link(target)
        return label if address is None else f"[{label}]({address})"

    return _LINK.sub(follow, text)


def expand(markdown: str, link: Callable[[str], str | None]) -> str:
    """The page with everything that it asks for. `link` gives the address of a file's page, None if it has none."""

    def answer(request: re.Match[str]) -> str:
        kind, name = request.groups()
        return _include(name, link) if kind == "include" else GENERATED[name]()

    return _REQUEST.sub(answer, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Called by MkDocs for each page. Docstrings name what they refer to as Sphinx has it, :meth:`pause`."""
    return _ROLE.sub("", html)


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Called by MkDocs for each page."""
    up = "../" * page.file.src_uri.count("/")

    def link(target: str) -> str | None:
        path, mark, anchor = target.partition("#")
        if path in _PAGES:
            return up + _PAGES[path] + mark + anchor
        if path.startswith("docs/"):
            return up + path.removeprefix("docs/") + mark + anchor
        return None

    return expand(markdown, link)
