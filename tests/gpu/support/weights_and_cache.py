"""Memory of two tags, as in a program that hands over its GPU: weights with a backup and a cache without one."""

from __future__ import annotations

from gpu_support import LARGE, checksum, core, empty, fill_random, saver, state_of, torch, write_and_check

#: Seconds for a wait that has to end well; a test that needs them all has failed.
PATIENCE_S = 60


def weights_and_cache() -> tuple[list[torch.Tensor], list[tuple[int, int, int]]]:
    """Memory of twice LARGE, half of it with a backup (tag weights) and half without (kv_cache); the sums of the former."""
    with saver.region(tag="weights", enable_cpu_backup=True):
        tensors = [empty(LARGE // 2) for _ in range(2)]
    with saver.region(tag="kv_cache"):
        tensors.append(empty(LARGE))
    for seed, tensor in enumerate(tensors[:2]):
        fill_random(tensor, seed)
    return tensors, [checksum(tensor) for tensor in tensors[:2]]


def states(tensors: list[torch.Tensor]) -> set[int]:
    return {state_of(tensor) for tensor in tensors}


def assert_all_there(tensors: list[torch.Tensor], sums: list[tuple[int, int, int]]) -> None:
    assert states(tensors) == {core.STATE_ACTIVE}
    assert [checksum(tensor) for tensor in tensors[: len(sums)]] == sums
    for tensor in tensors[len(sums) :]:
        write_and_check(tensor, 0x77)
