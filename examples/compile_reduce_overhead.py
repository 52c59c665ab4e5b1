"""Pauses of memory that torch.compile(mode="reduce-overhead") uses: its own CUDA graphs stay valid, in both hook modes.

Inductor captures graphs of its own and puts their memory into one pool. The program never sees those captures, so
`torch_memory_saver.cuda_graph()` cannot take their place. What can be done depends on the hook mode:

- preload: call compiled code inside a region. The graphs' memory is then managed, and a pause gives it back.
- torch: the pool stays on the GPU. PyTorch makes it without an allocator of ours, and has no way to set one. Everything
  else can be paused as usual. `torch.compiler.reset()` gives the pool back, but the next call compiles again.

The example runs in a child process for each mode, with inputs of two shapes. After each of 20 pauses the outputs, losses,
gradients and updated weights must equal those before the first pause, bit for bit.

    python examples/compile_reduce_overhead.py
    python examples/compile_reduce_overhead.py --backend cudagraphs    # without Triton: the same graphs of plain operators
"""

import argparse
import contextlib
import gc
import importlib.util
import multiprocessing
import sys
from typing import Any

import torch
from _common import MIB, check, free_bytes, show

from torch_memory_saver import configure_subprocess, torch_memory_saver

CYCLES = 20
CALLS_TO_RECORD = 3  # without a graph, its capture, a replay
SLACK = 64 * MIB  # by which the driver's own memory may change during a pause
WEIGHTS, COMPILED = "weights", "compiled"


def compiled_graphs() -> tuple[int, int]:
    """Return the bytes of Inductor's graph pool on the current device, and the number of its graphs."""
    from torch._inductor.cudagraph_trees import get_manager  # PyTorch has no public API for it

    manager = get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    if manager is None:
        return 0, 0
    pool = tuple(manager.cuda_graphs_thread_pool)
    graphs = sum(1 + root.num_descendants() for root in manager.get_roots())
    segments = [row for row in torch.cuda.memory_snapshot() if tuple(row["segment_pool_id"]) == pool]
    return sum(int(row["total_size"]) for row in segments), graphs


class Trainer:
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
        return torch.nn.functional.mse_loss(self.model(batch), batch)

    def run(self, batch: torch.Tensor) -> list[torch.Tensor]:
        """Return the results of a forward pass and a training step, in host memory. The weights are reset afterwards."""
        torch.compiler.cudagraph_mark_step_begin()
        # Every call of compiled code needs a region, because any of them may record a graph.
        with torch.no_grad(), torch_memory_saver.region(COMPILED, backup="host"):
            output = self.compiled_model(batch)
        output = output.cpu()
        torch.compiler.cudagraph_mark_step_begin()
        with torch_memory_saver.region(COMPILED, backup="host"):
            loss = self.compiled_loss(batch)
            loss.backward()
        gradients = [each.grad.cpu() for each in self.model.parameters() if each.grad is not None]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        weights = [each.detach().cpu() for each in self.model.parameters()]
        self.model.load_state_dict(self.initial)
        return [output, loss.detach().cpu(), *gradients, *weights]

    def record(self, batches: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Have the graphs for a shape recorded, and return their results for each input."""
        eager = self.model(batches[0]).detach().cpu()
        for _ in range(CALLS_TO_RECORD - 1):
            self.run(batches[0])
        results = [self.run(batch) for batch in batches]
        close = torch.allclose(results[0][0], eager, rtol=1e-3, atol=1e-3)
        check(close, f"compiled code computes what the model does, for {len(eager)} rows")
        check(not equal(*results), "and other numbers for another input")
        return results


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, first, second))


def cycle(first: bool) -> tuple[int, int, bool]:
    """Return the bytes that a pause released, the bytes in its reports, and whether Inductor's pool was part of them."""
    torch_memory_saver.empty_cache()  # a pause would do it too; done first, so that the freed memory equals the report
    pool, _ = compiled_graphs()
    before = free_bytes()
    # No output is needed any more, and each run computes its own, so no contents have to be saved.
    compiled = torch_memory_saver.pause(COMPILED, backup="discard")
    weights = torch_memory_saver.pause(WEIGHTS)
    given_back = free_bytes() - before
    if first:
        show("paused")
    other = torch.full((given_back // 2,), 0xFF, dtype=torch.uint8, device="cuda")  # overwrites the memory with NaNs
    del other
    torch.cuda.empty_cache()
    torch_memory_saver.resume()
    return given_back, compiled.bytes + weights.bytes, compiled.bytes >= pool


def run(arguments: argparse.Namespace, mode: str) -> None:
    torch_memory_saver.hook_mode = mode
    torch.manual_seed(0)
    trainer = Trainer(arguments.width, arguments.backend)

    def new_shape(rows: int) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
        batches = [torch.randn(rows, arguments.width, device="cuda") for _ in range(2)]
        return batches, trainer.record(batches)

    shapes = [new_shape(arguments.rows)]
    pool, graphs = compiled_graphs()
    check(torch_memory_saver.hook_mode == mode, f"hook mode {mode}")
    check(pool > 0, f"torch.compile's {graphs} graphs have a pool of {pool / MIB:.1f} MiB")
    show("awake")
    if mode == "preload":
        print("  Not managed: cuBLAS's workspace (here 32 MiB), the random generator's state (2 MiB).")

    same, pauses = True, []
    for number in range(CYCLES):
        pauses.append(cycle(first=number == 0))
        if number == CYCLES // 2:
            shapes.append(new_shape(arguments.rows // 2))
            pool, more = compiled_graphs()
            check(more > graphs, f"a new shape was recorded: {more} graphs, a pool of {pool / MIB:.1f} MiB")
        for batches, expected in shapes:
            same &= equal(trainer.run(batches[number % 2]), expected[number % 2])
    check(same, f"outputs, losses, gradients and weights after {CYCLES} pauses are those before, exactly")
    given_back, reported, _ = max(pauses, key=lambda pause: abs(pause[0] - pause[1]))
    sizes = f"{given_back / MIB:.1f} MiB (expected {reported / MIB:.1f} MiB)"
    check(abs(given_back - reported) <= SLACK, f"given back by each of {CYCLES} pauses, at worst: {sizes}")
    if mode == "preload":
        check(all(with_pool for *_, with_pool in pauses), "the graphs' pool was part of all of them")
        return
    print(f"  Not managed: {pool / MIB:.1f} MiB of torch.compile's graphs stayed on the GPU during every pause.")
    torch.cuda.empty_cache()
    before = free_bytes()
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()
    print(f"  torch.compiler.reset() gave back {(free_bytes() - before) / MIB:.1f} MiB. The next call would compile again.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--backend", choices=("inductor", "cudagraphs"), default="inductor", help="cudagraphs needs no Triton"
    )
    parser.add_argument("--rows", type=int, default=4096, help="rows of an input of the first shape (default %(default)s)")
    parser.add_argument("--width", type=int, default=1024, help="columns of an input (default %(default)s)")
    arguments = parser.parse_args()
    if arguments.backend == "inductor" and importlib.util.find_spec("triton") is None:
        raise SystemExit("torch.compile needs Triton, which is not installed: install it, or use --backend cudagraphs.")
    for mode in ("torch", "preload"):
        print(f"Hook mode {mode}:", flush=True)
        with configure_subprocess() if mode == "preload" else contextlib.nullcontext():
            child = multiprocessing.get_context("spawn").Process(target=run, args=(arguments, mode))
            child.start()
        child.join()
        if child.exitcode != 0:
            sys.exit(f"FAILED: the child ended with status {child.exitcode}")


if __name__ == "__main__":
    main()
