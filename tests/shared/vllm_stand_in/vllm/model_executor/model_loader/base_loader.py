"""The base class of loaders, with the order of a load."""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib import import_module
from typing import Any

from vllm.config import LoadConfig, VllmConfig


class BaseModelLoader(ABC):
    def __init__(self, load_config: LoadConfig) -> None:
        self.load_config = load_config

    @abstractmethod
    def download_model(self, model_config: Any) -> None:
        raise NotImplementedError

    @abstractmethod
    def load_weights(self, model: Any, model_config: Any) -> None:
        raise NotImplementedError

    def load_model(self, vllm_config: VllmConfig, model_config: Any, prefix: str = "") -> Any:
        torch = import_module("torch")
        models = import_module("vllm.model_executor.models")
        before = torch.get_default_dtype()
        torch.set_default_dtype(model_config.dtype)
        try:
            with torch.device("cuda"):
                model_class = getattr(models, model_config.hf_config.architectures[0])
                model = model_class(vllm_config=vllm_config, prefix=prefix)
            self.load_weights(model, model_config)
            process_weights_after_loading(model)
        finally:
            torch.set_default_dtype(before)
        return model.eval()


def process_weights_after_loading(model: Any) -> None:
    for _, module in model.named_modules():
        quant_method = getattr(module, "quant_method", None)
        if quant_method is not None:
            quant_method.process_weights_after_loading(module)
