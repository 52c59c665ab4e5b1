"""Guards that the benchmarks run with tensors, at a small size, and report what they measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gpu_support import SIMULATED, subprocess_run

pytestmark = [pytest.mark.outer, pytest.mark.timeout(300)]

SCALE = "0.002" if SIMULATED else "0.02"
CASES = "cycles,model,pooled,live,live-torch,wake-up,synchronise,send,decode,snapshot"


def test_the_suite(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    command = ["-m", "torch_memory_saver", "bench", "--device", "gpu", "--cases", CASES, "--scale", SCALE]
    done = subprocess_run([*command, "--repetitions", "1", "--json", str(path)], timeout=280).check()
    data = json.loads(path.read_text())
    assert data["left_out"] == [], done.output
    assert {row["case"] for row in data["rows"]} == set(CASES.split(","))
    assert data["machine"]["torch"]
    assert data["machine"]["simulated"] is SIMULATED
    for row in data["rows"]:
        assert row["ours"]["median"] > 0, row
        assert row["limit"] is not None or row["operation"] in ("both", "open", "close"), row
    for case in ("live", "live-torch"):
        live = next(row for row in data["rows"] if row["case"] == case)
        part = float(live["notes"].partition("%")[0])
        # With so little memory the remainders of segments count.
        assert 15 < part < 50, live["notes"]
    model = next(row for row in data["rows"] if row["case"] == "model")
    handles, held = (int(word) for word in model["notes"].split() if word.isdigit())
    tensors = int(model["shape"].split()[0])
    assert 0 < handles < tensors, "the small tensors lie together"
    assert held >= model["bytes"] > 0


def test_slack(tmp_path: Path) -> None:
    """Under churn bytes are reported, which are the same on every GPU, but for what the driver counts ("held")."""
    path = tmp_path / "out.json"
    command = ["-m", "torch_memory_saver", "bench", "--device", "gpu", "--cases", "slack,churn", "--scale", SCALE]
    done = subprocess_run([*command, "--repetitions", "2", "--json", str(path)], timeout=280).check()
    data = json.loads(path.read_text())
    assert data["left_out"] == [], done.output
    slack, *churn = data["rows"]
    assert (slack["case"], slack["operation"], slack["limit"]["median"]) == ("slack", "allocate", 2e-6)
    assert slack["ours"]["min"] > 0
    rows = {row["operation"]: row for row in churn}
    freed = rows["after frees"]["limit"]["median"]
    assert freed > 0
    assert rows["after frees"]["ours"]["values"] == [freed] * 2
    assert set(rows["after the pause"]["ours"]["values"]) == {0}
    assert set(rows["later cycles"]["ours"]["values"]) == {0}
