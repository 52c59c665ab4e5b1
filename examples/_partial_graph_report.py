"""The reports of partial_cuda_graph.py: what the graphs take in the orders of a pipeline, and the memory over one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from _common import MIB, check
from _moe_transformer import SCOPE, Layer, Shape
from torch import nn

from torch_memory_saver.layer_graphs import MemoryReport, capture_layers
from torch_memory_saver.layer_graphs.plan import peak_in_flight, pipeline_order

RANKS, CHUNKS = 4, 2
LEAST_MICROBATCHES = 8
#: The ways in which micro-batches share graphs and memory, as arguments of capture_layers().
WAYS: dict[str, dict[str, Any]] = {
    "per_microbatch": {"graphs": "per_microbatch"},
    "shared": {"graphs": "shared"},
    "without reuse": {"graphs": "per_microbatch", "reuse_memory": False},
}
#: The relative difference up to which two pools count as equal.
EQUAL = 0.02
#: The segment that PyTorch takes for blocks of 1 to 10 MiB. Its choice of blocks depends on addresses, so a pool may need
#: one segment more.
SEGMENT = 20 * MIB
#: The factor by which pools grow at least from one number of micro-batches to the next, without reuse.
GROWTH = 1.2


def capture(shape: Shape, rank: int, microbatches: int, samples: list[Sample] | None = None, **way: Any) -> MemoryReport:
    """Capture two chunks of one layer each, for one rank of four, and delete the graphs."""
    order = pipeline_order(RANKS, rank, microbatches, CHUNKS)
    chunks = [[Watched(Layer(shape), samples).cuda()] for _ in range(CHUNKS)]
    inputs = [[torch.zeros(shape.length, shape.width, device="cuda", requires_grad=True)] for _ in chunks]
    report = capture_layers(chunks, inputs, order, scope=SCOPE, tag="graphs", warmup=1, **way).memory_report()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return report


def table(shape: Shape, most: int) -> None:
    """Print the sizes of the pools by rank, way and number of micro-batches (8, 16 and so on, up to `most`). Check the
    properties that a pipeline may rely on."""
    numbers = [LEAST_MICROBATCHES]
    while 2 * numbers[-1] <= most:
        numbers.append(2 * numbers[-1])
    pools: dict[tuple[int, str, int], MemoryReport] = {}
    ranks = (0, RANKS - 1)
    peaks = {rank: peak_in_flight(pipeline_order(RANKS, rank, numbers[-1], CHUNKS)) for rank in ranks}
    print(
        f"MiB of the pools of two layers in two chunks, on a rank of {RANKS}, by micro-batches; and the graphs of the most:"
    )
    print(row("rank", "in flight", "", *map(str, numbers), "graphs"))
    for rank in ranks:
        for name, way in WAYS.items():
            found = [capture(shape, rank, number, **way) for number in numbers]
            pools |= {(rank, name, number): report for number, report in zip(numbers, found, strict=True)}
            sizes = [f"{report.pool_bytes / MIB:.0f}" for report in found]
            print(row(str(rank), str(peaks[rank]), name, *sizes, str(found[-1].graphs)), flush=True)
    check_table({key: report.pool_bytes for key, report in pools.items()}, numbers, peaks)


def row(*cells: str) -> str:
    return "  " + "".join(cell.rjust(16) for cell in cells[:3]) + "".join(cell.rjust(8) for cell in cells[3:])


def check_table(pools: dict[tuple[int, str, int], int], numbers: Sequence[int], peaks: dict[int, int]) -> None:
    least, *more = numbers
    for rank in peaks:
        for name in ("per_microbatch", "shared"):
            first = pools[rank, name, least]
            same = all(abs(pools[rank, name, number] - first) <= max(EQUAL * first, SEGMENT) for number in more)
            check(same, f"rank {rank}, {name}: the pools are the same for {', '.join(map(str, numbers))} micro-batches")
        sizes = [pools[rank, "without reuse", number] for number in numbers]
        grows = all(later > GROWTH * earlier for earlier, later in pairwise(sizes))
        check(grows, f"rank {rank}, without reuse: the pools grow with the micro-batches")
    low, high = sorted(peaks, key=peaks.__getitem__)
    for name in ("per_microbatch", "shared"):
        what = f"{name}: the pools grow with the peak in flight, from {peaks[low]} to {peaks[high]}"
        check(pools[low, name, least] < pools[high, name, least], what)


# -- memory over a step ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """PyTorch's counters after one forward or backward, in bytes."""

    in_use: int
    reserved: int

    @staticmethod
    def now() -> Sample:
        return Sample(torch.cuda.memory_allocated(), torch.cuda.memory_reserved())


class Watched(nn.Module):
    """A layer that records, while it is captured, the memory in use after its forward and after its backward."""

    def __init__(self, layer: nn.Module, samples: list[Sample] | None) -> None:
        super().__init__()
        self.layer = layer
        self.samples = samples

    def note(self) -> None:
        # The layer also runs to be prepared for the capture, and those runs are not recorded.
        if self.samples is not None and torch.cuda.is_current_stream_capturing():
            self.samples.append(Sample.now())

    def forward(self, hidden: torch.Tensor) -> Any:
        if not self.samples:
            self.note()  # before the first capture
        try:
            return self.layer(Behind.apply(hidden, self.note))
        finally:  # also where the capture of a part ends the forward
            self.note()


class Behind(torch.autograd.Function):
    """An identity whose backward runs as the last one of the layer."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, note: Any) -> torch.Tensor:
        ctx.note = note
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.note()
        return gradient, None


def plot(shape: Shape, path: Path, rank: int = 0, microbatches: int = 16) -> None:
    """Draw the memory of one step of a rank, with and without reuse."""
    pyplot = require_pyplot()
    order = pipeline_order(RANKS, rank, microbatches, CHUNKS)
    curves = {}
    for label, name in (("with reuse", "per_microbatch"), ("without reuse", "without reuse")):
        curves[label] = measure(shape, rank, microbatches, order, WAYS[name])
    figure, axes = pyplot.subplots(figsize=(10, 5.2), layout="constrained")
    colours = {"with reuse": "#2b6cb0", "without reuse": "#c87f3a"}
    for label, samples in reversed(curves.items()):
        in_use = [sample.in_use / MIB for sample in samples]
        pool = [sample.reserved / MIB for sample in samples]
        axes.step(range(len(order)), pool, "--", where="mid", color=colours[label], linewidth=1.2, label=f"pool, {label}")
        axes.step(range(len(order)), in_use, where="mid", color=colours[label], linewidth=2, label=f"results, {label}")
    draw_order(axes, order)
    axes.set(
        xlabel="forwards (white) and backwards (grey), in the order of the step",
        ylabel="MiB",
        title=f"Memory of the graphs over a step: rank {rank} of {RANKS}, {CHUNKS} chunks, {microbatches} micro-batches",
        xlim=(-0.5, len(order) - 0.5),
        ylim=(0, None),
    )
    axes.legend(loc="upper left")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    most = {label: max(sample.in_use for sample in samples) for label, samples in curves.items()}
    check(most["with reuse"] < most["without reuse"], f"{path.name}: reuse keeps fewer results at once")


def measure(shape: Shape, rank: int, microbatches: int, order: Sequence[int], way: dict[str, Any]) -> list[Sample]:
    """Return the memory in use after each forward and backward of the order, relative to that before the first."""
    samples: list[Sample] = []
    capture(shape, rank, microbatches, samples, **way)
    before, *behind = samples
    check(len(behind) == len(order), f"{len(order)} forwards and backwards were measured")
    return [Sample(each.in_use - before.in_use, each.reserved - before.reserved) for each in behind]


def draw_order(axes: Any, order: Sequence[int]) -> None:
    """Draw a grey background behind each backward."""
    for position, entry in enumerate(order):
        if entry < 0:
            axes.axvspan(position - 0.5, position + 0.5, color="#e2e8f0", linewidth=0, zorder=0)


def require_pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install 'torch_memory_saver[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
