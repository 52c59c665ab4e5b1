"""Compares the speed of the simulated GPU with the CPU's: python tools/operator_speed.py [--threads N] [--repetitions N]

It must run under ``python -m torch_memory_saver simulate``, as ``make operator-speed`` does. The CPU and the simulated GPU
take turns. It prints medians with the lowest and the highest, and the simulated GPU's time as a multiple of the CPU's:

- a small operator: two tensors of 16 floats are added many times, with one synchronisation at the end;
- a training step of a transformer: 4 layers of width 512, a batch of 8 x 256, dropout, checkpoints, Adam.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

DEVICES = ("cpu", "cuda")
CALLS = 2000
LAYERS, WIDTH, HEADS, BATCH, LENGTH = 4, 512, 8, 8, 256


def small_operator(device: str) -> Callable[[], None]:
    one, other = torch.ones(16, device=device), torch.ones(16, device=device)

    def run() -> None:
        for _ in range(CALLS):
            one + other
        torch.cuda.synchronize()

    return run


def training_step(device: str) -> Callable[[], None]:
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(
        torch.nn.TransformerEncoderLayer(WIDTH, HEADS, dropout=0.1, batch_first=True) for _ in range(LAYERS)
    ).to(device)
    optimizer = torch.optim.Adam(layers.parameters(), lr=1e-4)
    given, wanted = (torch.randn(BATCH, LENGTH, WIDTH).to(device) for _ in range(2))

    def run() -> None:
        optimizer.zero_grad()
        hidden = given
        for layer in layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False)
        (hidden - wanted).square().mean().backward()
        optimizer.step()
        torch.cuda.synchronize()

    return run


def seconds(run: Callable[[], None]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def compare(name: str, make: Callable[[str], Callable[[], None]], repetitions: int, unit: str, scale: float) -> None:
    runs = {device: make(device) for device in DEVICES}
    first = {device: seconds(run) for device, run in runs.items()}
    times: dict[str, list[float]] = {device: [] for device in DEVICES}
    for _ in range(repetitions):
        for device in DEVICES:
            times[device].append(seconds(runs[device]))
    for device in DEVICES:
        spread = _spread([scale * each for each in times[device]])
        print(f"{name} on {device}: {spread} {unit}, the first {scale * first[device]:.2f}")
    ratios = [cuda / cpu for cpu, cuda in zip(times["cpu"], times["cuda"], strict=True)]
    print(f"{name}: {_spread(ratios)} times the CPU's")


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


def main() -> int:
    parser = argparse.ArgumentParser(description="Compares the speed of the simulated GPU with the CPU's.")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="PyTorch's CPU threads, for both (default 1)")
    parser.add_argument(
        "--repetitions", type=int, default=5, metavar="N", help="how often each is timed, after a first run (default 5)"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    compare("small operator", small_operator, options.repetitions, "us", 1e6 / CALLS)
    compare("training step", training_step, options.repetitions, "s", 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
