#!/usr/bin/env python3
"""Checks the layers of csrc/: fails if a file uses another one that it must not use.

The order is base < device < backup < core < abi < preload, python. A file uses its own layer and lower ones.
preload and python do not use each other. All may use include/, the public ABI. The parts of backup and of core have an
order (PARTS), and some of backup may include only certain headers of another part (BACKUP_DOORS). The simulator stands
beside the layers, shares only include/ with them, and has its own order of folders (SIMULATOR_ORDER). A use is an
`#include "..."` or, if objects are found, a symbol that one object needs and another defines (nm). A module is x.c with
x.h. The check fails on

- a use against the order of the layers, of the parts of backup or core, or of the simulator's folders;
- an include of a header of another part of backup that BACKUP_DOORS does not allow;
- a circle of modules in a layer or in the simulator, or of folders in the simulator;
- Python.h outside csrc/python.

There is no list of exceptions. A call upwards goes through a pointer in a table that the upper layer fills.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import layers_picture

# From the lowest to the highest. The layers of one row do not use each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("base",),
    ("device",),
    ("backup",),
    ("core",),
    ("abi",),
    ("preload", "python"),
)
SHARED = "include"
# The parts of some layers in the same form. A part is a module directly in the layer, or a folder.
PARTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "backup": (("content",), ("fingerprints",), ("backup",), ("host",), ("disk",), ("shared",), ("stores",), ("pass",)),
    "core": (("model",), ("allocation",), ("transition",)),
}
# (user, used): the modules of the used part whose headers the user may include. A pair that is not listed: all modules.
BACKUP_DOORS: dict[tuple[str, str], frozenset[str]] = {
    ("disk", "host"): frozenset({"backup/host/store", "backup/host/map"}),
    ("stores", "host"): frozenset({"backup/host/operations"}),
    ("stores", "disk"): frozenset({"backup/disk/operations"}),
    ("pass", "host"): frozenset({"backup/host/batch"}),
}
SIMULATOR = "simulator"
# The folders of csrc/simulator in the same form. "." stands for the files directly in it.
SIMULATOR_ORDER: tuple[tuple[str, ...], ...] = (
    (".",),
    ("base",),
    ("devices",),
    ("memory",),
    ("work",),
    ("streams",),
    ("graphs",),
    ("contexts",),
    ("runtime",),
    ("operators", "nccl"),
    ("control",),
)


def ranks_of(order: Iterable[Iterable[str]]) -> dict[str, int]:
    return {name: rank for rank, row in enumerate(order) for name in row}


RANKS = ranks_of(LAYERS)
ONLY_IN_PYTHON = "Python.h"

_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]+([\"<])([^\">\n]+)[\">]", re.MULTILINE)


@dataclass
class Use:
    """How one module uses another: its includes as (file, header), and its symbols."""

    includes: list[tuple[str, str]] = field(default_factory=list)
    symbols: list[str] = field(default_factory=list)

    def describe(self, user: str, used: str) -> str:
        parts = [f'{file} has #include "{header}"' for file, header in self.includes]
        if self.symbols:
            parts.append(f"{user}.c uses {', '.join(self.symbols)} of {used}.c")
        return "; ".join(parts)


Graph = dict[str, dict[str, Use]]


@dataclass
class Sources:
    """The modules that were read, their uses of one another, and the problems found. Paths are relative to csrc. The name of
    a module is its path without the suffix."""

    modules: set[str] = field(default_factory=set)
    graph: Graph = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    objects: int = 0

    def use(self, user: str, used: str) -> Use:
        return self.graph.setdefault(user, {}).setdefault(used, Use())


def module_of(file: str) -> str:
    return str(PurePosixPath(file).with_suffix(""))


def layer_of(module: str) -> str:
    return module.split("/", 1)[0]


def folder_of(module: str) -> str:
    """The folder in csrc/simulator of a module of the simulator; "." if the module is directly in it."""
    folders = PurePosixPath(module).parts[1:-1]
    return folders[0] if folders else "."


def part_of(module: str) -> str:
    """The part of its layer that a module belongs to."""
    return PurePosixPath(module).parts[1]


def read_includes(csrc: Path, sources: Sources) -> None:
    paths = (path for ending in ("c", "h", "def") for path in csrc.rglob(f"*.{ending}"))
    files = sorted(path.relative_to(csrc).as_posix() for path in paths)
    known = set(files)
    sources.modules.update(map(module_of, files))
    for file in files:
        for quote, header in _INCLUDE.findall((csrc / file).read_text(encoding="utf-8")):
            if header == ONLY_IN_PYTHON and layer_of(file) != "python":
                sources.problems.append(f"{file} includes {ONLY_IN_PYTHON}, which is for csrc/python only")
            if quote == "<" or header == ONLY_IN_PYTHON:
                continue
            beside = (PurePosixPath(file).parent / header).as_posix()
            target = beside if beside in known else header
            if target not in known:
                sources.problems.append(f'{file} has #include "{header}", which is not in csrc')
            elif module_of(target) != module_of(file):
                sources.use(module_of(file), module_of(target)).includes.append((file, header))


def find_objects(folder: Path, csrc: Path) -> dict[str, Path]:
    """The objects under `folder`/csrc by module, without those whose source is missing or newer."""
    objects = {}
    for path in sorted((folder / "csrc").rglob("*.o")):
        module = module_of(path.relative_to(folder / "csrc").as_posix())
        source = csrc / f"{module}.c"
        if source.is_file() and source.stat().st_mtime <= path.stat().st_mtime:
            objects[module] = path
    return objects


def read_symbols(objects: Mapping[str, Path], sources: Sources) -> None:
    defined: dict[str, list[str]] = {}
    needed: dict[str, list[str]] = {}
    for module, path in objects.items():
        output = subprocess.run(["nm", "-P", str(path)], check=True, capture_output=True, text=True).stdout
        for line in output.splitlines():
            name, kind = line.split()[:2]
            if kind in "Uwv":
                needed.setdefault(module, []).append(name)
            elif kind.isupper():
                defined.setdefault(name, []).append(module)
    for user, names in needed.items():
        for name in sorted(names):
            for used in _definers(user, defined.get(name, [])):
                sources.use(user, used).symbols.append(name)
    sources.objects = len(objects)


def _definers(user: str, modules: list[str]) -> list[str]:
    """The modules among those that define a symbol to which `user` is linked. The libraries built from csrc share names."""
    for same in (
        [module for module in modules if layer_of(module) == layer_of(user)],
        [module for module in modules if (layer_of(module) == SIMULATOR) == (layer_of(user) == SIMULATOR)],
    ):
        if same:
            return same
    return modules


def may_use(user: str, used: str) -> bool:
    """Whether the order of the layers allows `user` to use `used`."""
    above, below = layer_of(user), layer_of(used)
    if above == below or below == SHARED:
        return True
    return above in RANKS and below in RANKS and RANKS[above] > RANKS[below]


def check_layers(sources: Sources) -> Iterator[str]:
    known = {*RANKS, SHARED, SIMULATOR}
    for module in sorted(sources.modules):
        if layer_of(module) not in known:
            yield f"{module} is in no layer; the layers are {', '.join(sorted(known))}"
    for user, uses in sorted(sources.graph.items()):
        for used, use in sorted(uses.items()):
            if not may_use(user, used):
                yield f"against the order, {layer_of(user)} uses {layer_of(used)}: {use.describe(user, used)}"


def check_parts(sources: Sources) -> Iterator[str]:
    ranks = {layer: ranks_of(order) for layer, order in PARTS.items()}
    for module in sorted(sources.modules):
        layer = layer_of(module)
        if layer in PARTS and part_of(module) not in ranks[layer]:
            yield f"{module} is in no part of {layer}; the parts are {', '.join(ranks[layer])}"
    for user, uses in sorted(sources.graph.items()):
        for used, use in sorted(uses.items()):
            layer = layer_of(user)
            if layer not in PARTS or layer_of(used) != layer or part_of(user) == part_of(used):
                continue
            above, below, rank = part_of(user), part_of(used), ranks[layer]
            if above in rank and below in rank and rank[above] <= rank[below]:
                yield f"against the order in {layer}, {above} uses {below}: {use.describe(user, used)}"
            doors = BACKUP_DOORS.get((above, below), {used})
            if use.includes and used not in doors:
                yield f"{above} may include of {below} only {', '.join(sorted(doors))}: {use.describe(user, used)}"


def check_simulator(sources: Sources) -> Iterator[str]:
    ranks = ranks_of(SIMULATOR_ORDER)
    edges: dict[str, dict[str, list[str]]] = {}
    for user, uses in sorted(sources.graph.items()):
        for used, use in sorted(uses.items()):
            above, below = folder_of(user), folder_of(used)
            if layer_of(user) != SIMULATOR or layer_of(used) != SIMULATOR or above == below:
                continue
            edges.setdefault(above, {}).setdefault(below, []).append(use.describe(user, used))
            if above in ranks and below in ranks and ranks[above] <= ranks[below]:
                yield f"against the order in the simulator, {above} uses {below}: {use.describe(user, used)}"
    if ranks:
        for folder in sorted({folder_of(module) for module in sources.modules if layer_of(module) == SIMULATOR}):
            if folder not in ranks:
                yield f"simulator/{folder} is not in SIMULATOR_ORDER"
        return
    for circle in circles(edges):
        yield f"a circle of the simulator's folders {', '.join(circle)}:" + "".join(
            f"\n    {above} uses {below}: {edges[above][below][0]}"
            for above in circle
            for below in edges[above]
            if below in circle
        )


def check_circles(sources: Sources) -> Iterator[str]:
    inside = {
        user: {used: use for used, use in uses.items() if layer_of(user) == layer_of(used)}
        for user, uses in sources.graph.items()
    }
    for circle in circles(inside):
        yield f"a circle of {', '.join(circle)}:" + "".join(
            f"\n    {use.describe(user, used)}"
            for user in circle
            for used, use in sorted(inside[user].items())
            if used in circle
        )


def circles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """The strongly connected components of more than one node (Tarjan's algorithm), each sorted."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for used in graph.get(node, ()):
            if used not in index:
                visit(used)
                low[node] = min(low[node], low[used])
            elif used in stack:
                low[node] = min(low[node], index[used])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1:
                found.append(sorted(component))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return sorted(found)


def read(csrc: Path, objects: Path) -> Sources:
    sources = Sources()
    read_includes(csrc, sources)
    read_symbols(find_objects(objects, csrc), sources)
    return sources


def check(sources: Sources) -> list[str]:
    """The problems, each a sentence or a few lines."""
    return [
        *sources.problems,
        *check_layers(sources),
        *check_parts(sources),
        *check_circles(sources),
        *check_simulator(sources),
    ]


def count_uses(sources: Sources) -> layers_picture.Counts:
    """The number of pairs of modules for each pair of folders, in which a module of one folder uses one of the other."""
    counts: layers_picture.Counts = {}
    for user, uses in sources.graph.items():
        for used in uses:
            pair = (str(PurePosixPath(user).parent), str(PurePosixPath(used).parent))
            if pair[0] != pair[1]:
                counts[pair] = counts.get(pair, 0) + 1
    return counts


def main(arguments: list[str] | None = None) -> int:
    root = Path(__file__).resolve().parents[1]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csrc", type=Path, default=root / "csrc", help="the sources (default: this repository's)")
    parser.add_argument(
        "--objects",
        type=Path,
        default=root / "build/c/plain",
        help="the objects built from them (default: those of `make ctest-build`)",
    )
    parser.add_argument("--need-objects", action="store_true", help="fail if a source file has no object")
    parser.add_argument("--dot", action="store_true", help="print the graph of the folders for graphviz, and check nothing")
    parser.add_argument("--svg", type=Path, metavar="PATH", help="draw the layers to this file, and check nothing")
    options = parser.parse_args(arguments)

    sources = read(options.csrc, options.objects)
    if options.dot:
        print(layers_picture.dot(count_uses(sources)), end="")
    if options.svg:
        options.svg.write_text(layers_picture.svg(count_uses(sources), LAYERS, SHARED, SIMULATOR, SIMULATOR_ORDER))
    if options.dot or options.svg:
        return 0
    problems = check(sources)
    compiled = {module for module in sources.modules if (options.csrc / f"{module}.c").is_file()}
    if options.need_objects and sources.objects < len(compiled):
        problems.append(f"only {sources.objects} of {len(compiled)} files have an object in {options.objects}: build them")
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{len(sources.modules)} modules and the symbols of {sources.objects} objects: ", end="")
    print(f"problems: {len(problems)}" if problems else "every use follows the order of the layers")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
