"""The doctor: checks what the package needs of a machine, and says what to change."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from torch_memory_saver._cli import sharing_checks
from torch_memory_saver._cli.check import Check, Status

__all__ = ["CHECKS", "run_doctor"]

#: Each runs alone and needs neither a GPU nor PyTorch. They are shown in this order.
CHECKS: tuple[Check, ...] = (*sharing_checks.CHECKS,)


def run_doctor(*, as_json: bool, checks: Sequence[Check] = CHECKS) -> int:
    """Prints the result of each check. Returns the exit status: 1 if one has failed."""
    results = [check() for check in checks]
    if as_json:
        json.dump([result._asdict() for result in results], sys.stdout, indent=2)
        print()
    else:
        width = max(len(result.name) for result in results)
        for result in results:
            print(f"{result.status:<4}  {result.name:<{width}}  {result.found}")
            if result.advice:
                print(f"{'':<4}  {'':<{width}}  -> {result.advice}")
    return 1 if any(result.status == Status.FAIL for result in results) else 0
