"""Loses a device: a kernel accesses paused memory. Every later call reports it, nothing hangs, and the exit is silent.

    python lost_device.py DEVICE STATUS

Memory is managed on GPUs 0 to DEVICE; the last of them is lost. STATUS is the exit status.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))

from gpu_support import MIB, core, empty, errors, saver, state_of, torch

SIZE = 32 * MIB
lost = int(sys.argv[1])


def refused(call: Callable[[], object]) -> errors.DeviceLostError:
    try:
        call()
    except errors.DeviceLostError as error:
        return error
    raise SystemExit("failed: a call on a lost device succeeded")


weights, cache = [], []
for device in range(lost + 1):
    with torch.cuda.device(device), saver.region(tag="weights", enable_cpu_backup=True):
        weights.append(torch.full((SIZE,), 1, dtype=torch.uint8, device=f"cuda:{device}"))
    with torch.cuda.device(device), saver.region(tag="saved", enable_cpu_backup=True):
        cache.append(empty(SIZE, device))
    torch.empty(SIZE, dtype=torch.uint8, device=f"cuda:{device}")  # from now on PyTorch caches memory, which a resume counts
saver.pause("saved")
assert all(saver.is_paused(tensor) for tensor in cache)
assert not any(saver.is_paused(tensor) for tensor in weights)
cache[lost].fill_(1)
try:
    torch.cuda.synchronize(lost)
except RuntimeError as error:
    print(f"lost: {str(error).splitlines()[0]}")
else:
    raise SystemExit("failed: the access to paused memory was not noticed")

for _ in range(2):
    for error in (
        refused(lambda: saver.pause("weights")),
        refused(lambda: saver.pause()),
        refused(lambda: saver.resume("saved")),
        refused(lambda: saver.resume("saved", timeout=1)),
        refused(lambda: saver.resume()),
    ):
        assert error.error_name.startswith("CUDA_ERROR_"), str(error)
        assert error.operation in ("pause", "resume") and str(error).startswith(f"{error.operation}: the device's"), str(
            error
        )
        assert f"{SIZE * len(cache) >> 20}.0 MiB" in str(error), str(error)
        assert "of managed memory were paused" in str(error), str(error)
        assert "'saved'" in str(error), str(error)
        assert "'weights'" not in str(error), str(error)
    assert {state_of(tensor) for tensor in weights} == {core.STATE_ACTIVE}
    assert {state_of(tensor) for tensor in cache} == {core.STATE_PAUSED}
try:
    with torch.cuda.device(lost), saver.region(tag="weights"):
        empty(SIZE, lost)
except errors.DeviceLostError as error:
    assert (error.operation, str(error)[:8]) == ("region", "region: "), str(error)
    print(f"region: {error.error_name}")
except errors.TorchMemorySaverError as error:
    raise SystemExit(f"failed: {error!r}") from error
except RuntimeError as error:
    print(f"torch: {type(error).__name__}")
else:
    raise SystemExit("failed: torch allocated memory on a lost device")
assert core.counters()["paused_bytes"] == sum(tensor.numel() for tensor in cache)
print("ready", flush=True)
sys.exit(int(sys.argv[2]))
