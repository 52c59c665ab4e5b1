"""The engine of memory_leak.py as seen from outside: it starts three processes in a row and sends requests through them.

This module needs neither PyTorch nor torch_memory_saver.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from _check import MIB
from _image_bursts import side_of

ROLES = ("tokenizer", "scheduler", "detokenizer")
HERE = Path(__file__).resolve().parent
#: The number of rollouts, and of images in each request. A step of the trainer follows each rollout.
STEPS, IMAGES = 4, 3
#: Variables of the user's shell that are removed because they would change what the example shows.
REMOVED = ("TMS_DEBUG", "TMS_RELEASE_CACHED", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
#: Seconds to wait for a process to end after its input has ended.
PATIENCE = 60


class Counters(NamedTuple):
    """PyTorch's counters of a process, in bytes."""

    allocated: int
    reserved: int


class Load(NamedTuple):
    """The work of the engine.

    Attributes:
        requests: The number of requests in a rollout.
        batch_mib: The size of the images that the scheduler has on the device at once, in MiB.
        optimizer_mib: Each block of the optimizer's state has this size, in MiB.
    """

    requests: int
    batch_mib: int
    optimizer_mib: int

    @property
    def images_of_step(self) -> int:
        return self.requests * IMAGES

    def rollout(self, step: int) -> list[dict[str, Any]]:
        """Return the requests of a step."""
        numbers = range(step * self.requests, (step + 1) * self.requests)
        return [
            {"id": number, "images": [{"id": number * IMAGES + image, "side": side_of(step)} for image in range(IMAGES)]}
            for number in numbers
        ]


@dataclass
class Results:
    """The results of one run: each process's counters after each step, and the answers by request."""

    memory: dict[str, list[Counters]]
    answers: dict[int, str]

    def __str__(self) -> str:
        """Return a table of the counters, in MiB."""
        columns = "  ".join(f"{'allocated':>10}{'reserved':>10}" for _ in ROLES)
        lines = ["  MiB   " + "  ".join(f"{role:^20}" for role in ROLES).rstrip(), f"  step  {columns}"]
        for step, counters in enumerate(zip(*(self.memory[role] for role in ROLES), strict=True), 1):
            cells = (f"{each.allocated / MIB:>10.1f}{each.reserved / MIB:>10.1f}" for each in counters)
            lines.append(f"  {step:>4}  {'  '.join(cells)}")
        return "\n".join(lines)


class Engine:
    """The processes of an engine. They end with the context.

    Args:
        settings: Environment variables for all processes.
        drop_answered: Whether the tokenizer has the fix.
    """

    def __init__(self, load: Load, settings: dict[str, str], drop_answered: bool) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(REMOVED)}
        commands = {
            "tokenizer": ["_leak_tokenizer.py", "--optimizer-mib", str(load.optimizer_mib)],
            "scheduler": ["_leak_stage.py", "scheduler", "--batch-mib", str(load.batch_mib)],
            "detokenizer": ["_leak_stage.py", "detokenizer"],
        }
        if drop_answered:
            commands["tokenizer"].append("--drop-answered")
        self.processes: list[subprocess.Popen[str]] = []
        for role in ROLES:
            program, *arguments = commands[role]
            command = [sys.executable, str(HERE / program), *arguments]
            source = self.processes[-1].stdout if self.processes else subprocess.PIPE
            process = subprocess.Popen(command, stdin=source, stdout=subprocess.PIPE, env=kept | settings, text=True)
            if self.processes:
                source.close()  # type: ignore[union-attr]  # only the new process reads it
            self.processes.append(process)

    def ask(self, do: str, **content: Any) -> dict[str, Any]:
        """Send a message through all processes, and return the message that the last one writes."""
        first, last = self.processes[0].stdin, self.processes[-1].stdout
        assert first is not None and last is not None
        with contextlib.suppress(BrokenPipeError):  # then there is no answer
            first.write(json.dumps({"do": do, **content}) + "\n")
            first.flush()
        line = last.readline()
        if not line:
            raise SystemExit(f"FAILED: the engine has ended while it was to {do}")
        message: dict[str, Any] = json.loads(line)
        return message

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        first = self.processes[0].stdin
        assert first is not None
        with contextlib.suppress(BrokenPipeError):
            first.close()
        try:
            for process in self.processes:
                process.wait(PATIENCE)
        finally:
            for process in self.processes:
                process.kill()
        failed = [role for role, process in zip(ROLES, self.processes, strict=True) if process.returncode]
        if failed:
            raise SystemExit(f"FAILED: the {' and the '.join(failed)} failed")


def recording(folder: Path) -> dict[str, str]:
    """Return the settings with which every process records its memory, with a snapshot before each pause."""
    return {"TMS_DEBUG": "history,snapshots", "TMS_DEBUG_DIR": str(folder)}


def run(load: Load, settings: dict[str, str], drop_answered: bool = False) -> Results:
    """Start an engine, have it make all steps, and end it. Prints the counters of its processes."""
    results = Results({role: [] for role in ROLES}, {})
    with Engine(load, settings, drop_answered) as engine:
        for step in range(STEPS):
            answered = engine.ask("generate", requests=load.rollout(step))
            results.answers |= {request["id"]: request["text"] for request in answered["requests"]}
            memory = engine.ask("sleep", memory={})["memory"]
            memory |= engine.ask("train", memory={})["memory"]
            for role in ROLES:
                results.memory[role].append(Counters(**memory[role]))
            engine.ask("wake")
    print(results, flush=True)
    return results
