"""A thread pool: shards that several threads load are managed like those that the caller loads itself.

A call that is submitted to a `ThreadPoolExecutor` inside a region belongs to the region. For other threads, `bind_region`
makes a function whose allocations belong to the region that the caller was in.

    python examples/thread_pool.py
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from _common import GIB, check, check_bytes, free_bytes, options, show, total

from torch_memory_saver import torch_memory_saver

SHARDS = 8
THREADS = 4


def main() -> None:
    size = options(__doc__, gib=4).parse_args().gib * GIB
    shard_bytes = int(size / SHARDS)
    torch.ones(1, device="cuda")
    start = free_bytes()

    def load(number: int) -> Any:
        return torch.full((shard_bytes,), number, dtype=torch.uint8, device="cuda")

    with torch_memory_saver.region(tag="weights", backup="host"), ThreadPoolExecutor(THREADS) as pool:
        shards = list(pool.map(load, range(SHARDS - 1)))
        thread = threading.Thread(target=torch_memory_saver.bind_region(lambda: shards.append(load(SHARDS - 1))))
    show(f"{THREADS} threads of a pool have loaded {SHARDS - 1} shards")
    thread.start()
    thread.join()
    show("a thread of the program's own has loaded the last one, after the region was left")
    check(all(torch_memory_saver.tag_of(shard) == "weights" for shard in shards), "every shard belongs to the region")
    check_bytes(start - free_bytes(), total(shards), "taken by the shards")

    torch_memory_saver.pause("weights")
    show("paused")
    check_bytes(start - free_bytes(), 0, "still taken")
    torch_memory_saver.resume("weights")
    check(all(bool((shard == number).all()) for number, shard in enumerate(shards)), "every shard is as it was loaded")


if __name__ == "__main__":
    main()
