"""Records small snapshots of a program with planted memory problems, for tests/data and tests/gpu.

    python tools/record_snapshots.py DIRECTORY

The program leaks small blocks between large ones, makes the state of Adam in its second step, fills a cache and stops,
lets small blocks hold segments from its first step on, and loads blocks anew in each step. After each step it writes
DIRECTORY/step-00000N/trainer.pickle. It needs PyTorch with a GPU and, for managed memory, torch_memory_saver; without
that it writes PyTorch's own snapshots.

The paths of this machine do not stay in the files: a frame of an installed package begins with /site-packages/, one of
this file with /program/.
"""

from __future__ import annotations

import argparse
import contextlib
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

MIB = 1 << 20
STEPS = 4
#: Events of the history: all of the program's.
ENTRIES = 2000
PROTOCOL = 4

LEAKED_BLOCKS, LEAKED_BYTES = 4, 3 * MIB // 2
LARGE_BYTES = 12 * MIB
CACHE_STEPS, CACHED_BYTES = 2, 16 * MIB
#: Each segment of 20 MiB has two blocks of a burst, and one between them that stays.
HELD_SEGMENTS, BURST_BYTES, KEPT_BYTES = 16, 9 * MIB, 5 * MIB // 4
OFFLOADED_BLOCKS, OFFLOADED_BYTES = 2, 32 * MIB
WIDTH = 1024

saver: Any = None
with contextlib.suppress(ImportError):
    from torch_memory_saver import torch_memory_saver as saver


def numbers(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cuda")


class Program:
    """The recorded program: its steps, and the objects that they keep."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(WIDTH, WIDTH, bias=False, device="cuda")
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.features: list[torch.Tensor] = []
        self.cache: list[torch.Tensor] = []
        self.headers: list[torch.Tensor] = []
        self.offloaded: list[torch.Tensor] = []
        with saver.region(tag="kv_cache") if saver else contextlib.nullcontext():
            self.kv_cache = numbers(LARGE_BYTES)

    def step(self, number: int) -> None:
        if number == 0:
            self.read_batch()
        self.encode_images()
        self.remember(number)
        self.load_optimizer()
        if number > 0:
            self.train()

    def read_batch(self) -> None:
        burst = []
        for _ in range(HELD_SEGMENTS):
            burst.append(numbers(BURST_BYTES))
            self.headers.append(numbers(KEPT_BYTES))
            burst.append(numbers(BURST_BYTES))

    def encode_images(self) -> None:
        images = []
        for _ in range(LEAKED_BLOCKS):
            images.append(numbers(LARGE_BYTES))
            self.features.append(numbers(LEAKED_BYTES))

    def remember(self, number: int) -> None:
        if number < CACHE_STEPS:
            self.cache.append(numbers(CACHED_BYTES))

    def load_optimizer(self) -> None:
        self.offloaded.clear()
        for _ in range(OFFLOADED_BLOCKS):
            self.offloaded.append(numbers(OFFLOADED_BYTES))

    def train(self) -> None:
        self.model(torch.ones(1, WIDTH, device="cuda")).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Pause the managed memory while a snapshot is taken."""
    if saver:
        saver.pause("kv_cache")
    yield
    if saver:
        saver.resume("kv_cache")


def take(step: int) -> dict[str, Any]:
    if saver:
        from torch_memory_saver.observe.memory import take_snapshot

        return take_snapshot(step=step, role="trainer")
    snapshot: dict[str, Any] = torch.cuda.memory._snapshot()
    return snapshot


def without_paths(snapshot: dict[str, Any]) -> dict[str, Any]:
    """The snapshot with other beginnings of its file names. PyTorch's frames are shared, so each is changed once."""
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    events = [event for trace in snapshot["device_traces"] for event in trace]
    frames = {id(frame): frame for row in [*blocks, *snapshot["segments"], *events] for frame in row.get("frames", ())}
    for frame in frames.values():
        _, installed, name = frame["filename"].rpartition("/site-packages/")
        frame["filename"] = installed + name if installed else f"/program/{Path(frame['filename']).name}"
    return snapshot


def main() -> None:
    parser = argparse.ArgumentParser(description="Records small snapshots of a program with planted memory problems.")
    parser.add_argument("directory", type=Path, help="gets a folder for each step")
    directory = parser.parse_args().directory
    # Without a history of C++ frames: the files are for a repository.
    torch.cuda.memory._record_memory_history(max_entries=ENTRIES, stacks="python")
    program = Program()
    for step in range(STEPS):
        program.step(step)
        torch.cuda.synchronize()
        with paused():
            snapshot = without_paths(take(step))
        path = directory / f"step-{step:06d}" / "trainer.pickle"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pickle.dumps(snapshot, protocol=PROTOCOL))
        print(f"{path}: {path.stat().st_size / 1000:.1f} kB")
    name = torch.cuda.get_device_name()
    print(f"PyTorch {torch.__version__}, {name}, with torch_memory_saver: {saver is not None}")


if __name__ == "__main__":
    main()
