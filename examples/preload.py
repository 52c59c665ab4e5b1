"""Preload mode: children whose every cudaMalloc is caught, whichever library makes it.

Inside `configure_subprocess()` the environment has our library in LD_PRELOAD, and children started there inherit it.
Regions work as before and catch the allocations of other libraries too. With TMS_INIT_ENABLE=1 everything in the child
is managed from the start, without a change to its code: that is how a whole trainer is parked.

    python examples/preload.py
"""

import ctypes
import multiprocessing
import os
import sys

import torch
from _common import GIB, MIB, check, check_bytes, free_bytes, options

from torch_memory_saver import configure_subprocess, torch_memory_saver


def regions(size: int) -> None:
    """In the first child: a region catches a cudaMalloc that torch knows nothing of."""
    check(torch_memory_saver.hook_mode in ("auto", "preload"), "the child's hook mode")
    torch.ones(1, device="cuda")
    before = free_bytes()
    address = ctypes.c_void_p()
    with torch_memory_saver.region(tag="weights"):
        tensor = torch.zeros(size, dtype=torch.uint8, device="cuda")
        # Stands for a library of its own: NCCL, DeepEP, a kernel package.
        check(ctypes.CDLL(None).cudaMalloc(ctypes.byref(address), ctypes.c_size_t(64 * MIB)) == 0, "cudaMalloc by ctypes")
    check(torch_memory_saver.hook_mode == "preload", "the library is preloaded")
    check_bytes(before - free_bytes(), size + 64 * MIB, "taken by torch and by the other library")
    torch_memory_saver.pause("weights")
    check_bytes(before - free_bytes(), 0, "still taken by either")
    torch_memory_saver.resume("weights")
    tensor.fill_(1)
    check(ctypes.CDLL(None).cudaFree(address) == 0, "cudaFree by ctypes")


def everything(size: int) -> None:
    """In the second child: a trainer that knows nothing of regions, parked with its contents."""
    width = 2048
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(max(1, size // (width * width * 16)))]).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    batch = torch.randn(64, width, device="cuda")

    def step() -> float:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    losses = [step() for _ in range(3)]
    expected = [parameter.detach().cpu() for parameter in model.parameters()]
    torch.cuda.empty_cache()  # a pause would do it too; here, so that what is given back is what the report says
    before = free_bytes()
    report = torch_memory_saver.pause()
    print(f"  the whole trainer went: {report.bytes / GIB:.2f} GiB, {report.copied_bytes / GIB:.2f} GiB of it to the host")
    check_bytes(free_bytes() - before, report.bytes, "given back")
    torch_memory_saver.resume()
    same = all(torch.equal(old, new.detach().cpu()) for old, new in zip(expected, model.parameters(), strict=True))
    check(same, "its parameters are what they were")
    losses.append(step())
    check(losses[-1] < losses[0], f"it goes on training: {', '.join(f'{loss:.4f}' for loss in losses)}")


def run(target: str, size: int, environment: dict[str, str]) -> None:
    print(f"A child with LD_PRELOAD{''.join(f' and {name}={value}' for name, value in environment.items())}:", flush=True)
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    with configure_subprocess():
        child = multiprocessing.get_context("spawn").Process(target=globals()[target], args=(size,))
        child.start()
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    child.join()
    if child.exitcode != 0:
        sys.exit(f"FAILED: the child ended with status {child.exitcode}")


def main() -> None:
    size = int(options(__doc__, gib=1).parse_args().gib * GIB) // (2 * MIB) * (2 * MIB)
    run("regions", size, {})
    run("everything", size, {"TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_CPU_BACKUP": "1"})
    check("torch_memory_saver" not in os.environ.get("LD_PRELOAD", ""), "this process's environment is as it was")


if __name__ == "__main__":
    main()
