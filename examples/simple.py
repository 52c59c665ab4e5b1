"""The idea on one page: the memory is released and restored, and the tensor keeps its address.

A tensor made inside `region()` has its own address, which is backed by physical memory. `pause()` returns the physical
memory to the driver, so that any process can use it. `resume()` maps new memory at the same address.
Contents are lost unless a backup is requested (see backups.py).

    python examples/simple.py
"""

import torch
from _common import GIB, MIB, check, check_bytes, free_bytes, options, show

from torch_memory_saver import torch_memory_saver


def main() -> None:
    size = int(options(__doc__, gib=4).parse_args().gib * GIB) // (2 * MIB) * (2 * MIB)
    torch.ones(1, device="cuda")
    start = free_bytes()

    with torch_memory_saver.region():
        tensor = torch.full((size,), 1, dtype=torch.uint8, device="cuda")
    address = tensor.data_ptr()
    show(f"a tensor at {address:#x}")
    check_bytes(start - free_bytes(), size, "taken from the device")

    torch_memory_saver.pause()
    show("paused")
    check_bytes(start - free_bytes(), 0, "still taken")

    other = torch.full((size,), 2, dtype=torch.uint8, device="cuda")
    show("another tensor uses the memory")
    check(bool((other[:MIB] == 2).all()), "another tensor of that size fits and works")
    del other
    torch.cuda.empty_cache()

    torch_memory_saver.resume()
    show("resumed")
    check(tensor.data_ptr() == address, "the tensor is where it was")
    tensor.fill_(3)
    check(bool((tensor == 3).all()), "it can be written and read")


if __name__ == "__main__":
    main()
