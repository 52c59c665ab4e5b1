"""The pool that a CUDA graph is captured into."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.config import VllmConfig
from vllm.device_allocator import get_mem_allocator_instance


@contextmanager
def capture_pool(pool: Any, vllm_config: VllmConfig) -> Iterator[Any]:
    if not vllm_config.use_cumem_cudagraph_pool:
        yield pool
        return
    with get_mem_allocator_instance().cudagraph_pool() as own:
        yield own
