"""Guards that every example runs on the GPU, at a small size, and all of its own checks hold. `pytest -rP` shows their
output."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from gpu_programs import subprocess_run
from gpu_support import REPOSITORY, SIMULATED, torch

pytestmark = [pytest.mark.outer, pytest.mark.timeout(300)]

EXAMPLES = REPOSITORY / "examples"
CALLS: dict[str, list[str]] = {
    "simple.py": ["--gib", "1"],
    "tags.py": ["--gib", "1"],
    "backups.py": ["--gib", "0.5"],
    "cuda_graph.py": ["--gib", "0.5"],
    "preload.py": ["--gib", "0.5"],
    "sleeping_engine.py": ["--gib", "0.25"],
    "thread_pool.py": ["--gib", "0.5"],
    "simulated_training.py": [],
}
#: How many things each checks: none is left out.
CHECKS = {
    "simple.py": 5,
    "tags.py": 7,
    "backups.py": 33,
    "cuda_graph.py": 7,
    "preload.py": 10,
    "sleeping_engine.py": 14,
    "thread_pool.py": 4,
    "simulated_training.py": 3,
}
#: Examples for several GPUs are run below, and others by test files of their own.
RUN_ELSEWHERE = {
    "compile_reduce_overhead.py",
    "fragmentation.py",
    "memory_leak.py",
    "model_swap.py",
    "partial_cuda_graph.py",
    "rl_loop.py",
    "rl_sharded.py",
    "sglang_published_loader.py",
    "torchrun.py",
    "transformers_engine.py",
    "trl_grpo.py",
}
#: An amount of memory in an example's output.
SIZES = re.compile(r"(-?\d+\.\d\d) GiB \(expected (\d+\.\d\d)\)")
#: A row of the table of rl_sharded.py, and the size of its KV caches.
PHASES = re.compile(r" +\d+ +\d+ +\d+\.\d{4}( +\d+){4}$")
KV_MIB = 64 if SIMULATED else 256
#: The optimizer has its state from the first step on: the second is as all others.
STEPS = 2
#: With the defaults, on a simulated machine of its own.
OWN_MACHINE = {
    "TMS_SIMULATED_SHARED": f"example-{os.getpid()}",
    "TMS_SIMULATED_MEMORY": "2GiB",
    "TMS_SIMULATED_DEVICES": "1",
}
SHARED_MEMORY = Path(f"/dev/shm/tms_simulated_example-{os.getpid()}")


def call(name: str) -> tuple[list[str], dict[str, str]]:
    """The arguments of an example, and its additional environment."""
    return ([], OWN_MACHINE) if SIMULATED else (CALLS[name], {})


def held(output: str) -> list[str]:
    """The checks of an example that succeeded."""
    return [line.removeprefix("  ok: ") for line in output.splitlines() if line.startswith("  ok: ")]


def expect_bytes(checks: list[str]) -> None:
    """Amounts of memory are as the example expects: exactly, if only the program allocates any."""
    sizes = [(float(actual), float(expected)) for line in checks for actual, expected in SIZES.findall(line)]
    assert sizes
    slack = 0 if SIMULATED else 0.07
    assert [size for size in sizes if abs(size[0] - size[1]) > slack] == []


@pytest.mark.parametrize("name", CALLS)
def test_example(name: str) -> None:
    arguments, environment = call(name)
    try:
        done = subprocess_run([str(EXAMPLES / name), *arguments], environment, timeout=280).check()
    finally:  # the last process of a machine removes it by itself, unless it is killed
        if environment:
            SHARED_MEMORY.unlink(missing_ok=True)
    print(done.output)
    checks = held(done.output)
    assert len(checks) == CHECKS[name]
    if name != "simulated_training.py":
        expect_bytes(checks)


def test_every_example_is_run() -> None:
    files = {path.name for path in EXAMPLES.glob("*.py") if not path.name.startswith("_")} - {"transformer.py"}
    assert files - RUN_ELSEWHERE == set(CALLS) == set(CHECKS)


def test_model_swap_example() -> None:
    """At its full size, more than half of the device for each model, on a simulated machine of its own."""
    machine = OWN_MACHINE | {"TMS_SIMULATED_MEMORY": "512MiB"} if SIMULATED else {}
    try:
        command = [str(EXAMPLES / "model_swap.py"), *([] if SIMULATED else ["--gib", "2"])]
        done = subprocess_run(command, machine, timeout=280).check()
    finally:
        if machine:
            SHARED_MEMORY.unlink(missing_ok=True)
    print(done.output)
    assert len(held(done.output)) == 2 + 6 * 3
    copied = [float(each) for each in re.findall(r"pause of \w+: .* s, (\d+\.\d) MiB copied", done.output)]
    assert [each > 250 for each in copied] == [True, True] + 6 * [False]
    assert copied[2::2] == [0.0, 0.0, 0.0]
    assert min(copied[3::2]) > 0


def test_torchrun_example() -> None:
    processes = min(torch.cuda.device_count(), 2)
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    done = subprocess_run([*command, str(EXAMPLES / "torchrun.py"), "--gib", "0.25"], timeout=120).check()
    print(done.output)
    checks = held(done.output)
    expect_bytes(checks)
    total = 2.0 * sum(range(1, processes + 1))
    for rank in range(processes):
        assert f"rank {rank}: the captured all-reduce over {processes} processes gives {total}" in checks
        assert len([line for line in checks if line.startswith(f"rank {rank} of {processes} gave back: ")]) == 1
    assert len(checks) == 2 * processes


@pytest.mark.slow  # eight processes import PyTorch
@pytest.mark.multigpu
def test_sharded_example() -> None:
    """Two GPUs with a trainer and an engine each. The example itself compares the losses of its two runs."""
    arguments = ["--steps", str(STEPS), "--width", "128", "--kv-mib", str(KV_MIB)]
    done = subprocess_run([str(EXAMPLES / "rl_sharded.py"), *arguments], timeout=280).check()
    print(done.output)
    checks = held(done.output)
    assert len(checks) == STEPS * 2 * 4
    kept, managed = (rows_of_phases(part) for part in done.output.split("Trainers and engines in turn."))
    assert len(kept) == len(managed) == STEPS * 2
    for (_, _, *everything, nothing), (_, _, train, update, rollout, parked) in zip(kept, managed, strict=True):
        assert nothing == 0 < parked
        assert max(train, update) < min(everything) - KV_MIB / 2, "the KV cache was there before the rollout"
        assert rollout <= min(everything) - parked, "the trainer was there in the rollout"


@pytest.mark.slow
@pytest.mark.multigpu
def test_a_model_of_32b_in_small(tmp_path: Path) -> None:
    """With an eighth of each width and a quarter of the layers, on GPUs of any size: the ratio counts from the weights."""
    results = {}
    for strategy in ("kept", "stages"):
        file = tmp_path / f"{strategy}.json"
        arguments = ["--model", "32b", "--divided", "8", "--steps", "2", "--strategy", strategy, "--json", str(file)]
        ratio = 2 * 10**8 / torch.cuda.get_device_properties(0).total_memory
        subprocess_run([str(EXAMPLES / "rl_sharded.py"), *arguments, "--ratio", str(ratio)], timeout=280).check()
        results[strategy] = json.loads(file.read_text())
    done = subprocess_run([str(EXAMPLES / "rl_sharded.py"), "--compare", *map(str, tmp_path.glob("*.json"))]).check()
    assert len(held(done.output)) == 1, "the losses are equal"
    kept, stages = ([steps[-1] for steps in results[name]["ranks"]] for name in ("kept", "stages"))
    layer_parameters = 7_620_736  # of _qwen.Shape().divided(8)
    trainer = 12 * results["kept"]["layers"] * layer_parameters // len(kept)
    for own, other in zip(stages, kept, strict=True):
        assert own["released"] > 0.9 * trainer
        assert own["bytes"]["rollout"] < other["bytes"]["rollout"] - 0.9 * trainer
        assert own["sent"] == own["answered"] != 0


def rows_of_phases(output: str) -> list[list[float]]:
    """The rows of the table of rl_sharded.py, without the losses."""
    return [[float(cell) for cell in row.split() if "." not in cell] for row in output.splitlines() if PHASES.match(row)]
