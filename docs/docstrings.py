"""Descriptions of the package's classes and functions in Markdown, made from their docstrings and signatures.

The code is read and not imported, because some of it needs PyTorch. Docstrings have the Google convention: paragraphs, and
sections such as "Args:" with entries. docs/generated.py puts the descriptions into the pages.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["describe", "first_paragraph", "members_of_module", "resolve"]

REPOSITORY = Path(__file__).resolve().parents[1]

Definition = ast.ClassDef | ast.FunctionDef

#: Sections of a docstring, with their titles on the page.
_SECTIONS = {
    "Args": "Arguments",
    "Attributes": "Attributes",
    "Returns": "Returns",
    "Yields": "Yields",
    "Raises": "Raises",
}
_SECTION = re.compile(rf"^({'|'.join(_SECTIONS)}):$")
_ENTRY = re.compile(r"^([*\w][\w*., ]*): (.*)$", re.DOTALL)
_SPHINX_ROLE = re.compile(r":(?:attr|class|func|meth|mod):`[.~]?([^`]+)`")
_SIGNATURE_WIDTH = 88


class Found(NamedTuple):
    """A definition, and its name on the page."""

    name: str
    node: Definition
    file: Path


def resolve(path: str) -> Found:
    """Find the definition with this dotted path. Imports of it from other modules are followed.

    Raises:
        LookupError: There is no such definition.
    """
    parts = path.split(".")
    for number in range(len(parts) - 1, 0, -1):
        file = _module_file(parts[:number])
        if file is not None:
            names = parts[number:]
            name = ".".join(names).removeprefix("TorchMemorySaver.")
            if number > 1 and name in _methods_of_saver():  # such as ranks.pause
                name = f"{parts[number - 1]}.{name}"
            return Found(name, *_find(file, parts[:number], names))
    raise LookupError(path)


@functools.cache
def _methods_of_saver() -> frozenset[str]:
    node = _find(REPOSITORY / "torch_memory_saver/saver.py", ["torch_memory_saver", "saver"], ["TorchMemorySaver"])[0]
    return frozenset(each.name for each in ast.iter_child_nodes(node) if isinstance(each, ast.FunctionDef))


def members_of_module(file: Path) -> list[Found]:
    """Return the public classes of a module."""
    classes = (each for each in _definitions(_tree(file)) if isinstance(each, ast.ClassDef))
    return [Found(each.name, each, file) for each in classes if not each.name.startswith("_")]


def first_paragraph(node: Definition) -> str:
    """Return the first paragraph of the docstring, on one line.

    Raises:
        LookupError: There is no docstring.
    """
    return _prose((_docstring(node).split("\n\n"))[0])


def describe(found: Found, level: int = 3) -> str:
    """Return the whole description, under a heading of this level. The description of a class has its public members."""
    node = found.node
    parts = [f"{'#' * level} `{found.name}`"]
    if isinstance(node, ast.FunctionDef) and not _is_property(node):
        parts.append(f"```python\n{_signature(node, found.file)}\n```")
    parts += _paragraphs(_docstring(node))
    if isinstance(node, ast.ClassDef):
        members = [Found(f"{found.name}.{each.name}", each, found.file) for each in _members(node)]
        parts += [describe(each, level + 1) for each in members]
    return "\n\n".join(parts)


def _module_file(parts: list[str]) -> Path | None:
    base = REPOSITORY.joinpath(*parts)
    return next((each for each in (base / "__init__.py", base.with_suffix(".py")) if each.exists()), None)


@functools.cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _definitions(tree: ast.AST) -> Iterator[Definition]:
    return (each for each in getattr(tree, "body", ()) if isinstance(each, Definition))


def _find(file: Path, module: list[str], names: list[str]) -> tuple[Definition, Path]:
    """Find a name in a module, then names in classes. The last of several definitions that has a docstring is
    meant: overloads come before it, and the setter of a property after it."""
    tree: ast.AST = _tree(file)
    for depth, name in enumerate(names):
        found = [each for each in _definitions(tree) if each.name == name]
        if not found:
            if depth == 0:
                return _find_imported(file, module, names)
            raise LookupError(".".join([*module, *names]))
        tree = ([each for each in found if ast.get_docstring(each)] or found)[-1]
    assert isinstance(tree, Definition)
    return tree, file


def _find_imported(file: Path, module: list[str], names: list[str]) -> tuple[Definition, Path]:
    for source in _sources_of(file, module, names[0]):
        other = _module_file(source)
        if other is not None:
            return _find(other, source, names)
    raise LookupError(".".join([*module, *names]))


def _sources_of(file: Path, module: list[str], name: str) -> Iterator[list[str]]:
    """Yield the modules from which a file imports a name."""
    for each in ast.walk(_tree(file)):
        if isinstance(each, ast.ImportFrom) and name in [alias.asname or alias.name for alias in each.names]:
            package = module if file.name == "__init__.py" else module[:-1]
            source = package[: len(package) - each.level + 1] if each.level else []
            yield [*source, *(each.module.split(".") if each.module else [])]


def _assigned(file: Path, name: str) -> ast.expr | None:
    """Return the value of a constant or of a private type alias of a module, which the module may import."""
    for each in _tree(file).body:
        target = each.targets[0] if isinstance(each, ast.Assign) else getattr(each, "target", None)
        if isinstance(each, (ast.Assign, ast.AnnAssign)) and getattr(target, "id", "") == name:
            return None if isinstance(each.value, ast.Call) else each.value
    module = list(file.relative_to(REPOSITORY).with_suffix("").parts)
    files = [_module_file(source) for source in _sources_of(file, module, name)]
    return next((_assigned(other, name) for other in files if other is not None), None)


class _Inline(ast.NodeTransformer):
    """Replaces constants and private type aliases by their values, which a reader knows."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if not (node.id.isupper() or node.id.startswith("_")):
            return node
        return _assigned(self.file, node.id) or node


def _members(node: ast.ClassDef) -> list[Definition]:
    """Return the public methods and properties, of each name the definition with a docstring."""
    found: dict[str, Definition] = {}
    for each in _definitions(node):
        if not each.name.startswith("_") and ast.get_docstring(each):
            found[each.name] = each
    return list(found.values())


def _docstring(node: Definition) -> str:
    text = ast.get_docstring(node)
    if not text:
        raise LookupError(f"{node.name} has no docstring")
    return text


def _is_property(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(each).split(".")[-1] in ("property", "cached_property") for each in node.decorator_list)


def _signature(node: ast.FunctionDef, file: Path) -> str:
    """Return the call without self, on one line if it fits."""
    copied = ast.parse(ast.unparse(node)).body[0]
    assert isinstance(copied, ast.FunctionDef)
    arguments = copied.args
    positional = arguments.posonlyargs or arguments.args
    if positional and positional[0].arg in ("self", "cls"):
        positional.pop(0)
    inline = _Inline(file)
    parts = [_spaced(each) for each in _split(_unparsed(inline.visit(arguments)))]
    returned = f" -> {_unparsed(inline.visit(copied.returns))}" if copied.returns else ""
    line = f"{node.name}({', '.join(parts)}){returned}"
    if len(line) <= _SIGNATURE_WIDTH:
        return line
    return f"{node.name}(\n{''.join(f'    {each},' + chr(10) for each in parts)}){returned}"


def _unparsed(node: ast.AST) -> str:
    """Return the code of a node, with texts in double quotes."""
    return re.sub(r"'([^'\"]*)'", r'"\1"', ast.unparse(node))


def _split(text: str, separator: str = ",") -> list[str]:
    """Split at separators that lie outside of brackets and texts."""
    parts, depth, start, quote = [], 0, 0, ""
    for place, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == separator and depth == 0:
            parts.append(text[start:place].strip())
            start = place + 1
    return [part for part in [*parts, text[start:].strip()] if part]


def _spaced(argument: str) -> str:
    """Return an argument with spaces around the equals sign if it has a type."""
    parts = _split(argument, "=")
    return " = ".join(parts) if len(parts) > 1 and ":" in parts[0] else argument


def _prose(text: str) -> str:
    return _SPHINX_ROLE.sub(r"`\1`", " ".join(text.split())).replace("``", "`")


def _paragraphs(text: str) -> list[str]:
    """Return the paragraphs and sections of a docstring in Markdown."""
    parts: list[str] = []
    section = ""
    for block in text.split("\n\n"):
        first, _, rest = block.partition("\n")
        heading = _SECTION.match(first)
        if heading:
            section = heading[1]
            parts += [f"**{_SECTIONS[section]}**", _entries(section, rest)]
        elif section and block.startswith(" "):  # a further paragraph of the section
            parts.append(_entries(section, block))
        elif first.startswith("    ") or ("\n    " in block and first.endswith("::")):
            parts.append(f"```python\n{block}\n```")
        else:
            parts.append(_list_or_prose(block))
    return [part for part in parts if part]


def _entries(section: str, text: str) -> str:
    """Return the entries of a section as a list. A section without names is prose."""
    lines = text.split("\n")
    entries: list[str] = []
    for line in lines:
        if (line.startswith("    ") and not line.startswith("     ")) or not entries:
            entries.append(line.strip())
        else:
            entries[-1] += " " + line.strip()
    matched = [_ENTRY.match(entry) for entry in entries]
    if section in ("Returns", "Yields") or not all(matched):
        return _prose(" ".join(entries))
    return "\n".join(f"- `{entry[1]}`: {_prose(entry[2])}" for entry in matched if entry)


def _list_or_prose(block: str) -> str:
    """Return a list of the docstring as a list, anything else as one line."""
    lines = block.split("\n")
    if not lines[0].lstrip().startswith("- "):
        return _prose(block)
    entries: list[str] = []
    for line in lines:
        if line.lstrip().startswith("- "):
            entries.append(line.strip())
        else:
            entries[-1] += " " + line.strip()
    return "\n".join("- " + _prose(entry[2:]) for entry in entries)
