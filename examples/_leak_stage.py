"""What the three engine processes of memory_leak.py have in common.

Messages come on standard input, one JSON object a line, and go on to standard output, the input of the next process. A
message says what to do: "generate", "sleep", "train" or "wake". Each process adds what the next ones need.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from torch_memory_saver import torch_memory_saver

#: Each process is named by its part of the engine, as a server does with setproctitle, before it uses the package.
sys.argv[0] = Path(sys.argv[0]).stem.removeprefix("_leak_")


class Stage:
    """One process of the engine, with a method for each kind of message."""

    role: str

    def generate(self, message: dict[str, Any]) -> None:
        """A rollout: answers the requests."""
        raise NotImplementedError

    def sleep(self, message: dict[str, Any]) -> None:
        """The rollout is over: the memory is for the trainer."""
        torch_memory_saver.pause()
        self.report(message)

    def train(self, message: dict[str, Any]) -> None:
        """A step of the trainer."""

    def wake(self, message: dict[str, Any]) -> None:
        torch_memory_saver.resume()

    def report(self, message: dict[str, Any]) -> None:
        """PyTorch's counters, which cover this process only. Paused memory counts."""
        counters = {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
        message["memory"][self.role] = counters


def serve(stage: Stage) -> None:
    """Handles messages until there are no more."""
    for line in sys.stdin:
        message = json.loads(line)
        getattr(stage, message["do"])(message)
        print(json.dumps(message), flush=True)
