"""The generated parts of the pages: tables from the code and from results of the benchmarks.

A part lies between two comments on lines of their own, so that it can be read where nothing is built:

    <!-- generated: NAME -->
    ...
    <!-- end of generated -->

NAME is a key of GENERATED, "api", or a Markdown file of the repository, which is shown without its title. `make pages`
writes all parts again; tests/docs/test_generated.py fails if a part is not up to date. The Python code is read and not
imported, because some of it needs PyTorch.
"""

from __future__ import annotations

import ast
import functools
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import docstrings

REPOSITORY = Path(__file__).resolve().parents[1]
DOCS = REPOSITORY / "docs"

#: A row of the table in config.c: kind, name, the variable read in its place, field, default, what is allowed.
_ROW = re.compile(r'^    X\((\w+), "(TMS_\w+)", (NULL|"\w+"), (\w+), "([^"]*)", (\w+|"[^"]*")\)', re.MULTILINE)
_STRING = re.compile(r'^#define (\w+) "([^"]*)"$', re.MULTILINE)
#: A field of the struct in config.h, and the comment that explains it.
_FIELD = re.compile(r"^ {4}\S.*?\b(\w+); +/\* (TMS_\w+): (.*?) \*/$", re.MULTILINE | re.DOTALL)
_SIMULATED = re.compile(r"^ \*   (TMS_SIMULATED_\w+) +(.+(?:\n \* {10,}.+)*)", re.MULTILINE)
_INTERPOSED = re.compile(r"^#define TMS_(RUNTIME|DRIVER)_HOOKS\(X\).*?\n\n", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^    ([a-z]+) ", re.MULTILINE)

_PART = re.compile(r"^<!-- generated: (\S+) -->\n.*?^<!-- end of generated -->$", re.MULTILINE | re.DOTALL)
#: A list of paths of objects, or of modules, that the part before it describes.
_REFERENCE = re.compile(r"^<!-- reference\n(.*?)^-->$", re.MULTILINE | re.DOTALL)


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
    return _output("-m", "torch_memory_saver", *arguments, "--help")


def _output(*arguments: str) -> str:
    """Return what Python writes with these arguments."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TMS_")}
    environment |= {"COLUMNS": "100", "NO_COLOR": "1", "TMPDIR": "/tmp"}
    if any((REPOSITORY / "torch_memory_saver").glob("_core.*.so")):  # built in the tree: otherwise the installed package
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), environment.get("PYTHONPATH", "")]))
    return subprocess.run(
        [sys.executable, *arguments], env=environment, check=True, capture_output=True, text=True, cwd=DOCS
    ).stdout


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


def _patches() -> str:
    """The table of replacements."""
    program = "import json; from torch_memory_saver._patches import all_patches\n"
    program += "print(json.dumps([vars(patch) for patch in all_patches()]))"
    patches = [SimpleNamespace(**patch) for patch in json.loads(_output("-c", program))]
    lines = ["| replaced | when | effect, and why | until |", "| --- | --- | --- | --- |"]
    for (when, reason, until), rows in itertools.groupby(patches, lambda row: (row.when, row.reason, row.until)):
        names = ", ".join(f"`{row.name}`" for row in rows)
        lines.append(f"| {names} | {_cell(when)} | {_cell(reason)} | {until or 'no release is known'} |")
    return "\n".join(lines)


def _interposed() -> str:
    """The functions before which the preload library stands."""
    header = (REPOSITORY / "csrc/preload/resolve.h").read_text(encoding="utf-8")
    rows = {part[1]: re.findall(r"^ +X\((\w+),", part[0], re.MULTILINE) for part in _INTERPOSED.finditer(header)}
    names = {"RUNTIME": "CUDA runtime", "DRIVER": "CUDA driver"}
    return "\n".join(f"- {names[kind]}: {', '.join(f'`{name}`' for name in found)}." for kind, found in rows.items())


def _api(after: str) -> str:
    """A table of the objects in the first reference list of a text, then their descriptions."""
    found = _REFERENCE.search(after)
    objects: list[docstrings.Found] = []
    for path in found[1].split() if found else ():
        file = REPOSITORY / (path.replace(".", "/") + ".py")
        objects += docstrings.members_of_module(file) if file.exists() else [docstrings.resolve(path)]
    lines = ["| name | purpose |", "| --- | --- |"]
    lines += [f"| `{each.name}` | {_cell(docstrings.first_paragraph(each.node))} |" for each in objects]
    return "\n\n".join(["\n".join(lines), *(docstrings.describe(each) for each in objects)])


def _tested_versions() -> str:
    rows = json.loads((REPOSITORY / "tests/versions.json").read_text(encoding="utf-8"))
    if not rows:
        return "No result has been recorded."
    names = {"torch": "PyTorch", "cuda": "CUDA", "python": "Python", "gpu": "GPU", "driver": "driver", "mode": "hook mode"}
    names |= {"engine": "engine", "passed": "passed", "failed": "failed", "skipped": "skipped", "date": "day"}
    lines = [f"| {' | '.join(names.values())} |", "| --- " * len(names) + "|"]
    lines += ["| " + " | ".join(_cell(str(row[name])) or "none" for name in names) + " |" for row in rows]
    return "\n".join(lines)


GENERATED: dict[str, Callable[[], str]] = {
    "tested-versions": _tested_versions,
    "environment": _environment,
    "simulated": _simulated,
    "command-line": _command_line,
    "patches": _patches,
    "interposed": _interposed,
}


def written(page: str) -> str:
    """The page without its generated parts: what people have written."""
    return _PART.sub("", page)


def refreshed(page: str, is_wanted: Callable[[str], bool] = lambda name: True) -> str:
    """The page with its wanted parts written again."""

    def write(part: re.Match[str]) -> str:
        name = part[1]
        if not is_wanted(name):
            return part[0]
        if name == "api":
            text = _api(page[part.end() :])
        elif name in GENERATED:
            text = GENERATED[name]()
        else:
            text = re.sub(r"\A# .*\n", "", (REPOSITORY / name).read_text(encoding="utf-8"))
        return f"<!-- generated: {name} -->\n\n{text.strip()}\n\n<!-- end of generated -->"

    return _PART.sub(write, page)


def main() -> None:
    for path in sorted(DOCS.rglob("*.md")):
        old = path.read_text(encoding="utf-8")
        new = refreshed(old)
        if new != old:
            path.write_text(new, encoding="utf-8")
            sys.stderr.write(f"wrote {path.relative_to(REPOSITORY)}\n")


if __name__ == "__main__":
    main()
