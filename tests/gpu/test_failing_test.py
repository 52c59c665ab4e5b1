"""Guards that a test of this folder that fails does not make those after it fail."""

from __future__ import annotations

import pytest
from gpu_programs import subprocess_run
from gpu_support import PROGRAMS

pytestmark = pytest.mark.outer


def test_a_failing_test_leaves_nothing_to_the_next() -> None:
    done = subprocess_run(["-m", "pytest", "--gpu", "-q", "-p", "no:cacheprovider", str(PROGRAMS / "failing_tests.py")])
    assert "FAILED" in done.output and "test_that_fails" in done.output, done.output + done.error
    assert "1 failed, 1 passed" in done.output, done.output + done.error
