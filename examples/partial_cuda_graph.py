"""CUDA graphs of a transformer with experts: attention, router and preprocessing are captured, the experts are not.

The number of tokens of an expert differs in each micro-batch, which a graph cannot express. So the layers are captured up to
the experts, and run as ordinary code from there on. The model's code is the same for both. A step has these stages:

  train   forwards and backwards of all micro-batches, which replay graphs
  update  pause("graphs"): the graphs' memory is released while the optimizer runs
  idle    the weights are paused as well, and all memory of the program but the optimizer's is free for others

The program trains twice, first without graphs. Each loss must be the same, bit for bit.

    python examples/partial_cuda_graph.py                       # and the time of a step: --at-least 2 asks for twice as fast
    python examples/partial_cuda_graph.py --table --plot memory.png  # what graphs take in the orders of a pipeline
    python examples/partial_cuda_graph.py --experts-over 2      # experts on two GPUs, which exchange tokens
    python examples/partial_cuda_graph.py --pipeline 2 --chunks 2    # a pipeline of two GPUs, with two chunks each
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it, matrix products may differ from run to run
os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")  # registrations of NCCL do not survive a pause

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _common import MIB, check, free_bytes
from _moe_transformer import SCOPE, Experts, Shape, loss_of, make_batch, make_layers, seen_by
from _partial_graph_report import plot, table
from _pipeline_stage import Batch, Links, Stage
from torch import nn

from torch_memory_saver import torch_memory_saver
from torch_memory_saver.layer_graphs import LayerGraphs, capture_layers
from torch_memory_saver.layer_graphs.plan import pipeline_order

WEIGHTS, GRAPHS = "weights", "graphs"
#: The model's width and the tokens of a micro-batch. They are so small that a GPU waits for the host to launch kernels.
SMALL = 256, 128
#: Sizes that are so large that PyTorch's segments of 2 and 20 MiB matter little.
LARGE = 512, 1024
#: The number of steps before steps are timed.
WARM_UP = 3


@dataclass(frozen=True)
class Setup:
    shape: Shape
    steps: int
    microbatches: int
    repetitions: int = 0
    """The number of steps that are timed after the training."""
    chunks: int = 1
    graphed: bool = False


@dataclass
class Run:
    """The values that a rank reports for a training."""

    losses: list[list[float]] = field(default_factory=list)
    """The losses of each step, by micro-batch."""
    counts: list[list[tuple[int, ...]]] = field(default_factory=list)
    """The number of tokens of each expert of this rank, by step and micro-batch."""
    freed: list[tuple[int, int]] = field(default_factory=list)
    """Free bytes that the device gained between two steps, and bytes that the pauses reported."""
    seconds: list[float] = field(default_factory=list)
    report: str = ""


def capture(setup: Setup, chunks: Sequence[Sequence[nn.Module]], order: Sequence[int], is_first: bool) -> LayerGraphs:
    """Capture all layers, each up to its experts. `is_first`: the first layer reads the data, which has no gradient."""
    shape = setup.shape
    samples = [[torch.zeros(shape.length, shape.width, device="cuda", requires_grad=True) for _ in row] for row in chunks]
    if is_first:
        samples[0][0].requires_grad_(False)
    return capture_layers(chunks, samples, order=order, scope=SCOPE, tag=GRAPHS)


class Training:
    """Some layers, an optimizer, and steps that release memory."""

    def __init__(self, setup: Setup, chunks: list[list[nn.Module]], order: Sequence[int], is_first: bool = True) -> None:
        self.setup = setup
        with torch_memory_saver.region(tag=WEIGHTS, backup="host"):
            self.modules = [[module.cuda() for module in row] for row in chunks]
        self.parameters = [each for row in self.modules for module in row for each in module.parameters()]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-3)
        self.graphs = capture(setup, self.modules, order, is_first) if setup.graphed else None
        self.layers: Sequence[Sequence[Any]] = self.modules if self.graphs is None else self.graphs.layers

    def forwards_and_backwards(self, batches: Sequence[Batch]) -> list[float]:
        """Run one micro-batch after the other. Returns the losses."""
        losses = []
        for hidden, wanted in batches:
            for layer in self.layers[0]:
                hidden = layer(hidden)
            loss = loss_of(hidden, wanted)
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).tolist()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(
        self, run_step: Callable[[Sequence[Batch]], list[float]], rank: int = 0, reduce: Callable[[], Any] = nullcontext
    ) -> Run:
        """Run all steps. `reduce` runs before the update."""
        run = Run()
        if self.graphs is not None:
            idle()  # the first copies allocate a little device memory that stays
        for number in range(self.setup.steps):
            batches = [make_batch(self.setup.shape, number, rank, each) for each in range(self.setup.microbatches)]
            run.losses.append(run_step(batches))
            layers = [module for row in self.modules for module in row]
            run.counts.append(seen_by(layers, self.setup.microbatches))
            reduce()
            if self.graphs is None:
                self.update()
                continue
            torch_memory_saver.pause(GRAPHS)
            self.update()
            torch_memory_saver.resume(GRAPHS)
            del batches
            run.freed.append(idle())
        if self.graphs is not None:
            run.report = str(self.graphs.memory_report())
        return run

    def measure(self) -> list[float]:
        """Return the seconds of some steps, including the optimizer, without pauses."""
        batches = [make_batch(self.setup.shape, 0, 0, each) for each in range(self.setup.microbatches)]
        seconds = []
        for number in range(WARM_UP + self.setup.repetitions):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            self.forwards_and_backwards(batches)
            self.update()
            torch.cuda.synchronize()
            if number >= WARM_UP:
                seconds.append(time.perf_counter() - begin)
        return seconds


def idle() -> tuple[int, int]:
    """Pause and resume everything. Returns the free bytes that the device gained, and the bytes in the reports."""
    torch.cuda.empty_cache()
    before = free_bytes()
    reports = [torch_memory_saver.pause(tag) for tag in (GRAPHS, WEIGHTS)]
    freed = free_bytes() - before
    torch_memory_saver.resume(WEIGHTS)
    torch_memory_saver.resume(GRAPHS)
    return freed, sum(report.bytes for report in reports if report is not None)


def train_on_one_gpu(setup: Setup, rank: int = 0) -> Run:
    training = Training(setup, [make_layers(setup.shape)], (1, -1))
    run = training.train(training.forwards_and_backwards, rank)
    if setup.repetitions:
        run.seconds = training.measure()
    return run


# -- several GPUs ------------------------------------------------------------------------------------------------------


def train_with_experts_over_ranks(rank: int, ranks: int, setup: Setup) -> list[Run]:
    """Train twice, without graphs and with them. Each rank has a part of the experts, all of the rest of the model, and its
    own micro-batches."""
    return [train_with_a_part_of_the_experts(rank, replace(setup, graphed=graphed)) for graphed in (False, True)]


def train_with_a_part_of_the_experts(rank: int, setup: Setup) -> Run:
    layers = make_layers(setup.shape, dist.group.WORLD)
    training = Training(setup, [layers], (1, -1))
    own = {id(module.matrices) for layer in layers for module in layer.modules() if isinstance(module, Experts)}

    def reduce() -> None:
        for parameter in training.parameters:
            if id(parameter) not in own:
                dist.all_reduce(parameter.grad)

    return training.train(training.forwards_and_backwards, rank, reduce)


def train_in_pipeline(rank: int, ranks: int, setup: Setup) -> Run:
    """Train in stages of equal numbers of layers. The last stage has the head as well."""
    order = pipeline_order(ranks, rank, setup.microbatches, setup.chunks)
    *layers, head = make_layers(setup.shape)
    size = setup.shape.layers // (ranks * setup.chunks)
    stages = [chunk * ranks + rank for chunk in range(setup.chunks)]
    chunks = [layers[stage * size : (stage + 1) * size] for stage in stages]
    if rank == ranks - 1:
        chunks[-1].append(head)
    training = Training(setup, chunks, order, is_first=rank == 0)
    links = Links(ranks, (setup.shape.length, setup.shape.width))
    stage = Stage(training.layers, order, rank, ranks, links, training.graphs)
    return training.train(stage.step)


def run_rank(rank: int, ranks: int, program: Callable[..., Any], setup: Setup, rendezvous: str, results: Any) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    results.put((rank, program(rank, ranks, setup)))
    dist.barrier(device_ids=[rank])
    dist.destroy_process_group()


def run_ranks(ranks: int, program: Callable[..., Any], setup: Setup) -> list[Any]:
    """Run the program in a process on each GPU."""
    if torch.cuda.device_count() < ranks:
        raise SystemExit(f"this needs {ranks} GPUs, real or simulated: see simulate --devices")
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, args=(ranks, program, setup, f"{folder}/rendezvous", results), nprocs=ranks)
    by_rank = dict(results.get() for _ in range(ranks))
    return [by_rank[rank] for rank in range(ranks)]


# -- checks and output -------------------------------------------------------------------------------------------------


def check_run(run: Run, who: str = "") -> None:
    """Check a run with graphs by itself."""
    for number, counts in enumerate(run.counts):
        what = f"{who}step {number}: the experts got other numbers of tokens in each of {len(counts)} micro-batches"
        check(len(set(counts)) == len(counts), what)
    for number, (freed, reported) in enumerate(run.freed):
        what = f"{who}after step {number}: a pause of graphs and weights gave back {freed / MIB:.0f} MiB"
        check(freed >= reported > 0, f"{what} (reported {reported / MIB:.0f})")


def check_losses(found: Iterable[list[float]], expected: Iterable[list[float]], what: str) -> None:
    for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        check(mine == theirs, f"step {number}: the losses {what}, bit for bit ({', '.join(f'{loss:.4f}' for loss in mine)})")


def on_one_gpu(setup: Setup, at_least: float) -> None:
    eager = train_on_one_gpu(setup)
    graphed = train_on_one_gpu(replace(setup, graphed=True))
    check_run(graphed)
    check_losses(graphed.losses, eager.losses, "are those without graphs")
    check(graphed.losses[0] != graphed.losses[-1], "the model has changed")
    print(graphed.report)
    if not setup.repetitions:
        return
    print(f"ms of a step of {setup.microbatches} micro-batches and the optimizer, of {setup.repetitions}:")
    print("  " + "".join(title.rjust(14) for title in ("", "median", "least", "most")))
    for name, run in (("eager", eager), ("with graphs", graphed)):
        figures = (statistics.median(run.seconds), min(run.seconds), max(run.seconds))
        print("  " + name.rjust(14) + "".join(f"{figure * 1000:.2f}".rjust(14) for figure in figures))
    faster = statistics.median(eager.seconds) / statistics.median(graphed.seconds)
    print(f"With graphs a step is {faster:.2f} times as fast.")
    if at_least:
        check(faster >= at_least, f"a step is at least {at_least:g} times as fast")


def over_experts(setup: Setup, ranks: int) -> None:
    for rank, (eager, graphed) in enumerate(run_ranks(ranks, train_with_experts_over_ranks, setup)):
        check_run(graphed, f"rank {rank}, ")
        check_losses(graphed.losses, eager.losses, f"of rank {rank} are those without graphs")
        alone = train_on_one_gpu(setup, rank)  # its first losses depend on no other rank's micro-batches
        check_losses(graphed.losses[:1], alone.losses[:1], f"of rank {rank} are those of all experts on one GPU")
        print(f"rank {rank}:\n{graphed.report}")


def over_stages(setup: Setup, ranks: int) -> None:
    stages = ranks * setup.chunks
    if setup.shape.layers % stages:
        raise SystemExit(f"--layers {setup.shape.layers} cannot be divided into {stages} stages: use a multiple of it")
    alone = train_on_one_gpu(setup)
    graphed = run_ranks(ranks, train_in_pipeline, replace(setup, graphed=True))
    for rank, run in enumerate(graphed):
        check_run(run, f"rank {rank}, ")
        print(f"rank {rank}:\n{run.report}")
    check_losses(graphed[-1].losses, alone.losses, f"of {ranks} ranks with graphs are those of one without")


TABLE = "only print what graphs take in the orders of a pipeline, for 8 micro-batches and more (default %(const)s at most)"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--width", type=int, help=f"of the transformer (default {SMALL[0]}, for --table and --plot {LARGE[0]})"
    )
    parser.add_argument("--length", type=int, help=f"tokens of a micro-batch (default {SMALL[1]}, likewise {LARGE[1]})")
    parser.add_argument("--layers", type=int, default=8, help="default %(default)s")
    parser.add_argument("--experts", type=int, default=4, help="of each layer (default %(default)s)")
    parser.add_argument("--microbatches", type=int, default=8, help="of a step (default %(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="that are compared (default %(default)s)")
    parser.add_argument("--repetitions", type=int, default=10, help="steps that are timed (default %(default)s)")
    parser.add_argument("--at-least", type=float, default=0, help="fail if a step is not so many times as fast with graphs")
    parser.add_argument("--table", type=int, nargs="?", const=32, metavar="MICROBATCHES", help=TABLE)
    parser.add_argument("--plot", type=Path, help="only draw the memory over a step: a file that ends in .png, .svg or .pdf")
    several = parser.add_mutually_exclusive_group()
    several.add_argument("--experts-over", type=int, metavar="GPUS", help="distribute the experts over so many GPUs")
    several.add_argument("--pipeline", type=int, metavar="GPUS", help="distribute the layers over so many GPUs")
    parser.add_argument("--chunks", type=int, default=1, help="of each GPU of the pipeline (default %(default)s)")
    return parser.parse_args()


def main() -> None:
    arguments = options()
    is_report = arguments.table or arguments.plot
    width, length = LARGE if is_report else SMALL
    shape = Shape(arguments.width or width, arguments.length or length, arguments.layers, arguments.experts)
    setup = Setup(shape, arguments.steps, arguments.microbatches, chunks=arguments.chunks)
    if is_report:
        if arguments.table:
            table(shape, arguments.table)
        if arguments.plot:
            plot(shape, arguments.plot)
    elif arguments.experts_over:
        over_experts(setup, arguments.experts_over)
    elif arguments.pipeline:
        over_stages(setup, arguments.pipeline)
    else:
        timed = Setup(shape, arguments.steps, arguments.microbatches, arguments.repetitions)
        on_one_gpu(timed, arguments.at_least)


if __name__ == "__main__":
    main()
