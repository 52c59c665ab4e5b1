"""Managed tensors, and what sending one makes in this process: a counter and a file descriptor."""

from __future__ import annotations

import os
import resource

from gpu_support import MIB, empty, fill_random, saver, torch

__all__ = ["COUNTER", "COUNTER_FILE", "HANDLE", "OFFSET", "SIZE", "drop_counter", "share", "shared_descriptors", "weights"]

SIZE = 64 * MIB
#: Positions in what `_share_cuda_` returns.
HANDLE, OFFSET, COUNTER_FILE, COUNTER = 1, 3, 4, 5


def weights(size: int = SIZE, tag: str = "weights", seed: int = 1) -> torch.Tensor:
    """A random managed tensor of that many bytes, with a CPU backup."""
    with saver.region(tag=tag, enable_cpu_backup=True):
        tensor = empty(size)
    fill_random(tensor, seed)
    torch.cuda.synchronize()
    return tensor


def share(tensor: torch.Tensor) -> tuple[object, ...]:
    fields: tuple[object, ...] = tensor.untyped_storage()._share_cuda_()
    return fields


def drop_counter(fields: tuple[object, ...]) -> None:
    """What an importer does when its tensor is gone."""
    storage = torch.UntypedStorage
    release = getattr(storage, "_release_ipc_counter", None) or storage._release_ipc_counter_cuda
    arguments = {"device": 0} if hasattr(storage, "_release_ipc_counter") else {}  # PyTorch 2.6 has no device there
    release(fields[COUNTER_FILE], fields[COUNTER], **arguments)


def shared_descriptors() -> set[int]:
    """The open files with numbers that are used for shared memory: see csrc/base/descriptors.h."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    first = min(limit // 2, 4096)
    return {number for number in map(int, os.listdir("/proc/self/fd")) if first <= number < first + 4096}
