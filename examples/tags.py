"""Tags: an inference engine releases its memory for training, and resumes it in stages.

The KV cache and the weights have separate tags. Both are paused before a training step. Afterwards the weights are resumed
first and filled, while the trainer's memory is still in use. The KV cache is resumed only after the trainer's memory is
freed, so the two peaks never add up. A region may be entered while its tag is paused, and `None` means every tag.

    python examples/tags.py
"""

import torch
from _common import GIB, allocate, check, check_bytes, free_bytes, options, show, total

from torch_memory_saver import torch_memory_saver


def main() -> None:
    size = options(__doc__, gib=4).parse_args().gib * GIB
    torch.ones(1, device="cuda")
    start = free_bytes()

    with torch_memory_saver.region(tag="weights"):
        weights = allocate(size / 4)
    with torch_memory_saver.region(tag="kv_cache"):
        cache = allocate(size * 3 / 4)
    show("the engine has its weights and its KV cache")
    check_bytes(start - free_bytes(), total(weights) + total(cache), "taken by the engine")

    torch_memory_saver.pause(["kv_cache", "weights"])
    show("training begins: the engine has given everything back")
    check_bytes(start - free_bytes(), 0, "still taken by the engine")
    trained = [torch.full_like(weight, 7) for weight in weights]  # reads only their shapes

    torch_memory_saver.resume("weights")
    show("first stage: the weights are back, and are filled from the trainer's")
    for weight, new in zip(weights, trained, strict=True):
        weight.copy_(new)
    tags = torch_memory_saver.stats().tags
    check(tags["kv_cache"].resident_bytes == 0, "the KV cache takes nothing yet")

    del trained, new
    torch.cuda.empty_cache()
    torch_memory_saver.resume("kv_cache")
    show("second stage: the trainer's memory has gone, and the KV cache is back")
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
    check(report.allocations >= len(cache), f"resume() of everything {report}")


if __name__ == "__main__":
    main()
