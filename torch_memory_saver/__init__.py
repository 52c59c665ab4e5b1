"""A library that pauses and resumes the GPU memory of tensors without changing their addresses.

    from torch_memory_saver import torch_memory_saver

    with torch_memory_saver.region(tag="kv_cache"):
        cache = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
    torch_memory_saver.pause("kv_cache")   # gives the physical memory back to the driver
    torch_memory_saver.resume("kv_cache")  # maps new physical memory at the same address

The values that calls return are in :mod:`torch_memory_saver.reports`, and the exceptions are in
:mod:`torch_memory_saver.errors`.

Importing this module loads no driver, makes no CUDA context, starts no thread and does not import torch.
"""

import importlib
import sys
from typing import TYPE_CHECKING

from torch_memory_saver._interface import __version__  # the first import, which checks the native library

# isort: split
from torch_memory_saver import errors, reports
from torch_memory_saver._engine.calls.hooks import Hook, HookCall, HookHandle
from torch_memory_saver._engine.calls.pending import PendingResume
from torch_memory_saver._engine.hook_modes import register_hook_mode
from torch_memory_saver._engine.tensors.managed_tensors import ManageHandle
from torch_memory_saver._engine.tensors.preserved import PreserveHandle
from torch_memory_saver.errors import OutOfMemoryError, TorchMemorySaverError
from torch_memory_saver.saver import TorchMemorySaver, forward_settings, torch_memory_saver

#: Another name of this object, which existing programs use.
memory_saver = torch_memory_saver

# The saver's settings are properties of the module's class, so these are declarations for type checkers.
enabled: bool
hook_mode: str
memory_margin_bytes: int
retain_cpu_backup: bool
guard: bool
host_memory: str
share_for: str | None
forward_settings(sys.modules[__name__], torch_memory_saver)

configure_subprocess = torch_memory_saver.configure_subprocess
region = torch_memory_saver.region
cuda_graph = torch_memory_saver.cuda_graph
disable = torch_memory_saver.disable
bind_region = torch_memory_saver.bind_region
manage = torch_memory_saver.manage
pause = torch_memory_saver.pause
resume = torch_memory_saver.resume
empty_cache = torch_memory_saver.empty_cache
get_cpu_backup = torch_memory_saver.get_cpu_backup
is_paused = torch_memory_saver.is_paused
preserve = torch_memory_saver.preserve
preserved = torch_memory_saver.preserved
on_pause = torch_memory_saver.on_pause
on_resume = torch_memory_saver.on_resume
check_fresh = torch_memory_saver.check_fresh
reserve_host_memory = torch_memory_saver.reserve_host_memory
release_host_memory = torch_memory_saver.release_host_memory
set_disk_backup_dir = torch_memory_saver.set_disk_backup_dir
enable_peer_access = torch_memory_saver.enable_peer_access
stats = torch_memory_saver.stats
ledger = torch_memory_saver.ledger
reset_peaks = torch_memory_saver.reset_peaks
tag_of = torch_memory_saver.tag_of
patches = torch_memory_saver.patches

_SUBMODULES = ("layer_graphs", "nccl", "node_store", "observe", "ranks", "simulate", "vllm")

if TYPE_CHECKING:
    from torch_memory_saver import layer_graphs as layer_graphs
    from torch_memory_saver import nccl as nccl
    from torch_memory_saver import node_store as node_store
    from torch_memory_saver import ranks as ranks
    from torch_memory_saver import simulate as simulate
    from torch_memory_saver import vllm as vllm
else:

    def __getattr__(name):
        """Load a submodule when it is first used."""
        if name not in _SUBMODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *vars(type(sys.modules[__name__])), *_SUBMODULES})


__all__ = [
    "Hook",
    "HookCall",
    "HookHandle",
    "ManageHandle",
    "OutOfMemoryError",
    "PendingResume",
    "PreserveHandle",
    "TorchMemorySaver",
    "TorchMemorySaverError",
    "__version__",
    "bind_region",
    "check_fresh",
    "configure_subprocess",
    "cuda_graph",
    "disable",
    "empty_cache",
    "enable_peer_access",
    "errors",
    "get_cpu_backup",
    "is_paused",
    "ledger",
    "manage",
    "memory_saver",
    "on_pause",
    "on_resume",
    "patches",
    "pause",
    "preserve",
    "preserved",
    "region",
    "register_hook_mode",
    "release_host_memory",
    "reports",
    "reserve_host_memory",
    "reset_peaks",
    "resume",
    "set_disk_backup_dir",
    "stats",
    "tag_of",
    "torch_memory_saver",
]
