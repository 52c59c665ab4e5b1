"""CUDA graphs of layers in training: the capture of layers, whole steps and parts of steps, and reports on graphs.

`plan` decides in advance in which order micro-batches run, and which buffers and graphs they share. Importing this package
imports neither torch nor matplotlib. Torch is imported when a function is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torch_memory_saver._services import import_torch

from . import plan

if TYPE_CHECKING:
    from .captured.capture import LayerGraphs, capture_layers
    from .captured.graph_report import GraphReport, graph_report, measure_capture
    from .captured.layer import CapturedLayer
    from .captured.memory import MemoryReport
    from .captured.parts import PartialCapture, graph_part
    from .captured.step import CapturedStep, capture_step

__all__ = [
    "CapturedLayer",
    "CapturedStep",
    "GraphReport",
    "LayerGraphs",
    "MemoryReport",
    "PartialCapture",
    "capture_layers",
    "capture_step",
    "graph_part",
    "graph_report",
    "measure_capture",
    "plan",
]

#: Names that need torch, and the modules that define them.
_NEED_TORCH = {
    "CapturedLayer": "captured.layer",
    "CapturedStep": "captured.step",
    "GraphReport": "captured.graph_report",
    "LayerGraphs": "captured.capture",
    "MemoryReport": "captured.memory",
    "PartialCapture": "captured.parts",
    "capture_layers": "captured.capture",
    "capture_step": "captured.step",
    "graph_part": "captured.parts",
    "graph_report": "captured.graph_report",
    "measure_capture": "captured.graph_report",
}


def __getattr__(name: str) -> Any:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_torch()
    return getattr(importlib.import_module(f".{_NEED_TORCH[name]}", __name__), name)
