"""The program that fragmentation.py runs with each setting of PyTorch's allocator.

Each step has a burst of images on the device. The program keeps a prefix of each of the first images until it ends: a small
block, which PyTorch puts into the rest of the image's segment. After each step the program writes a snapshot, and at the
end it releases cached memory, with --pause after a pause and a resume of everything. It prints its figures as JSON.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from _check import MIB
from _fragmentation_sizes import FIRST_SIDE, PREFIX_BYTES, PREFIXES, STRIDE
from _image_bursts import CHANNELS, at_once, side_of

from torch_memory_saver import torch_memory_saver
from torch_memory_saver.observe import memory


class Program:
    """Bursts of images within a budget of bytes."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.prefixes: list[torch.Tensor] = []

    def step(self, number: int) -> None:
        side = side_of(number, FIRST_SIDE, STRIDE)
        images = []
        for _ in range(at_once(self.budget, side)):
            images.append(self.decode(side))
            if len(self.prefixes) < PREFIXES:
                self.prefixes.append(self.remember(images[-1]))

    def decode(self, side: int) -> torch.Tensor:
        return torch.full((CHANNELS, side, side), side, dtype=torch.int32, device="cuda")

    def remember(self, image: torch.Tensor) -> torch.Tensor:
        return image.flatten()[: PREFIX_BYTES // image.element_size()].clone()


def counters() -> dict[str, int]:
    return {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="for the snapshots")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--burst-mib", type=int, required=True)
    parser.add_argument("--pause", action="store_true")
    options = parser.parse_args()
    memory.record_history()
    sampler = memory.MemorySnapshotSampler(options.folder, role="bursts")
    program = Program(options.burst_mib * MIB)
    steps = []
    for number in range(options.steps):
        program.step(number)
        sampler.sample(number + 1)
        steps.append(counters())
    expandable = any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())
    if options.pause:
        if torch_memory_saver.pause(backup="host").bytes == 0 or torch_memory_saver.stats().total.resident_bytes > 0:
            raise SystemExit("FAILED: not everything was paused")
        torch_memory_saver.resume()
    memory.release_cached()
    print(json.dumps({"steps": steps, "released": counters(), "expandable": expandable}))


if __name__ == "__main__":
    main()
