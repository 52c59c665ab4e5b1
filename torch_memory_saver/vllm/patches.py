"""The functions of vLLM that the plug-in replaces, as rows of the table of all replacements (_patches.py)."""

from __future__ import annotations

from torch_memory_saver._patches import Patch

__all__ = ["patches"]

_SELECTED = "construction of the first vLLM worker that selects the backend `torch_memory_saver`"
_PATCHES = (
    Patch(
        "vllm.v1.worker.worker_base.WorkerBase.__init__",
        "load of the plug-in by vLLM",
        "It only notes which sleep mode backend and load format the new worker selects. vLLM has no earlier callback",
    ),
    Patch(
        "vllm.device_allocator.get_mem_allocator_instance",
        _SELECTED,
        "Memory of an engine that selects the backend comes from regions. The name is replaced in every module that has "
        "imported it",
    ),
    Patch(
        "vllm.config.VllmConfig.use_cumem_cudagraph_pool",
        _SELECTED,
        "vLLM decides by the name of its own backend whether sleeping releases the memory of CUDA graphs",
    ),
)


def patches() -> tuple[Patch, ...]:
    """Return the rows."""
    return _PATCHES
