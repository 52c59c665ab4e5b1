"""Programs that tests run: in processes of their own, in either hook mode, without the tests' TMS_ variables."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu_support import HERE, HOOK, PROGRAMS, SIMULATED, tms, torch
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

    def start(self, pipes: bool = False) -> WarmProcess:
        """Start it. With `pipes` the test writes its input and reads its output."""
        command = [str(PROGRAMS / self.script), *self.arguments]
        return torch_programs.start(command, _environment(dict(self.environment), self.preload), HERE, pipes)


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


def run_ranks(
    script: str,
    arguments: tuple[str, ...] = (),
    ranks: int = 2,
    environment: Mapping[str, str] | None = None,
    preload: bool = False,
    timeout: float = 110,
) -> list[str]:
    """Runs the ranks of a program with the variables that torchrun gives them, and returns their outputs. This process has
    their store, as torchrun's process does."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(ranks),
        **(environment or {}),
    }
    own = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    programs = [Program(script, arguments, tuple((shared | each).items()), preload) for each in own]
    return [done.check().output for done in run_programs(programs, timeout)]


def subprocess_run(
    command: Sequence[str], environment: Mapping[str, str] | None = None, preload: bool = False, timeout: float = 110
) -> Finished:
    """Runs `python *command` in a process of its own with a clean TMS_ environment."""
    process = torch_programs.start(command, _environment(environment or {}, preload), HERE)
    try:
        output, error = process.communicate(timeout)
    finally:
        process.kill()
    return Finished(" ".join(command), process.wait(), output, error)
