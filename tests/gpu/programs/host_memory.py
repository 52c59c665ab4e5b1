"""Scenario: the policy for host memory after a resume, by region, by call and by process; and a reservation."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import torch

from torch_memory_saver import errors
from torch_memory_saver import torch_memory_saver as saver

MIB = 1 << 20
SIZE = 16 * MIB
#: The buffer of the fingerprints of one tensor, which the pool keeps after a pause with a retained backup.
FINGERPRINTS = 4096
#: Seconds after which background work counts as failed.
PATIENCE_S = 60
numbers = itertools.count()


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, saver.stats()
        time.sleep(0.002)


def resident() -> int:
    return saver.stats().host_resident_bytes


def pooled() -> int:
    return saver.stats().host_pooled_bytes


def cycle(tag: str, host_memory: str | None = None) -> None:
    tensor, contents = tensors[tag], torch.arange(SIZE // 8) + next(numbers)  # a retained copy has other contents
    tensor.view(torch.int64).copy_(contents)
    assert saver.pause(tag).copied_bytes == SIZE
    assert resident() >= SIZE
    if host_memory is None:
        saver.resume(tag)
    else:
        saver.resume(tag, host_memory=host_memory)
    assert torch.equal(tensor.view(torch.int64).cpu(), contents)


def is_kept(tag: str) -> bool:
    return saver.get_cpu_backup(tensors[tag]) is not None


assert saver.host_memory == "release"
tensors = {}
for name in (None, "release", "pool", "retain"):
    with saver.region(tag=str(name), enable_cpu_backup=True, host_memory=name):
        tensors[str(name)] = torch.empty(SIZE, dtype=torch.uint8, device="cuda")
start = resident()

# Released: by default, and if the region or the call requests it.
for tag, choice in (("None", None), ("release", None), ("pool", "release"), ("retain", "release")):
    cycle(tag, choice)
    assert not is_kept(tag)
    wait_for(lambda: resident() <= start + pooled())
    assert pooled() == (FINGERPRINTS if tag == "retain" else 0)

# Kept with its contents.
cycle("retain")
assert is_kept("retain")
assert (pooled(), resident() - start >= SIZE) == (FINGERPRINTS, True)
address = saver.get_cpu_backup(tensors["retain"], zero_copy=True).data_ptr()
for _ in range(2):
    cycle("retain")
    assert saver.get_cpu_backup(tensors["retain"], zero_copy=True).data_ptr() == address
    assert resident() - start < 2 * SIZE
cycle("retain", "release")
wait_for(lambda: resident() <= start + FINGERPRINTS)

# Pooled, and reused by any tag.
cycle("pool")
wait_for(lambda: pooled() >= SIZE)
once = resident()
for tag in ("pool", "None", "release"):
    cycle(tag, "pool")
    assert not is_kept(tag)
    wait_for(lambda: pooled() >= SIZE)
    assert resident() == once, "nothing was added"

# A view is valid as long as it lives, and its memory is not reused.
tensors["pool"].fill_(9)
saver.pause("pool")
view = saver.get_cpu_backup(tensors["pool"], zero_copy=True)
saver.resume("pool")
assert pooled() < SIZE
cycle("None", "release")
assert int(view.min()) == int(view.max()) == 9
del view
wait_for(lambda: pooled() >= SIZE)

# By process.
for choice in ("pool", "retain", "release"):
    saver.host_memory = choice
    assert saver.host_memory == choice
    assert saver.retain_cpu_backup is (choice == "retain")
    cycle("None")
    assert is_kept("None") is (choice == "retain")
saver.retain_cpu_backup = True
assert saver.host_memory == "retain"
saver.retain_cpu_backup = False
assert saver.host_memory == "release"

# Ahead of time.
saver.reserve_host_memory(4 * SIZE)
wait_for(lambda: pooled() >= 4 * SIZE)
before = resident()
saver.pause(["None", "pool"], backup="host")
assert resident() == before, "the pool had it"
saver.resume()
try:
    saver.reserve_host_memory(1 << 50)
except errors.OutOfHostMemoryError as error:
    assert "host" in str(error).lower(), error
else:
    raise AssertionError
saver.reserve_host_memory(0, device=0)
saver.release_host_memory()
wait_for(lambda: pooled() == 0)
print("ok", flush=True)
