"""Helpers that the examples share: options, checks of device memory, and functions that allocate and fill it."""

from __future__ import annotations

import argparse

import torch
from _check import GIB as GIB
from _check import MIB as MIB
from _check import check as check

#: The part of a device's memory that --gib is limited to by default. Some examples need several times --gib for a moment.
SHARE = 1 / 16


class options(argparse.ArgumentParser):
    """A parser with --gib, whose default is `gib`, or less if the device is small."""

    def __init__(self, description: str | None, gib: float) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.most = gib
        help = f"size of the example's memory, GiB (default {gib}, and no more than a sixteenth of the device's)"
        self.add_argument("--gib", type=float, help=help)

    def parse_args(self) -> argparse.Namespace:  # type: ignore[override]
        arguments = super().parse_args()
        if arguments.gib is None:
            arguments.gib = min(self.most, device_bytes() * SHARE / GIB)
        return arguments


def device_bytes() -> int:
    """Return the total memory of the current device, in bytes."""
    return int(torch.cuda.mem_get_info()[1])


def used_mib() -> int:
    """Return the device memory that all processes use, in MiB."""
    return (device_bytes() - free_bytes()) // MIB


def show(stage: str) -> None:
    """Print how much of the device's memory is in use in this stage, by all processes."""
    print(f"{used_mib():6} MiB in use: {stage}", flush=True)


def check_bytes(actual: int, expected: int, what: str, slack: int = 64 * MIB) -> None:
    """End the program unless a size of device memory is as expected, give or take `slack` for the driver's own memory."""
    check(abs(actual - expected) <= slack, f"{what}: {actual / GIB:.2f} GiB (expected {expected / GIB:.2f})")


def free_bytes() -> int:
    """Return the free physical memory of the current device, in bytes."""
    torch.cuda.synchronize()
    return int(torch.cuda.mem_get_info()[0])


def allocate(size: float, chunk: int = 256 * MIB) -> list[torch.Tensor]:
    """Allocate tensors of `chunk` bytes on the GPU, `size` bytes together."""
    return [torch.empty(chunk, dtype=torch.uint8, device="cuda") for _ in range(max(1, int(size) // chunk))]


def total(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def checksum(tensors: list[torch.Tensor]) -> int:
    """Compute a checksum of all bytes on the GPU. Sizes must be multiples of 8 bytes."""
    return sum(int(tensor.view(torch.int64).sum()) for tensor in tensors)


def fill_random(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.view(torch.int64).random_()
