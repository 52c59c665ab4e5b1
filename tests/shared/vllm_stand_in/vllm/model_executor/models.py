"""Small models, whose layers have the parameters and quantisation methods that vLLM's have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from vllm.model_executor.parameter import ModelWeightParameter

WIDTH = 512


class Unquantized:
    uses_meta_device = False

    def create_weights(self, layer: Linear) -> None:
        layer.weight = ModelWeightParameter(torch.empty(WIDTH, layer.rows), weight_loader=layer.load)

    def process_weights_after_loading(self, layer: Linear) -> None:
        pass


class Repacked(Unquantized):
    """Checkpoints have a weight and a scale. Processing replaces the weight, and makes the scale a number of Python."""

    def create_weights(self, layer: Linear) -> None:
        super().create_weights(layer)
        layer.scale = ModelWeightParameter(torch.full((1,), -1.0), weight_loader=layer.load)

    def process_weights_after_loading(self, layer: Linear) -> None:
        layer.scale_value = float(layer.scale)
        del layer.scale
        layer.weight = torch.nn.Parameter(layer.weight.data.t().contiguous() * layer.scale_value, requires_grad=False)


class Online(Unquantized):
    """Weights are quantised while they are loaded, and do not exist before."""

    uses_meta_device = True

    def create_weights(self, layer: Linear) -> None:
        empty = torch.empty(WIDTH, layer.rows, device="meta")
        layer.weight = ModelWeightParameter(empty, weight_loader=layer.replace)


METHODS = {None: Unquantized, "repacked": Repacked, "online": Online}


class Linear(torch.nn.Module):
    def __init__(self, rows: int, quantization: str | None) -> None:
        super().__init__()
        self.rows = rows
        self.quant_method = METHODS[quantization]()
        self.quant_method.create_weights(self)

    def load(self, parameter: ModelWeightParameter, value: torch.Tensor) -> None:
        parameter.data.copy_(value)

    def replace(self, parameter: ModelWeightParameter, value: torch.Tensor) -> None:
        self.weight = torch.nn.Parameter(value.to("cuda"), requires_grad=False)


class PlainModel(torch.nn.Module):
    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        quantization = vllm_config.model_config.quantization
        self.embedding = Linear(1000, None)
        self.up = Linear(WIDTH, quantization)
        self.down = Linear(WIDTH // vllm_config.parallel_config.tensor_parallel_size, quantization)
        self.head = self.embedding
        self.register_buffer("cache", torch.arange(64, dtype=torch.float32), persistent=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        parameters = dict(self.named_parameters())
        loaded = set()
        for name, value in weights:
            if name in parameters:
                parameter = parameters[name]
                parameter.weight_loader(parameter, value[tuple(slice(size) for size in parameter.shape)])
                loaded.add(name)
        return loaded


class AttributeModel(PlainModel):
    """Loading sets a tensor that is no parameter."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = super().load_weights(weights)
        self.up.w_kc = self.up.weight.t().contiguous()
        return loaded
