"""Checks of the driver and the GPUs. They need a driver, and say so where there is none."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from torch_memory_saver._cli.child_python import program_options
from torch_memory_saver._services import driver_library
from torch_memory_saver._text import binary_size
from torch_memory_saver.observe._doctor.check import (
    Check,
    Device,
    Finding,
    ask_child,
    driver_facts,
    fail,
    ok,
    skip,
    torch_facts,
    warn,
)

__all__ = ["CHECKS", "NO_USABLE_GPU", "network_cards"]

#: Folder that contains /proc and /sys. Tests substitute another folder.
ROOT = Path("/")
#: The oldest version of CUDA for which the package is built and tested.
_OLDEST_CUDA = 12000
#: Advice about a failure of cuInit or of a context, by the name of the error.
_REMEDIES = {
    "CUDA_ERROR_OUT_OF_MEMORY": "end the processes that hold the GPU's memory: see nvidia-smi",
    "CUDA_ERROR_SYSTEM_NOT_READY": "start the service nvidia-fabricmanager, in the release of the driver",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "restart the machine, because the library and the kernel module differ in release",
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": "take the cuda-compat libraries out of LD_LIBRARY_PATH",
    "CUDA_ERROR_DEVICE_UNAVAILABLE": "end the process that uses the GPU, or set the compute mode to DEFAULT",
}
_SEE_NVIDIA_SMI = "run nvidia-smi: what it reports about the GPU or the driver must be solved first"
#: The finding of a check that needs a GPU, if none can be used.
NO_USABLE_GPU = "there is no usable GPU"
_NO_GPU = "run the doctor where the driver finds a GPU"
_TRIAL_BYTES = 64 << 20
#: Allocates memory on each device, pauses it, and prints how much more memory the driver then calls free. Other programs may
#: allocate and free at the same time, so the resume must take the memory again, and the best of several attempts counts.
_PAUSE_TRIAL = """
import json, sys
from torch_memory_saver import _core
from torch_memory_saver.errors import TorchMemorySaverError
size, *devices = map(int, sys.argv[1:])
found = {"problem": None, "freed": []}
try:
    _core.region_enter("doctor", _core.BACKUP_NONE, True)
    for device in devices:
        address = _core.allocate(size, device)
        freed = 0
        for _ in range(5):
            before = _core.device_memory(device).free
            _core.pause(("doctor",), None)
            paused = _core.device_memory(device).free
            _core.resume(("doctor",), None)
            freed = max(freed, paused - max(before, _core.device_memory(device).free))
        found["freed"].append([device, freed])
        _core.free(address)
except TorchMemorySaverError as error:
    found["problem"] = " ".join(str(error).split())
print("\\n" + json.dumps(found))
"""


def _version_text(cuda: int) -> str:
    """Return "12.8" for 12080."""
    return f"{cuda // 1000}.{cuda % 1000 // 10}"


def _remedy(problem: str) -> str:
    return next((advice for name, advice in _REMEDIES.items() if name in problem), _SEE_NVIDIA_SMI)


def _kernel_module() -> str:
    """Return the release of the kernel module in words, or "" if it is unknown, as for the simulated GPU."""
    try:
        text = (ROOT / "proc/driver/nvidia/version").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    match = re.search(r"\b\d+\.\d+(?:\.\d+)?\b", text)
    return f", kernel module {match[0]}" if match else ""


def driver() -> Finding:
    facts = driver_facts()
    if not facts.loaded:
        return fail(
            str(facts.problem),
            "install NVIDIA's driver; start containers with --gpus all; on machines without a GPU use simulate",
        )
    library = driver_library()
    if facts.problem is not None:
        return fail(f"{library}: {facts.problem}", _remedy(facts.problem))
    if facts.cuda_version is None:
        return fail(f"{library} does not tell its version", "install NVIDIA's driver again")
    found = f"{library} supports CUDA {_version_text(facts.cuda_version)}{_kernel_module()}"
    if facts.cuda_version < _OLDEST_CUDA:
        return warn(found, "update the driver: the package is tested with CUDA 12 and 13")
    return ok(found)


def versions() -> Finding:
    cuda, torch = driver_facts().cuda_version, torch_facts().cuda
    if cuda is None or torch is None:
        return skip("one of the two versions is unknown", "see driver, and PyTorch")
    found = f"PyTorch is built for CUDA {torch}, and the driver supports CUDA {_version_text(cuda)}"
    if int(torch.partition(".")[0]) > cuda // 1000:
        return fail(found, "update the driver, or install PyTorch for an older CUDA")
    return ok(found)


def _line(device: Device) -> str:
    if device.problem is not None:
        return f"GPU {device.ordinal}: {device.name}: {device.problem}"
    sizes = f"{binary_size(device.total_bytes)}, {binary_size(device.free_bytes)} free"
    return f"GPU {device.ordinal}: {device.name}, {sizes}"


def gpus() -> Finding:
    facts = driver_facts()
    if facts.problem is not None:
        return skip("the driver cannot be used", "see driver")
    if not facts.devices:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is not None:
            return fail(f"the driver finds no GPU, and CUDA_VISIBLE_DEVICES is '{visible}'", "unset CUDA_VISIBLE_DEVICES")
        return fail("the driver finds no GPU", "start containers with --gpus all; see nvidia-smi")
    lines = [_line(device) for device in facts.devices]
    failed = [device for device in facts.devices if device.problem is not None]
    if failed:
        return fail(f"{len(failed)} of {_count(facts.devices)} cannot be used", _remedy(str(failed[0].problem)), lines)
    return ok(f"{_count(facts.devices)}{_numbering()}", lines)


def _numbering() -> str:
    """Return a note about the numbers of GPUs if CUDA_VISIBLE_DEVICES is set, else "". The numbers are CUDA's, and the
    numbers of nvidia-smi differ if devices are hidden."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if visible is None else f", chosen and numbered by CUDA_VISIBLE_DEVICES={visible}"


def _count(devices: Sequence[Device]) -> str:
    return "1 GPU" if len(devices) == 1 else f"{len(devices)} GPUs"


def _names(devices: list[Device]) -> str:
    return f"GPU {', '.join(str(device.ordinal) for device in devices)}"


def _usable() -> list[Device]:
    return [device for device in driver_facts().devices if device.problem is None]


def virtual_memory() -> Finding:
    devices = _usable()
    if not devices:
        return skip(NO_USABLE_GPU, _NO_GPU)
    without = [device for device in devices if not device.virtual_memory]
    if without:
        return fail(
            f"{_names(without)}: no virtual memory management, so no memory can be paused there",
            "use other GPUs: virtual GPUs and some modes of the driver on Windows lack it",
        )
    sizes = sorted({device.granularity_bytes for device in devices})
    found = f"supported; memory is managed in units of {', '.join(map(binary_size, sizes))}"
    closed = [device for device in devices if not device.exportable]
    if closed:
        return warn(
            f"{found}; memory of {_names(closed)} cannot be exported",
            "send copies of its tensors to other processes (tensor.cpu()), because the tensors cannot be sent",
        )
    return ok(f"{found}, and can be exported to other processes")


def pause() -> Finding:
    """Check whether memory that a pause releases is free, as the driver counts it."""
    usable = _usable()
    if not usable:
        return skip(NO_USABLE_GPU, _NO_GPU)
    devices = [device for device in usable if device.virtual_memory and device.free_bytes >= _TRIAL_BYTES]
    size = binary_size(_TRIAL_BYTES)
    if not devices:
        return skip(
            f"no usable GPU has {size} of free memory for a trial", "run the doctor where the driver finds such a GPU"
        )
    numbers = [str(device.ordinal) for device in devices]
    answer = ask_child(*program_options(_PAUSE_TRIAL), str(_TRIAL_BYTES), *numbers)
    if answer["problem"] is not None:
        return fail(f"the trial with {size} has failed: {answer['problem'].rstrip('.')}", _remedy(answer["problem"]))
    # The driver may take a little of what a pause releases, for page tables.
    lines = [f"GPU {number}: {binary_size(freed)} freed" for number, freed in answer["freed"] if freed < _TRIAL_BYTES // 2]
    if lines:
        return fail(
            f"the driver does not free memory: a pause of {size} reports no error, but the driver counts less of it as free",
            "install another release of the driver: until then a pause leaves no memory to others on this machine",
            lines,
        )
    return ok(f"a pause of {size} makes as much memory free, as the driver counts it")


def _exists(path: str) -> bool:
    return (ROOT / path).exists()


def network_cards() -> list[str]:
    """Return the network cards that can do RDMA."""
    try:
        return sorted(path.name for path in (ROOT / "sys/class/infiniband").iterdir())
    except OSError:
        return []


def rdma() -> Finding:
    devices, cards = _usable(), network_cards()
    if not devices:
        return skip(NO_USABLE_GPU, _NO_GPU)
    without = [device for device in devices if not device.rdma]
    if without:
        return warn(
            f"managed memory of {_names(without)} cannot be registered for GPUDirect RDMA",
            "allocate buffers that are registered inside disable()",
        )
    if not cards:
        return skip(
            "managed memory can be registered, but /sys/class/infiniband has no network card for RDMA",
            "load the network card's driver if there should be one",
        )
    found = f"managed memory can be registered; network cards: {', '.join(cards)}"
    if _exists("sys/module/nvidia_peermem") or all(device.dma_buf for device in devices):
        return ok(found)
    return warn(
        f"{found}; neither nvidia_peermem nor DMA-BUF is there, so that the card cannot reach GPU memory",
        "load the kernel module: modprobe nvidia_peermem",
    )


def peers() -> Finding:
    devices = _usable()
    if not devices:
        return skip(NO_USABLE_GPU, _NO_GPU)
    if len(devices) == 1:
        return skip("there is only one usable GPU", "one GPU needs no access to others")
    unreachable = [
        f"GPU {device.ordinal} cannot access the memory of GPU {', '.join(map(str, missing))}"
        for device in devices
        if (missing := [other.ordinal for other in devices if other is not device and other.ordinal not in device.peers])
    ]
    if unreachable:
        return warn(
            "not all GPUs can access each other's memory, so copies between them go through host memory",
            "see nvidia-smi topo -p2p r; an IOMMU or PCIe access control can be the reason",
            unreachable,
        )
    return ok(f"each of {len(devices)} GPUs can access the memory of the others")


def _numbers(text: str) -> set[int]:
    """Return {0, 1, 4} for "0-1,4"."""
    result: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        result |= set(range(int(first), int(last or first) + 1))
    return result


def _node_of(device: Device) -> int:
    """Return the NUMA node of a device, or -1 if it is unknown."""
    try:
        return int((ROOT / "sys/bus/pci/devices" / device.pci / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return -1


def numa() -> Finding:
    try:
        online = _numbers((ROOT / "sys/devices/system/node/online").read_text(encoding="ascii"))
    except FileNotFoundError:
        online = {0}
    if len(online) < 2:
        return ok("the machine has one NUMA node")
    status = (ROOT / "proc/self/status").read_text(encoding="ascii", errors="replace")
    match = re.search(r"^Mems_allowed_list:\s*(\S+)", status, re.MULTILINE)
    allowed = _numbers(match[1]) & online if match else online
    nodes = {device.ordinal: _node_of(device) for device in _usable()}
    lines = [f"GPU {ordinal}: node {node if node >= 0 else 'unknown'}" for ordinal, node in nodes.items()]
    found = f"{len(online)} nodes, of which this process may use {', '.join(map(str, sorted(allowed)))}"
    if any(node >= 0 and node not in allowed for node in nodes.values()):
        return warn(
            f"{found}; backups of a GPU on another node cross the link between the nodes",
            "start the process on the GPU's node (numactl --membind, or the cpuset of the container)",
            lines,
        )
    if any(node < 0 for node in nodes.values()):
        return warn(
            f"{found}; the node of a GPU is unknown, so backups may lie on the other one",
            "start one process for each GPU with numactl --cpunodebind and --membind: see nvidia-smi topo -m",
            lines,
        )
    return ok(found, lines)


CHECKS = (
    Check("driver", driver),
    Check("CUDA versions", versions),
    Check("GPUs", gpus),
    Check("virtual memory", virtual_memory),
    Check("pause", pause),
    Check("RDMA", rdma),
    Check("peers", peers),
    Check("NUMA", numa),
)
