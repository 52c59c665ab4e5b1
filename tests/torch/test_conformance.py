"""Guards that PyTorch and NCCL behave on the simulated GPU as they were recorded to on a real one. tests/conformance/pytorch
holds the behaviours, and the records of real GPUs. A behaviour that is not recorded, because it is new or needs more devices
than the recording machine had, is not compared, and named by a skip."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SUITE = ROOT / "tests" / "conformance" / "pytorch"
RECORDS = sorted(SUITE.glob("recorded_*.json"))
TIMEOUT_S = 600
#: The release of PyTorch that the records are of. Others have other texts and operators.
RELEASE = "2.11"
#: PyTorch itself ends the process: an exception leaves a destructor.
DIE = {"captures.another_capture"}

sys.path.insert(0, str(SUITE.parent))
import compare  # noqa: E402

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() != 2, reason="the records are of two devices"),
]


@functools.cache
def record() -> dict[str, Any]:
    """The behaviour of the simulated GPU."""
    command = [sys.executable, str(ROOT / "tools" / "record_gpu.py"), "--suite", "pytorch"]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=TIMEOUT_S, check=True)
    recorded: dict[str, Any] = json.loads(done.stdout)
    return recorded


def test_every_behaviour_can_be_observed() -> None:
    seen = record()["behaviours"]
    assert {name for name, each in seen.items() if "died" in each} == DIE
    assert [name for name, each in seen.items() if "failed" in each] == []
    assert len(seen) > len(DIE)


@functools.cache
def table() -> dict[str, int]:
    """How many devices each behaviour needs."""
    command = [sys.executable, str(ROOT / "tools" / "record_gpu.py"), "--suite", "pytorch", "--table"]
    answer = subprocess.run(command, stdout=subprocess.PIPE, timeout=TIMEOUT_S, check=True)
    needed: dict[str, int] = json.loads(answer.stdout)
    return needed


#: The beginning of the names of NCCL's behaviours; the others are those of operators.
NCCL = "nccl."


def is_of(part: str, name: str) -> bool:
    return name.startswith(NCCL) == (part == "nccl")


def compared(path: Path, part: str) -> Any:
    """The comparison of a part of the suite with a record."""
    sides = []
    for side in (json.loads(path.read_text(encoding="utf-8")), record()):
        sides.append(side | {"behaviours": {name: seen for name, seen in side["behaviours"].items() if is_of(part, name)}})
    known = [each for each in compare.read_known(SUITE) if is_of(part, each["behaviour"])]
    return compare.compare(*sides, known, compare.read_same_meaning(SUITE) if part == "operators" else [])


NO_RECORD = pytest.param(None, id="none", marks=pytest.mark.skip("no record: run 'make conformance' on two GPUs"))
each_record = pytest.mark.parametrize("path", [pytest.param(path, id=path.stem) for path in RECORDS] or [NO_RECORD])
of_the_release = pytest.mark.skipif(
    not torch.__version__.startswith(f"{RELEASE}."),
    reason=f"the records are of PyTorch {RELEASE}, and this is {torch.__version__}",
)


@of_the_release
@each_record
@pytest.mark.parametrize("part", ["operators", "nccl"])
def test_like_the_recorded_gpu(path: Path, part: str) -> None:
    result = compared(path, part)
    lines = [str(difference) for difference in result.unexpected]
    lines += [f"{SUITE.name} lists what does not differ any more: {entry}" for entry in result.outdated]
    assert not lines, "\n".join(["", *lines])


@each_record
def test_to_be_recorded(path: Path) -> None:
    recorded = json.loads(path.read_text(encoding="utf-8"))
    devices = recorded["machine"]["devices"]
    pending = [name for name in table() if name not in recorded["behaviours"]]
    more = [name for name in pending if table()[name] > devices]
    assert sorted(more) == sorted(name for name, needed in table().items() if needed > devices)
    others = [name for name in pending if name not in more]
    if pending:
        pytest.skip(
            f"not compared: {', '.join(more)} need more than {devices} GPU; not recorded yet: {', '.join(others) or 'none'}"
        )


@of_the_release
@each_record
def test_the_readme_has_the_figures(path: Path) -> None:
    result = compared(path, "operators")
    size = len([name for name in table() if is_of("operators", name)])
    readme = (SUITE.parent / "README.md").read_text(encoding="utf-8")
    expected = (
        f"{size} behaviours of operators\n",
        f"{result.equal} of their observations are the same\n",
        f"{len(result.known)} of their observations differ\n",
        f"{result.varying} of their observations depend on time\n",
    )
    assert [line for line in expected if f"\n{line}" not in readme] == []


def test_the_record_is_of_a_real_gpu() -> None:
    for path in RECORDS:
        assert not re.search("simulated", json.loads(path.read_text(encoding="utf-8"))["machine"]["device"], re.IGNORECASE)
