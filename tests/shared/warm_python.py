"""Programs in processes that have imported PyTorch already, because the import takes seconds of a core.

A server, which is this file as a program, imports modules and forks a child for each program. The child gets the program's
arguments, environment, folder and standard files, and runs it as `__main__` until the interpreter ends. The server never
uses CUDA. So a child is as fresh as a new process, but for the variables that Python, the dynamic linker and PyTorch read
when they start: programs that differ in one of them have servers of their own.

One thread uses a WarmPython. Its servers end with its process.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import SourceFileLoader
from io import FileIO
from pathlib import Path
from types import CodeType
from typing import Any

#: PyTorch reads these at its first allocation.
_OF_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING")
_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_")
#: What the names of the variables begin with that are read after the import of torch, but for those that the package's
#: sitecustomize looks at.
_READ_LATE = ("TMS_", "CUDA_VISIBLE_DEVICES", "NCCL_", "TORCH_NCCL_", "PYTEST_", *_OF_ALLOCATOR, *_OF_RANKS)
_READ_EARLY = ("TMS_DEBUG", "TMS_METRICS_FILE", "TMS_RELEASE_CACHED")
#: A request: arguments and environment.
_MAX_BYTES = 1 << 20
#: An answer: the process id at first, and its status at the end.
_NUMBER = struct.Struct("i")


class WarmProcess:
    """A program that runs. Its members mean what those of subprocess.Popen mean.

    Its output goes to a file, or to `stdout` if it reads `stdin`.
    """

    def __init__(self, name: str, answer: FileIO, output: FileIO, error: FileIO, stdin: int | None = None) -> None:
        self._name, self._answer, self._files = name, answer, (output, error)
        self.stdin = None if stdin is None else os.fdopen(stdin, "w", encoding="utf-8")
        self.stdout = None if stdin is None else os.fdopen(output.fileno(), encoding="utf-8", closefd=False)
        self.pid = self._number()
        self.returncode: int | None = None

    def _number(self) -> int:
        answer = self._answer.read(_NUMBER.size)
        if not answer:
            raise ChildProcessError(f"the process that starts {self._name} has ended")
        return int(_NUMBER.unpack(answer)[0])

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._answer], [], [], timeout)[0]:
                assert timeout is not None
                raise subprocess.TimeoutExpired(self._name, timeout)
            self.returncode = os.waitstatus_to_exitcode(self._number())
            self._answer.close()
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        output, error = self._files
        if self.stdin is not None:
            self.stdin.close()
        self.wait(timeout)  # a program that writes more than a pipe holds does not end
        rest = None if self.stdout is None else self.stdout.read()
        for file in self._files if rest is None else [error]:
            file.seek(0)
        return output.readall().decode() if rest is None else rest, error.readall().decode()


class WarmPython:
    """Starts programs in processes that have imported some modules."""

    def __init__(self, *modules: str) -> None:
        self._modules = modules
        self._servers: dict[tuple[tuple[str, str], ...], tuple[socket.socket, subprocess.Popen[bytes]]] = {}

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], folder: Path, pipes: bool = False
    ) -> WarmProcess:
        """Start `python *command`: a file, `-c` and a program, or `-m` and a module, and then arguments.

        With `pipes` the caller writes the program's input and reads its output.
        """
        server = self._server(environment)
        request = json.dumps([list(command), dict(environment), str(folder)]).encode()
        error = FileIO(os.memfd_create("error"), "r+")
        answer, its_answer = os.pipe()
        its_input, stdin = os.pipe() if pipes else (os.open(os.devnull, os.O_RDONLY), None)
        output, its_output = os.pipe() if pipes else (file := os.memfd_create("output"), os.dup(file))
        theirs = [its_input, its_output, os.dup(error.fileno()), its_answer]
        try:
            socket.send_fds(server, [request], theirs)
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        mode = "r" if pipes else "r+"
        return WarmProcess(" ".join(command), FileIO(answer), FileIO(output, mode), error, stdin)

    def _server(self, environment: Mapping[str, str]) -> socket.socket:
        early = {name for name in environment if name in _READ_EARLY or not name.startswith(_READ_LATE)}
        key = tuple(sorted((name, environment[name]) for name in early))
        if key not in self._servers:
            ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with its:
                server = subprocess.Popen(
                    [sys.executable, __file__, str(its.fileno()), *self._modules],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[its.fileno()],
                )
            self._servers[key] = ours, server
        return self._servers[key][0]


#: What the tests with PyTorch share. PyTorch imports sympy at its first operator on the simulated GPU.
torch_programs = WarmPython("torch", "sympy")


def _serve(control: socket.socket) -> CodeType:
    """Fork a child for each request. Returns in the children only: the program to run."""
    children: dict[int, tuple[int, int]] = {}  # by the descriptor of the process: its id, and where the answer goes
    while True:
        ready, _, _ = select.select([control.fileno(), *children], [], [])
        for descriptor in ready:
            if descriptor in children:
                pid, answer = children.pop(descriptor)
                os.write(answer, _NUMBER.pack(os.waitpid(pid, 0)[1]))
                os.close(answer)
                os.close(descriptor)
                continue
            request, descriptors, _, _ = socket.recv_fds(control, _MAX_BYTES, 4)
            if not request:
                sys.exit()  # the tests have ended
            pid = os.fork()
            if pid == 0:
                control.close()
                for each, (_, answer) in children.items():
                    os.close(each)
                    os.close(answer)
                return _become(*json.loads(request), *descriptors)
            *files, answer = descriptors
            for each in files:
                os.close(each)
            os.write(answer, _NUMBER.pack(pid))
            children[os.pidfd_open(pid)] = pid, answer


def _become(command: list[str], environment: dict[str, str], folder: str, *descriptors: int) -> CodeType:
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
    for descriptor in descriptors:
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    names: dict[str, Any] = {
        "__doc__": None,
        "__package__": None,
        "__spec__": None,
        "__cached__": None,
        "__annotations__": {},
    }
    if command[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *command[2:]], ""
        code = compile(command[1], "<string>", "exec", dont_inherit=True)
    elif command[0] == "-m":  # as the interpreter does it
        sys.argv, sys.path[0] = ["-m", *command[2:]], folder
        code = compile(f"import runpy; runpy._run_module_as_main({command[1]!r})", "<string>", "exec", dont_inherit=True)
    else:
        sys.argv, sys.path[0] = command, os.path.dirname(os.path.realpath(command[0]))
        code = compile(Path(command[0]).read_bytes(), command[0], "exec", dont_inherit=True)
        names |= {"__file__": command[0], "__loader__": SourceFileLoader("__main__", command[0])}
    main = sys.modules["__main__"].__dict__
    keep = {"__name__", "__builtins__"}
    for name in [name for name in main if name not in keep]:
        del main[name]
    main.update(names)
    return code


if __name__ == "__main__":
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.freeze()
    exec(_serve(socket.socket(fileno=int(sys.argv[1]))), globals())
