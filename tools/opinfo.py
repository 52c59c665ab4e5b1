"""PyTorch's own database of operators on the simulated GPU, compared with the CPU: python tools/opinfo.py [--share 1/10] ...

Runs under ``python -m torch_memory_saver simulate``; ``make opinfo`` starts it so. Prints how many entries are equal, and
the causes of the others. The exit status is 1 if one is different that tests/torch/opinfo_differences.json does not list.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests" / "torch"
sys.path.insert(0, str(TESTS))

from pytorch_opinfo import differences, report, running  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(
        description="PyTorch's database of operators on the simulated GPU, compared with the CPU."
    )
    parser.add_argument("--share", default="1/1", metavar="N/OF", help="one of OF shares of the entries")
    parser.add_argument("--only", default="", metavar="ENTRY", help="one entry, such as add or nn.Linear")
    parser.add_argument("--lanes", type=int, default=2, metavar="N", help="how many processes work side by side (2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes the outcome of every check")
    options = parser.parse_args()
    share, of = map(int, options.share.split("/"))
    begin = time.monotonic()
    outcomes = running.run(share, of, options.lanes, options.only)
    if options.json is not None:
        options.json.write_text(json.dumps(outcomes, indent=1) + "\n")
    print(report.causes(outcomes))
    print(f"\n{report.table(outcomes)}; {time.monotonic() - begin:.0f} s")
    unlisted = differences.unlisted(outcomes)
    for each in unlisted:
        print(f"not listed: {each}")
    for each in differences.no_longer(outcomes):
        print(f"listed, but equal now: {each}")
    return 1 if unlisted else 0


if __name__ == "__main__":
    sys.exit(main())
