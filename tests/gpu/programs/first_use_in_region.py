"""The process first uses its GPUs inside regions: each tensor is managed, on whatever GPU, and entering makes no context.

The argument is the device that is current before the first region: -1 leaves it to PyTorch.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import torch

from torch_memory_saver import _core, torch_memory_saver

MIB = 1 << 20
SIZE = 22 * MIB
DEVICES = range(torch.cuda.device_count())


def shard(device: int, value: int) -> torch.Tensor:
    return torch.full((SIZE,), value, dtype=torch.uint8, device=f"cuda:{device}")


def tags(tensors: list[torch.Tensor]) -> list[tuple[int, str] | None]:
    rows = [_core.find(tensor.data_ptr()) for tensor in tensors]
    return [None if row is None else (row.device, row.tag) for row in rows]


def enter_and_leave() -> None:
    for _ in range(2):
        with torch_memory_saver.region(tag="weights"), torch_memory_saver.disable(), torch_memory_saver.region(tag="cache"):
            pass


chosen = int(sys.argv[1])
if chosen >= 0:
    torch.cuda.set_device(chosen)
current = torch.cuda.current_device()
assert current == max(chosen, 0)

used = _core.active_devices()
enter_and_leave()
with ThreadPoolExecutor(1) as pool:
    pool.submit(enter_and_leave).result()
with torch_memory_saver.region(tag="weights"):
    torch_memory_saver.empty_cache()
torch_memory_saver.pause()
torch_memory_saver.resume()
assert _core.active_devices() == used, f"contexts on {_core.active_devices():#b} instead of {used:#b}"
assert torch.cuda.current_device() == current

# Devices are used for the first time inside, the last one first.
last = DEVICES[-1]
with torch_memory_saver.region(tag="weights", enable_cpu_backup=True):
    assert _core.active_devices() == used
    weights = [shard(last, 1)]
    assert _core.active_devices() == used | 1 << last
    assert torch.cuda.current_device() == current
    with torch_memory_saver.region(tag="cache"):
        cache = [shard(device, 2) for device in DEVICES]
        with torch_memory_saver.disable():
            plain = [shard(device, 3) for device in DEVICES]
    weights += [shard(device, 1) for device in DEVICES[:-1]]
assert sorted(filter(None, tags(weights))) == [(device, "weights") for device in DEVICES]
assert tags(cache) == [(device, "cache") for device in DEVICES]
assert tags(plain) == [None] * len(DEVICES)
assert torch.zeros(1, device="cuda").device.index == current

report = torch_memory_saver.pause()
assert (report.allocations, report.bytes) == (2 * len(DEVICES), 2 * len(DEVICES) * SIZE)

# While the tags are paused their regions give other memory, on every device.
with torch_memory_saver.region(tag="weights", enable_cpu_backup=True):
    more = [shard(device, 4) for device in DEVICES]
assert all(int(tensor.min()) == int(tensor.max()) == 4 for tensor in more)
torch_memory_saver.resume()
for tensors, value in ((weights, 1), (plain, 3), (more, 4)):
    assert all(int(tensor.min()) == int(tensor.max()) == value for tensor in tensors), value
print("ok")
