"""What is true of everything that a check of the doctor finds."""

from __future__ import annotations

from torch_memory_saver.observe._doctor.check import Finding, Status

__all__ = ["assert_complete"]


def assert_complete(finding: Finding, status: str | None = None) -> None:
    """Sentences without a full stop, and advice wherever something is not right."""
    assert finding.status in (Status.OK, Status.WARN, Status.FAIL, Status.SKIP)
    assert finding.found and "\n" not in finding.found and not finding.found.endswith(".")
    assert bool(finding.advice) == (finding.status != Status.OK), finding
    assert not finding.advice.endswith(".")
    assert all(line and "\n" not in line for line in finding.details)
    assert status in (None, finding.status), finding
