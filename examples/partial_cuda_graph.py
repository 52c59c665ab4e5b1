"""Training with CUDA graphs of a part of each layer: attention, router and preprocessing are captured, the experts are not.

The number of tokens of an expert differs in each micro-batch, which a graph cannot express. So the layers are captured up to
the experts, and run as ordinary code from there on. The model's code is the same for both. A step has these stages:

  train   forwards and backwards of all micro-batches, which replay graphs
  update  pause("graphs"): the graphs' memory is released while the optimizer runs
  idle    the weights are paused as well, and all memory of the program but the optimizer's is free for others

The program trains twice: without graphs on one GPU, and with graphs on one GPU or in a pipeline of several. Each loss must
be the same, bit for bit.

    python examples/partial_cuda_graph.py
    python examples/partial_cuda_graph.py --pipeline 2 --chunks 2    # a pipeline of two GPUs, with two chunks of layers each
"""

import argparse
import os
import tempfile
from dataclasses import dataclass, field, replace
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it, matrix products may differ from run to run
os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")  # registrations of NCCL do not survive a pause

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _common import MIB, check, free_bytes, show
from _moe_transformer import SCOPE, Shape, make_batch, make_layers, seen_by
from _pipeline_stage import Links, Stage
from torch import nn

from torch_memory_saver import torch_memory_saver
from torch_memory_saver.layer_graphs import capture_layers
from torch_memory_saver.layer_graphs.plan import pipeline_order

WEIGHTS, GRAPHS = "weights", "graphs"


@dataclass(frozen=True)
class Setup:
    shape: Shape
    steps: int
    microbatches: int
    ranks: int = 1
    chunks: int = 1
    """The number of chunks of layers on each rank."""
    graphed: bool = False


@dataclass
class Run:
    """The values that a rank reports for a training."""

    losses: list[list[float]] = field(default_factory=list)
    """The losses of each step, by micro-batch."""
    counts: list[list[tuple[int, ...]]] = field(default_factory=list)
    """The number of tokens of each expert, by step and micro-batch."""
    freed: list[tuple[int, int]] = field(default_factory=list)
    """Free bytes that the device gained between two steps, and bytes that the pauses reported."""
    report: str = ""


def layers_of(setup: Setup, rank: int) -> list[list[nn.Module]]:
    """Return a rank's chunks of layers. All chunks have the same number of layers, and the last one has the head as well."""
    *layers, head = make_layers(setup.shape)
    size = setup.shape.layers // (setup.ranks * setup.chunks)
    stages = [chunk * setup.ranks + rank for chunk in range(setup.chunks)]
    chunks = [layers[stage * size : (stage + 1) * size] for stage in stages]
    if rank == setup.ranks - 1:
        chunks[-1].append(head)
    return chunks


class Training:
    """The layers of a rank, an optimizer, and steps that release memory."""

    def __init__(self, setup: Setup, rank: int) -> None:
        self.setup, shape = setup, setup.shape
        with torch_memory_saver.region(tag=WEIGHTS, backup="host"):
            self.chunks = [[layer.cuda() for layer in chunk] for chunk in layers_of(setup, rank)]
        self.layers = [layer for chunk in self.chunks for layer in chunk]
        self.optimizer = torch.optim.AdamW([each for layer in self.layers for each in layer.parameters()], lr=1e-3)
        order = pipeline_order(setup.ranks, rank, setup.microbatches, setup.chunks)
        self.graphs = None
        runs: Any = self.chunks
        if setup.graphed:
            sample = torch.zeros(shape.length, shape.width, device="cuda", requires_grad=True)
            samples = [[sample] * len(chunk) for chunk in self.chunks]
            if rank == 0:
                samples[0][0] = sample.detach()  # the first layer reads the data, which has no gradient
            captured = (1, -1) if setup.ranks == 1 else order  # on one GPU all micro-batches replay the same graphs
            self.graphs = capture_layers(self.chunks, samples, order=captured, scope=SCOPE, tag=GRAPHS)
            runs = self.graphs.layers
        links = Links(setup.ranks, (shape.length, shape.width)) if setup.ranks > 1 else None
        self.stage = Stage(runs, order, rank, setup.ranks, links, self.graphs)

    def train(self) -> Run:
        """Run all steps."""
        run = Run()
        if self.graphs is not None:
            idle()  # the first copies allocate a little device memory that stays
        for number in range(self.setup.steps):
            batches = [make_batch(self.setup.shape, number, each) for each in range(self.setup.microbatches)]
            run.losses.append(self.stage.step(batches))
            run.counts.append(seen_by(self.layers, self.setup.microbatches))
            del batches
            if self.graphs is not None:
                torch_memory_saver.pause(GRAPHS)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.graphs is not None:
                torch_memory_saver.resume(GRAPHS)
                run.freed.append(idle())
        if self.graphs is not None:
            run.report = str(self.graphs.memory_report())
        return run


def idle() -> tuple[int, int]:
    """Pause and resume everything. Returns the free bytes that the device gained, and the bytes in the reports."""
    torch.cuda.empty_cache()
    before = free_bytes()
    reports = [torch_memory_saver.pause(tag) for tag in (GRAPHS, WEIGHTS)]
    freed = free_bytes() - before
    show("graphs and weights are paused")
    torch_memory_saver.resume([WEIGHTS, GRAPHS])
    show("graphs and weights are resumed")
    return freed, sum(report.bytes for report in reports if report is not None)


def run_rank(rank: int, setup: Setup, rendezvous: str, results: Any) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{rendezvous}", rank=rank, world_size=setup.ranks)
    results.put((rank, Training(setup, rank).train()))
    dist.barrier(device_ids=[rank])
    dist.destroy_process_group()


def train(setup: Setup) -> list[Run]:
    """Train on one GPU, or in a process on each GPU. Returns the values of all ranks."""
    if setup.ranks == 1:
        return [Training(setup, 0).train()]
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, args=(setup, f"{folder}/rendezvous", results), nprocs=setup.ranks)
    by_rank = dict(results.get() for _ in range(setup.ranks))
    return [by_rank[rank] for rank in range(setup.ranks)]


def check_run(run: Run, who: str) -> None:
    """Check a run with graphs by itself."""
    for number, counts in enumerate(run.counts):
        what = f"{who}, step {number}: the experts got other numbers of tokens in each of {len(counts)} micro-batches"
        check(len(set(counts)) == len(counts), what)
    for number, (freed, reported) in enumerate(run.freed):
        what = f"{who}, after step {number}: a pause of graphs and weights gave back {freed / MIB:.0f} MiB"
        check(freed >= reported > 0, f"{what} (reported {reported / MIB:.0f})")
    print(f"{who}:\n{run.report}")


def check_losses(found: list[list[float]], expected: list[list[float]]) -> None:
    for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        losses = ", ".join(f"{loss:.4f}" for loss in mine)
        check(mine == theirs, f"step {number}: the losses are those without graphs, bit for bit ({losses})")
    check(found[0] != found[-1], "the model has changed")


def parse() -> Setup:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=128, help="width of the transformer (default %(default)s)")
    parser.add_argument("--length", type=int, default=64, help="tokens of a micro-batch (default %(default)s)")
    parser.add_argument("--layers", type=int, default=8, help="default %(default)s")
    parser.add_argument("--microbatches", type=int, default=8, help="micro-batches of a step (default %(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="default %(default)s")
    parser.add_argument("--pipeline", type=int, default=1, metavar="GPUS", help="distribute the layers over so many GPUs")
    parser.add_argument("--chunks", type=int, default=1, help="chunks of layers on each GPU (default %(default)s)")
    options = parser.parse_args()
    if torch.cuda.device_count() < options.pipeline:
        parser.error(f"--pipeline {options.pipeline} needs as many GPUs, real or simulated: see simulate --devices")
    if options.layers % (options.pipeline * options.chunks):
        parser.error("--layers must be a multiple of GPUs times chunks")
    shape = Shape(options.width, options.length, options.layers)
    return Setup(shape, options.steps, options.microbatches, options.pipeline, options.chunks)


def main() -> None:
    setup = parse()
    [eager] = train(replace(setup, ranks=1, chunks=1))
    graphed = train(replace(setup, graphed=True))
    for rank, run in enumerate(graphed):
        check_run(run, f"rank {rank}")
    check_losses(graphed[-1].losses, eager.losses)


if __name__ == "__main__":
    main()
