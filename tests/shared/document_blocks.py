"""The code blocks of README.md and docs/, as programs.

The Python blocks of a page are one program, in their order. A comment on the line before a block changes that:

``<!-- test: setup``     the lines up to ``-->`` are part of the program, and the reader does not see them
``<!-- test: program -->``   a program of its own begins with this block, or with the setup that follows
``<!-- test: skip: why -->`` this block is not run
``<!-- test: shell -->``     this shell block is run; without a comment, a shell block is an error
``<!-- test: torch shell -->`` this shell block is run where PyTorch's CUDA build is
``<!-- test: file: NAME -->`` this block is a file, which the shell blocks after it find in their folder
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[\w-]*)(?P<rest>.*)$")
_DIRECTIVE = re.compile(
    r"^ *<!-- test: (?P<what>setup|program|(?:torch )?shell|skip: (?P<reason>.+?)|file: (?P<file>\S+))(?: -->)?$"
)
#: What docs/generated.py writes. Its code blocks are signatures and outputs, no programs.
_GENERATED = re.compile(r"^<!-- generated: .*?^<!-- end of generated -->$", re.MULTILINE | re.DOTALL)
_TORCH = re.compile(r"^\s*(?:import|from) torch\b(?!_)", re.MULTILINE)
#: Languages of blocks that are no programs: what a command prints, a file's contents, a picture.
_TEXT = ("text", "mermaid")


@dataclass
class Program:
    """What runs in one process. A line of it stands at the number that it has in the page, so that a traceback names it."""

    page: Path
    line: int
    lines: dict[int, str] = field(default_factory=dict)
    language: str = "python"
    #: Files in the folder where it runs.
    files: dict[str, str] = field(default_factory=dict)
    in_torch_shell: bool = False

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(REPOSITORY)}:{self.line}"

    @property
    def text(self) -> str:
        return "\n".join(self.lines.get(number, "") for number in range(1, max(self.lines) + 1)) + "\n"

    @property
    def needs_torch(self) -> bool:
        return self.in_torch_shell or (self.language == "python" and _TORCH.search(self.text) is not None)


@dataclass(frozen=True)
class Skipped:
    """A block that is not run."""

    name: str
    reason: str


def pages() -> list[Path]:
    """README and every page of docs."""
    return [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]


def read(page: Path) -> tuple[list[Program], list[Skipped]]:
    """The programs of a page and the blocks that are none.

    Raises:
        ValueError: A block is marked wrongly, or not marked where it has to be.
    """
    return _Reader(page).read()


class _Reader:
    def __init__(self, page: Path) -> None:
        self.page = page
        self.programs: list[Program] = []
        self.skipped: list[Skipped] = []
        self.current: Program | None = None
        self.files: dict[str, str] = {}
        written = _GENERATED.sub(lambda part: "\n" * part[0].count("\n"), page.read_text(encoding="utf-8"))
        self.lines = written.splitlines()
        self.at = 0

    def read(self) -> tuple[list[Program], list[Skipped]]:
        directive: re.Match[str] | None = None
        while self.at < len(self.lines):
            line = self.lines[self.at]
            self.at += 1
            mark, fence = _DIRECTIVE.match(line), _FENCE.match(line)
            if mark is None and line.lstrip().startswith("<!-- test"):
                raise ValueError(f"{self._here()}: this is no mark of a test: {line.strip()}")
            if mark is not None and mark["what"] == "setup":
                if directive is not None and directive["what"] == "program":
                    self.current = directive = None
                self._add(*self._until("-->"))
            elif fence is not None:
                self._block(fence, directive)
                directive = None
            elif mark is not None:
                directive = mark
            elif line.strip() and directive is not None:
                raise ValueError(f"{self._here()}: a mark must be followed by its block")
        return self.programs, self.skipped

    def _here(self) -> str:
        return f"{self.page.relative_to(REPOSITORY)}:{self.at}"

    def _until(self, end: str) -> tuple[int, list[str]]:
        first = self.at
        while self.lines[self.at].strip() != end:
            self.at += 1
        self.at += 1
        return first + 1, textwrap.dedent("\n".join(self.lines[first : self.at - 1])).split("\n")

    def _add(self, first: int, lines: list[str]) -> None:
        if self.current is None:
            self.current = Program(self.page, first)
            self.programs.append(self.current)
        self.current.lines |= dict(enumerate(lines, first))

    def _block(self, fence: re.Match[str], directive: re.Match[str] | None) -> None:
        here = self._here()
        first, lines = self._until("```")
        language, what = fence["language"], directive["what"] if directive is not None else ""
        if directive is not None and directive["reason"]:
            self.skipped.append(Skipped(here, directive["reason"]))
        elif directive is not None and directive["file"]:
            self.files[directive["file"]] = "\n".join(lines) + "\n"
        elif language == "python":
            if what == "program":
                self.current = None
            self._add(first, lines)
        elif language == "bash" and what in ("shell", "torch shell"):
            text, files = dict(enumerate(lines, first)), dict(self.files)
            self.programs.append(Program(self.page, first, text, "bash", files, what == "torch shell"))
        elif language not in _TEXT or what:
            raise ValueError(
                f"{here}: say whether this block of {language or 'no language'} runs: shell, or skip with a reason"
            )
