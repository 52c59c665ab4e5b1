"""Guards examples/memory_leak.py and examples/fragmentation.py: their checks hold, the commands find what is planted with
its bytes, and what they print says so. The output that the guides show is what they print.

Each example starts 15 to 30 processes that import PyTorch, so the file is slow. test_leak_recording.py and
test_memory_compare.py guard the same commands in one process."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from gpu_programs import subprocess_run
from gpu_support import MIB, REPOSITORY, SIMULATED

from torch_memory_saver.observe.memory import Comparison, compare

pytestmark = [pytest.mark.slow, pytest.mark.outer, pytest.mark.timeout(300)]

EXAMPLES = REPOSITORY / "examples"
#: A simulated machine of its own, as the command `simulate` makes by default.
OWN_MACHINE = {
    "TMS_SIMULATED_SHARED": f"memory-example-{os.getpid()}",
    "TMS_SIMULATED_MEMORY": "8GiB",
    "TMS_SIMULATED_DEVICES": "1",
}
SHARED_MEMORY = Path(f"/dev/shm/tms_simulated_memory-example-{os.getpid()}")
SECONDS = 280

#: By default.
STEPS, REQUESTS, IMAGES, OPTIMIZER_MIB = 4, 8, 3, 32
#: What the tokenizer keeps of the images of a step.
LEAKED = REQUESTS * IMAGES * 3 * 224 * 224 * 4
#: MiB that the scheduler's images reserve in each step after the first: so many at once, in segments of so many MiB.
BURSTS = [16 * 18, 13 * 22, 11 * 26]
ROLES = ("tokenizer", "scheduler", "detokenizer")
#: A block of output in a guide.
OUTPUT = re.compile(r"^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: A row of a table: the number of the step, and sizes in MiB.
ROW = re.compile(r"^ +(\d+)((?: +\d+\.\d){6})$", re.MULTILINE)

#: Images at once, and the MiB of a segment with one of them, in each step of fragmentation.py.
IMAGE_SEGMENTS = [(11, 48), (8, 64), (6, 84), (4, 106)]
PREFIXES, PIECE_MIB = 4, 20
FRAGMENTATION_ROW = re.compile(r"^  (step \d|released) +(\d+\.\d) +(\d+\.\d) +(\d+\.\d) +(\d+\.\d)$", re.MULTILINE)


def held(output: str) -> list[str]:
    """The checks of an example that succeeded."""
    return [line.removeprefix("  ok: ") for line in output.splitlines() if line.startswith("  ok: ")]


@contextmanager
def own_machine() -> Iterator[dict[str, str]]:
    """The environment for an example."""
    try:
        yield OWN_MACHINE if SIMULATED else {}
    finally:  # the last process of a machine removes it by itself, unless it is killed
        if SIMULATED:
            SHARED_MEMORY.unlink(missing_ok=True)


def run_example(name: str, *arguments: str) -> str:
    with own_machine() as environment:
        done = subprocess_run([str(EXAMPLES / name), *arguments], environment, timeout=SECONDS).check()
    print(done.output)
    assert "Traceback" not in done.error
    return done.output


def shown(guide: str) -> list[str]:
    """The outputs that a guide shows."""
    page = (REPOSITORY / "docs" / "guides" / guide).read_text(encoding="utf-8")
    return [block for block in OUTPUT.findall(page) if "MiB" in block]


def without_places(text: str) -> str:
    """An output without what differs from run to run: the numbers of processes, folders, and where lines end."""
    return " ".join(re.sub(r"\S*/(?=_\w+\.py:)", "", re.sub(r"pid \d+", "pid", text)).split())


# ---- memory_leak.py


@dataclass(frozen=True)
class Hunt:
    """A run of memory_leak.py: what it printed, and the folder that it left."""

    output: str
    folder: Path

    def compared(self, run: str) -> Comparison:
        return compare(self.folder / run / "snapshots")

    def table(self, run: int) -> dict[str, list[tuple[float, float]]]:
        """MiB (allocated, reserved) of each process after each step, of the first or the second run."""
        rows = [[float(cell) for cell in cells.split()] for _, cells in ROW.findall(self.output)]
        assert len(rows) == 2 * STEPS
        own = rows[run * STEPS : (run + 1) * STEPS]
        return {role: [(row[2 * at], row[2 * at + 1]) for row in own] for at, role in enumerate(ROLES)}


@pytest.fixture(scope="module")
def hunt(tmp_path_factory: pytest.TempPathFactory) -> Hunt:
    folder = tmp_path_factory.mktemp("hunt")
    return Hunt(run_example("memory_leak.py", "--out", str(folder)), folder)


def test_every_check_of_the_hunt_holds(hunt: Hunt) -> None:
    checks = held(hunt.output)
    assert len(checks) == 19
    assert "the scheduler does not leak" in checks
    assert f"it grows by {LEAKED} bytes in each step, 24 images of 602112" in checks
    assert f"all {STEPS * REQUESTS} answers are the same" in checks


def test_the_commands_exit_with_what_they_found(hunt: Hunt) -> None:
    assert re.findall(r"^  exit status (\d)$", hunt.output, re.MULTILINE) == ["0", "1", "0"]
    scheduler, everything, cured = hunt.output.split("$ python -m torch_memory_saver compare ")[1:]
    assert "leak: " not in scheduler and "fragmentation: scheduler" in scheduler
    assert "leak: tokenizer" in everything and "_leak_tokenizer.py" in everything
    assert "Findings\n    none" in cured


def test_the_planted_leak_is_first_and_has_its_bytes(hunt: Hunt) -> None:
    results = hunt.compared("before")
    (leak,) = results.leaks
    assert leak is results.growths[0]
    assert leak.process.role == results.processes[0].process.role == "tokenizer"
    assert leak.stack.frames[0].name.endswith("preprocess")
    assert leak.bytes == leak.requested_bytes == tuple(step * LEAKED for step in range(1, STEPS + 1))
    assert leak.blocks == tuple(step * REQUESTS * IMAGES for step in range(1, STEPS + 1))


def test_the_optimizer_rises_on_what_leaked(hunt: Hunt) -> None:
    drift = hunt.compared("before").drifts[0]
    assert drift.process.role == "tokenizer"
    assert (drift.bytes, drift.blocks) == (OPTIMIZER_MIB * MIB, 4)
    assert "load_optimizer" in {frame.name.rpartition(".")[-1] for frame in drift.stack.frames}
    assert [after - before for before, after in pairwise(drift.positions)] == [LEAKED] * (STEPS - 1)
    ((stack, grown),) = drift.below
    assert stack.frames[0].name.endswith("preprocess") and grown == LEAKED * (STEPS - 1)


def test_what_the_scheduler_caches_is_no_leak(hunt: Hunt) -> None:
    results = hunt.compared("before")
    (found,) = results.fragmentation
    assert found.usage.process.role == "scheduler"
    assert found.usage.unused_grows and not found.usage.is_held
    assert [after - before for before, after in pairwise(found.usage.cached)] == [burst * MIB for burst in BURSTS]


def test_nothing_is_found_after_the_fix(hunt: Hunt) -> None:
    results = hunt.compared("after")
    assert results.leaks == results.fragmentation == results.drifts == ()
    assert {usage.process.role for usage in results.processes} == set(ROLES)


def test_memory_grows_before_and_is_flat_after(hunt: Hunt) -> None:
    before, after = hunt.table(0), hunt.table(1)
    allocated, reserved = zip(*before["scheduler"], strict=True)
    assert len(set(allocated)) == 1
    assert [later - earlier for earlier, later in pairwise(reserved)] == BURSTS
    leaked = [later[0] - earlier[0] for earlier, later in pairwise(before["tokenizer"])]
    assert leaked == [pytest.approx(LEAKED / MIB, abs=0.11)] * (STEPS - 1)
    assert {role: len(set(counters)) for role, counters in after.items()} == dict.fromkeys(ROLES, 1)
    assert after["scheduler"][0][1] < min(reserved)


@pytest.mark.skipif(not SIMULATED, reason="the guide shows the figures of the simulated GPU")
def test_the_guide_shows_what_the_hunt_prints(hunt: Hunt) -> None:
    printed = without_places(hunt.output)
    blocks = shown("leak-hunt.md")
    assert len(blocks) == 4
    for block in blocks:
        for part in block.split("\n\n$ "):  # the example prints its checks between a table and a command
            assert without_places(part) in printed, part


def test_the_page_of_the_hunt_names_the_leak(hunt: Hunt) -> None:
    page = (hunt.folder / "leak.html").read_text(encoding="utf-8")
    assert "preprocess" in page and "load_optimizer" in page


def test_the_parent_of_the_hunt_needs_neither_torch_nor_this_package() -> None:
    for name in ("memory_leak.py", "_leak_pipeline.py", "_image_bursts.py", "_check.py"):
        tree = ast.parse((EXAMPLES / name).read_text(encoding="utf-8"))
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        own = {module for module in imported if module.startswith("_") and module != "__future__"}
        assert own <= {"_check", "_image_bursts", "_leak_pipeline"}, name
        assert not {module for module in imported if module.split(".")[0] in ("torch", "torch_memory_saver")}, name


# ---- fragmentation.py


@dataclass(frozen=True)
class Bursts:
    """A run of fragmentation.py: what it printed, and the folder that it left."""

    output: str
    folder: Path

    def table(self) -> dict[str, list[float]]:
        """MiB by row: allocated and reserved with ordinary segments, then with expandable ones."""
        return {name: [float(cell) for cell in cells] for name, *cells in FRAGMENTATION_ROW.findall(self.output)}


@pytest.fixture(scope="module")
def bursts(tmp_path_factory: pytest.TempPathFactory) -> Bursts:
    folder = tmp_path_factory.mktemp("bursts")
    return Bursts(run_example("fragmentation.py", "--out", str(folder)), folder)


def test_every_check_of_the_bursts_holds(bursts: Bursts) -> None:
    assert len(held(bursts.output)) == 12


def test_ordinary_segments_grow_by_each_burst_and_are_held(bursts: Bursts) -> None:
    (usage,) = compare(bursts.folder / "ordinary").processes
    sizes = [images * segment for images, segment in IMAGE_SEGMENTS]
    assert usage.reserved == tuple(sum(sizes[: step + 1]) * MIB for step in range(STEPS))
    assert usage.unused_grows
    assert (usage.held_segments[-1], usage.held_pieces[-1]) == (PREFIXES, 0)
    assert usage.held[-1] + usage.cached[-1] == usage.unused[-1]


def test_expandable_segments_grow_once_and_are_held_by_the_piece(bursts: Bursts) -> None:
    (usage,) = compare(bursts.folder / "expandable").processes
    assert len(set(usage.reserved[1:])) == 1 and not usage.unused_grows
    assert usage.held_pieces[-1] == usage.held_segments[-1] == PREFIXES
    assert usage.held[-1] == PREFIXES * PIECE_MIB * MIB - usage.allocated[-1]


def test_a_release_leaves_what_is_held(bursts: Bursts) -> None:
    table = bursts.table()
    assert list(table) == [*(f"step {number}" for number in range(1, STEPS + 1)), "released"]
    assert table["released"][1] == PREFIXES * IMAGE_SEGMENTS[0][1]
    assert table["released"][3] == PREFIXES * PIECE_MIB


def test_compare_says_what_is_held(bursts: Bursts) -> None:
    ordinary, expandable = bursts.output.split("`compare`, ")[1:3]
    assert f"held in {PREFIXES} segments by {PREFIXES} blocks" in ordinary and "remember" in ordinary
    assert f"held in {PREFIXES} pieces of expandable segments by {PREFIXES} blocks" in expandable
    assert "grew in every interval" in ordinary and "grew in every interval" not in expandable
