"""The common part of the three engine processes of memory_leak.py.

A process reads messages from standard input, one JSON object a line, and passes them on to standard output, the input of the
next process. A message says what to do: "generate", "sleep", "train" or "wake". Each process adds what the next ones need.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from torch_memory_saver import torch_memory_saver

#: Name the process by its part of the engine before it uses the package, as a server does with setproctitle.
sys.argv[0] = Path(sys.argv[0]).stem.removeprefix("_leak_")


class Stage:
    """One process of the engine, with a method for each kind of message."""

    role: str

    def generate(self, message: dict[str, Any]) -> None:
        """Answer the requests of a rollout."""
        raise NotImplementedError

    def sleep(self, message: dict[str, Any]) -> None:
        """Pause all memory after a rollout, so that the trainer can use it."""
        torch_memory_saver.pause()
        self.report(message)

    def train(self, message: dict[str, Any]) -> None:
        """Make a step of the trainer. Processes without a trainer do nothing."""

    def wake(self, message: dict[str, Any]) -> None:
        torch_memory_saver.resume()

    def report(self, message: dict[str, Any]) -> None:
        """Add PyTorch's counters of this process to the message. They include paused memory."""
        counters = {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
        message["memory"][self.role] = counters


def serve(stage: Stage) -> None:
    """Handle messages until the input ends."""
    for line in sys.stdin:
        message = json.loads(line)
        getattr(stage, message["do"])(message)
        print(json.dumps(message), flush=True)
