"""Guards the table of docs/guides/memory-views.md: each view is measured before and after a pause, in both hook modes, and
does what the table says."""

from __future__ import annotations

import json
import re

import pytest
from gpu_programs import Program, run_programs
from gpu_support import MIB, REPOSITORY, SIMULATED, STARTED_PRELOADED

PAGE = REPOSITORY / "docs/guides/memory-views.md"
#: Of programs/memory_views.py.
DROPPED, KEPT, IDLE = 192 * MIB, 64 * MIB, 24 * MIB
PLAIN = 32 * MIB

#: Rows that no program can measure everywhere: NVML may hide them, the simulated one does not know the first; memory.current
#: is of all processes of a container. The shared store has tests of its own (test_shared_backups.py).
NOT_MEASURED = ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetComputeRunningProcesses", "memory.current", "shared store")
#: Views of slack, which a test of its own measures: a resume does not bring it back.
OF_SLACK = ("stats().total.slack_bytes", "ledger(): slack")
#: Views that other processes, the driver's bookkeeping or the host's allocator move as well, by up to so many bytes.
SHARED = ("nvml", "torch.cuda.mem_get_info", "MemoryLog: device_used", "RSS")
TOLERANCE = 16 * MIB

pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="needs the sources: there is no docs/")


def table() -> dict[str, str]:
    """What the views of each row do at a pause, by the row's first cell."""
    rows = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 3 and re.match(r"(falls|stays|rises)\b", cells[2]):
            rows[cells[0]] = cells[2]
    return rows


def row_of(view: str) -> str:
    """The first cell of the row that names a view of the program."""
    found = [cell for cell in table() if view in re.sub(r"\]\([^)]*\)|[\[`]", "", cell)]
    assert len(found) == 1, f"{view}: {found}"
    return found[0]


def changes(program: Program) -> dict[str, tuple[int, int]]:
    """What each view moved by, at the pause and at the resume."""
    (done,) = run_programs([program])
    before, paused, after = json.loads(done.check().output)
    assert before.keys() == paused.keys() == after.keys()
    return {view: (paused[view] - before[view], after[view] - paused[view]) for view in before}


def ways() -> list[Program]:
    everything = Program("memory_views.py", ("everything",), (("TMS_INIT_ENABLE", "1"),), preload=True)
    return [Program("memory_views.py", ("region",)), Program("memory_views.py", ("region",), preload=True), everything]


def skip_in_the_other_mode(preload: bool) -> None:
    """The suite runs on the simulated GPU once in each hook mode, and each program has to import PyTorch."""
    if SIMULATED and preload != STARTED_PRELOADED:
        pytest.skip("runs in the other hook mode of this suite")


@pytest.mark.parametrize("way", ways(), ids=["regions-torch", "regions-preload", "everything"])
def test_each_view_does_what_the_table_says(way: Program) -> None:
    skip_in_the_other_mode(way.preload)
    moved = DROPPED + KEPT + (PLAIN if "everything" in way.arguments else 0)
    measured: set[str] = set()
    for view, (at_pause, at_resume) in changes(way).items():
        row = row_of(view)
        measured.add(row)
        if view in OF_SLACK:
            assert (at_pause, at_resume) == (0, 0), "there is none"
            continue
        says = table()[row]
        size = KEPT if "with a backup" in says else moved
        expected = {"falls": -size, "stays": 0, "rises": size}[says.partition(",")[0]]
        tolerance = TOLERANCE if view.startswith(SHARED) else 2 * MIB
        assert abs(at_pause - expected) <= tolerance, f"{view} {says}: {at_pause / MIB} MiB"
        assert abs(at_resume + expected) <= tolerance, f"{view} at the resume: {at_resume / MIB} MiB"
    missing = {row for row in table() if row not in measured and not any(name in row for name in NOT_MEASURED)}
    assert missing == set(), "rows that nothing has measured"


@pytest.mark.parametrize("way", ["region", "everything"])
def test_slack_falls_at_the_pause_for_good(way: str) -> None:
    """In all views of the device as well; PyTorch has not had it before, either."""
    everything = way == "everything"
    skip_in_the_other_mode(everything)
    environment = (("TMS_INIT_ENABLE", "1"),) if everything else ()
    moved = changes(Program("memory_views.py", (way, "slack"), environment, preload=everything))
    assert [table()[row_of(view)] for view in OF_SLACK] == ["falls", "falls"]
    assert [moved[view] for view in OF_SLACK] == [(-IDLE, 0), (-IDLE, 0)]
    resident = moved["stats().total.resident_bytes"]
    assert resident[1] == -resident[0]
    for view in ("torch.cuda.mem_get_info", "MemoryLog: device_used"):
        assert abs(moved[view][0] - (resident[0] - IDLE)) <= TOLERANCE and abs(moved[view][1] - resident[1]) <= TOLERANCE
    assert abs(moved["torch.cuda.memory_reserved"][0]) <= 2 * MIB


@pytest.mark.parametrize("way", ["region", "everything"])
def test_segments_without_tensors_go_back_for_good(way: str) -> None:
    everything = way == "everything"
    skip_in_the_other_mode(everything)
    environment = (("TMS_INIT_ENABLE", "1"),) if everything else ()
    moved = changes(Program("memory_views.py", (way, "idle"), environment, preload=everything))
    at_pause, at_resume = moved["torch.cuda.memory_reserved"]
    assert at_resume == 0
    assert IDLE <= -at_pause <= IDLE + 2 * MIB
    assert moved["MemoryLog: physical"][0] <= -(DROPPED + KEPT + IDLE)
