"""The loader of files. It reads *.pt only, and counts in `loads` how often it has filled a model."""

from __future__ import annotations

import glob
import os
from collections.abc import Generator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from vllm.config import LoadConfig
from vllm.model_executor.model_loader.base_loader import BaseModelLoader


class DefaultModelLoader(BaseModelLoader):
    loads = 0

    @dataclass
    class Source:
        model_or_path: str
        revision: str | None
        subfolder: str | None = None
        prefix: str = ""
        fall_back_to_pt: bool = True
        allow_patterns_overrides: list[str] | None = None

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        unexpected_keys = load_config.model_loader_extra_config.keys() - {"enable_multithread_load", "num_threads"}
        if unexpected_keys:
            raise ValueError(f"Unexpected extra config keys for load format {load_config.load_format}: {unexpected_keys}")

    def _prepare_weights(
        self,
        model_name_or_path: str,
        subfolder: str | None,
        revision: str | None,
        fall_back_to_pt: bool,
        allow_patterns_overrides: list[str] | None,
    ) -> tuple[str, list[str], bool]:
        assert fall_back_to_pt and allow_patterns_overrides is None
        files = sorted(glob.glob(os.path.join(model_name_or_path, subfolder or "", "*.pt")))
        if not files:
            raise RuntimeError(f"Cannot find any model weights with `{model_name_or_path}`")
        return model_name_or_path, files, False

    def get_all_weights(self, model_config: Any, model: Any) -> Generator[tuple[str, Any], None, None]:
        for path in self._prepare_weights(model_config.model, None, model_config.revision, True, None)[1]:
            yield from import_module("torch").load(path).items()

    def download_model(self, model_config: Any) -> None:
        self._prepare_weights(model_config.model, None, model_config.revision, True, None)

    def load_weights(self, model: Any, model_config: Any) -> None:
        DefaultModelLoader.loads += 1
        model.load_weights(self.get_all_weights(model_config, model))
