"""Guards the table of tested versions: what is recorded, what is refused, and that the package warns of nothing else."""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tested_versions

from torch_memory_saver._text import forget_warnings
from torch_memory_saver._torch.binding import releases

REPOSITORY = Path(__file__).resolve().parents[3]
MACHINE = {"torch": "2.11.0", "cuda": "13.0", "python": "3.11.7", "gpu": "simulated", "driver": "simulated"}


def row(**fields: Any) -> dict[str, Any]:
    return MACHINE | {"mode": "torch", "engine": "", "passed": 1, "failed": 0, "skipped": 0} | fields


def recorded(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a file without their days: the day can change while a test runs."""
    rows = json.loads(file.read_text())
    for each in rows:
        datetime.date.fromisoformat(each.pop("date"))
    return list(rows)


def test_a_result_replaces_the_one_of_the_same_versions(tmp_path: Path) -> None:
    file = tmp_path / "versions.json"
    for mode, engine, failed in [("torch", "", 4), ("preload", "", 0), ("torch", "vLLM 0.26.0", 0), ("torch", "", 0)]:
        tested_versions.record(file, MACHINE | {"mode": mode, "engine": engine}, passed=1, failed=failed)
    rows = recorded(file)
    assert rows == [row(mode="preload"), row(), row(engine="vLLM 0.26.0")]
    assert len(file.read_text().splitlines()) == len(rows) + 2


CONFTEST = """
import pathlib, tested_versions
tested_versions.this_machine = lambda: {machine!r}
def pytest_configure(config):
    config.pluginmanager.register(tested_versions.Recorder(pathlib.Path("versions.json"), "torch"))
"""
TESTS = """
import pytest
def test_passes(): pass
def test_fails(): assert False
@pytest.fixture
def broken(): assert False
def test_error(broken): pass
def test_skipped(): pytest.skip("a reason")
def test_stops(): {last}
"""


@pytest.mark.parametrize("last", ["pass", "raise KeyboardInterrupt"])
def test_a_run_that_ended_is_recorded(tmp_path: Path, last: str) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST.format(machine=MACHINE))
    (tmp_path / "test_it.py").write_text(TESTS.format(last=last))
    environment = os.environ | {"PYTHONPATH": str(Path(tested_versions.__file__).parent)}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=120)
    if last == "pass":
        assert recorded(tmp_path / "versions.json") == [row(passed=2, failed=2, skipped=1)], done.stdout
    else:
        assert not (tmp_path / "versions.json").exists()
        assert "so nothing was recorded" in done.stdout


@pytest.mark.parametrize(
    "part",
    [
        {"keyword": "x"},
        {"markexpr": "multigpu"},
        {"deselect": ["x"]},
        {"ignore": ["x"]},
        {"maxfail": 1},
        {"lf": True},
        {"collectonly": True},
        {"args": ["tests"]},
    ],
)
def test_a_part_of_the_tests_is_not_recorded(part: dict[str, Any]) -> None:
    gpu_tests = [str(REPOSITORY / "tests/gpu")]
    whole: dict[str, Any] = {"args": gpu_tests, "keyword": "", "markexpr": "not slow", "deselect": None, "maxfail": 0}

    def configuration(chosen: dict[str, Any]) -> Any:
        return argparse.Namespace(args=chosen["args"], option=argparse.Namespace(**chosen))

    tested_versions.refuse_a_part(configuration(whole))
    with pytest.raises(pytest.UsageError, match="whole runs"):
        tested_versions.refuse_a_part(configuration(whole | part))


def numbers(texts: list[str]) -> set[tuple[int, int]]:
    return {(int(major), int(minor)) for major, minor in (text.split(".")[:2] for text in texts)}


def test_the_newest_tested_release_is_the_one_of_ci_and_of_the_results() -> None:
    (in_ci,) = re.findall(r"for release in ([0-9. ]+); do", (REPOSITORY / ".ci/run").read_text(encoding="utf-8"))
    assert max(numbers(in_ci.split())) == releases.NEWEST_TESTED
    rows = json.loads(tested_versions.FILE.read_text(encoding="utf-8"))
    assert {field for each in rows for field in each} <= {*tested_versions.VERSIONS, *tested_versions.RESULTS}
    passed = [each["torch"] for each in rows if not each["failed"]]
    assert all(release <= releases.NEWEST_TESTED for release in numbers(passed))
    assert not rows or releases.NEWEST_TESTED in numbers(passed)


def test_an_untested_release_gets_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    forget_warnings()
    major, minor = releases.NEWEST_TESTED
    with caplog.at_level(logging.WARNING):
        for release in (f"{major}.{minor}.9+cu130", "2.8.0", "not a release"):
            releases.warn_if_untested(release)
        assert caplog.messages == []
        for release in (f"{major}.{minor + 1}.0a0", f"{major + 1}.0.0"):
            releases.warn_if_untested(release)
    assert len(caplog.messages) == 1
    assert f"PyTorch {major}.{minor + 1}.0a0 is newer than {major}.{minor}, the newest" in caplog.messages[0]
    forget_warnings()
