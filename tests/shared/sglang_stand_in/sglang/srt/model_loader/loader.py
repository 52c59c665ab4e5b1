"""The loader of files, which reads *.bin only, and counts in `loads` how often it has filled a model."""

from __future__ import annotations

import glob
import os
from collections.abc import Generator
from typing import Any

import torch

from sglang.srt.configs.load_config import LoadConfig, LoadFormat


class Model(torch.nn.Module):
    """Processing replaces the weight, and sets a number of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(512, 512), requires_grad=False)
        self.scale = torch.nn.Parameter(torch.zeros(1), requires_grad=False)

    def load_weights(self, weights: Any) -> None:
        DefaultModelLoader.loads += 1
        for name, value in weights:
            getattr(self, name).data.copy_(value)

    def process_weights_after_loading(self) -> None:
        self.scale_value = float(self.scale)
        self.weight = torch.nn.Parameter(self.weight.data.t().contiguous() * self.scale_value, requires_grad=False)


class DefaultModelLoader:
    loads = 0

    def __init__(self, load_config: LoadConfig) -> None:
        self.load_config = load_config

    def _prepare_weights(
        self, model_name_or_path: str, revision: str | None, fall_back_to_pt: bool
    ) -> tuple[str, list[str], bool]:
        if self.load_config.load_format != LoadFormat.AUTO:
            raise ValueError(f"Unknown load_format: {self.load_config.load_format}")
        return model_name_or_path, sorted(glob.glob(os.path.join(model_name_or_path, "*.bin"))), False

    def _get_all_weights(self, model_config: Any, model: Any) -> Generator[tuple[str, Any], None, None]:
        for path in self._prepare_weights(model_config.model_path, model_config.revision, True)[1]:
            yield from torch.load(path).items()

    def load_model(self, *, model_config: Any, device_config: Any) -> Any:
        target_device = torch.device(device_config.device)
        with target_device:
            model = Model()
        self.load_weights_and_postprocess(model, self._get_all_weights(model_config, model), target_device)
        return model.eval()

    @staticmethod
    def load_weights_and_postprocess(model: Any, weights: Any, target_device: Any) -> None:
        model.load_weights(weights)
        model.process_weights_after_loading()


def get_model_loader(load_config: LoadConfig, model_config: Any = None) -> DefaultModelLoader:
    if isinstance(load_config.load_format, type):
        made: DefaultModelLoader = load_config.load_format(load_config)
        return made
    return DefaultModelLoader(load_config)
