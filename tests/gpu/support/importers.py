"""Processes that import managed tensors, with the PyTorch of this environment or of another one."""

from __future__ import annotations

import os
import subprocess
import zlib
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from gpu_support import PROGRAMS, SIMULATED, torch
from warm_python import WarmProcess, torch_programs

__all__ = ["Importer", "contents", "message"]


def message(tensor: torch.Tensor) -> str:
    """A tensor as multiprocessing sends it. Each message counts as one importer."""
    return bytes(ForkingPickler.dumps(tensor)).hex()


def contents(tensor: torch.Tensor) -> str:
    """What an importer answers to `read` if it sees the contents that the tensor has now."""
    data = tensor.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes()
    return f"{len(data)} {zlib.crc32(data)}"


class Importer:
    """programs/importer.py in a process of its own. Commands raise AssertionError if the answer is an error.

    Args:
        python: The interpreter of another environment; None: this one's.
    """

    def __init__(self, python: str | None = None) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TMS_") or SIMULATED}
        if not SIMULATED:  # in preload mode this process has the hook library; the importer has nothing
            environment.pop("LD_PRELOAD", None)
        program = str(PROGRAMS / "importer.py")
        self.process: WarmProcess | subprocess.Popen[str]
        if python is None:
            self.process = torch_programs.start([program], environment, Path.cwd(), pipes=True)
        else:  # another PyTorch needs stubs of its own, on the same simulated machine
            simulate = [python, "-m", "torch_memory_saver", "simulate", "--"] if SIMULATED else []
            self.process = subprocess.Popen(
                [*simulate, python, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
            )
        self.release = self._answer().split()[-1]

    def __enter__(self) -> Importer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        self._input.close()
        self.process.wait(timeout=60)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=60)

    @property
    def _input(self) -> IO[str]:
        assert self.process.stdin is not None
        return self.process.stdin

    def _answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the importer has ended with status {self.process.wait(timeout=60)}"
        return line.strip()

    def try_to(self, command: str, name: str, argument: str = "") -> str:
        """The answer to a command, which may begin with "error"."""
        self._input.write(f"{command} {name} {argument}\n")
        self._input.flush()
        return self._answer()

    def _do(self, command: str, name: str, argument: str = "") -> str:
        answer = self.try_to(command, name, argument)
        assert not answer.startswith("error"), answer
        return answer

    def take(self, name: str, sent: str) -> str:
        """Unpickles a message. Returns the tensor's dtype, shape, strides and class."""
        return self._do("take", name, sent)

    def call(self, name: str, reduced: tuple[Any, ...]) -> None:
        """Rebuilds what reduce_tensor has returned."""
        self._do("call", name, bytes(ForkingPickler.dumps(reduced)).hex())

    def load(self, name: str, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Copies tensors into the importer's own, by name, and drops them."""
        self._do("load", name, bytes(ForkingPickler.dumps(tensors)).hex())

    def read(self, name: str) -> str:
        return self._do("read", name)

    def fill(self, name: str, value: int) -> None:
        self._do("fill", name, str(value))

    def drop(self, name: str) -> None:
        self._do("drop", name)

    def is_waiting(self) -> str:
        """Whether the importer's stream has work that has not ended: "True" or "False"."""
        return self._do("is", "waiting")

    def restrict(self, kind: str) -> None:
        """Takes a right from the importer: see tests/shared/restrictions.py."""
        self._do("restrict", kind)
