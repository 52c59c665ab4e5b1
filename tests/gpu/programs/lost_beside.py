"""GPU 0 is lost while a kernel of GPU 1 uses memory that both have access to: a free of that memory waits for the kernel."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpu_support import MIB, core, hold_stream, saver, tensor_at, torch

SIZE = 32 * MIB


def allocate(tag: str, device: int) -> int:
    depth = core.region_push(tag, core.BACKUP_NONE, True)
    address = core.allocate(SIZE, device)
    core.region_pop(depth)
    return int(address)


for device in (0, 1):
    torch.ones(1, device=f"cuda:{device}")
    torch.cuda.synchronize(device)
paused, used = allocate("paused", 0), allocate("used", 1)
fault, tensor = tensor_at(paused, SIZE, 0), tensor_at(used, SIZE, 1)
with torch.cuda.device(1):
    event = torch.cuda.Event()
    event.record()
    torch.cuda.synchronize(1)
    assert event.query()
saver.pause("paused")
fault.fill_(1)
try:
    torch.cuda.synchronize(0)
except RuntimeError as error:
    print(f"lost: {str(error).splitlines()[0]}")
else:
    raise SystemExit("failed: the access to paused memory was not noticed")
with torch.cuda.device(1):
    hold_stream()
    tensor.fill_(7)
    event.record()
    assert not event.query(), "the kernel is in flight"
    assert core.free(used)
    assert event.query(), "the free has waited"
    torch.cuda.synchronize(1)
print("waited", flush=True)
# PyTorch's own objects on the lost device need not find a way to end.
os._exit(0)
