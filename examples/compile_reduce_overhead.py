"""torch.compile(mode="reduce-overhead") and pauses: the compiled code's own CUDA graphs stay valid, in both hook modes.

Inductor captures graphs of its own and puts their memory into one pool. The program never sees those captures, so
`torch_memory_saver.cuda_graph()` cannot take their place. What can be done depends on the hook mode:

- preload: call compiled code inside a region. The graphs' memory is then managed, and a pause gives it back.
- torch: the pool stays on the GPU. PyTorch makes it without an allocator of ours, and has no way to set one. Everything
  else can be paused as usual. `torch.compiler.reset()` gives the pool back, but the next call compiles again.

The example runs itself in a child process for each mode. Each child runs the forward pass and a training step of a small
model, with two inputs of one shape, then with two of a new shape, which is recorded again. After each of 20 pauses the
outputs, losses, gradients and updated weights must equal those before the first pause, bit for bit.

    python examples/compile_reduce_overhead.py
    python examples/compile_reduce_overhead.py --backend cudagraphs    # without Triton: the same graphs of plain operators
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import multiprocessing
import sys
from typing import Any, NamedTuple

import torch
from _common import MIB, check, free_bytes

from torch_memory_saver import configure_subprocess, torch_memory_saver

#: The first call of compiled code runs it without a graph, the second captures it, the third replays it.
CALLS_TO_RECORD = 3
#: The bytes by which the driver's own memory may change during a pause.
SLACK = 64 * MIB
#: The tag of the weights, and the tag of memory that compiled code allocates.
WEIGHTS, COMPILED = "weights", "compiled"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hook-mode", choices=("both", "torch", "preload"), default="both")
    help = 'inductor is mode="reduce-overhead"; cudagraphs captures PyTorch\'s own operators in the same way, without Triton'
    parser.add_argument("--backend", choices=("inductor", "cudagraphs"), default="inductor", help=help)
    parser.add_argument("--cycles", type=int, default=20, help="pauses and resumes, one at least")
    parser.add_argument(
        "--rows", type=int, default=4096, help="of an input of the first shape; the new shape has half of them"
    )
    parser.add_argument(
        "--width", type=int, default=1024, help="columns of an input; the hidden layer has four times as many"
    )
    arguments = parser.parse_args()
    if arguments.cycles < 1 or arguments.rows < 2:
        parser.error("one cycle and two rows at least")
    return arguments


class Pool(NamedTuple):
    """The memory of the graphs that torch.compile has captured, and their number."""

    bytes: int
    graphs: int


def compiled_graphs() -> Pool:
    """Return Inductor's graph pool on the current device. PyTorch has no public API for it."""
    try:
        from torch._inductor.cudagraph_trees import get_manager

        manager = get_manager(torch.cuda.current_device(), create_if_none_exists=False)
        if manager is None:
            return Pool(0, 0)
        pool = tuple(manager.cuda_graphs_thread_pool)
        graphs = sum(1 + root.num_descendants() for root in manager.get_roots())
    except (ImportError, AttributeError) as error:
        message = (
            f"FAILED: torch.compile's graph pool is not where it was in PyTorch 2.11; this is {torch.__version__}: {error}"
        )
        raise SystemExit(message) from error
    segments = [row for row in torch.cuda.memory_snapshot() if tuple(row["segment_pool_id"]) == pool]
    return Pool(sum(int(row["total_size"]) for row in segments), graphs)


class Results(NamedTuple):
    """The results of one forward pass and one training step, in host memory."""

    output: torch.Tensor
    loss: torch.Tensor
    gradients: list[torch.Tensor]
    weights: list[torch.Tensor]

    def equal(self, other: Results) -> bool:
        """Return whether all results are the same, bit for bit."""
        here = [self.output, self.loss, *self.gradients, *self.weights]
        there = [other.output, other.loss, *other.gradients, *other.weights]
        return all(torch.equal(first, second) for first, second in zip(here, there, strict=True))


class Trainer:
    """A small model, its optimizer, and its compiled forward pass and loss."""

    def __init__(self, width: int, backend: str) -> None:
        layers = torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        with torch_memory_saver.region(WEIGHTS, backup="host"):
            self.model = torch.nn.Sequential(*layers).cuda()
        self.initial = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        how: dict[str, Any] = {"mode": "reduce-overhead"} if backend == "inductor" else {"backend": backend}
        self.compiled_model = torch.compile(self.model, dynamic=False, **how)
        self.compiled_loss = torch.compile(self.loss, dynamic=False, **how)

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the mean squared difference between the model's output and its input."""
        return torch.nn.functional.mse_loss(self.model(batch), batch)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Run the forward pass. The output lies in the graphs' memory, and the next call of compiled code overwrites it."""
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad(), compiled_region():
            output: torch.Tensor = self.compiled_model(batch)
        return output

    def run(self, batch: torch.Tensor) -> Results:
        """Run a forward pass and a training step. Then reset the weights, so that the next run computes the same."""
        output = self.forward(batch).cpu()
        torch.compiler.cudagraph_mark_step_begin()
        with compiled_region():
            loss = self.compiled_loss(batch)
            loss.backward()
        gradients = [each.grad.cpu() for each in self.model.parameters() if each.grad is not None]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)  # gradients lie in the graphs' memory, too
        weights = [each.detach().cpu() for each in self.model.parameters()]
        self.model.load_state_dict(self.initial)
        return Results(output, loss.detach().cpu(), gradients, weights)

    def record(self, batches: list[torch.Tensor]) -> list[Results]:
        """Have the graphs for a shape recorded, and return their results for each input."""
        eager = self.model(batches[0]).detach().cpu()
        for _ in range(CALLS_TO_RECORD - 1):
            self.run(batches[0])
        results = [self.run(batch) for batch in batches]
        close = torch.allclose(results[0].output, eager, rtol=1e-3, atol=1e-3)
        check(close, f"compiled code computes what the model does, for {len(eager)} rows")
        check(not results[0].equal(results[1]), "and other numbers for another input")
        return results


def compiled_region() -> contextlib.AbstractContextManager[Any]:
    """Return a region for a call of compiled code. Every call needs one, because any of them may record a graph."""
    return torch_memory_saver.region(COMPILED, backup="host")


def use_released_memory(size: int) -> None:
    """Overwrite released memory, as another program would do. Bytes of 0xFF are floating-point NaNs."""
    other = torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")
    del other
    torch.cuda.empty_cache()


class Cycles:
    """Pauses and resumes, with the memory that they released."""

    def __init__(self, managed: bool) -> None:
        self.managed = managed
        self.given_back: list[int] = []
        self.reported: list[int] = []
        self.pool_kept: list[bool] = []

    def cycle(self, backup: str | None = None) -> None:
        """Pause and resume once. `backup` applies to the memory of compiled code, as in `pause()`."""
        torch_memory_saver.empty_cache()  # a pause would do it too; done first, so that the freed memory equals the report
        pool = compiled_graphs().bytes
        before = free_bytes()
        compiled = torch_memory_saver.pause(COMPILED, backup=backup)
        weights = torch_memory_saver.pause(WEIGHTS)
        self.given_back.append(free_bytes() - before)
        self.reported.append(compiled.bytes + weights.bytes)
        self.pool_kept.append(compiled.bytes < pool)
        use_released_memory(self.given_back[-1] // 2)
        torch_memory_saver.resume()

    def check(self) -> None:
        """Check that every pause released what it reported, including Inductor's pool if it is managed."""
        pauses = list(zip(self.given_back, self.reported, strict=True))
        given_back, reported = max(pauses, key=lambda pause: abs(pause[0] - pause[1]))
        sizes = f"{describe(given_back)} (expected {describe(reported)})"
        check(abs(given_back - reported) <= SLACK, f"given back by each of {len(pauses)} pauses, at worst: {sizes}")
        if self.managed:
            check(not any(self.pool_kept), "the graphs' pool was part of all of them")


def check_live_output(trainer: Trainer, batch: torch.Tensor, expected: Results, cycles: Cycles) -> None:
    """Check that an output in the graphs' memory survives a pause with a backup."""
    output = trainer.forward(batch)
    torch_memory_saver.pause(COMPILED)
    if cycles.managed:
        check(torch_memory_saver.is_paused(output), "an output in the graphs' memory is paused")
    else:
        check(not torch_memory_saver.is_paused(output), "an output in the graphs' memory is not managed, and stays")
    torch_memory_saver.resume(COMPILED)
    check(torch.equal(output.cpu(), expected.output), "it is what it was")


def describe(size: int) -> str:
    return f"{size / MIB:.1f} MiB"


def run(arguments: argparse.Namespace, mode: str) -> None:
    """Run everything, in a child process."""
    torch_memory_saver.hook_mode = mode
    torch.manual_seed(0)
    trainer = Trainer(arguments.width, arguments.backend)
    cycles = Cycles(managed=mode == "preload")

    def new_shape(rows: int) -> tuple[list[torch.Tensor], list[Results]]:
        batches = [torch.randn(rows, arguments.width, device="cuda") for _ in range(2)]
        return batches, trainer.record(batches)

    shapes = [new_shape(arguments.rows)]
    first = compiled_graphs()
    check(torch_memory_saver.hook_mode == mode, f"hook mode {mode}")
    check(first.bytes > 0, f"torch.compile's {first.graphs} graphs have a pool of {describe(first.bytes)}")
    check_live_output(trainer, shapes[0][0][0], shapes[0][1][0], cycles)

    same = True
    for cycle in range(arguments.cycles):
        # No output is needed any more, and each run computes its own, so no contents have to be saved.
        cycles.cycle(backup="discard")
        if cycle == arguments.cycles // 2:
            shapes.append(new_shape(arguments.rows // 2))
            pool = compiled_graphs()
            check(
                pool.graphs > first.graphs,
                f"a new shape was recorded: {pool.graphs} graphs, a pool of {describe(pool.bytes)}",
            )
        for batches, expected in shapes:
            same &= trainer.run(batches[cycle % 2]).equal(expected[cycle % 2])
    check(same, f"outputs, losses, gradients and weights after {arguments.cycles} pauses are those before, exactly")
    cycles.check()
    if not cycles.managed:
        explain_what_stays(trainer)


def explain_what_stays(trainer: Trainer) -> None:
    """Print how much memory stays on the GPU in hook mode torch, and why."""
    pool = compiled_graphs().bytes
    print(
        f"  Not managed: {describe(pool)} of torch.compile's graphs stayed on the GPU during every pause. PyTorch makes\n"
        "  their pool itself and takes no allocator for it. Preload mode manages it."
    )
    torch.cuda.empty_cache()
    before = free_bytes()
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()
    print(
        f"  torch.compiler.reset() gave back {describe(free_bytes() - before)}. The next call would compile and record\n"
        "  again."
    )


def start(arguments: argparse.Namespace, mode: str) -> None:
    """Run the example in a child in that hook mode. End the program if the child fails."""
    print(f"Hook mode {mode}:", flush=True)
    with configure_subprocess() if mode == "preload" else contextlib.nullcontext():
        child = multiprocessing.get_context("spawn").Process(target=run, args=(arguments, mode))
        child.start()
    child.join()
    if child.exitcode != 0:
        sys.exit(f"FAILED: the child ended with status {child.exitcode}")


def main() -> None:
    arguments = parse_arguments()
    for mode in ("torch", "preload") if arguments.hook_mode == "both" else (arguments.hook_mode,):
        start(arguments, mode)


if __name__ == "__main__":
    main()
