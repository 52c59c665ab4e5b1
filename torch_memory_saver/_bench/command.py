"""The command ``bench``: runs each shape of each case in a process of its own and shows the results."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch_memory_saver import _core, simulate
from torch_memory_saver._cli.machines import GpuMachine
from torch_memory_saver._simulate.torch_build import find_torch
from torch_memory_saver.errors import InvalidArgumentError, TorchUnavailableError

from . import plot, table
from .cases import CASES, find, with_comparisons
from .figures import Row, merge, row_from_json
from .setting import SMALLEST_SCALE, Case, Shape

__all__ = ["Options", "add_arguments", "run"]

_WORKER = Path(__file__).with_name("worker.py")
#: A process that takes longer is ended and reported as failed.
_TIMEOUT_S = 600
#: The exit status after Ctrl-C, as in shells.
_INTERRUPTED = 130
_OURS, _PEER = "ours", "C++"
_SIMULATED_SCALE = SMALLEST_SCALE
_SIMULATED_REPETITIONS = 2
_SIMULATED_MEMORY = "2GiB"


@dataclass(frozen=True)
class Options:
    """The options of one run.

    Attributes:
        cases: The cases to run, in this order.
        scale: The factor that sizes are multiplied by. None: 1, or the smallest one on the simulated GPU.
        repetitions: How often each measurement is repeated. None: as each case defines.
        peer: The folder in which the C++ package is installed. None: it is not timed.
        directory: The folder for the files of the disk case.
        former: JSON files of earlier runs. If there are any, they are shown together, and nothing is measured.
    """

    cases: Sequence[Case] = CASES
    device: str = "auto"
    scale: float | None = None
    repetitions: int | None = None
    peer: str | None = None
    directory: str = field(default_factory=tempfile.gettempdir)
    former: Sequence[str] = ()
    json_path: str | None = None
    plot_path: str | None = None
    markdown: bool = False


@dataclass
class _Machine:
    """The machine that the processes run on, real or simulated."""

    environment: Mapping[str, str]
    allocator: str
    simulated: bool
    largest_scale: float = 1.0


@dataclass
class _Job:
    """The work of one process."""

    case: Case
    shape: int
    side: str
    repetitions: int
    scale: float

    @property
    def scaled(self) -> Shape:
        return self.case.shapes[self.shape].scaled(self.scale)

    def __str__(self) -> str:
        return f"{self.case.name}, {self.scaled} ({self.side})"


@dataclass
class _Run:
    """The results of the processes so far."""

    measured: list[Row] = field(default_factory=list)
    left_out: list[dict[str, str]] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)
    status: int = 0

    def take(self, job: _Job, result: Mapping[str, Any]) -> None:
        """Adds the result of one process."""
        if "rows" in result:
            self.measured += map(row_from_json, result["rows"])
            self.machine = self.machine or result["machine"]
            return
        if "failed" in result and job.side == _OURS:
            self.status = 1
        reason = result.get("unavailable") or result["failed"]
        entry = {"case": job.case.name, "shape": str(job.scaled), "side": job.side, "reason": reason}
        if entry not in self.left_out:
            self.left_out.append(entry)
        if "traceback" in result:
            _say(result["traceback"])

    def rows(self, scale: float) -> list[Row]:
        """One row for each operation, without those that only the peer has, and the rows of comparisons."""
        return with_comparisons([row for row in merge(self.measured) if row.ours is not None], scale)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(case.name for case in CASES)
    parser.add_argument("--cases", type=_cases, default=CASES, metavar="A,B", help=f"which of {names} to run (default: all)")
    parser.add_argument(
        "--device",
        choices=["auto", "gpu", "simulated"],
        default="auto",
        help="where to run: the GPU through PyTorch, the simulated GPU (small sizes; its times mean nothing), or (auto) the "
        "GPU if there is one",
    )
    parser.add_argument("--scale", type=_scale, help="factor that sizes are multiplied by, for small machines (default 1)")
    parser.add_argument("--repetitions", type=_count, help="how often each measurement is made (default: set by the case)")
    parser.add_argument(
        "--peer", metavar="PATH", help="also time the C++ package that is installed in this folder (pip install --target)"
    )
    parser.add_argument(
        "--directory", default=tempfile.gettempdir(), help="the folder for files of the disk case (default %(default)s)"
    )
    parser.add_argument(
        "--from",
        dest="former",
        action="append",
        default=[],
        metavar="FILE",
        help="show results that --json wrote, and measure nothing; several are shown together",
    )
    parser.add_argument("--json", metavar="FILE", help="write all results to this file")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the results to this file; needs matplotlib")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")


def _cases(text: str) -> tuple[Case, ...]:
    chosen = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        case = find(name)
        if case is None:
            raise argparse.ArgumentTypeError(f"there is no case {name!r}: choose from {', '.join(c.name for c in CASES)}")
        chosen.append(case)
    if not chosen:
        raise argparse.ArgumentTypeError("no case is given: separate the names by commas")
    return tuple(chosen)


def _scale(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not SMALLEST_SCALE <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from {SMALLEST_SCALE:.3g} to 1")
    return value


def _count(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def from_arguments(arguments: argparse.Namespace) -> Options:
    """The options that the command line gives."""
    return Options(
        arguments.cases,
        arguments.device,
        arguments.scale,
        arguments.repetitions,
        arguments.peer,
        arguments.directory,
        arguments.former,
        arguments.json,
        arguments.plot,
        arguments.markdown,
    )


def run(options: Options) -> int:
    """Runs the cases, or reads earlier results, and prints and writes the results as the options say.

    Returns:
        The exit status: 0 if no process that times this library failed, whatever the times are; 130 after Ctrl-C.

    Raises:
        InvalidArgumentError: A file cannot be written, a folder does not exist, or matplotlib is not installed.
        TorchUnavailableError: The options name the GPU, and PyTorch finds none.
    """
    peer = _check(options)
    if options.former:
        return _show_former(options)
    machine = _choose_machine(options.device)
    scale = options.scale or (_SIMULATED_SCALE if machine.simulated else 1.0)
    if scale > machine.largest_scale:
        _say(f"The simulated GPU uses host memory: sizes are multiplied by {machine.largest_scale:.3g}, not by {scale:g}.")
        scale = machine.largest_scale
    jobs = list(_jobs(options, machine, scale))
    needed = max((job.case.host_bytes for job in jobs), default=0)
    if needed and not machine.simulated:
        _say("using the host's memory once, because some virtual machines get memory only on its first use")
        _start(machine, None, {"case": None, "host_bytes": int(needed * scale)})
    run = _Run()
    try:
        for number, job in enumerate(jobs, 1):
            _say(f"[{number}/{len(jobs)}] {job}")
            described = _described(job, options, machine)
            run.take(job, _start(machine, options.peer if job.side == _PEER else None, described))
            _write_json(options, run, _describe(run.machine, machine), peer, scale)
    except KeyboardInterrupt:
        _say("interrupted: the results so far follow")
        run.status = _INTERRUPTED
    about = _describe(run.machine, machine)
    _write_json(options, run, about, peer, scale)
    _show(options, run.rows(scale), run.left_out, about, peer)
    return run.status


def _check(options: Options) -> str | None:
    """Checks the options before anything is measured. Returns the peer's version; None without a peer."""
    if options.plot_path is not None:
        plot.require()
    for path in filter(None, (options.json_path, options.plot_path)):
        folder = os.path.dirname(os.path.abspath(path))
        if not os.access(folder, os.W_OK) or os.path.isdir(path):
            raise InvalidArgumentError(f"{path} cannot be written: name a file in a folder that you can write to")
    if not os.path.isdir(options.directory):
        raise InvalidArgumentError(f"{options.directory} is not a folder: --directory needs one that exists")
    if options.peer is None:
        return None
    found = [
        distribution.version
        for distribution in importlib.metadata.distributions(path=[options.peer])
        if distribution.metadata["Name"].replace("-", "_").lower() == "torch_memory_saver"
    ]
    if not found or not Path(options.peer, "torch_memory_saver").is_dir():
        raise InvalidArgumentError(
            f"there is no torch_memory_saver in {options.peer}: install one there with "
            f"pip install --target {options.peer} torch_memory_saver==..."
        )
    return found[0]


def _choose_machine(device: str) -> _Machine:
    if device == "gpu" or (device == "auto" and GpuMachine.is_available()):
        if not GpuMachine.is_available():
            raise TorchUnavailableError(
                "bench finds no GPU: it needs a GPU and PyTorch with CUDA; use --device simulated to run without them"
            )
        started_by_simulate = os.environ.get("TMS_CUDA_DRIVER") == str(simulate.simulator_path())
        return _Machine(os.environ, "torch", started_by_simulate)
    if device == "auto":
        _say("PyTorch finds no GPU: running on the simulated GPU.")
    try:
        with_torch = find_torch() is not None
    except TorchUnavailableError:  # built without CUDA
        with_torch = False
    if with_torch:
        environment, allocator = simulate.environment(devices=2, memory=_SIMULATED_MEMORY), "torch"
    else:
        environment, allocator = simulate.environment_without_torch(devices=2, memory=_SIMULATED_MEMORY), "runtime"
    return _Machine(environment, allocator, True, _SIMULATED_SCALE)


def _jobs(options: Options, machine: _Machine, scale: float) -> Iterator[_Job]:
    for case in options.cases:
        for shape in range(len(case.shapes)):
            fewest = _SIMULATED_REPETITIONS if machine.simulated else None
            repetitions = options.repetitions or fewest
            processes = case.processes if repetitions is None else min(repetitions, case.processes)
            for _ in range(processes):
                yield _Job(case, shape, _OURS, repetitions or case.repetitions, scale)
            if options.peer is not None and case.peer_repetitions:
                for _ in range(min(processes, case.peer_processes)):
                    yield _Job(case, shape, _PEER, repetitions or case.peer_repetitions, scale)


def _described(job: _Job, options: Options, machine: _Machine) -> dict[str, Any]:
    return {
        "case": job.case.name,
        "shape": job.shape,
        "scale": job.scale,
        "repetitions": job.repetitions,
        "directory": options.directory,
        "allocator": machine.allocator,
    }


def _start(machine: _Machine, peer: str | None, job: dict[str, Any]) -> dict[str, Any]:
    """Runs one process to its end. Returns the result that it wrote, or {"failed": reason} if it wrote none."""
    package_root = str(Path(_core.__file__).resolve().parent.parent)
    first = package_root if peer is None else os.path.abspath(peer)
    environment = dict(machine.environment)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [first, environment.get("PYTHONPATH", "")]))
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        described = json.dumps({**job, "peer": peer and os.path.abspath(peer), "result": str(result)})
        try:
            # Libraries in the process may print to stdout. This program's stdout is for results only.
            done = subprocess.run(
                [sys.executable, str(_WORKER), described],
                env=environment,
                stdout=sys.stderr,
                timeout=_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"the process did not end within {_TIMEOUT_S} seconds and was killed"}
        if not result.is_file():
            return {"failed": f"the process ended with status {done.returncode} and wrote no result"}
        written: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return written


def _describe(description: Mapping[str, Any], machine: _Machine) -> dict[str, Any]:
    return {
        **description,
        "simulated": machine.simulated,
        "processors": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


def _write_json(options: Options, run: _Run, machine: Mapping[str, Any], peer: str | None, scale: float) -> None:
    """Writes the results so far. It is called after every process, so that a run that is killed leaves them behind."""
    if options.json_path is None:
        return
    data = {
        "machine": machine,
        "scale": scale,
        "peer": peer,
        "rows": [row.as_json() for row in run.rows(scale)],
        "left_out": run.left_out,
    }
    Path(options.json_path).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def _show_former(options: Options) -> int:
    runs = []
    for path in options.former:
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            rows = [row_from_json(row) for row in data["rows"]]
            runs.append((rows, data["left_out"], data["machine"], data["peer"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidArgumentError(f"{path} cannot be read as a file that bench --json wrote: {error}") from error
    rows = [row for measured, *_ in runs for row in measured]
    shown = {row.key for row in rows}
    # Another run may have measured what one run left out.
    left_out = [entry for _, entries, *_ in runs for entry in entries if entry["case"] not in {case for case, *_ in shown}]
    _show(options, rows, left_out, runs[0][2], next((peer for *_, peer in runs if peer), None))
    return 0


def _show(
    options: Options,
    rows: Sequence[Row],
    left_out: Sequence[Mapping[str, str]],
    machine: Mapping[str, Any],
    peer: str | None,
) -> None:
    if options.plot_path is not None:
        plot.draw(options.plot_path, rows, machine, peer)
    if options.markdown:
        print(table.markdown(rows, machine, peer))
        _say(*(f"left out: {entry['case']}, {entry['shape']} ({entry['side']}): {entry['reason']}" for entry in left_out))
    else:
        print(table.terminal(rows, left_out, machine, peer))


def _say(*lines: str) -> None:
    for line in lines:
        print(line, file=sys.stderr, flush=True)
