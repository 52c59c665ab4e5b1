"""Tags: an inference engine releases its memory for training, and resumes it in stages.

The KV cache and the weights have separate tags. Both are paused before a training step. Afterwards the weights are resumed
first and filled, while the trainer's memory is still in use. The KV cache is resumed only after the trainer's memory is
freed, so the two peaks never add up. A region may be entered while its tag is paused, and `None` means every tag.

    python examples/tags.py
"""

import torch
from _common import GIB, allocate, check, check_bytes, free_bytes, options, total

from torch_memory_saver import torch_memory_saver


def main() -> None:
    size = options(__doc__, gib=4).parse_args().gib * GIB
    torch.ones(1, device="cuda")
    start = free_bytes()

    with torch_memory_saver.region(tag="weights"):
        weights = allocate(size / 4)
    with torch_memory_saver.region(tag="kv_cache"):
        cache = allocate(size * 3 / 4)
    for name, usage in torch_memory_saver.stats().tags.items():
        print(f"{name}: {usage.resident_bytes / GIB:.2f} GiB resident")
    check_bytes(start - free_bytes(), total(weights) + total(cache), "taken by the engine")

    print("Training begins: the engine gives everything back.")
    torch_memory_saver.pause("kv_cache")
    torch_memory_saver.pause("weights")
    check_bytes(start - free_bytes(), 0, "still taken by the engine")
    trained = [torch.full_like(weight, 7) for weight in allocate(total(weights))]

    print("First stage: the weights come back and are filled from the trainer's.")
    torch_memory_saver.resume("weights")
    for weight, new in zip(weights, trained, strict=True):
        weight.copy_(new)
    tags = torch_memory_saver.stats().tags
    check(tags["kv_cache"].resident_bytes == 0, "the KV cache takes nothing yet")

    print("Second stage: the trainer's memory goes, then the KV cache comes back.")
    del trained, new
    torch.cuda.empty_cache()
    torch_memory_saver.resume("kv_cache")
    check(all(bool((weight == 7).all()) for weight in weights), "the weights are the trained ones")
    for block in cache:
        block.zero_()
    check(all(int(block.max()) == 0 for block in cache), "the KV cache can be used")

    print("A request for more cache while the tag is paused gets memory that is there.")
    torch_memory_saver.pause("kv_cache")
    with torch_memory_saver.region(tag="kv_cache"):
        extra = torch.full((1 << 20,), 5, dtype=torch.uint8, device="cuda")
    check(bool((extra == 5).all()), "a tensor made while its tag is paused works at once")
    report = torch_memory_saver.resume()
    check(report.allocations >= len(cache), f"resume() of everything brought {report.allocations} allocations back")


if __name__ == "__main__":
    main()
