"""The settings of sleep mode."""

from __future__ import annotations

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

    @property
    def use_cumem_cudagraph_pool(self) -> bool:
        """Graphs are in the allocator's pool."""
        model = self.model_config
        if model is None or not (model.enable_sleep_mode and model.sleep_mode_offload_cudagraph):
            return False
        return model.sleep_mode_backend == "cumem" and self.captures_graphs and current_platform.is_cuda_alike()
