"""The engine processes of memory_leak.py that have no leak, the scheduler and the detokenizer, and the base class of all.

A process reads messages from standard input, one JSON object a line, and passes them on to standard output, the input of the
next process. A message says what to do: "generate", "sleep", "train" or "wake". Each process adds what the next ones need.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from _check import MIB
from _image_bursts import CHANNELS, at_once

from torch_memory_saver import torch_memory_saver

# Name the process by its part of the engine before it uses the package, as a server does with setproctitle.
sys.argv[0] = sys.argv[1] if __name__ == "__main__" else Path(sys.argv[0]).stem.removeprefix("_leak_")
#: The number of elements of the scheduler's weights and KV cache, and of the detokenizer's words.
WEIGHTS, SLOTS, WORDS = 1 << 24, 1 << 22, 1 << 16


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


class Scheduler(Stage):
    """A process that runs the model on batches of images.

    It frees all memory of a batch. PyTorch caches this memory, but images of later steps are too large for it.
    """

    role = "scheduler"

    def __init__(self, budget: int) -> None:
        self.budget = budget
        with torch_memory_saver.region(tag="weights", backup="host"):
            self.weights = torch.ones(WEIGHTS, dtype=torch.int32, device="cuda")
        with torch_memory_saver.region(tag="kv_cache"):
            self.kv_cache = torch.empty(SLOTS, dtype=torch.int64, device="cuda")

    def generate(self, message: dict[str, Any]) -> None:
        images = [image for request in message["requests"] for image in request["images"]]
        count = at_once(self.budget, images[0]["side"])
        answers = [answer for at in range(0, len(images), count) for answer in self.run_batch(images[at : at + count])]
        for request in message["requests"]:
            request["answer"] = sum(answers.pop(0) for _ in request["images"])

    def run_batch(self, images: list[dict[str, Any]]) -> list[int]:
        """Return a number for each image. The features of all images are on the device at once."""
        features = [self.upsample(image) for image in images]
        for slot, feature in enumerate(features):
            self.kv_cache[slot] = feature[:, ::16, ::16].sum() * self.weights[slot]
        return [int(answer) for answer in self.kv_cache[: len(features)].tolist()]

    def upsample(self, image: dict[str, Any]) -> torch.Tensor:
        side = image["side"]
        return torch.full((CHANNELS, side, side), image["token"], dtype=torch.int32, device="cuda")


class Detokenizer(Stage):
    """A process that turns answers into text. Its memory does not grow."""

    role = "detokenizer"

    def __init__(self) -> None:
        with torch_memory_saver.region(tag="vocabulary", backup="host"):
            self.words = torch.arange(WORDS - 1, -1, -1, device="cuda")

    def generate(self, message: dict[str, Any]) -> None:
        answers = torch.tensor([request.pop("answer") for request in message["requests"]], device="cuda")
        for request, word in zip(message["requests"], self.words[answers % WORDS].tolist(), strict=True):
            request["text"] = f"word {word}"


def serve(stage: Stage) -> None:
    """Handle messages until the input ends."""
    for line in sys.stdin:
        message = json.loads(line)
        getattr(stage, message["do"])(message)
        print(json.dumps(message), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("scheduler", "detokenizer"))
    parser.add_argument("--batch-mib", type=int, default=0, help="memory for the images of a batch of the scheduler")
    options = parser.parse_args()
    serve(Scheduler(options.batch_mib * MIB) if options.role == "scheduler" else Detokenizer())


if __name__ == "__main__":
    main()
