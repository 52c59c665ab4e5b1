"""The doctor: run the checks of the installation and the machine, say what to change, and show the ledger.

The checks change nothing and use no GPU in this process. The ledger does: it makes a context on every device, so it is read
last.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TextIO

from torch_memory_saver import _core
from torch_memory_saver._cli.output import write_line
from torch_memory_saver._text import wrapped
from torch_memory_saver.errors import TorchMemorySaverError
from torch_memory_saver.observe._doctor import gpu_checks, host_checks, installation_checks, sharing_checks
from torch_memory_saver.observe._doctor.check import Check, Finding, Status, fail
from torch_memory_saver.reports.ledger import Ledger

__all__ = ["GROUPS", "LedgerReport", "Result", "print_ledger", "read_ledger", "run_doctor"]

#: Each check runs alone. They are shown in this order.
GROUPS: Mapping[str, Sequence[Check]] = {
    "installation": installation_checks.CHECKS,
    "GPU": gpu_checks.CHECKS,
    "host": host_checks.CHECKS,
    "sending tensors to other processes": sharing_checks.CHECKS,
}
_REPORT = "report it, with the output of this command"
#: The last line if no GPU can be used. A machine without one always has failures above it.
_WITHOUT_GPU = (
    "There is no usable GPU. On a machine that has none, this is no fault: run programs on the simulated GPU, by "
    "`python -m torch_memory_saver simulate -- python my.py`."
)
#: ANSI codes: green, yellow, red, grey.
_COLOURS = {Status.OK: "32", Status.WARN: "33", Status.FAIL: "31", Status.SKIP: "90"}
_STATUS_WIDTH = 4
#: Below this the sentences are not wrapped.
_SMALLEST_WIDTH = 60


class Result(NamedTuple):
    """Return the findings of a check, as an object of the JSON."""

    group: str
    name: str
    status: str
    found: str
    advice: str
    details: Sequence[str]


def run_doctor(
    *, as_json: bool, with_ledger: bool = False, debug: bool = False, groups: Mapping[str, Sequence[Check]] = GROUPS
) -> int:
    """Print what each check has found, and the ledger if wanted. Return the exit status: 1 if one has failed.

    `debug`: the traceback of a check that raises goes to stderr.
    """
    checks = [(group, check) for group, checks in groups.items() for check in checks]
    width = max(len(check.name) for _, check in checks)
    page = _Page(sys.stdout, width)
    results: list[Result] = []
    for group, check in checks:
        result = Result(group, check.name, *_look(check, debug))
        if not as_json:
            if not results or results[-1].group != group:
                page.heading(group, first=not results)
            page.show(result)
        results.append(result)
    failed = any(result.status == Status.FAIL for result in results)
    if as_json:
        rows: Any = [result._asdict() for result in results]
        if with_ledger:
            ledger, failures = read_ledger()
            failed = failed or bool(failures)
            rows = {"checks": rows, "ledger": None if ledger is None else ledger.as_dict(), "failures": list(failures)}
        json.dump(rows, sys.stdout, indent=2)
        print()
    else:
        page.summary(results)
        if with_ledger:
            print()
            failed = print_ledger() != 0 or failed
    return 1 if failed else 0


class LedgerReport(NamedTuple):
    """The ledger of the devices that could be queried, and a sentence for each one that could not."""

    ledger: Ledger | None
    failures: tuple[str, ...]


def read_ledger() -> LedgerReport:
    """Make a context on every visible device, which stays until this process ends. Never raise an error."""
    from torch_memory_saver import torch_memory_saver

    failures: list[str] = []
    try:
        for device in range(_core.device_count()):
            try:
                _core.device_memory(device)
            except TorchMemorySaverError as error:  # no memory is left for a context
                failures.append(f"device {device} has no ledger: {error}")
        return LedgerReport(torch_memory_saver.ledger(), tuple(failures))
    except TorchMemorySaverError as error:
        return LedgerReport(None, (*failures, f"there is no ledger: {error}"))


def print_ledger() -> int:
    """Print the ledger, and failures on stderr. Return the exit status: 1 if a device could not be queried."""
    report = read_ledger()
    if report.ledger is not None:
        write_line(str(report.ledger))
    for failure in report.failures:
        print(failure, file=sys.stderr)
    return 1 if report.failures else 0


def _look(check: Check, debug: bool) -> Finding:
    try:
        return check.look()
    except Exception as error:
        if debug:
            traceback.print_exc()
        return fail(f"the check itself has failed: {type(error).__name__}: {' '.join(str(error).split())}", _REPORT)


class _Page:
    """Lines for people. They are as wide as the terminal; output that goes elsewhere is not wrapped."""

    def __init__(self, stream: TextIO, name_width: int) -> None:
        self._stream = stream
        self._name_width = name_width
        self._columns = shutil.get_terminal_size((0, 0)).columns
        self._coloured = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def heading(self, group: str, *, first: bool) -> None:
        """Write the title of a group, preceded by an empty line unless it is the first group."""
        self._write(group if first else f"\n{group}")

    def show(self, result: Result) -> None:
        """Write the lines of one check. They are written at once, because some checks take seconds."""
        status = f"{result.status:<{_STATUS_WIDTH}}"
        if self._coloured:
            status = f"\x1b[{_COLOURS[result.status]}m{status}\x1b[0m"
        margin = " " * (_STATUS_WIDTH + 2 + self._name_width + 2)
        found = self._wrapped(result.found, margin, "")
        self._write(f"{status}  {result.name:<{self._name_width}}  {found[len(margin) :]}")
        for line in result.details:
            self._write(self._wrapped(line, margin, "  "))
        if result.advice:
            self._write(self._wrapped(f"-> {result.advice}", margin, "   "))

    def summary(self, results: Sequence[Result]) -> None:
        """Write the number of each status and, if no GPU can be used, what is possible without one."""
        numbers = Counter(result.status for result in results)
        self._write("\n" + ", ".join(f"{numbers[status]} {status}" for status in _COLOURS if numbers[status]))
        if any(result.found == gpu_checks.NO_USABLE_GPU for result in results):
            self._write(self._wrapped(_WITHOUT_GPU, "", ""))

    def _wrapped(self, text: str, margin: str, hanging: str) -> str:
        if self._columns < max(_SMALLEST_WIDTH, len(margin) + len(margin)):
            return margin + text
        return "\n".join(wrapped(text, self._columns, margin + hanging, margin))

    def _write(self, text: str) -> None:
        write_line(text, self._stream)
