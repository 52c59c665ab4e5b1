"""Guards this suite itself: a run is in the hook mode that it claims, and a failing test does not make later ones fail.

Without the first, a preload that does not work would go undetected: all tests would pass in hook mode torch."""

from __future__ import annotations

import os

import pytest
from gpu_programs import subprocess_run
from gpu_support import PROGRAMS, STARTED_PRELOADED, core, saver


def test_this_run_is_in_the_hook_mode_that_it_claims(mode: str) -> None:
    expected = "preload" if STARTED_PRELOADED else "torch"
    assert mode == expected
    with saver.region(tag="weights"):
        pass
    assert saver.hook_mode == expected
    assert ("hook_mode_preload" in os.path.basename(core.library_path)) == (expected == "preload")


@pytest.mark.outer
def test_a_failing_test_leaves_nothing_to_the_next() -> None:
    done = subprocess_run(["-m", "pytest", "--gpu", "-q", "-p", "no:cacheprovider", str(PROGRAMS / "failing_tests.py")])
    assert "FAILED" in done.output and "test_that_fails" in done.output, done.output + done.error
    assert "1 failed, 1 passed" in done.output, done.output + done.error
