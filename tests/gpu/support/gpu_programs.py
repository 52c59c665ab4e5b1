"""Programs that tests run: in processes of their own, in either hook mode, without the tests' TMS_ variables."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu_support import HERE, HOOK, PROGRAMS, SIMULATED, tms
from warm_python import WarmProcess, torch_programs


@dataclass(frozen=True)
class Finished:
    """The results of a program."""

    name: str
    status: int
    output: str
    error: str

    def check(self, status: int = 0) -> Finished:
        assert self.status == status, (
            f"{self.name}: exit status {self.status} instead of {status}\n{self.output}\n{self.error}"
        )
        return self


def preload_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` with our library in LD_PRELOAD, as configure_subprocess() leaves it for children."""
    with tms.configure_subprocess():
        return {**environment, "LD_PRELOAD": os.environ["LD_PRELOAD"]}


def _is_kept(name: str) -> bool:
    """Whether a fresh process inherits an environment variable: all but ours, except for what chooses the device."""
    if name == "TMS_CUDA_DRIVER" or name.startswith("TMS_SIMULATED_") or name == "LD_PRELOAD":
        return SIMULATED
    return not name.startswith("TMS_")


def _environment(extra: Mapping[str, str], preload: bool) -> dict[str, str]:
    keep = {name: value for name, value in os.environ.items() if _is_kept(name)}
    package_root = str(Path(str(tms.__file__)).resolve().parent.parent)
    keep["PYTHONPATH"] = os.pathsep.join(filter(None, [package_root, keep.get("PYTHONPATH", "")]))
    keep["PYTHONWARNINGS"] = "ignore"
    if SIMULATED:  # several programs compute on few cores, and threads wait for each other by spinning
        keep.setdefault("OMP_NUM_THREADS", "1")
    if "LD_PRELOAD" in keep:  # the simulated GPU's, without the hook library of `simulate --preload`
        keep["LD_PRELOAD"] = ":".join(path for path in keep["LD_PRELOAD"].split(":") if HOOK not in path)
    keep.update(extra)
    return preload_environment(keep) if preload else keep


@dataclass(frozen=True)
class Program:
    """A program of tests/gpu/programs to run: its arguments, its additional environment, and its hook mode."""

    script: str
    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    preload: bool = False

    @property
    def name(self) -> str:
        settings = " ".join(f"{key}={value}" for key, value in self.environment)
        mode = "preload" if self.preload else "torch"
        return " ".join(filter(None, [settings, self.script, *self.arguments, f"({mode} mode)"]))

    def start(self) -> WarmProcess:
        command = [str(PROGRAMS / self.script), *self.arguments]
        return torch_programs.start(command, _environment(dict(self.environment), self.preload), HERE)

    def start_with_pipes(self) -> subprocess.Popen[str]:
        """For programs that the test talks to."""
        return subprocess.Popen(
            [sys.executable, str(PROGRAMS / self.script), *self.arguments],
            env=_environment(dict(self.environment), self.preload),
            cwd=HERE,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def run_programs(programs: Iterable[Program], timeout: float = 110) -> list[Finished]:
    """Runs programs at the same time, each in a fresh process, and returns what each left, in order."""
    listed = list(programs)
    started = [program.start() for program in listed]
    finished = []
    try:
        for program, process in zip(listed, started, strict=True):
            output, error = process.communicate(timeout=timeout)
            finished.append(Finished(program.name, process.returncode, output, error))
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.communicate()
    return finished


def subprocess_run(
    command: Sequence[str], environment: Mapping[str, str] | None = None, preload: bool = False, timeout: float = 110
) -> Finished:
    """Runs `python *command` in a process of its own with a clean TMS_ environment. Modules (`-m`) start in a new Python."""
    variables = _environment(environment or {}, preload)
    name = " ".join(command)
    if command[0] != "-m":
        process = torch_programs.start(command, variables, HERE)
        try:
            output, error = process.communicate(timeout)
        finally:
            process.kill()
        return Finished(name, process.wait(), output, error)
    done = subprocess.run(
        [sys.executable, *command],
        env=variables,
        cwd=HERE,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return Finished(name, done.returncode, done.stdout, done.stderr)
