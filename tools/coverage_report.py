"""Prints how much of the C code was run, by line and by branch, with one row for each file, from the counts of gcov.

    coverage_report.py [--lines PERCENT] [--branches PERCENT] [--missing FILE...] BUILD FOLDER...

BUILD holds the objects that were compiled with --coverage, in the folders of their sources. Each FOLDER is measured without
the folders in it. The counts of a header are the sums over all files that it was compiled into. The exit status is 1 if a
total is below PERCENT. --missing lists, for each file named, the lines that were not run (``-``) and the lines with a branch
that was not taken (``?``, with the numbers of the branches).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Counts:
    """How often each line of one source file was run, and how often each branch was taken."""

    lines: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    branches: dict[tuple[str, int, int], int] = field(default_factory=lambda: defaultdict(int))

    def add(self, line: dict[str, Any]) -> None:
        number = line["line_number"]
        self.lines[number] += line["count"]
        for index, branch in enumerate(line["branches"]):
            # A line of a header has branches of its own in every function that it was compiled into.
            self.branches[line.get("function_name", ""), number, index] += branch["count"]

    def taken(self) -> tuple[int, int, int, int]:
        """The numbers of lines run, of lines, of branches taken and of branches."""
        lines, branches = self.lines.values(), self.branches.values()
        return sum(map(bool, lines)), len(lines), sum(map(bool, branches)), len(branches)


def gcov(notes: list[Path]) -> Iterator[dict[str, Any]]:
    """The output of gcov for object files, one JSON document for each."""
    command = ["gcov", "--json-format", "--stdout", "--branch-probabilities", *map(str, notes)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for line in output.splitlines():
        if line.startswith("{"):
            yield json.loads(line)


def measure(build: Path, folders: list[Path]) -> dict[str, Counts]:
    counts: dict[str, Counts] = defaultdict(Counts)
    notes = [path for folder in folders for path in sorted((build / folder).glob("*.gcno"))]
    if not notes:
        raise SystemExit(f"error: nothing in {build} was compiled with --coverage: run 'make coverage'")
    measured = {str(folder) for folder in folders}
    for document in gcov(notes):
        for file in document["files"]:
            if str(Path(file["file"]).parent) in measured:
                for line in file["lines"]:
                    counts[file["file"]].add(line)
    return counts


def percent(part: int, whole: int) -> float:
    return 100.0 * part / whole if whole else 100.0


def row(name: str, lines_run: int, lines: int, taken: int, branches: int) -> str:
    line_text = f"{percent(lines_run, lines):6.1f} % {lines_run:5d}/{lines:<5d}"
    return f"{name:38s} {line_text} {percent(taken, branches):6.1f} % {taken:5d}/{branches:<5d}"


def print_missing(name: str, counts: Counts) -> None:
    not_taken: dict[int, list[int]] = defaultdict(list)
    for (_, number, index), count in counts.branches.items():
        if not count:
            not_taken[number].append(index)
    for number, text in enumerate(Path(name).read_text().splitlines(), 1):
        if counts.lines.get(number) == 0:
            print(f"{name}:{number}: - {text}")
        elif number in not_taken:
            print(f"{name}:{number}: ? {text}  // branches {sorted(set(not_taken[number]))}")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lines", type=float, default=0)
    parser.add_argument("--branches", type=float, default=0)
    parser.add_argument("--missing", action="append", default=[])
    parser.add_argument("build", type=Path)
    parser.add_argument("folders", type=Path, nargs="+")
    options = parser.parse_args()
    counts = measure(options.build, options.folders)
    rows = {name: counts[name].taken() for name in sorted(counts)}
    print(f"{'':38s} {'lines':>8s}{'':12s} {'branches':>8s}")
    for name, figures in rows.items():
        print(row(name, *figures))
    total = tuple(map(sum, zip(*rows.values(), strict=True)))
    print(row("total", *total))
    for name in options.missing:
        print_missing(name, counts[name])
    lines, branches = percent(*total[:2]), percent(*total[2:])
    for what, figure, least in (("line", lines, options.lines), ("branch", branches, options.branches)):
        if figure < least:
            print(f"error: {what} coverage is {figure:.1f} %, below {least:.0f} %", file=sys.stderr)
    return int(lines < options.lines or branches < options.branches)


if __name__ == "__main__":
    sys.exit(main())
