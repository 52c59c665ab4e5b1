"""The settings of sleep mode and of loading."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Any

from vllm.platforms import current_platform


@dataclass
class ModelConfig:
    enable_sleep_mode: bool = False
    sleep_mode_backend: str = "cumem"
    sleep_mode_offload_cudagraph: bool = False
    enable_cumem_allocator: bool = False
    model: str = ""
    revision: str | None = None
    dtype: Any = None
    quantization: str | None = None
    max_model_len: int = 4096
    architecture: str = "PlainModel"

    def __post_init__(self) -> None:
        self.enable_cumem_allocator |= self.enable_sleep_mode

    @property
    def hf_config(self) -> Any:
        return SimpleNamespace(architectures=[self.architecture])

    def compute_hash(self) -> str:
        return str({each.name: getattr(self, each.name) for each in fields(self)})


@dataclass
class ParallelConfig:
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    data_parallel_rank: int = 0
    enable_expert_parallel: bool = False
    rank: int = 0

    def compute_hash(self) -> str:
        """Ranks do not count."""
        return str([self.tensor_parallel_size, self.pipeline_parallel_size, self.data_parallel_size])


@dataclass
class LoadConfig:
    load_format: str = "auto"
    model_loader_extra_config: dict[str, Any] = field(default_factory=dict)


@dataclass
class VllmConfig:
    model_config: ModelConfig | None = field(default_factory=ModelConfig)
    captures_graphs: bool = True
    load_config: LoadConfig = field(default_factory=LoadConfig)
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        if self.use_cumem_cudagraph_pool:
            os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")

    @property
    def use_cumem_cudagraph_pool(self) -> bool:
        """Graphs are in the allocator's pool."""
        model = self.model_config
        if model is None or not (model.enable_sleep_mode and model.sleep_mode_offload_cudagraph):
            return False
        return model.sleep_mode_backend == "cumem" and self.captures_graphs and current_platform.is_cuda_alike()
