"""Another process on the same GPU that executes commands, one a line: programs/commands.py, or another program."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import TYPE_CHECKING

from gpu_programs import Program
from gpu_support import STARTED_PRELOADED

if TYPE_CHECKING:
    from typing_extensions import Self

#: Seconds after which the process is killed, so that a test fails instead of hanging.
LIFETIME_S = 110


class SecondProcess:
    """In the hook mode of this process. Leaving the block waits for its end, which must succeed unless it was killed.

    Args:

    environment: Additional variables.
    """

    def __init__(self, environment: tuple[tuple[str, str], ...] = (), program: str = "commands.py") -> None:
        started = Program(program, environment=environment, preload=STARTED_PRELOADED)
        self._process = started.start(pipes=True)
        self._timer = threading.Timer(LIFETIME_S, self._process.kill)
        self._timer.start()
        self._killed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is not None:
                self.kill()
            output, complaints = self._process.communicate(timeout=LIFETIME_S)
        finally:
            self._timer.cancel()
            self._process.kill()
        if not self._killed:
            assert self._process.returncode == 0, f"exit status {self._process.returncode}: {output}{complaints}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, *words: object) -> None:
        """Sends a command; `answer` returns its result."""
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()

    def answer(self) -> str:
        """Waits for the next line that the process writes."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.kill()
            complaints = self._process.communicate()[1]
            raise AssertionError(f"the second process ended, status {self._process.returncode}: {complaints}")
        return line.rstrip("\n")

    def do(self, *words: object) -> None:
        """A command that has to succeed."""
        self.tell(*words)
        answer = self.answer()
        assert answer == "ok", f"{' '.join(map(str, words))}: {answer}"

    def refuses(self, error: str, *words: object) -> str:
        """A command that has to raise an error of this class; returns its message."""
        self.tell(*words)
        answer = self.answer()
        assert answer.startswith(f"{error}: "), f"{' '.join(map(str, words))}: {answer}"
        return answer

    def kill(self) -> None:
        self._killed = True
        self._process.kill()
        self._process.wait()
