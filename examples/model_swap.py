"""Two models take turns on one GPU that has room for one of them. A switch copies only what has changed since the last one.

Each model has more than half of the device's memory. The first is frozen. The second is frozen except for a small
adapter, as with LoRA. Both have a backup in host memory, which `host_memory="retain"` keeps while the model is on the
GPU. The first pause of a model copies everything. A later pause finds out on the GPU what has changed, and copies that:
nothing of the first model, and the adapter of the second.

    python examples/model_swap.py                                                         # one GPU, and as much host memory
    python -m torch_memory_saver simulate --memory 1GiB -- python examples/model_swap.py

With --gib the models have another size, for instance on a machine with less host memory.
"""

from __future__ import annotations

import argparse
import time

import torch
from _common import GIB, MIB, check, checksum, device_bytes, free_bytes, show
from torch import nn

from torch_memory_saver import torch_memory_saver

#: Each model takes this share of the device, and at most so many GiB, because both are in host memory.
SHARE, MAX_GIB = 0.55, 49
SWITCHES = 6


class Model(nn.Module):
    """Feed-forward layers in bfloat16, and an adapter of one layer's size over eight."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(width, 4 * width, bias=False, dtype=torch.bfloat16, device="cuda") for _ in range(layers)
        )
        self.adapter = nn.Linear(width, width // 2, bias=False, dtype=torch.bfloat16, device="cuda")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).unflatten(-1, (4, -1)).mean(-2)
        return x + self.adapter(x).repeat(1, 2)


def host_bytes() -> int:
    """Return the bytes of host memory that are available."""
    with open("/proc/meminfo", encoding="ascii") as file:
        fields = dict(line.split(":") for line in file)
    return int(fields["MemAvailable"].split()[0]) << 10


def make(name: str, size: int) -> Model:
    """Return a model of about `size` bytes in a region, with random weights."""
    width = 4096 if size > 4 * GIB else 512
    layers = size // (2 * 4 * width * width)
    with torch_memory_saver.region(tag=name, backup="host", host_memory="retain"):
        return Model(width, layers).requires_grad_(False)


def bits(model: Model) -> int:
    return checksum([parameter.view(torch.uint8).view(-1) for parameter in model.parameters()])


def pause(name: str) -> int:
    """Return the number of bytes that were copied."""
    began = time.monotonic()
    done = torch_memory_saver.pause(name)
    seconds, copied, unchanged = time.monotonic() - began, done.copied_bytes / MIB, done.unchanged_bytes / MIB
    show(f"after a pause of {name}: {seconds:.3f} s, {copied:.1f} MiB copied, {unchanged:.1f} MiB unchanged")
    return done.copied_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, help=f"size of each model (default {SHARE} of the device, at most {MAX_GIB})")
    gib = parser.parse_args().gib
    torch.ones(1, device="cuda")
    size = int(GIB * (gib or min(SHARE * device_bytes() / GIB, MAX_GIB)))

    # A model that does not fit on the GPU, or whose backup does not fit in host memory, would fail later, half-way.
    check(
        free_bytes() > 1.02 * size + 64 * MIB, f"the device has {free_bytes() / GIB:.1f} GiB for a model of {size / GIB:.1f}"
    )
    check(host_bytes() > 2.1 * size, f"the host has {host_bytes() / GIB:.1f} GiB for two models")

    models, expected = {}, {}
    for name in ("frozen", "adapted"):
        models[name] = make(name, size)
        expected[name] = bits(models[name])
        pause(name)

    names, x = list(models), torch.ones(1, models["frozen"].adapter.in_features, dtype=torch.bfloat16, device="cuda")
    for number in range(SWITCHES):
        name = names[number % 2]
        began = time.monotonic()
        torch_memory_saver.resume(name)
        show(f"{name} is resumed, in {time.monotonic() - began:.3f} s")
        check(bits(models[name]) == expected[name], "its contents are what they were")
        check(bool(models[name](x).isfinite().all()), "it computes")
        adapter = models[name].adapter.weight
        if name == "adapted":
            adapter.add_(0.25)  # a training step
            expected[name] = bits(models[name])
        copied = pause(name)
        if name == "frozen":
            check(copied == 0, "nothing has changed, and nothing was copied")
        else:  # a pause finds changes by chunks of 512 KiB
            check(copied <= adapter.nbytes + MIB, "only chunks with the changed adapter were copied")


if __name__ == "__main__":
    main()
