"""Scenario: everything is managed. Of PyTorch's default pool, too, only live blocks are copied, and idle segments are
released."""

from __future__ import annotations

import torch

from torch_memory_saver import _core
from torch_memory_saver import torch_memory_saver as saver
from torch_memory_saver._engine.process import pool_store

MIB = 1 << 20


def live_bytes() -> int:
    managed = {row.address for row in _core.segments()}
    return sum(int(row["active_size"]) for row in torch.cuda.memory_snapshot() if row["address"] in managed)


def all_bytes() -> int:
    return sum(row.bytes for row in _core.segments())


tensors = [torch.full((size,), 3, dtype=torch.uint8, device="cuda") for size in [300_000, 3 * MIB, 512, 6 * MIB] * 4]
idle = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
del tensors[1::2], idle
for number, tensor in enumerate(tensors):
    tensor.fill_(number)
torch.cuda.synchronize()
report = saver.pause()
assert report.copied_bytes == live_bytes() < all_bytes() < 64 * MIB, (report, live_bytes(), all_bytes())
is_replaced = pool_store.substitutes.target(0) != (0, 0)  # by a pool without paused memory
assert report.reusable_bytes == (0 if is_replaced else all_bytes() - live_bytes())
saver.resume()
assert all(bool((tensor == number).all()) for number, tensor in enumerate(tensors))
report = saver.pause(live_only=False)
assert report.copied_bytes == all_bytes()
saver.resume()
assert all(bool((tensor == number).all()) for number, tensor in enumerate(tensors))

# A pause through the C functions copies everything.
cdll = saver._impl._binary_wrapper.cdll
assert cdll.tms_pause(None) == 0
held = sum(row.backup_bytes for row in _core.segments())
assert held >= all_bytes(), (held, all_bytes())
assert cdll.tms_resume(None) == 0
assert all(bool((tensor == number).all()) for number, tensor in enumerate(tensors))
print("ok", flush=True)
