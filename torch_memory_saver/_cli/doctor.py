"""The doctor: checks what the package needs of a machine, and says what to change."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from torch_memory_saver._cli import sharing_checks
from torch_memory_saver._cli.check import Check, Status
from torch_memory_saver._cli.ledger_report import print_ledger, read_ledger

__all__ = ["CHECKS", "run_doctor"]

#: Each runs alone and needs neither a GPU nor PyTorch. They are shown in this order.
CHECKS: tuple[Check, ...] = (*sharing_checks.CHECKS,)


def run_doctor(*, as_json: bool, with_ledger: bool = False, checks: Sequence[Check] = CHECKS) -> int:
    """Prints the result of each check, and the ledger if wanted. Returns the exit status: 1 if one has failed."""
    results = [check() for check in checks]
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
        width = max(len(result.name) for result in results)
        for result in results:
            print(f"{result.status:<4}  {result.name:<{width}}  {result.found}")
            if result.advice:
                print(f"{'':<4}  {'':<{width}}  -> {result.advice}")
        if with_ledger:
            print()
            failed = print_ledger() != 0 or failed
    return 1 if failed else 0
