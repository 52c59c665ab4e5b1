"""What each view of memory shows before a pause, while paused and after the resume, as JSON: bytes by the names of the rows
of docs/guides/memory-views.md. What cannot be measured here is absent.

memory_views.py region|everything [idle|slack]: memory of regions, or all of PyTorch's (TMS_INIT_ENABLE); with memory of a
tensor that was deleted, cached by PyTorch or left as slack, or without.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from torch_memory_saver import _core
from torch_memory_saver import torch_memory_saver as saver
from torch_memory_saver.observe import events
from torch_memory_saver.observe._processes.shared_pages import read_pages
from torch_memory_saver.observe.memory import MemoryLog, take_snapshot

MIB = 1 << 20
#: Without a backup, with one in host memory, and a tensor of no region.
DROPPED, KEPT, PLAIN, IDLE = 192 * MIB, 64 * MIB, 32 * MIB, 24 * MIB
#: So many tensors of the size IDLE that the last ones share a physical handle after a resume.
NEIGHBOURS = 8
WAY = sys.argv[1]
TIMEOUT_S = 60
SIMULATED = os.path.basename(os.environ.get("TMS_CUDA_DRIVER", "")) == "_simulated_cuda.so"


def segments_of(snapshot: list[dict[str, Any]]) -> int:
    return sum(segment["total_size"] for segment in snapshot)


def status_of(field: str) -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(f"{field}:"))


def from_nvml() -> dict[str, int]:
    """The used memory of the device and of this process, where NVML tells them."""
    found = {}
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(_core.device_info(0).uuid)  # NVML counts hidden devices, too
        rows = {row.pid: row.usedGpuMemory for row in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
        if SIMULATED:  # where a process has no context: it is not listed once it holds nothing
            rows.setdefault(os.getpid(), 0)
        if rows.get(os.getpid()) is not None:
            found["nvmlDeviceGetComputeRunningProcesses"] = rows[os.getpid()]
        if not SIMULATED:
            found["nvmlDeviceGetMemoryInfo"] = pynvml.nvmlDeviceGetMemoryInfo(handle).used
    except Exception as error:  # NVML is optional, and hides processes in containers
        print(f"NVML: {error}", file=sys.stderr)
    return found


def metric(state: str) -> int:
    """The sum of a state in the OpenMetrics text."""
    lines = [line for line in events.metrics().splitlines() if line.startswith("torch_memory_saver_memory_bytes{")]
    return sum(int(float(line.rpartition(" ")[2])) for line in lines if f'state="{state}"' in line)


def level(name: str) -> int:
    return sum(getattr(row, name) for row in events.events().after)


def on_own_page() -> int:
    """What `top` says of this process."""
    (page,) = (page for page in read_pages().pages if page.pid == os.getpid())
    return sum(row.resident_bytes for row in page.rows)


def wait_for_host_memory() -> None:
    """Until the background has released it."""
    end = time.monotonic() + TIMEOUT_S
    while saver.stats().host_resident_bytes > 0:
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.001)


def views() -> dict[str, int]:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    counters, stats, snapshot = torch.cuda.memory_stats(), saver.stats(), saver.stats().as_dict()
    whole = take_snapshot()
    (row,) = MemoryLog().mark()
    assert row.physical is not None and row.reserved is not None and row.device_used is not None
    return from_nvml() | {
        "torch.cuda.mem_get_info": total - free,
        "torch.cuda.memory_allocated": torch.cuda.memory_allocated(),
        "torch.cuda.max_memory_allocated": torch.cuda.max_memory_allocated(),
        "torch.cuda.memory_reserved": torch.cuda.memory_reserved(),
        "torch.cuda.memory_stats": counters["reserved_bytes.all.current"],
        "torch.cuda.memory_snapshot": segments_of(torch.cuda.memory_snapshot()),
        "memory.take_snapshot": segments_of(whole["segments"]),
        "stats().total.resident_bytes": stats.total.resident_bytes,
        "stats().total.paused_bytes": stats.total.paused_bytes,
        "stats().total.resident_peak_bytes": stats.total.resident_peak_bytes or 0,
        "stats().total.backup_bytes": stats.total.backup_bytes,
        "stats().as_dict()": sum(item["reserved_bytes"] for item in snapshot["allocations"] if item["state"] == "active"),
        "events.events().levels()": level("resident_bytes"),
        "events.metrics()": metric("resident"),
        "ledger(): managed": sum(line.bytes or 0 for line in saver.ledger(0)[0].of("managed")),
        "torch-memory-saver top: resident": on_own_page(),
        "MemoryLog: reserved": row.reserved,
        "MemoryLog: physical": row.physical,
        "MemoryLog: device_used": row.device_used,
        "RSS": status_of("RssAnon" if SIMULATED else "VmRSS"),
        "stats().total.slack_bytes": stats.total.slack_bytes,
        "ledger(): slack": sum(line.bytes or 0 for line in saver.ledger(0)[0].of("slack")),
        "stats().host_resident_bytes": stats.host_resident_bytes,
        "MemoryLog: host_backup": row.host_backup or 0,
    }


def managed() -> AbstractContextManager[Any]:
    return saver.region(tag="dropped") if WAY == "region" else nullcontext()


def main() -> None:
    torch.zeros(1, device="cuda")
    plain = torch.ones(PLAIN, dtype=torch.uint8, device="cuda")
    with managed():
        dropped = torch.ones(DROPPED, dtype=torch.uint8, device="cuda")
    with saver.region(tag="kept", enable_cpu_backup=True):
        kept = torch.ones(KEPT, dtype=torch.uint8, device="cuda")
    assert (_core.find(plain.data_ptr()) is None) == (WAY == "region")
    assert _core.find(dropped.data_ptr()) and _core.find(kept.data_ptr())
    pieces = []
    if "slack" in sys.argv:
        with managed():
            pieces = [torch.ones(IDLE, dtype=torch.uint8, device="cuda") for _ in range(NEIGHBOURS)]
    saver.pause()
    saver.resume()  # what is made once
    if pieces:
        del pieces[-2]
        saver.empty_cache()
    if "idle" in sys.argv:
        with managed():
            idle = torch.ones(IDLE, dtype=torch.uint8, device="cuda")
        del idle  # inside the region, its end would give back the memory
    wait_for_host_memory()
    measured = [views()]
    saver.pause()
    measured.append(views())
    saver.resume()
    wait_for_host_memory()
    measured.append(views())
    json.dump(measured, sys.stdout)


main()
