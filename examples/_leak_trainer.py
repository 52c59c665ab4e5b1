"""The trainer of memory_leak.py, which lives in the tokenizer's process. Between steps its optimizer's state lies in host
memory, so that each step allocates it again."""

from __future__ import annotations

import torch
from _check import MIB

from torch_memory_saver import torch_memory_saver

BLOCKS = 4
MOMENTUM, RATE = 0.9, 0.125


class Trainer:
    """Weights and an optimizer state, each in BLOCKS blocks of `mib` MiB."""

    def __init__(self, mib: int) -> None:
        values = mib * MIB // 4
        with torch_memory_saver.region(tag="trainer", backup="host"):
            self.weights = [torch.zeros(values, device="cuda") for _ in range(BLOCKS)]
        self.offloaded = [torch.zeros(values) for _ in range(BLOCKS)]
        self.moments: list[torch.Tensor] = []

    def step(self) -> None:
        torch_memory_saver.resume("trainer")
        self.load_optimizer()
        for weight, moment in zip(self.weights, self.moments, strict=True):
            moment.mul_(MOMENTUM).add_(1)
            weight.sub_(moment, alpha=RATE)
        torch_memory_saver.pause("trainer")
        self.offload_optimizer()

    def load_optimizer(self) -> None:
        self.moments = [moment.cuda() for moment in self.offloaded]

    def offload_optimizer(self) -> None:
        for host, moment in zip(self.offloaded, self.moments, strict=True):
            host.copy_(moment)
        self.moments.clear()
