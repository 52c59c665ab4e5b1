"""vLLM's own allocator: here it only records what is called."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any


class CuMemAllocator:
    instance: CuMemAllocator | None = None

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    @staticmethod
    def get_instance() -> CuMemAllocator:
        if CuMemAllocator.instance is None:
            CuMemAllocator.instance = CuMemAllocator()
        return CuMemAllocator.instance

    def use_memory_pool(self, tag: str | None = None) -> AbstractContextManager[None]:
        self.calls.append(("use_memory_pool", tag))
        return nullcontext()

    def cudagraph_pool(self) -> AbstractContextManager[tuple[int, int]]:
        self.calls.append(("cudagraph_pool", None))
        return nullcontext((0, 7))

    def sleep(self, offload_tags: tuple[str, ...] | str | None = None) -> None:
        self.calls.append(("sleep", offload_tags))

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.calls.append(("wake_up", tags))

    def discard(self, tags: tuple[str, ...] | str) -> None:
        self.calls.append(("discard", tags))

    def get_current_usage(self) -> int:
        return 0
