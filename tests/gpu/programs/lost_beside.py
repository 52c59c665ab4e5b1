"""GPU 0 is lost while a kernel of GPU 1 uses memory that both have access to: a free of that memory waits for the kernel."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))

from gpu_support import MIB, SIMULATED, core, driver, hold_stream, saver, tensor_at, torch

SIZE = 32 * MIB


def allocate(tag: str, device: int) -> int:
    level = core.region_enter(tag, core.BACKUP_NONE, True)
    address = core.allocate(SIZE, device)
    core.region_leave(level)
    return int(address)


for device in (0, 1):
    torch.ones(1, device=f"cuda:{device}")
    torch.cuda.synchronize(device)
paused, used = allocate("paused", 0), allocate("used", 1)
fault, tensor = tensor_at(paused, SIZE, 0), tensor_at(used, SIZE, 1)
# Pinned memory, which is read without a CUDA call.
flag = torch.zeros(1, dtype=torch.uint8).pin_memory()
saver.pause("paused")
with torch.cuda.device(1):
    # Launched before: once a device is lost the runtime refuses every launch, on the others too.
    hold_stream()
    tensor.fill_(7)
    flag.copy_(tensor[:1], non_blocking=True)
    context = ctypes.c_void_p()
    assert driver().cuCtxGetCurrent(ctypes.byref(context)) == 0
fault.fill_(1)
try:
    torch.cuda.synchronize(0)
except RuntimeError as error:
    print(f"lost: {str(error).splitlines()[0]}")
else:
    raise SystemExit("failed: the access to paused memory was not noticed")

assert flag[0] == 0, "the kernel has ended before the free"
assert core.free(used)
# One H200's fault loses the process's contexts on the others too: each then answers 700 at once, although its kernel still
# runs. So the free has waited, or the other context is lost as well and the result cannot be read.
assert driver().cuCtxPushCurrent_v2(context) == 0
other = driver().cuCtxSynchronize()
print(f"after the free: the kernel's result is {int(flag[0])}, the other context answers {other}")
assert flag[0] == 7 or (other != 0 and not SIMULATED), f"the free has not waited, and the other context answers {other}"
print("waited", flush=True)
# PyTorch's own objects on the lost device may not terminate.
os._exit(0)
