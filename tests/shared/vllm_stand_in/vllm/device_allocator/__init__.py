"""The function that finds the allocator."""

from typing import Any


def get_mem_allocator_instance() -> Any:
    from vllm.device_allocator.cumem import CuMemAllocator

    return CuMemAllocator.get_instance()
