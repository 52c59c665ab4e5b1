"""CUDA graphs of layers in training: in which order micro-batches run, which buffers and graphs they share, and the capture.

The plans are plain data for plain Python: importing this package imports neither torch nor matplotlib. `capture_layers`,
`capture_step` and the reports import torch when they are first used.

Words used in all of it: a pipeline has `pp` ranks. A *chunk* is a part of the model that lies on one rank as a whole;
each rank has `vpp` of them. A *micro-batch* is a part of a step's samples. Ranks, chunks, micro-batches, layers,
positions and slots count from 0. An *order* is what one rank runs in one step: chunk number + 1 for a forward, its
negative for a backward. The forwards of a chunk run the micro-batches in ascending order, and so do its backwards, so an
order names no micro-batch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .buffers import (
    Graph,
    GraphUse,
    StaticInputs,
    assign_pool_memory,
    assign_static_inputs,
    find_overlap,
    graph_uses,
    number_of_graphs,
)
from .orders import Pass, passes, peak_by_chunk, peak_in_flight
from .padding import PaddingCost, padding_cost, smallest_size
from .plot import plot_schedule
from .schedule import bubble_fraction, pipeline_order, schedule_table, warmup_count
from .timeline import Bubble, Timeline, Work, run_orders

if TYPE_CHECKING:
    from .captured.capture import LayerGraphs, capture_layers
    from .captured.graph_report import GraphReport, graph_report, measure_capture
    from .captured.layer import CapturedLayer
    from .captured.memory import MemoryReport
    from .captured.parts import PartialCapture, graph_part
    from .captured.step import CapturedStep, capture_step

__all__ = [
    "Bubble",
    "CapturedLayer",
    "CapturedStep",
    "Graph",
    "GraphReport",
    "GraphUse",
    "LayerGraphs",
    "MemoryReport",
    "PaddingCost",
    "PartialCapture",
    "Pass",
    "StaticInputs",
    "Timeline",
    "Work",
    "assign_pool_memory",
    "assign_static_inputs",
    "bubble_fraction",
    "capture_layers",
    "capture_step",
    "find_overlap",
    "graph_part",
    "graph_report",
    "graph_uses",
    "measure_capture",
    "number_of_graphs",
    "padding_cost",
    "passes",
    "peak_by_chunk",
    "peak_in_flight",
    "pipeline_order",
    "plot_schedule",
    "run_orders",
    "schedule_table",
    "smallest_size",
    "warmup_count",
]

#: Names that need torch, and the modules that have them.
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
    return getattr(importlib.import_module(f".{_NEED_TORCH[name]}", __name__), name)
