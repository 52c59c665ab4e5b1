"""Guards that the planted bugs of tests/mutants apply to the sources, and that the tests that must detect them exist."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
TOOLS = ROOT / "tools"


@pytest.fixture(scope="module")
def runner() -> ModuleType:
    specification = importlib.util.spec_from_file_location("tms_mutants_run", TOOLS / "mutants.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module


def test_every_mutant_applies(runner: ModuleType) -> None:
    assert len(runner.MUTANTS) >= 26
    assert runner.check(runner.MUTANTS, ROOT) == []


def test_a_mutant_that_no_longer_fits_is_an_error(runner: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.c").write_text("one two two\n")
    (tmp_path / "test.py").write_text("def test_it(): ...\n")

    def problems(old: str, new: str, *tests: str) -> list[str]:
        found: list[str] = runner.check((runner.Mutant("name", "a.c", old, new, tests),), tmp_path)
        return found

    assert problems("one", "1", "test.py::test_it", "torch:test.py::test_it[case]") == []
    (gone,) = problems("three", "3", "test.py")
    assert "name: a.c has this text 0 times instead of once" in gone and gone.endswith("three")
    (twice,) = problems("two", "2", "test.py")
    assert "2 times" in twice
    assert problems("one", "one", "test.py") == ["name: it changes nothing"]
    assert problems("one", "1") == ["name: no test has to notice it"]
    assert problems("one", "1", "test.py::test_other", "other.py") == [
        "name: there is no test.py::test_other",
        "name: there is no other.py",
    ]
    (missing,) = runner.check((runner.Mutant("name", "b.c", "one", "1", ("test.py",)),), tmp_path)
    assert "b.c" in missing


def test_only_a_failing_test_counts_as_detection(runner: ModuleType, tmp_path: Path) -> None:
    """Not one that passes, crashes, is skipped, or never ends."""
    tree = runner.Tree(tmp_path, seconds=60)
    programs = tmp_path / "build" / "c" / "plain" / "tests" / "unit"
    programs.mkdir(parents=True)

    def outcome_of(script: str) -> str:
        program = programs / "test_it"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        found: str = tree.test("tests/unit/test_it.c").what
        return found

    assert outcome_of("exit 0") == "passed"
    ended = "echo '[==========] 1 test(s) run.'"
    failed = f"echo '[  FAILED  ] a_test'; {ended}"
    assert outcome_of(f"{failed}; exit 1") == "failed"
    assert outcome_of(f"echo '[  ERROR   ] a_test'; {ended}; exit 1") == "failed"
    assert outcome_of(f"{ended}; exit 1") == "crashed (status 1)"
    assert outcome_of("echo '[  FAILED  ] a_test'; exit 1") == "crashed (status 1)"
    assert outcome_of(f"{failed}; kill -SEGV $$") == "crashed (status -11)"
    assert outcome_of(f"echo 'Test failed with exception: Segmentation fault'; {failed}; exit 1") == "crashed (status 1)"
    tree.seconds = 1
    assert outcome_of("while :; do :; done") == "ran into the limit of 1 s"
