"""How memory_leak.py runs its engine: three processes in a row. Needs neither PyTorch nor torch_memory_saver."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from _image_bursts import side_of

ROLES = ("tokenizer", "scheduler", "detokenizer")
HERE = Path(__file__).resolve().parent
#: Variables of the user's shell that are removed because they would change what the example shows.
LEFT_OUT = ("TMS_DEBUG", "TMS_RELEASE_CACHED", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
#: Seconds to wait for a process to end after its input has ended.
PATIENCE = 60


class Counters(NamedTuple):
    """PyTorch's counters of a process, in bytes."""

    allocated: int
    reserved: int


@dataclass(frozen=True)
class Load:
    """The work of the engine.

    Attributes:
        steps: The number of rollouts. A step of the trainer follows each.
        requests: The number of requests in a rollout.
        images: The number of images in a request.
        batch_mib: MiB of the images that the scheduler has on the device at once.
        optimizer_mib: MiB of each block of the optimizer's state.
    """

    steps: int
    requests: int
    images: int
    batch_mib: int
    optimizer_mib: int

    @property
    def images_of_step(self) -> int:
        return self.requests * self.images

    def rollout(self, step: int) -> Iterator[dict[str, Any]]:
        for request in range(self.requests):
            number = step * self.requests + request
            images = [{"id": number * self.images + image, "side": side_of(step)} for image in range(self.images)]
            yield {"id": number, "images": images}


@dataclass
class Results:
    """The results of one run: each process's counters after each step, and the answers by request."""

    memory: dict[str, list[Counters]]
    answers: dict[int, str]


class Engine:
    """The processes of an engine. They end with the context.

    Args:
        settings: Environment variables for all processes.
        drop_answered: Whether the tokenizer has the fix.
    """

    def __init__(self, load: Load, settings: dict[str, str], drop_answered: bool) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(LEFT_OUT)}
        arguments = {
            "tokenizer": ["--optimizer-mib", str(load.optimizer_mib), *(["--drop-answered"] if drop_answered else [])],
            "scheduler": ["--batch-mib", str(load.batch_mib)],
            "detokenizer": [],
        }
        self.processes: list[subprocess.Popen[str]] = []
        for role in ROLES:
            command = [sys.executable, str(HERE / f"_leak_{role}.py"), *arguments[role]]
            source = self.processes[-1].stdout if self.processes else subprocess.PIPE
            environment = {**kept, **settings}
            process = subprocess.Popen(command, stdin=source, stdout=subprocess.PIPE, env=environment, text=True)
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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
    """Start an engine, have it make all steps, and end it."""
    results = Results({role: [] for role in ROLES}, {})
    with Engine(load, settings, drop_answered) as engine:
        for step in range(load.steps):
            answered = engine.ask("generate", requests=list(load.rollout(step)))
            results.answers |= {request["id"]: request["text"] for request in answered["requests"]}
            memory = engine.ask("sleep", memory={})["memory"]
            memory |= engine.ask("train", memory={})["memory"]
            for role in ROLES:
                results.memory[role].append(Counters(**memory[role]))
            engine.ask("wake")
    return results
