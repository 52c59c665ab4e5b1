"""The ledger of all devices, as the doctor shows it: a process of its own asks, so it sees what other processes hold."""

from __future__ import annotations

import sys
from typing import NamedTuple

from torch_memory_saver import _core
from torch_memory_saver._cli.output import write_line
from torch_memory_saver.errors import TorchMemorySaverError
from torch_memory_saver.reports.ledger import Ledger

__all__ = ["LedgerReport", "print_ledger", "read_ledger"]


class LedgerReport(NamedTuple):
    """The ledger of the devices that could be asked, and a sentence for each one that could not."""

    ledger: Ledger | None
    failures: tuple[str, ...]


def read_ledger() -> LedgerReport:
    """Makes a context on every visible device, which stays until this process ends. Raises nothing."""
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
    """Prints the ledger, and failures on stderr. Returns the exit status: 1 if a device could not be asked."""
    report = read_ledger()
    if report.ledger is not None:
        write_line(str(report.ledger))
    for failure in report.failures:
        print(failure, file=sys.stderr)
    return 1 if report.failures else 0
