"""Guards benchmarks/rl_colocate.py: every strategy makes its steps or says what is missing, and holds in each phase the
memory that it should. A run starts nine engines, so all tests are slow but those of recorded results."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from gpu_programs import subprocess_run
from gpu_support import REPOSITORY, SIMULATED

pytestmark = [pytest.mark.outer, pytest.mark.timeout(300)]

EXAMPLE = str(REPOSITORY / "benchmarks" / "rl_colocate.py")
MIB = 1 << 20
STEPS = 2
#: A simulated GPU whose memory the scaled sizes exceed, as the published ones exceed an H200's. A real GPU has room for all.
OWN_MACHINE = {
    "TMS_SIMULATED_SHARED": f"colocate-{os.getpid()}",
    "TMS_SIMULATED_MEMORY": "1GiB",
    "TMS_SIMULATED_DEVICES": "1",
}
SHARED_MEMORY = Path(f"/dev/shm/tms_simulated_colocate-{os.getpid()}")
STRATEGIES = ["keep everything", "restart the engine", "wake whole", "wake in stages"]
PROCESSES = {
    "train": {"trainer's weights", "activations", "gradients", "optimizer"},
    "update": {"trainer's weights", "gradients", "optimizer"},
}
ENGINE = {"engine's weights", "kv_cache", "graphs"}


def run_example(path: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    """Its output and its figures."""
    scale = [] if SIMULATED else ["--scale", "0.02"]
    command = [EXAMPLE, "--steps", str(STEPS), "--json", str(path), *scale, *arguments]
    try:
        done = subprocess_run(command, OWN_MACHINE if SIMULATED else {}, timeout=280).check()
    finally:  # the last process of a machine removes it by itself, unless it is killed
        if SIMULATED:
            SHARED_MEMORY.unlink(missing_ok=True)
    return done.output, json.loads(path.read_text(encoding="utf-8"))


def held(outcome: dict[str, Any], phase: str) -> set[str]:
    """The components that device memory holds in a phase."""
    return {name for name, size in outcome["demand"][phase].items() if size and name != "other"}


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    return run_example(tmp_path_factory.mktemp("rl") / "results.json", "--skip-search")


def by_name(figures: tuple[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {outcome["strategy"]: outcome for outcome in figures[1]["outcomes"]}


@pytest.mark.slow
def test_every_strategy_makes_its_steps_or_says_what_is_missing(figures: tuple[str, dict[str, Any]]) -> None:
    output, results = figures
    outcomes = by_name(figures)
    assert list(outcomes) == STRATEGIES
    for outcome in outcomes.values():
        peak = max(sum(phase.values()) for phase in outcome["demand"].values())
        assert outcome["missing"] == max(0, peak - results["capacity"])
        assert len(outcome["steps"]) == (0 if outcome["missing"] else STEPS)
    assert [name for name in STRATEGIES if outcomes[name]["missing"]] == (["keep everything"] if SIMULATED else [])
    # A step of each strategy checks two things. The one that does not fit makes one with a small cache.
    steps = sum(len(outcome["steps"]) or 1 for outcome in outcomes.values())
    assert output.count("  ok: ") == 2 * steps + len(STRATEGIES) + 1
    assert "Traceback" not in output


@pytest.mark.slow
def test_each_phase_holds_what_it_should(figures: tuple[str, dict[str, Any]]) -> None:
    outcomes = by_name(figures)
    for phase, trainer in PROCESSES.items():
        assert held(outcomes["keep everything"], phase) == trainer | ENGINE
        for name in STRATEGIES[1:]:
            assert held(outcomes[name], phase) == trainer
    for name in STRATEGIES[1:]:
        assert held(outcomes[name], "generate") == ENGINE
    assert held(outcomes["restart the engine"], "synchronise") == PROCESSES["update"]
    assert held(outcomes["wake whole"], "synchronise") == {"trainer's weights"} | ENGINE
    assert held(outcomes["wake in stages"], "synchronise") == {"trainer's weights", "engine's weights"}


@pytest.mark.slow
def test_components_have_the_sizes_that_were_asked_for(figures: tuple[str, dict[str, Any]]) -> None:
    _, results = figures
    sizes = results["sizes"]
    layers, hidden, batches = 28, 3584, range(8, 257, 8)
    weights = layers * sizes["rows"] * hidden * 2
    expected = {
        "trainer's weights": weights,
        "engine's weights": weights,
        "gradients": weights,
        "optimizer": sizes["trainer"] - 2 * weights,
        "kv_cache": sizes["kv_cache"],
        "activations": sizes["activations"],
        "graphs": sum(batches) * sizes["vocabulary"] * 4,
    }
    step = by_name(figures)["wake whole"]["steps"][-1]["phases"]
    for name, size in expected.items():
        found = max(phase[name] for phase in step.values())
        # PyTorch's segments are whole pieces of 2 MiB, or 20 MiB for small blocks. Graphs have temporary blocks, too.
        assert size <= found <= size + layers * 2 * MIB + 40 * MIB, name


@pytest.mark.slow
def test_the_weights_are_timed_part_by_part(figures: tuple[str, dict[str, Any]]) -> None:
    _, results = figures
    assert len(results["weights"]) == STEPS
    for times in results["weights"]:
        assert list(times) == ["resume", "open", "copy", "close", "all"]
        assert times["all"] == pytest.approx(sum(times.values()) - times["all"])


@pytest.mark.slow
def test_results_are_shown_again(figures: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    output, results = figures
    path = tmp_path / "results.json"
    path.write_text(json.dumps(results), encoding="utf-8")
    again = subprocess_run([EXAMPLE, "--results", str(path)], timeout=60).check()
    table = [line for line in output.splitlines() if line.startswith("|")]
    assert len(table) == (2 + len(STRATEGIES)) + (2 + 4 * len(STRATEGIES))
    assert [line for line in again.output.splitlines() if line.startswith("|")] == table


def test_the_recorded_tables_are_those_of_the_recorded_results() -> None:
    recorded = REPOSITORY / "benchmarks" / "rl_colocate_h200.json"
    shown = subprocess_run([EXAMPLE, "--results", str(recorded)], timeout=60).check()
    assert recorded.with_suffix(".md").read_text(encoding="utf-8").strip() in shown.output


@pytest.mark.slow
@pytest.mark.skipif(not SIMULATED, reason="fills the GPU: on a real one the example does it itself")
def test_each_strategy_survives_the_cache_that_its_memory_allows(tmp_path: Path) -> None:
    output, results = run_example(tmp_path / "results.json")
    largest = {outcome["strategy"]: outcome["largest"] for outcome in results["outcomes"]}
    weights = 28 * results["sizes"]["rows"] * 3584 * 2
    pace = 28 * 2 * MIB
    assert 0 < largest["keep everything"] < largest["wake whole"] < largest["wake in stages"]
    # One set of weights makes the difference, give or take what the search cannot tell apart.
    assert abs(largest["wake in stages"] - largest["wake whole"] - weights) <= pace + 40 * MIB
    tried = re.findall(r"^  (.+), a KV cache of (\d+\.\d+) GB: (enough|out of) memory$", output, re.MULTILINE)
    for name, size in largest.items():
        enough = [float(each) for other, each, result in tried if other == name and result == "enough"]
        too_large = [float(each) for other, each, result in tried if other == name and result == "out of"]
        assert max(enough) == pytest.approx(size / 1e9, abs=0.006)
        assert min(too_large) == pytest.approx((size + pace) / 1e9, abs=0.006)
