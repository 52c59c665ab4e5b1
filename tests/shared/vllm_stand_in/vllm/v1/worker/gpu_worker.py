"""The worker, which allocates the model and the cache, and sleeps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from vllm.config import VllmConfig
from vllm.device_allocator import get_mem_allocator_instance
from vllm.device_allocator.sleep_mode_backend import SleepModeBackend, SleepModeBackendFactory
from vllm.model_executor.model_loader import get_model_loader
from vllm.v1.worker.worker_base import WorkerBase


class Worker(WorkerBase):
    """`buffers` are the named buffers of the model, which the worker itself keeps at level 2."""

    def __init__(self, vllm_config: VllmConfig, local_rank: int = 0, rank: int = 0) -> None:
        super().__init__(vllm_config=vllm_config, local_rank=local_rank, rank=rank)
        self._backend: SleepModeBackend | None = None
        self.buffers: dict[str, Any] = {}
        self._saved: dict[str, Any] = {}

    @property
    def sleep_mode_backend(self) -> SleepModeBackend:
        if self._backend is None:
            self._backend = SleepModeBackendFactory.create_backend(self.vllm_config.model_config)
        return self._backend

    def memory_pool(self, tag: str) -> AbstractContextManager[None]:
        model = self.vllm_config.model_config
        if model is None or not model.enable_cumem_allocator:
            return nullcontext()
        allocator = get_mem_allocator_instance()
        if tag == "weights":
            assert allocator.get_current_usage() == 0, "another engine of this process has memory"
        pool: AbstractContextManager[None] = allocator.use_memory_pool(tag=tag)
        return pool

    def load_model(self, load: Callable[[], Any]) -> Any:
        with self.memory_pool("weights"):
            return load()

    def load_checkpoint(self) -> Any:
        """Load the model that the configuration names."""
        config = self.vllm_config
        loader = get_model_loader(config.load_config)
        return self.load_model(lambda: loader.load_model(vllm_config=config, model_config=config.model_config))

    def initialize_cache(self, make_state: Callable[[], Any], make_cache: Callable[[], Any]) -> tuple[Any, Any]:
        cache_pool = self.memory_pool("kv_cache")
        with self.memory_pool("runtime"):
            state = make_state()
            with cache_pool:
                return state, make_cache()

    def sleep(self, level: int = 1) -> None:
        if level == 2:
            self._saved = {name: buffer.cpu().clone() for name, buffer in self.buffers.items()}
        self.sleep_mode_backend.suspend(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.sleep_mode_backend.resume(tags)
        if tags is None or "weights" in tags:
            for name, saved in self._saved.items():
                self.buffers[name].copy_(saved)
            self._saved = {}

    def discard(self, tags: tuple[str, ...]) -> None:
        self.sleep_mode_backend.discard(tags)
