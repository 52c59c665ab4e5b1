"""A plug-in of vLLM, whose sleep mode then releases and restores memory through this package.

vLLM calls :func:`register` in each of its processes, because it is an entry point of the group ``vllm.general_plugins``. The
plug-in takes effect if an engine is started with sleep mode and ``sleep_mode_backend="torch_memory_saver"``. It was written
for the interface of vLLM 0.33.0, and ran in complete engines of vLLM 0.26.0.

With ``load_format="torch_memory_saver"`` an engine adopts weights that an earlier one has published. This part ran in
engines of vLLM 0.26.0.

Importing this package imports neither vLLM nor torch.
"""

from __future__ import annotations

from .allocator import SleepAllocator, allocator
from .plugin import register

__all__ = ["SleepAllocator", "allocator", "register"]
