"""Guards the shared page on a GPU: what `top` shows of this process is what it holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpu_support import MIB, saver, torch

from torch_memory_saver import _core
from torch_memory_saver.observe._processes.names import user_of
from torch_memory_saver.observe._processes.requests import result_path
from torch_memory_saver.observe._processes.shared_pages import Page, read_pages
from torch_memory_saver.observe.memory import load_snapshot

SIZE = 64 * MIB


def own_page() -> Page:
    path = _core.page_path()
    assert path is not None
    (page,) = (page for page in read_pages(Path(path).parent).pages if page.path == Path(path))
    return page


def top() -> dict[str, Any]:
    """What `top` shows."""
    done = subprocess.run(
        [sys.executable, "-m", "torch_memory_saver", "top", "--once", "--json"], stdout=subprocess.PIPE, check=True
    )
    return dict(json.loads(done.stdout))


def shown(tag: str) -> dict[str, Any]:
    """What `top` shows of a tag of this process."""
    data = top()
    rows = [row for gpu in data["gpus"] for row in gpu["processes"] if row["pid"] == os.getpid() and not row["foreign"]]
    (found,) = (found for row in rows for found in row["tags"] if found["tag"] == tag)
    return dict(found)


def test_a_cycle_is_shown() -> None:
    with saver.region(tag="shown", enable_cpu_backup=True):
        kept = torch.ones(SIZE, dtype=torch.uint8, device="cuda")
    held = saver.stats("shown").total
    row = shown("shown")
    assert (row["state"], row["resident_bytes"], row["paused_bytes"]) == ("resident", held.resident_bytes, 0)
    saver.pause("shown")
    row = shown("shown")
    assert (row["state"], row["resident_bytes"], row["paused_bytes"]) == ("paused", 0, held.resident_bytes)
    assert row["host_backup_bytes"] >= SIZE and row["pauses_total"] == 1 and row["last_pause_seconds"] > 0
    saver.resume("shown")
    row = shown("shown")
    assert (row["state"], row["resumes_total"], row["failures_total"]) == ("resident", 1, 0)
    assert bool((kept == 1).all())


def test_the_devices_are_named_as_nvidia_smi_names_them() -> None:
    with saver.region(tag="named"):
        kept = torch.ones(1, device="cuda")
    uuid = str(torch.cuda.get_device_properties(kept.device).uuid)
    assert own_page().devices[0].uuid == f"GPU-{uuid}"
    assert own_page().devices[0].total_bytes == torch.cuda.get_device_properties(kept.device).total_memory


def test_the_gpu_is_the_one_that_nvml_knows() -> None:
    """Also where CUDA_VISIBLE_DEVICES hides some, and where it is a MIG device."""
    with saver.region(tag="known"):
        kept = torch.ones(SIZE, dtype=torch.uint8, device="cuda")
    uuid = str(torch.cuda.get_device_properties(kept.device).uuid)
    data = top()
    (gpu,) = (gpu for gpu in data["gpus"] if gpu["uuid"].endswith(uuid))
    assert gpu["index"] is not None and gpu["total_bytes"] >= torch.cuda.mem_get_info()[1]
    (row,) = (row for row in gpu["processes"] if row["pid"] == os.getpid() and row["managed"])
    # The sum over all pages may have more: every simulated GPU has this UUID, also those of other simulated machines.
    assert gpu["used_bytes"] >= row["resident_bytes"] >= SIZE
    assert row["user"] == user_of(os.getpid())
    assert row["used_bytes"] is None or row["used_bytes"] >= row["resident_bytes"], "None: NVML does not list it"


def test_a_snapshot_is_written_for_another_process() -> None:
    with saver.region(tag="asked"):
        kept = torch.ones(SIZE, dtype=torch.uint8, device="cuda")
    page = own_page()
    with open(page.path, "r+b") as file:
        _core.request_page(file.fileno(), _core.PAGE_REQUESTS.index("snapshot"))
    saver.pause("asked")
    path = result_path(page.path, "snapshot")
    try:
        snapshot = load_snapshot(path)
    finally:
        path.unlink()
    assert snapshot.pid == os.getpid()
    (segment,) = (segment for segment in snapshot.segments if segment.address == kept.untyped_storage().data_ptr())
    assert (segment.tag, segment.state) == ("asked", "paused")


def test_a_failed_allocation_is_counted() -> None:
    with saver.region(tag="too large"):
        total = torch.cuda.mem_get_info()[1]
        try:
            torch.empty(2 * total, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            pass
        else:
            raise AssertionError("twice the memory of the device was allocated")
    (row,) = (row for row in own_page().rows if row.tag == "too large")
    assert row.failed_allocations_total >= 1 and row.allocations == 0
