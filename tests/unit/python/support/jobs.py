"""A process on the simulated GPU that does what a test tells it, line by line, and commands of ours beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from processes import ELSEWHERE, PRELUDE, TIMEOUT_S, environment

_LOOP = """
for line in sys.stdin:
    exec(line, globals())
    print("done", flush=True)
"""


class Job:
    """A process with the preload library, whose page is in `directory`. It has the names of PRELUDE."""

    def __init__(self, directory: Path, **variables: str) -> None:
        self.directory = directory
        self._process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + _LOOP],
            env=environment(True, **{"TMS_SHARED_PAGE": str(directory), **variables}),
            cwd=ELSEWHERE,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid

    def do(self, line: str) -> None:
        """Has it execute one line, and waits until that is done."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n"

    def allocate(self, tag: str, mebibytes: int = 2) -> None:
        self.do(f"with module.region(tag={tag!r}): cuda_malloc({mebibytes} * MIB)")

    @property
    def page(self) -> Path:
        (path,) = self.directory.glob(f"tms-{self.pid}-*.page")
        return path

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(TIMEOUT_S)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.wait(TIMEOUT_S)
        self._process.stdout.close()


def start_command(*arguments: str, directory: Path) -> subprocess.Popen[str]:
    """A command of ours that looks at the pages in `directory`, on a machine without a GPU."""
    return subprocess.Popen(
        [sys.executable, "-m", "torch_memory_saver", *arguments],
        env=environment(False, TMS_SHARED_PAGE=str(directory)) | {"LANG": os.environ.get("LANG", "C.UTF-8")},
        cwd=ELSEWHERE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
