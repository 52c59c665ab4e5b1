"""The reasons for which a test may be skipped in CI: a plugin of pytest that fails a test which is skipped for another one.

tests/conftest.py uses it if the environment has TESTS_LACK. .ci/run sets that variable to what an environment lacks on
purpose, in words of ``Reason.lacking``: another step of .ci/run has it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Iterable
from typing import NamedTuple

import pytest

VARIABLE = "TESTS_LACK"


class Reason(NamedTuple):
    """A regular expression for whole reasons, why CI goes without these tests, and what the environment lacks."""

    pattern: str
    why: str
    lacking: str = ""


REASONS = (
    Reason("needs a (real )?GPU: run pytest with --gpu", "the steps with PyTorch run these tests", "torch"),
    Reason("needs PyTorch's CUDA build on the simulated GPU: .*", "the steps with PyTorch run these tests", "torch"),
    Reason("needs (transformers|trl|accelerate)( and accelerate)?", "the steps with PyTorch run these tests", "torch"),
    Reason("Inductor needs .*", "a compiler for GPUs makes code that the simulated GPU cannot run"),
    Reason("IMPORTER_PYTHONS names no environments", "make torch-matrix has environments of several releases"),
    Reason("PyTorch is not installed", "the step with PyTorch's CPU build runs these tests", "torch"),
    Reason(
        "(matplotlib|mkdocs-material|tqdm|nvidia-.*) is not installed.*",
        "the step with the optional packages runs these",
        "packages",
    ),
    Reason("needs a real GPU: (?!run pytest).*", "the simulated GPU does not have what the test shows"),
    Reason("(not in .* yet|not compared: .*need more than).*", "only a real GPU can be recorded"),
    Reason("(only|runs) in (the other )?hook mode .*", "the step of the other hook mode runs this test"),
    Reason("one of those that only make faults has the time for", "half an hour"),
    Reason("the page says: .*", "a block of the documentation that cannot run"),
    Reason(
        "root may .*|only root .*|a process without CAP_SYS_PTRACE .*|Yama .*|kernel.yama.*",
        "the rights of the user who runs CI",
    ),
    Reason(
        r"needs Python 3\.\d+, in PATH .*|needs notes of exceptions: Python 3.11", "the releases of Python that are there"
    ),
    Reason("needs Chromium, .*", "a browser has no package that every system of CI has"),
    Reason("starts a process with a context|PyTorch warns that it .*", "a combination of parameters that means nothing"),
)


def counted(texts: Iterable[str]) -> list[str]:
    """A line for each reason, with a count. Reasons that differ only after a colon are one line."""
    groups: dict[str, list[str]] = {}
    for text in texts:
        reason = text.removeprefix("Skipped: ")
        groups.setdefault(reason.partition(": ")[0], []).append(reason)
    lines = [(len(found), found[0] if len(set(found)) == 1 else f"{group}: ...") for group, found in groups.items()]
    return [f"{count:5} skipped: {reason}" for count, reason in sorted(lines, reverse=True)]


def is_allowed(reason: str, lacking: str) -> bool:
    """Whether a test may be skipped for that reason where the environment lacks these things."""
    words = ["", *lacking.split()]
    return any(each.lacking in words and re.fullmatch(each.pattern, reason, re.DOTALL) for each in REASONS)


def _refuse(report: pytest.TestReport | pytest.CollectReport) -> None:
    if not report.skipped or hasattr(report, "wasxfail") or not isinstance(report.longrepr, tuple):
        return
    path, line, text = report.longrepr
    reason = text.removeprefix("Skipped: ")
    lacking = os.environ.get(VARIABLE, "")
    if not is_allowed(reason, lacking):
        report.outcome = "failed"
        report.longrepr = (
            f"{path}:{line}: skipped, and CI does not allow the reason ({VARIABLE}='{lacking}'): {reason!r}. Give the test "
            f"what it needs, or add the reason to {os.path.basename(__file__)}."
        )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _refuse(report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _refuse(report)
    return report
