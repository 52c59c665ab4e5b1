"""Plans for CUDA graphs of layers in training.

A plan says in which order micro-batches run, which buffers and graphs they share, and what padding costs. It can be drawn as
a picture.

Plain data for plain Python: neither torch nor matplotlib is imported before `plot_schedule` draws.

These words are used in all modules: a pipeline has `pp` ranks. A *chunk* is a part of the model that lies on one rank as a
whole; each rank has `vpp` of them. A *micro-batch* is a part of a step's samples. Ranks, chunks, micro-batches, layers,
positions and slots count from 0. An *order* lists the forwards and backwards that one rank runs in one step: chunk number +
1 for a forward, its negative for a backward. The forwards of a chunk run the micro-batches in ascending order, and so do its
backwards, so an order names no micro-batch.
"""

from .padding import PaddingCost, padding_cost, smallest_size
from .plot import plot_schedule
from .schedule import bubble_fraction, pipeline_order
from .timeline import Bubble, Timeline, Work

__all__ = [
    "Bubble",
    "PaddingCost",
    "Timeline",
    "Work",
    "bubble_fraction",
    "padding_cost",
    "pipeline_order",
    "plot_schedule",
    "smallest_size",
]
