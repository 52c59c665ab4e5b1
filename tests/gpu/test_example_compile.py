"""Guards that examples/compile_reduce_overhead.py runs in both hook modes, that all of its own checks hold, and that the
pool of torch.compile's graphs is not empty. `pytest -rP` shows its output."""

from __future__ import annotations

import importlib.util
import re

import pytest
from gpu_programs import subprocess_run
from gpu_support import REPOSITORY, SIMULATED, skip_where_the_outer_pool_wins

pytestmark = [pytest.mark.outer, pytest.mark.timeout(300)]

EXAMPLE = str(REPOSITORY / "examples" / "compile_reduce_overhead.py")
CYCLES = 20
#: Small enough for the CPU to compute in seconds.
SMALL = ["--backend", "cudagraphs", "--rows", "128", "--width", "128"]
#: How many things it checks in each hook mode.
CHECKS = {"torch": 9, "preload": 10}
FIRST = re.compile(r"  ok: torch\.compile's (\d+) graphs have a pool of (\d+\.\d) MiB$", re.MULTILINE)
RECORDED_AGAIN = re.compile(r"  ok: a new shape was recorded: (\d+) graphs, a pool of (\d+\.\d) MiB$", re.MULTILINE)
GIVEN_BACK = re.compile(
    r"  ok: given back by each of (\d+) pauses, at worst: (-?\d+\.\d) MiB \(expected (\d+\.\d) MiB\)$", re.MULTILINE
)
STAYED = re.compile(r"  Not managed: (\d+\.\d) MiB of torch\.compile's graphs stayed", re.MULTILINE)
HAS_TRITON = importlib.util.find_spec("triton") is not None
#: MiB that the driver of a GPU may take or give for itself during a pause, as in the example.
SLACK = 0 if SIMULATED else 64


def numbers(pattern: re.Pattern[str], output: str) -> list[float]:
    """What the pattern's groups match in its only occurrence."""
    (found,) = pattern.finditer(output)
    return [float(group) for group in found.groups()]


def run(arguments: list[str]) -> dict[str, str]:
    """The example's output for each hook mode."""
    done = subprocess_run([EXAMPLE, *arguments], timeout=280).check()
    print(done.output)
    _, torch_mode, preload = re.split(r"^Hook mode \w+:$", done.output, flags=re.MULTILINE)
    return {"torch": torch_mode, "preload": preload}


def expect_pauses(arguments: list[str]) -> None:
    skip_where_the_outer_pool_wins()
    outputs = run(arguments)
    pools = {}
    for mode, output in outputs.items():
        assert output.count("  ok: ") == CHECKS[mode]
        graphs, first = numbers(FIRST, output)
        more_graphs, pools[mode] = numbers(RECORDED_AGAIN, output)
        assert more_graphs == 2 * graphs == 6, "for each shape the forward pass, and those of the training step"
        assert pools[mode] >= first > 0
        cycles, given_back, expected = numbers(GIVEN_BACK, output)
        assert cycles == CYCLES
        assert abs(given_back - expected) <= SLACK
        if mode == "preload":
            assert given_back > first - SLACK
    assert numbers(STAYED, outputs["torch"]) == [pools["torch"]]
    assert not STAYED.search(outputs["preload"])


def test_graphs_of_plain_operators() -> None:
    expect_pauses(SMALL)


@pytest.mark.skipif(SIMULATED, reason="the simulated GPU has no kernels of Triton's")
@pytest.mark.skipif(not HAS_TRITON, reason="Inductor needs Triton for GPUs, which is not installed")
def test_reduce_overhead() -> None:
    expect_pauses([])


@pytest.mark.skipif(HAS_TRITON, reason="Triton is installed")
def test_a_missing_triton_is_one_sentence() -> None:
    done = subprocess_run([EXAMPLE], timeout=60).check(status=1)
    assert done.output == ""
    (line,) = [line for line in done.error.splitlines() if line]
    assert line.startswith("torch.compile needs Triton, which is not installed") and line.endswith("--backend cudagraphs.")
