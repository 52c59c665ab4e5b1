"""Guards pauses that copy what was in use at the last one while PyTorch is asked what is in use now."""

from __future__ import annotations

from typing import Any

from gpu_support import MIB, checksum, fill_random, saver, torch

from torch_memory_saver import events

#: Bytes; two fill a segment of PyTorch's.
SIZE = 8 * MIB
COUNT = 6


def plans_of_last_pause() -> int:
    """How often the last pause planned its backups: twice if others were in use than it expected."""
    log = events.events().events
    call = max(event.call for event in log if event.kind == "end" and event.operation == "pause")
    return sum(event.call == call and event.phase == "plan" for event in log)


def cycle(tensors: list[Any], seed: int) -> int:
    """Pauses and resumes the tensors with new contents, and returns how often the pause planned."""
    for offset, tensor in enumerate(tensors):
        fill_random(tensor, seed + offset)
    sums = [checksum(tensor) for tensor in tensors]
    assert saver.pause("weights").copied_bytes == SIZE * len(tensors)
    plans = plans_of_last_pause()
    assert saver.resume("weights").copied_bytes == SIZE * len(tensors)
    assert [checksum(tensor) for tensor in tensors] == sums
    return plans


def test_each_pause_keeps_what_is_in_use_then() -> None:
    with saver.region(tag="weights", enable_cpu_backup=True):
        tensors: list[Any] = [torch.empty(SIZE, dtype=torch.uint8, device="cuda") for _ in range(COUNT)]
    del tensors[1]
    assert [cycle(tensors, seed) for seed in (0, 10, 20)] == [1, 1, 1]
    del tensors[3]
    assert [cycle(tensors, seed) for seed in (30, 40, 50)] == [2, 1, 1], "less was in use than before, and then the same"
    with saver.region(tag="weights", enable_cpu_backup=True):
        tensors.append(torch.empty(SIZE, dtype=torch.uint8, device="cuda"))
    assert cycle(tensors, 60) == 2, "more was in use"
    tensors.pop(0)
    assert cycle(tensors, 70) == 1, "it has varied: nothing is expected"
    assert [cycle(tensors, seed) for seed in (80, 90)] == [1, 1]
    del tensors[0]
    assert cycle(tensors, 100) == 2
