"""A comparison of four strategies by which a trainer and an inference engine take turns on one GPU.

It needs one GPU. With 140 GB or more it uses the sizes of a published comparison, 50 GB of host memory and 16 GB in the
temporary folder, and takes some minutes: the second strategy writes and reads the weights in every step. A smaller GPU gets
the same sizes in proportion, and so do host memory and the folder. `--scale 0.1 --skip-search` is a short run.

The published sizes are a 7B model, a KV cache of 90 GB and a trainer of 48 GB. Together they need more than a GPU of 150 GB.
The trainer and the engine are processes, and their memory lies in regions. Each answer of the engine, by replayed CUDA
graphs, is checked against the trainer's own.

  keep everything      both keep all they have; the engine copies the trainer's live weights over CUDA IPC
  restart the engine   the engine ends before training and restarts, with weights from a file and newly captured graphs
  wake whole           the engine's memory is paused for training and resumed all at once
  wake in stages       the weights are resumed and taken, the trainer's are parked, and only then the KV cache is resumed

The table shows the peak of device memory, the seconds of the switches (median of the steps after the first, and range), and
the largest KV cache with which each strategy succeeds, found by trying. A second table and the plot show what the memory
holds in each phase. The last part resumes the engine's weights from host memory and then takes the trainer's, step by step.

    python benchmarks/rl_colocate.py
    python benchmarks/rl_colocate.py --scale 0.1 --skip-search
    python benchmarks/rl_colocate.py --json results.json
    python benchmarks/rl_colocate.py --results results.json --plot memory.svg
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from rl_processes import KV_CACHE, WEIGHTS, Remote, Trainer
from rl_report import Outcome, Results, plot
from rl_sizes import FULL_SIZE_GB, GB, LAYERS, PIECE, Sizes
from rl_strategies import STRATEGIES, Step, Strategy, WakeInStages, check, largest_cache, run

#: The search tries sizes that differ by the GPU's memory divided by this number.
SEARCH_PARTS = 500


def demand_of_all(small: Step, sizes: Sizes) -> dict[str, dict[str, int]]:
    """Return the memory that keeping everything would need: the step with a small KV cache, with the full cache instead."""
    return {phase: held | {KV_CACHE: sizes.physical_cache} for phase, held in small.phases.items()}


def try_strategy(
    strategy: type[Strategy], sizes: Sizes, trainer: Remote, folder: Path, options: argparse.Namespace
) -> Outcome:
    _, capacity = trainer("device_memory")
    print(f"{strategy.name}:", flush=True)
    steps = run(strategy, sizes, trainer, folder, options.steps)
    measured, reference = steps, sizes
    if steps is None:
        print("  out of memory; with a small KV cache:", flush=True)
        reference = replace(sizes, kv_cache=max(sizes.smallest_cache, sizes.kv_cache // 4))
        measured = run(strategy, reference, trainer, folder, 1)
    check(measured is not None, f"{strategy.name}: a step succeeds with a KV cache of {reference.kv_cache / GB:.2f} GB")
    assert measured is not None
    last = measured[-1]
    outcome = Outcome(strategy, steps or [], last.phases if steps else demand_of_all(last, sizes))
    outcome.missing = max(0, outcome.peak - capacity)
    if not options.skip_search:
        pace = max(capacity // SEARCH_PARTS, LAYERS * PIECE)
        guess = reference.kv_cache + capacity - last.peak_with_cache
        outcome.largest = largest_cache(strategy, sizes, guess, trainer, folder, pace)
    return outcome


def resume_and_take(sizes: Sizes, trainer: Remote, folder: Path, rounds: int) -> list[dict[str, float]]:
    """Resume the weights from host memory, then take them from the trainer's live tensors. Returns seconds of each part."""
    manager = WakeInStages(sizes, trainer, folder)
    manager.start()
    engine = manager.awake()
    trainer("pause", "optimizer", "gradients")
    times = []
    for round in range(rounds + 1):
        engine("resume", WEIGHTS)
        engine("pause", WEIGHTS)
        seconds = {"resume": engine("resume_weights")} | engine("take_weights", trainer("send_weights"))
        if round > 0:  # the first round pins the host memory
            times.append(seconds | {"all": sum(seconds.values())})
        engine("pause", WEIGHTS)
    engine("resume")
    check(trainer("answer")[1] == engine("answer")[1], "the weights that were resumed and taken are the trainer's")
    manager.stop()
    return times


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, help="part of the published sizes (default: 1, or less on a small GPU)")
    parser.add_argument("--kv-gb", type=float, help="of the KV cache, 10^9 bytes (default: 90 times the scale)")
    parser.add_argument("--trainer-gb", type=float, help="weights, gradients, optimizer state (default: 48 times the scale)")
    parser.add_argument("--steps", type=int, default=4, help="of each strategy; the first warms up (default %(default)s)")
    parser.add_argument("--skip-search", action="store_true", help="leave out the search for the largest KV cache")
    parser.add_argument("--folder", help="where the restarted engine's weights file is written (default: a temporary one)")
    parser.add_argument("--json", help="write all figures to this file")
    parser.add_argument("--plot", help="draw the memory of each phase to this file (needs matplotlib)")
    parser.add_argument("--results", help="show what --json wrote, and run nothing")
    options = parser.parse_args()
    if options.steps < 2:
        parser.error("--steps must be at least 2: the first warms up")
    return options


def measure(options: argparse.Namespace) -> Results:
    device = torch.cuda.get_device_properties(0)  # makes no context, so this process uses no device memory
    capacity = device.total_memory
    scale = min(1.0, capacity / (FULL_SIZE_GB * GB)) if options.scale is None else options.scale
    sizes = Sizes.scaled(scale, options.kv_gb, options.trainer_gb)
    sizes.check()
    print(
        f"Weights {sizes.weights / GB:.2f} GB, KV cache {sizes.kv_cache / GB:.2f}, graphs {sizes.graphs / GB:.2f}, "
        f"activations {sizes.activations / GB:.2f}, trainer {sizes.trainer / GB:.2f}: {sizes.total / GB:.1f} GB. "
        f"The GPU has {capacity / GB:.1f}.",
        flush=True,
    )
    trainer = Remote(Trainer, sizes)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        outcomes = [try_strategy(strategy, sizes, trainer, Path(name), options) for strategy in STRATEGIES]
        times = resume_and_take(sizes, trainer, Path(name), options.steps)
    trainer.stop()
    return Results(device.name, capacity, sizes, outcomes, times)


def main() -> None:
    options = parse()
    results = measure(options) if options.results is None else Results.read(options.results)
    print(f"\n{results.text()}\n", flush=True)
    if options.json:
        results.write(options.json)
    if options.plot:
        plot(options.plot, results)


if __name__ == "__main__":
    main()
