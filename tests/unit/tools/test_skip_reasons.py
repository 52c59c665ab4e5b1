"""Guards the list of reasons for which CI may skip a test: a test that is skipped for another reason fails the run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import skip_reasons

TESTS = """
import pytest

def test_runs():
    pass

@pytest.mark.xfail
def test_expected():
    assert False

@pytest.mark.skip(reason={mark!r})
def test_marked():
    pass

@pytest.fixture
def missing():
    pytest.skip({fixture!r})

def test_in_a_fixture(missing):
    pass

def test_inside():
    pytest.importorskip("no_such_package", reason={inside!r})
"""
ALLOWED = "needs a real GPU: it has no NVLink"


def run(folder: Path, lacking: str | None, *options: str, module: str | None = None, **reasons: str) -> tuple[int, str]:
    """The status and the output of pytest. `reasons` replace ALLOWED; `module` is the reason of a whole file."""
    (folder / "test_it.py").write_text(TESTS.format(**dict.fromkeys(("mark", "fixture", "inside"), ALLOWED) | reasons))
    if module is not None:
        (folder / "test_module.py").write_text(f"import pytest\npytest.skip({module!r}, allow_module_level=True)\n")
    environment = os.environ | {"PYTHONPATH": str(Path(skip_reasons.__file__).parent)}
    environment.pop(skip_reasons.VARIABLE, None)
    if lacking is not None:
        environment[skip_reasons.VARIABLE] = lacking
    command = [sys.executable, "-m", "pytest", "-p", "skip_reasons", "-p", "no:cacheprovider", *options, str(folder)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=120)
    return done.returncode, done.stdout


def counts(output: str) -> dict[str, int]:
    return {name: int(number) for number, name in re.findall(r"(\d+) (\w+?)s?\b", output.strip().splitlines()[-1])}


def test_listed_reasons_are_skips(tmp_path: Path) -> None:
    """One of them is a lack that the step names."""
    lack = "matplotlib is not installed"
    assert not skip_reasons.is_allowed(lack, "torch")
    status, output = run(tmp_path, "torch packages", module=ALLOWED, inside=lack)
    assert (status, counts(output)["passed"], counts(output)["skipped"]) == (0, 1, 4), output


UNLISTED = "broken since Tuesday"


@pytest.mark.parametrize(
    "options",
    [pytest.param((), id="one process"), pytest.param(("-n", "2"), id="two processes", marks=pytest.mark.slow)],
)
def test_unlisted_reasons_fail_the_run(tmp_path: Path, options: tuple[str, ...]) -> None:
    if options:
        pytest.importorskip("xdist")
    status, output = run(tmp_path, "", *options, mark=UNLISTED, fixture=UNLISTED, inside=UNLISTED)
    assert status == 1
    # pytest calls it an error if a test failed before it began.
    assert (counts(output)["error"], counts(output)["failed"], counts(output).get("skipped", 0)) == (2, 1, 0), output
    assert output.count(f"CI does not allow the reason (TESTS_LACK=''): '{UNLISTED}'") >= 3


def test_an_unlisted_reason_of_a_file_fails_the_run(tmp_path: Path) -> None:
    status, output = run(tmp_path, "", module=UNLISTED)
    assert status != 0 and counts(output)["error"] == 1, output
    assert f"'{UNLISTED}'" in output


@pytest.mark.parametrize("reason", ["needs a real GPU", "needs a real GPU: run pytest with --gpu", "unconditional skip"])
def test_reasons_are_whole_and_a_step_with_pytorch_runs_its_tests(reason: str) -> None:
    assert not skip_reasons.is_allowed(reason, "")


def test_each_reason_has_its_pattern_and_says_why() -> None:
    assert len({each.pattern for each in skip_reasons.REASONS}) == len(skip_reasons.REASONS)
    assert [each for each in skip_reasons.REASONS if not each.why or re.fullmatch(each.pattern, "")] == []
    assert {each.lacking for each in skip_reasons.REASONS} == {"", "torch", "packages"}


def test_the_summary_has_a_line_for_each_reason() -> None:
    found = ["Skipped: the page says: a server", "needs a GPU: run --gpu", "the page says: root", "needs a GPU: run --gpu"]
    assert skip_reasons.counted([*found, "needs a GPU: run --gpu"]) == [
        "    3 skipped: needs a GPU: run --gpu",
        "    2 skipped: the page says: ...",
    ]
