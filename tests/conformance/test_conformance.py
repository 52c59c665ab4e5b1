"""Guards that the simulated GPU behaves as a real one was recorded to.

Each recorded_*.json holds the record of a machine (tools/record_gpu.py). The same behaviours are run here on the simulated
GPU, with as many devices as that machine had, and compared. A skipped test names the behaviours of the table that the
record lacks.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
RECORD_GPU = HERE.parents[1] / "tools" / "record_gpu.py"
DRIVER = HERE / "driver"
RECORDS = sorted(DRIVER.glob("recorded_*.json"))
MEMORY = "8GiB"


def load(name: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(f"faithful_{name}", HERE / f"{name}.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[module.__name__] = module
    specification.loader.exec_module(module)
    return module


compare = load("compare")


def simulate(devices: int, output: Path) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TMS_SIMULATED_")}
    environment["TMS_SIMULATED_DEVICES"] = str(devices)
    environment["TMS_SIMULATED_MEMORY"] = MEMORY
    assert environment.get("TMS_CUDA_DRIVER"), "conftest.py names the simulated GPU"
    subprocess.run([sys.executable, str(RECORD_GPU), "--output", str(output)], env=environment, check=True, timeout=300)
    simulated: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return simulated


@pytest.fixture(autouse=True)
def _on_the_simulated_gpu(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--gpu"):
        pytest.skip("compares the simulated GPU with the record; record_gpu.py runs on the real one")


def test_there_is_a_record() -> None:
    if not RECORDS:
        pytest.skip("no record: 'make conformance' has not been run on a GPU yet")
    for path in RECORDS:
        recorded = json.loads(path.read_text(encoding="utf-8"))
        assert recorded["machine"]["device"] != "Simulated GPU", f"{path.name} is not of a real GPU"


@functools.cache
def table() -> dict[str, int]:
    """How many devices each behaviour needs."""
    command = [sys.executable, str(RECORD_GPU), "--table"]
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=60)
    needed: dict[str, int] = json.loads(answer.stdout)
    return needed


def pending() -> list[tuple[Path, str]]:
    names = []
    for path in RECORDS:
        recorded = json.loads(path.read_text(encoding="utf-8"))
        devices = recorded["machine"]["devices"]
        wanted = [name for name, needed in table().items() if needed <= devices]
        names += [(path, name) for name in wanted if name not in recorded["behaviours"]]
    return names


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_what_is_not_recorded_yet(path: Path) -> None:
    assert set(json.loads(path.read_text(encoding="utf-8"))["behaviours"]) <= set(table())
    if names := [name for record, name in pending() if record == path]:
        pytest.skip(f"not in {path.name} yet, run record_gpu.py on that machine: {', '.join(names)}")


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_like_the_recorded_gpu(path: Path, tmp_path: Path) -> None:
    recorded = json.loads(path.read_text(encoding="utf-8"))
    simulated = simulate(recorded["machine"]["devices"], tmp_path / "simulated.json")
    result = compare.compare(recorded, simulated, compare.read_known(DRIVER))
    lines = [str(difference) for difference in result.unexpected]
    lines += [f"known_differences.json lists what does not differ any more: {entry}" for entry in result.outdated]
    assert not lines, "\n".join(["", *lines])
    assert [each for each in pending() if each[0] == path] == [(path, name) for name in result.pending]
    readme = (HERE / "README.md").read_text(encoding="utf-8")
    assert f"\n{result.equal} observations are the same\n{len(result.known)} observations differ\n" in readme, "README.md"


MACHINE = {"devices": 1}


def compared(recorded: Any, simulated: Any, *known: tuple[str, str]) -> Any:
    entries = [{"behaviour": "b", "observation": label, "reason": reason} for label, reason in known]
    sides = [{"machine": MACHINE, "behaviours": {"b": seen}} for seen in (recorded, simulated)]
    return compare.compare(*sides, entries)


def test_a_difference_is_found() -> None:
    result = compared({"x": "SUCCESS", "y": {"z": 1}}, {"x": "SUCCESS", "y": {"z": 2}})
    assert [(d.observation, d.recorded, d.simulated) for d in result.unexpected] == [("y / z", 1, 2)]
    assert result.equal == 1


def test_an_observation_that_is_missing_differs() -> None:
    result = compared({"x": 1}, {})
    assert [(d.observation, d.simulated) for d in result.unexpected] == [("x", compare.ABSENT)]


@pytest.mark.parametrize("label", ["y / z", "y", "*"])
def test_a_known_difference_is_allowed(label: str) -> None:
    result = compared({"y": {"z": 1}}, {"y": {"z": 2}}, (label, "because"))
    assert not result.unexpected and not result.outdated and len(result.known) == 1


def test_a_known_difference_that_is_gone_is_reported() -> None:
    result = compared({"y": 1}, {"y": 1}, ("y", "because"))
    assert result.outdated == ["b: y"]


def test_an_entry_for_several_behaviours_and_observations(tmp_path: Path) -> None:
    entry = {"behaviour": "b*", "observation": ["x", "y"], "reason": "because"}
    (tmp_path / compare.KNOWN_DIFFERENCES).write_text(json.dumps([entry]), encoding="utf-8")
    behaviours = {"b1": {"x": 1, "y": 1}, "b2": {"x": 1, "y": 1}, "c": {"x": 1}}
    recorded = {"machine": MACHINE, "behaviours": behaviours}
    for changed, unexpected, outdated in (
        ({"b1": {"x": 2, "y": 1}, "b2": {"x": 1, "y": 2}}, [], []),
        ({"b1": {"x": 2, "y": 1}, "b2": {"x": 2, "y": 1}}, [], ["b*: y"]),
        ({"b1": {"x": 2, "y": 2}, "c": {"x": 2}}, ["c"], []),
    ):
        result = compare.compare_in(tmp_path, recorded, {"behaviours": behaviours | changed})
        assert ([each.behaviour for each in result.unexpected], result.outdated) == (unexpected, outdated)


def test_an_entry_without_a_reason_is_refused(tmp_path: Path) -> None:
    for name, read in (
        (compare.KNOWN_DIFFERENCES, compare.read_known),
        (compare.SAME_MEANING, compare.read_same_meaning),
    ):
        (tmp_path / name).write_text('[{"behaviour": "b", "observation": "x", "pattern": "x", "meaning": ""}]')
        with pytest.raises(ValueError, match="without a reason"):
            read(tmp_path)


@pytest.mark.parametrize("simulated", [1, 2])
def test_what_varies_is_not_compared(simulated: int) -> None:
    entry = {"behaviour": "b", "observation": "x", "reason": "because", "varies": True}
    sides = [{"machine": MACHINE, "behaviours": {"b": {"x": value}}} for value in (1, simulated)]
    result = compare.compare(*sides, [entry])
    assert (result.varying, result.equal, result.known, result.unexpected, result.outdated) == (1, 0, [], [], [])


@pytest.mark.parametrize(
    ("recorded", "simulated", "equal"),
    [
        ('"add_cuda" not implemented for Half', '"add_cpu" not implemented for Half', True),
        ('"add_cuda" not implemented for Half', '"add_cpu" not implemented for Int', False),
        ('"add_cuda" not implemented for Half', "another error", False),
    ],
)
def test_texts_are_compared_by_their_meaning(recorded: str, simulated: str, equal: bool) -> None:
    meaning = {"pattern": '^"\\w+" not', "meaning": "not", "reason": "because"}
    sides = [{"machine": MACHINE, "behaviours": {"b": {"message": text}}} for text in (recorded, simulated)]
    result = compare.compare(*sides, [], [meaning])
    assert result.equal == int(equal) and len(result.unexpected) == int(not equal) and not result.outdated


def test_a_pattern_that_matches_nothing_is_reported() -> None:
    meaning = {"pattern": "x+", "meaning": "x", "reason": "because"}
    sides = [{"machine": MACHINE, "behaviours": {"b": {"message": "text", "number": 1}}}] * 2
    assert compare.compare(*sides, [], [meaning]).outdated == []
    assert compare.compare(*sides, [], [meaning | {"pattern": "z"}]).outdated == ["pattern z"]


#: Texts of a GPU and of the CPU, and whether they say the same.
TEXTS = (
    ("\"addmm_cuda\" not implemented for 'Int'", "\"addmm_cpu\" not implemented for 'Int': aten::mm of int32 has", True),
    ("\"addmm_cuda\" not implemented for 'Int'", "\"addmm_cpu\" not implemented for 'Char'", False),
    (
        "got mat2 is on cpu (when checking argument in method a)",
        "got mat2 is on cpu (when checking argument in method b)",
        True,
    ),
    (
        "got mat2 is on cpu (when checking argument in method a)",
        "got mat1 is on cpu (when checking argument in method a)",
        False,
    ),
    ("expected mat1 and mat2 to have the same", "expected m1 and m2 to have the same", True),
    ("expected mat1 and mat2 to have the same", "expected mat1 and mat2 to be", False),
)


@pytest.mark.parametrize(("recorded", "simulated", "equal"), TEXTS)
def test_the_meanings_of_pytorchs_texts(recorded: str, simulated: str, equal: bool) -> None:
    meanings = compare.Meanings(compare.read_same_meaning(HERE / "pytorch"))
    assert (meanings.of(recorded) == meanings.of(simulated)) is equal


def test_a_behaviour_that_was_not_recorded_is_pending() -> None:
    sides = [{"machine": MACHINE, "behaviours": seen} for seen in ({}, {"b": {"x": 1}})]
    result = compare.compare(*sides, [])
    assert result.pending == ["b"] and not result.unexpected


def test_a_behaviour_that_left_the_table_differs() -> None:
    sides = [{"machine": MACHINE, "behaviours": seen} for seen in ({"b": {"x": 1}}, {})]
    result = compare.compare(*sides, [])
    assert not result.pending and [d.behaviour for d in result.unexpected] == ["b"]


def test_the_readme_has_the_size_of_the_table() -> None:
    size = re.search(r"^(\d+) behaviours$", (HERE / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert size and int(size.group(1)) == len(table()), f"README.md: {len(table())} behaviours"
