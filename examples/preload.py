"""Preload mode: child processes in which every cudaMalloc is managed, whichever library calls it.

Inside `configure_subprocess()` the environment has our library in LD_PRELOAD, and children started there inherit it.
Regions work as before, and also manage the allocations of other libraries. With TMS_INIT_ENABLE=1 everything in the child
is managed from the start, without a change to its code. In this way a whole trainer can be parked.

    python examples/preload.py
"""

import ctypes
import multiprocessing
import os
import sys
from unittest.mock import patch

import torch
from _common import GIB, MIB, check, check_bytes, free_bytes, options, show

from torch_memory_saver import configure_subprocess, torch_memory_saver

LAYER_BYTES = 32 * MIB


def regions(size: int) -> None:
    """Run the first child: a region manages a cudaMalloc that torch does not know of."""
    check(torch_memory_saver.hook_mode in ("auto", "preload"), "the child's hook mode")
    torch.ones(1, device="cuda")
    before = free_bytes()
    address = ctypes.c_void_p()
    with torch_memory_saver.region(tag="weights"):
        tensor = torch.zeros(size, dtype=torch.uint8, device="cuda")
        # This stands for another library: NCCL, DeepEP, a kernel package.
        check(ctypes.CDLL(None).cudaMalloc(ctypes.byref(address), ctypes.c_size_t(64 * MIB)) == 0, "cudaMalloc by ctypes")
    check(torch_memory_saver.hook_mode == "preload", "the library is preloaded")
    check_bytes(before - free_bytes(), size + 64 * MIB, "taken by torch and by the other library")
    show("the region has memory of torch and of the other library")
    torch_memory_saver.pause("weights")
    show("paused")
    check_bytes(before - free_bytes(), 0, "still taken by either")
    torch_memory_saver.resume("weights")
    tensor.fill_(1)
    check(ctypes.CDLL(None).cudaFree(address) == 0, "cudaFree by ctypes")


class Trainer:
    """A trainer that does not use torch_memory_saver. It learns to be all ones, with momentum. Its rates are powers of two,
    so every number is exact and can be predicted."""

    def __init__(self, size: int) -> None:
        count = max(1, size // (2 * LAYER_BYTES))
        self.parameters = [torch.zeros(LAYER_BYTES // 4, device="cuda") for _ in range(count)]
        self.momenta = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.expected = (0.0, 0.0)

    def step(self) -> None:
        for parameter, momentum in zip(self.parameters, self.momenta, strict=True):
            gradient = parameter - 1
            momentum.mul_(0.5).add_(gradient)
            parameter.sub_(momentum * 0.25)
        value, momentum_value = self.expected
        momentum_value = momentum_value * 0.5 + value - 1
        self.expected = (value - momentum_value * 0.25, momentum_value)

    def is_as_expected(self) -> bool:
        numbers = zip((self.parameters, self.momenta), self.expected, strict=True)
        return all(bool((tensor == value).all()) for tensors, value in numbers for tensor in tensors)


def everything(size: int) -> None:
    """Run the second child: a trainer that does not use regions is parked with its contents."""
    trainer = Trainer(size)
    for _ in range(3):
        trainer.step()
    torch.cuda.empty_cache()  # a pause would do it too; done first, so that the freed memory equals the report
    before = free_bytes()
    show("the trainer is awake")
    report = torch_memory_saver.pause()
    show("the whole trainer is parked")
    check_bytes(free_bytes() - before, report.bytes, "given back")
    torch_memory_saver.resume()
    check(trainer.is_as_expected(), f"parameters and momenta are what they were: {trainer.expected}")
    trainer.step()
    check(trainer.is_as_expected(), f"and it goes on training: {trainer.expected}")


def run(target: str, size: int, environment: dict[str, str]) -> None:
    print(f"A child with LD_PRELOAD{''.join(f' and {name}={value}' for name, value in environment.items())}:", flush=True)
    with patch.dict(os.environ, environment), configure_subprocess():
        child = multiprocessing.get_context("spawn").Process(target=globals()[target], args=(size,))
        child.start()
    child.join()
    if child.exitcode != 0:
        sys.exit(f"FAILED: the child ended with status {child.exitcode}")


def main() -> None:
    size = int(options(__doc__, gib=1).parse_args().gib * GIB) // (2 * MIB) * (2 * MIB)
    before = os.environ.get("LD_PRELOAD")
    run("regions", size, {})
    run("everything", size, {"TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_CPU_BACKUP": "1"})
    check(os.environ.get("LD_PRELOAD") == before, "this process's environment is as it was")


if __name__ == "__main__":
    main()
