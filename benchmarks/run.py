"""Runs the benchmarks and shows their results: `make bench`, or `python benchmarks/run.py` in a clone.

Each shape of each case runs in a process of its own, which this file starts from itself (`--worker`). The process times the
package in turns with the limit that the hardware sets. With `--peer`, other processes do the same work with the C++ package.
There, `torch_memory_saver` is that package. So the modules of this folder import the package only to use it as any program
would.

The package is the one that Python finds; `make bench` uses that of the clone. PyTorch's GPUs are used.
`python -m torch_memory_saver simulate -- python benchmarks/run.py` uses simulated ones.

pyperf does not fit: its runner calibrates and times one function in a process, and so cannot take turns with the limit.
Without the runner, all that it adds to the `statistics` module is a file format.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cases import CASES, find
from limits import Device, use_memory
from results import Row, markdown, merge
from savers import Ours, Peer, Unavailable
from setting import SMALLEST_SCALE, Case, Setting

__all__ = ["main", "measure"]

#: A process that takes longer is ended and reported as failed.
_TIMEOUT_S = 600
#: The exit status after Ctrl-C, as in shells.
_INTERRUPTED = 130
_OURS, _PEER = "ours", "C++"


@dataclass
class _Results:
    """The results of the processes so far."""

    rows: list[Row] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)
    status: int = 0

    def take(self, name: str, side: str, result: Mapping[str, Any]) -> None:
        """Adds the result of one process."""
        if "rows" in result:
            self.rows += [Row(**row) for row in result["rows"]]
            self.machine = self.machine or result["machine"]
            return
        if "failed" in result and side == _OURS:
            self.status = 1
        reason = f"{name}: {result.get('unavailable') or result['failed']}"
        if reason not in self.left_out:
            self.left_out.append(reason)
        _say(result.get("traceback", ""))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the cases, and prints and writes the results.

    Returns:
        The exit status: 0 if no process that times this package failed, whatever the times are; 1 if one failed; 130 after
        Ctrl-C.
    """
    options = _parser().parse_args(arguments)
    if options.worker is not None:
        _work(json.loads(options.worker))
        return 0
    peer = None if options.peer is None else _peer_version(options.peer)
    results = _Results()
    simulated = bool(os.environ.get("TMS_CUDA_DRIVER"))
    scale = options.scale or (SMALLEST_SCALE if simulated else 1.0)
    host_bytes = max(case.host_bytes for case in options.cases)
    if host_bytes and not simulated:
        _say("using the host's memory once, because some virtual machines get memory only on its first use")
        _start({"host_bytes": int(host_bytes * scale)})
    jobs = list(_jobs(options, scale))
    try:
        for number, job in enumerate(jobs, 1):
            side = _OURS if job["peer"] is None else _PEER
            name = f"{job['case']}, {job['described']} ({side})"
            _say(f"[{number}/{len(jobs)}] {name}")
            results.take(name, side, _start(job))
            _write(options, results, peer, scale)
    except KeyboardInterrupt:
        _say("interrupted: the results so far follow")
        results.status = _INTERRUPTED
    if results.rows:
        print(markdown(merge(results.rows), results.machine, peer))
    _say(*(f"left out: {reason}" for reason in results.left_out))
    return results.status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks/run.py", description="Time pause and resume beside what the hardware allows."
    )
    names = ", ".join(case.name for case in CASES)
    parser.add_argument("--cases", type=_cases, default=CASES, metavar="A,B", help=f"which of {names} to run (default: all)")
    parser.add_argument("--scale", type=_scale, help="factor that sizes are multiplied by, for small machines (default 1)")
    parser.add_argument("--repetitions", type=_count, help="how often each measurement is made (default: set by the case)")
    parser.add_argument(
        "--peer", metavar="PATH", help="also time the C++ package installed in this folder (pip install --target)"
    )
    parser.add_argument(
        "--directory", default=tempfile.gettempdir(), help="the folder for files of the disk case (default %(default)s)"
    )
    parser.add_argument("--json", metavar="FILE", help="write all results to this file, after each process")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser


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


def _peer_version(folder: str) -> str:
    """Return the version of the C++ package in a folder. Exits with one sentence if there is none."""
    for distribution in importlib.metadata.distributions(path=[folder]):
        if distribution.metadata["Name"].replace("-", "_").lower() == "torch_memory_saver":
            return distribution.version
    raise SystemExit(
        f"error: there is no torch_memory_saver in {folder}: install one there with "
        f"pip install --target {folder} torch_memory_saver==..."
    )


def _jobs(options: argparse.Namespace, scale: float) -> Iterator[dict[str, Any]]:
    """The work of each process, as its argument."""
    for case in options.cases:
        for index, shape in enumerate(case.shapes):
            job = {"case": case.name, "shape": index, "described": str(shape.scaled(scale)), "scale": scale}
            job |= {"directory": options.directory, "peer": None, "repetitions": options.repetitions or case.repetitions}
            processes = min(options.repetitions or case.processes, case.processes)
            for _ in range(processes):
                yield job
            for _ in range(processes if options.peer is not None and case.peer_repetitions else 0):
                yield {
                    **job,
                    "peer": os.path.abspath(options.peer),
                    "repetitions": options.repetitions or case.peer_repetitions,
                }


def _start(job: Mapping[str, Any]) -> dict[str, Any]:
    """Runs one process to its end. Returns the result that it wrote, or {"failed": reason} if it wrote none."""
    # Without a peer, the process finds the package as this one does.
    path = os.pathsep.join(filter(None, [job.get("peer"), os.environ.get("PYTHONPATH", "")]))
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        command = [sys.executable, __file__, "--worker", json.dumps({**job, "result": str(result)})]
        try:
            # Libraries in the process may print to stdout. This program's stdout is for results only.
            done = subprocess.run(
                command, env={**os.environ, "PYTHONPATH": path}, stdout=sys.stderr, timeout=_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"the process did not end within {_TIMEOUT_S} seconds and was killed"}
        if not result.is_file():
            return {"failed": f"the process ended with status {done.returncode} and wrote no result"}
        written: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return written


def _write(options: argparse.Namespace, results: _Results, peer: str | None, scale: float) -> None:
    """Writes the results so far, so that a run that is killed leaves them behind."""
    if options.json is not None:
        rows = [row.as_json() for row in merge(results.rows)]
        data = {"machine": results.machine, "scale": scale, "peer": peer, "rows": rows, "left_out": results.left_out}
        Path(options.json).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def _say(*lines: str) -> None:
    for line in filter(None, lines):
        print(line, file=sys.stderr, flush=True)


def _work(job: Mapping[str, Any]) -> None:
    """Does the work of one process and writes {"rows", "machine"}, {"unavailable"} or {"failed"} to its file."""
    try:
        if "host_bytes" in job:
            use_memory(job["host_bytes"])
            return
        result = measure(job)
    except Unavailable as error:
        result = {"unavailable": str(error)}
    except Exception as error:  # Any failure is reported, and the other processes run.
        result = {"failed": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    Path(job["result"]).write_text(json.dumps(result), encoding="utf-8")
    if job["peer"] is not None:
        # The result is written. Not every release of the peer survives the exit of the interpreter.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """Measures one shape of one case in this process. Returns its rows and the description of the machine.

    Raises:
        Unavailable: The library or the machine lacks what the case needs.
    """
    case = find(job["case"])
    assert case is not None
    saver = Ours() if job["peer"] is None else Peer(job["peer"])
    torch = importlib.import_module("torch")
    torch.empty(1, device="cuda")  # PyTorch's allocator must be in use, as in every program that uses the library.
    device = Device()
    setting = Setting(saver, device, job["repetitions"], job["directory"], job["peer"] is not None)
    rows = case.run(setting, case.shapes[job["shape"]].scaled(job["scale"]))
    machine = {
        "device": device.name(),
        "driver": _driver_version(),
        "torch": str(torch.__version__),
        "simulated": bool(os.environ.get("TMS_CUDA_DRIVER")),
        "processors": len(os.sched_getaffinity(0)),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }
    return {"rows": [asdict(row) for row in rows], "machine": machine}


def _driver_version() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="ascii", errors="replace")
    except OSError:
        return "unknown"
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return found[0] if found else "unknown"


if __name__ == "__main__":
    sys.exit(main())
