"""What `import torch_memory_saver` changes in a process where torch is imported already. Prints JSON."""

from __future__ import annotations

import json
import os
import sys
import time

import torch


def libraries() -> set[str]:
    with open("/proc/self/maps", encoding="utf-8") as file:
        return {line.split()[-1] for line in file if ".so" in line}


def device_files() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    return [path for path in found if path.startswith("/dev/nvidia")]


before_libraries, before_devices = libraries(), device_files()
before_threads = len(os.listdir("/proc/self/task"))
start = time.perf_counter()
import torch_memory_saver  # noqa: E402

seconds = time.perf_counter() - start
print(
    json.dumps(
        {
            "seconds": seconds,
            "initialized": torch.cuda.is_initialized(),
            "devices": [path for path in device_files() if path not in before_devices],
            "drivers": [name for name in libraries() - before_libraries if "libcuda" in name],
            "threads": len(os.listdir("/proc/self/task")) - before_threads,
            "enabled": torch_memory_saver.torch_memory_saver.enabled,
            "imported": sorted(name for name in sys.modules if name.startswith("torch_memory_saver")),
        }
    )
)
