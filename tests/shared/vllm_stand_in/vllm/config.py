"""The settings of sleep mode."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from vllm.platforms import current_platform


@dataclass
class ModelConfig:
    enable_sleep_mode: bool = False
    sleep_mode_backend: str = "cumem"
    sleep_mode_offload_cudagraph: bool = False
    enable_cumem_allocator: bool = False

    def __post_init__(self) -> None:
        self.enable_cumem_allocator |= self.enable_sleep_mode


@dataclass
class VllmConfig:
    model_config: ModelConfig | None = field(default_factory=ModelConfig)
    captures_graphs: bool = True

    def __post_init__(self) -> None:
        self._verify_cumem_cudagraph_pool_env()

    def _verify_cumem_cudagraph_pool_env(self) -> None:
        """NCCL must not register memory that sleeping releases."""
        if self.use_cumem_cudagraph_pool and os.environ.setdefault("NCCL_GRAPH_REGISTER", "0") != "0":
            raise ValueError("NCCL_GRAPH_REGISTER must be 0")

    @property
    def use_cumem_cudagraph_pool(self) -> bool:
        """Graphs are in the allocator's pool."""
        model = self.model_config
        if model is None or not (model.enable_sleep_mode and model.sleep_mode_offload_cudagraph):
            return False
        return model.sleep_mode_backend == "cumem" and self.captures_graphs and current_platform.is_cuda_alike()
