"""The parameters of vLLM's layers, which are a subclass of PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class ModelWeightParameter(torch.nn.Parameter):
    def __new__(cls, data: torch.Tensor, **keywords: Any) -> ModelWeightParameter:
        return super().__new__(cls, data=data, requires_grad=False)  # type: ignore[no-any-return]

    def __init__(self, data: torch.Tensor, weight_loader: Callable[[ModelWeightParameter, torch.Tensor], None]) -> None:
        self._weight_loader = weight_loader

    @property
    def weight_loader(self) -> Callable[[ModelWeightParameter, torch.Tensor], None]:
        return self._weight_loader

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, {} if kwargs is None else kwargs)
