"""What entering and leaving `region()` costs, with little memory in use and with most of the GPU in use.

With most of it in use entering has one thing more to look at: whether torch's cache has to be given back first. The
project's limit is 10 microseconds (median).
"""

from __future__ import annotations

import time

import torch
from common import GIB, MIB, Samples, Table, arguments, samples

from torch_memory_saver import torch_memory_saver

WARM_UP = 200


def measure(repetitions: int, entries: int, **settings: bool) -> Samples:
    """Microseconds of one entry and exit."""
    region, clock = torch_memory_saver.region, time.perf_counter
    for _ in range(WARM_UP):
        with region(tag="weights", **settings):
            pass
    values = []
    for _ in range(repetitions):
        start = clock()
        for _ in range(entries):
            with region(tag="weights", **settings):
                pass
        values.append((clock() - start) / entries * 1e6)
    return samples(values)


def main() -> None:
    parser = arguments(__doc__, repetitions=21)
    parser.add_argument("--entries", type=int, default=500, help="entries in one measurement (default %(default)s)")
    options = parser.parse_args()
    table = Table("entering and leaving region()", ("when", "us", "spread"))

    def row(when: str, **settings: bool) -> None:
        measured = measure(options.repetitions, options.entries, **settings)
        table.add((when, f"{measured.median:.2f}", measured.spread), when=when, microseconds=measured)

    torch.ones(1, device="cuda")
    with torch_memory_saver.region(tag="weights"):
        keep = torch.ones(4 * MIB, device="cuda")
    row("little memory in use")
    row("little memory in use, with a CPU backup", enable_cpu_backup=True)
    with torch_memory_saver.region(tag="outer"):
        row("inside another region")
    with torch_memory_saver.region(tag="weights"):
        row("inside the same region")
    free, total = torch.cuda.mem_get_info()
    used = torch.empty(max(0, min(total * 6 // 10, free - 4 * GIB)), dtype=torch.uint8, device="cuda")
    row(f"{used.numel() / total:.0%} of the GPU in use by tensors")
    managed_bytes = min(total // 10, torch.cuda.mem_get_info()[0] // 2)
    with torch_memory_saver.region(tag="kv_cache"):
        managed = torch.empty(managed_bytes, dtype=torch.uint8, device="cuda")
    row(f"the same and {managed.numel() / total:.0%} managed")
    del managed
    torch_memory_saver.empty_cache()
    del used
    row("the same memory only cached by torch, less free than cached")
    del keep
    table.show(options.json)


if __name__ == "__main__":
    main()
