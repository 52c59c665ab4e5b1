"""One planted bug: a text of one file, its replacement, and the tests that must detect it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["Mutant", "TableError", "check"]


class TableError(Exception):
    """The table does not fit the sources any more."""


@dataclass(frozen=True)
class Mutant:
    """A bug in one file.

    Attributes:
        name: What is wrong, in words joined by dashes.
        file: From the root of the repository.
        old: Stands exactly once in the file. As little as says what is meant, so that other changes leave it alone.
        new: Takes its place.
        tests: Each of them has to fail. A C file is a whole program; a Python file stands for pytest, on the simulated GPU,
            as ``file::test``; ``torch:`` or ``preload:`` before ``tests/gpu`` or ``tests/torch`` for PyTorch under
            `simulate`, in that hook mode.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def needs_torch(self) -> bool:
        return any(test.startswith(("torch:", "preload:")) for test in self.tests)

    def apply(self, text: str) -> str:
        """The text of the file with the bug in it.

        Raises:
            TableError: `old` does not stand there exactly once, or changes nothing.
        """
        count = text.count(self.old)
        if count != 1:
            raise TableError(
                f"{self.name}: {self.file} has this text {count} times instead of once; give the mutant the text that is "
                f"there now, or replace it by another bug of its kind:\n{self.old}"
            )
        if self.new == self.old:
            raise TableError(f"{self.name}: it changes nothing")
        return text.replace(self.old, self.new)


def check(mutants: tuple[Mutant, ...], root: Path) -> list[str]:
    """The errors of the table, one text each: bugs that do not apply, tests that do not exist, names used twice."""
    problems = []
    for mutant in mutants:
        try:
            mutant.apply((root / mutant.file).read_text(encoding="utf-8"))
        except (OSError, TableError) as error:
            problems.append(str(error))
        if not mutant.tests:
            problems.append(f"{mutant.name}: no test has to notice it")
        problems += [f"{mutant.name}: there is no {test}" for test in mutant.tests if not _exists(test, root)]
        if sum(other.name == mutant.name for other in mutants) > 1:
            problems.append(f"{mutant.name}: two mutants have this name")
    return problems


def _exists(test: str, root: Path) -> bool:
    name, _, function = test.removeprefix("torch:").removeprefix("preload:").partition("::")
    path = root / name
    if not path.is_file():
        return False
    return not function or f"def {function.partition('[')[0]}(" in path.read_text(encoding="utf-8")
