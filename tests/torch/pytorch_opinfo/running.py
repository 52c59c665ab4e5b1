"""Runs a share of PyTorch's databases in worker processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

__all__ = ["RESTART", "UNIT_SECONDS", "run"]

#: The exit status of a worker that can no longer use CUDA.
RESTART = 7
#: Time limit of a check in seconds. When it expires, a signal ends the worker.
UNIT_SECONDS = 120

Outcome = dict[str, Any]


def run(share: int = 1, of: int = 1, lanes: int = 1, only: str = "", also: tuple[str, ...] = ()) -> list[Outcome]:
    """Runs the checks of a share, with `only` and `also` as in entries.units, in `lanes` concurrent processes.

    Returns:
        The outcomes of all checks.

    Raises:
        RuntimeError: A worker ended without output.
    """
    arguments = [f"--share={share}", f"--of={of}", f"--lanes={lanes}", f"--only={only}", "--also", *also]
    with ThreadPoolExecutor(lanes) as pool:
        done = pool.map(lambda lane: _lane([*arguments, f"--lane={lane}"]), range(lanes))
        return [outcome for lane in done for outcome in lane]


def _lane(arguments: list[str]) -> list[Outcome]:
    outcomes: list[Outcome] = []
    first = 0
    with tempfile.TemporaryDirectory() as folder:
        while True:
            output = Path(folder, f"{first}.jsonl")
            command = [sys.executable, str(Path(__file__).with_name("worker.py")), *arguments]
            done = subprocess.run(
                [*command, f"--first={first}", f"--output={output}"],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
            lines = [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []
            if not lines:
                raise RuntimeError(f"a worker ended with the status {done.returncode}:\n{done.stderr[-4000:]}")
            outcomes += [line for line in lines if "place" in line]
            if done.returncode == 0:
                return outcomes
            last = lines[-1]
            if last.get("sticky"):
                outcomes[-1]["cause"] = _of_the_device(done.stderr) or last["cause"]
            if "begins" in last:
                cause = f"the process ended with the status {done.returncode}"
                outcomes.append({**last, "place": last["begins"], "outcome": "died", "cause": cause})
            _log(f"after {last['entry']} {last['dtype']} {last['check']}: a new process")
            first = int(last.get("begins", last.get("place"))) + 1


def _of_the_device(text: str) -> str:
    """The last message of the simulated GPU on stderr, shortened; empty if there is none."""
    messages = [line for line in text.splitlines() if line.startswith("simulated GPU: ")]
    return messages[-1][:300] if messages else ""


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
