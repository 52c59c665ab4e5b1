"""A process with a leak, which is told by its environment alone to record it. Prints what it leaked, as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import torch

from torch_memory_saver import torch_memory_saver

STEPS, BYTES = 3, 3 << 20

leaked = []


def leaky_cache(device: int) -> None:
    leaked.append(torch.empty(BYTES, dtype=torch.uint8, device=f"cuda:{device}"))


with torch_memory_saver.region(tag="kv_cache"):  # the first use of the package
    kept = torch.empty(4 << 20, dtype=torch.uint8, device="cuda")
for _ in range(STEPS):
    for ordinal in range(torch.cuda.device_count()):
        leaky_cache(ordinal)
    torch_memory_saver.pause("kv_cache")
    torch_memory_saver.resume("kv_cache")
print(json.dumps({"pid": os.getpid(), "leaked": [tensor.data_ptr() for tensor in leaked]}))
if "child" in sys.argv:
    sys.stdout.flush()
    subprocess.run([sys.executable, __file__], check=True)  # it inherits the variables
