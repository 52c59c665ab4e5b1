"""Scenario: everything is managed, and host copies stay after a resume. PyTorch's own pool may have allocated since."""

from __future__ import annotations

import torch

from torch_memory_saver import torch_memory_saver as saver

MIB = 1 << 20

old, kept = (torch.full((32 * MIB,), value, dtype=torch.uint8, device="cuda") for value in (1, 2))
place = old.data_ptr()
saver.pause()
assert bool((saver.get_cpu_backup(old) == 1).all())
saver.resume()
del old
new = torch.full((32 * MIB,), 9, dtype=torch.uint8, device="cuda")
assert new.data_ptr() == place
for zero_copy in (False, True):
    assert saver.get_cpu_backup(new, zero_copy=zero_copy) is None
assert saver.pause().unchanged_bytes >= 32 * MIB, "the copies are still there for the next pause"
assert bool((saver.get_cpu_backup(new) == 9).all())
assert bool((saver.get_cpu_backup(kept) == 2).all())
saver.resume()
print("ok", flush=True)
