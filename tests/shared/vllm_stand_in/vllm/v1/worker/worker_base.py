"""The base class of workers."""

from __future__ import annotations

from vllm.config import VllmConfig


class WorkerBase:
    def __init__(self, vllm_config: VllmConfig, local_rank: int, rank: int, distributed_init_method: str = "") -> None:
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.parallel_config = vllm_config.parallel_config
        self.parallel_config.rank = rank
        self.rank = rank
