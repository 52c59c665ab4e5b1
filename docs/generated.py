"""The generated parts of the pages: tables from the code and from results of the benchmarks.

A part lies between two comments on lines of their own, so that it can be read where nothing is built:

    <!-- generated: NAME -->
    ...
    <!-- end of generated -->

NAME is a key of GENERATED, "summary", or a Markdown file of the repository, which is shown without its title. `make pages`
writes all parts anew; tests/docs/test_generated.py fails if a part is not up to date. The Python code is read and not
imported, because some of it needs PyTorch.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]
DOCS = REPOSITORY / "docs"

#: A row of the table in config.c: kind, name, the variable read in its place, field, default, what is allowed.
_ROW = re.compile(r'^    X\((\w+), "(TMS_\w+)", (NULL|"\w+"), (\w+), "([^"]*)", (\w+|"[^"]*")\)', re.MULTILINE)
_STRING = re.compile(r'^#define (\w+) "([^"]*)"$', re.MULTILINE)
#: A field of the struct in config.h, and the comment that explains it.
_FIELD = re.compile(r"^ {4}\S.*?\b(\w+); +/\* (TMS_\w+): (.*?) \*/$", re.MULTILINE | re.DOTALL)
_SIMULATED = re.compile(r"^ \*   (TMS_SIMULATED_\w+) +(.+(?:\n \* {10,}.+)*)", re.MULTILINE)
_COMMAND = re.compile(r"^    ([a-z]+) ", re.MULTILINE)

_PART = re.compile(r"^<!-- generated: (\S+) -->\n.*?^<!-- end of generated -->$", re.MULTILINE | re.DOTALL)
#: A list of objects for mkdocstrings, which GitHub hides: docs/hooks.py takes it out of the comment.
_REFERENCE = re.compile(r"^<!-- reference\n(.*?)^-->$", re.MULTILINE | re.DOTALL)
_OBJECT = re.compile(r"^::: (\S+)$", re.MULTILINE)
_SPHINX_ROLE = re.compile(r":(?:attr|class|func|meth|mod):`[.~]?([^`]+)`")


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


class Documented(NamedTuple):
    """A class, function or attribute of the package, with the first paragraph of its docstring."""

    name: str
    summary: str


def documented(path: str) -> Documented:
    """Find the object with this dotted path in the sources. Imports of it from other modules are followed.

    Raises:
        LookupError: There is no such object, or it has no docstring.
    """
    parts = path.split(".")
    for number in range(len(parts) - 1, 0, -1):
        file = _module_file(parts[:number])
        if file is not None:
            return Documented(".".join(parts[number:]), _first_paragraph(_node(file, parts[:number], parts[number:]), path))
    raise LookupError(path)


def _module_file(parts: list[str]) -> Path | None:
    base = REPOSITORY.joinpath(*parts)
    return next((each for each in (base / "__init__.py", base.with_suffix(".py")) if each.exists()), None)


@functools.cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _node(file: Path, module: list[str], names: list[str]) -> ast.AST:
    """The definition of `names`: a name in a module, then names in classes. Of several definitions, the last one with a
    docstring is meant: overloads come before it, and the setter of a property after it."""
    tree: ast.AST = _tree(file)
    for name in names:
        found = [each for each in _definitions(tree) if each.name == name]
        if found:
            tree = ([each for each in found if ast.get_docstring(each)] or found)[-1]
            continue
        for each in ast.walk(_tree(file)) if tree is _tree(file) else ():
            if isinstance(each, ast.ImportFrom) and name in [alias.asname or alias.name for alias in each.names]:
                package = module if file.name == "__init__.py" else module[:-1]
                source = package[: len(package) - each.level + 1] if each.level else []
                source += each.module.split(".") if each.module else []
                other = _module_file(source)
                if other is not None:
                    return _node(other, source, names)
        raise LookupError(".".join([*module, *names]))
    return tree


def _definitions(tree: ast.AST) -> Iterator[ast.ClassDef | ast.FunctionDef]:
    return (each for each in getattr(tree, "body", ()) if isinstance(each, (ast.ClassDef, ast.FunctionDef)))


def _first_paragraph(node: ast.AST, path: str) -> str:
    text = ast.get_docstring(node) if isinstance(node, (ast.ClassDef, ast.FunctionDef)) else None
    if not text:
        raise LookupError(f"{path} has no docstring")
    paragraph = _SPHINX_ROLE.sub(r"`\1`", " ".join(text.split("\n\n")[0].split()))
    return paragraph.replace("``", "`")


def _summary(after: str) -> str:
    """A table of the objects in the first reference list of a text."""
    found = _REFERENCE.search(after)
    rows = [documented(path) for path in _OBJECT.findall(found[1] if found else "")]
    lines = ["| name | purpose |", "| --- | --- |"]
    return "\n".join(
        [*lines, *(f"| `{row.name.removeprefix('TorchMemorySaver.')}` | {_cell(row.summary)} |" for row in rows)]
    )


def _errors() -> str:
    file = REPOSITORY / "torch_memory_saver/errors.py"
    lines = ["| exception | meaning |", "| --- | --- |"]
    for each in _definitions(_tree(file)):
        if isinstance(each, ast.ClassDef) and not each.name.startswith("_"):
            lines.append(f"| `{each.name}` | {_cell(_first_paragraph(each, each.name))} |")
    return "\n".join(lines)


GENERATED: dict[str, Callable[[], str]] = {
    "environment": _environment,
    "simulated": _simulated,
    "command-line": _command_line,
    "errors": _errors,
}


def written(page: str) -> str:
    """The page without its generated parts: what people have written."""
    return _PART.sub("", page)


def refreshed(page: str, is_wanted: Callable[[str], bool] = lambda name: True) -> str:
    """The page with its wanted parts written anew."""

    def write(part: re.Match[str]) -> str:
        name = part[1]
        if not is_wanted(name):
            return part[0]
        if name == "summary":
            text = _summary(page[part.end() :])
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
