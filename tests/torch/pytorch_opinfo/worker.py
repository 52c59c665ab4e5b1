"""Runs checks on the simulated GPU: one line of JSON for each, appended to a file.

It ends with the status RESTART after an error that ends a process's use of CUDA. The process that started it then continues
with the next unit, in a new one.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from pytorch_opinfo import composed, operators
from pytorch_opinfo.entries import Unit, choose_seeds, units
from pytorch_opinfo.running import RESTART, UNIT_SECONDS
from pytorch_opinfo.values import Different, NotOnCuda, is_missing_in_pytorch, is_sticky

RUNS = {
    "operator": operators.check,
    "foreach": operators.check,
    "module": composed.check_module,
    "optimizer": composed.check_optimizer,
}


def run(unit: Unit) -> dict[str, Any]:
    """Runs a unit. Returns its outcome, with the cause of a difference and notes."""
    notes: list[str] = []
    if unit.kind in ("operator", "foreach") and not unit.info.supports_dtype(unit.dtype, "cuda"):
        return {"outcome": "not on CUDA"}
    try:
        done = RUNS[unit.kind](unit, notes)
    except Different as difference:
        return {"outcome": "differs", "cause": _first_line(difference), "notes": notes}
    except Exception as error:
        if is_missing_in_pytorch(error) or isinstance(error, NotOnCuda):
            return {"outcome": "not on CUDA"}
        cause = f"{type(error).__name__}: {_first_line(error)}"
        return {"outcome": "raises", "cause": cause, "notes": notes, "sticky": is_sticky(error)}
    return {"outcome": "equal" if done else "nothing to check", "notes": notes}


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:4])[:300]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=int, default=1)
    parser.add_argument("--of", type=int, default=1)
    parser.add_argument("--lane", type=int, default=0)
    parser.add_argument("--lanes", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", default="")
    parser.add_argument("--also", nargs="*", default=())
    parser.add_argument("--output", required=True)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    choose_seeds()
    chosen = units(options.share, options.of, options.only, tuple(options.also))
    names = sorted({each.name for each in chosen})
    lanes = {name: place % options.lanes for place, name in enumerate(names)}
    chosen = [each for each in chosen if lanes[each.name] == options.lane]
    with open(options.output, "a") as output:
        for place in range(options.first, len(chosen)):
            unit = chosen[place]
            about = {"kind": unit.kind, "entry": unit.name, "dtype": str(unit.dtype)[len("torch.") :], "check": unit.check}
            print(json.dumps({"begins": place, **about}), file=output, flush=True)
            signal.alarm(UNIT_SECONDS)
            outcome = run(unit)
            signal.alarm(0)
            print(json.dumps({"place": place, **about, **outcome}), file=output, flush=True)
            if outcome.get("sticky"):
                os._exit(RESTART)  # the device's message is on stderr
    # Skips the shutdown of CUDA, which other tests cover.
    os._exit(0)


if __name__ == "__main__":
    main()
