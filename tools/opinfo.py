"""Compares the simulated GPU with the CPU on PyTorch's own database of operators: python tools/opinfo.py [--share 1/10] ...

It must run under ``python -m torch_memory_saver simulate``, as ``make opinfo`` does. It prints how many entries are equal,
and the causes of the differences. The exit status is 1 if an entry differs that tests/torch/opinfo_differences.json does not
list.
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
        description="Compares the simulated GPU with the CPU on PyTorch's own database of operators."
    )
    parser.add_argument("--share", default="1/1", metavar="N/OF", help="check share N of OF of the entries (default 1/1)")
    parser.add_argument("--only", default="", metavar="ENTRY", help="check one entry, such as add or nn.Linear")
    parser.add_argument("--lanes", type=int, default=2, metavar="N", help="how many processes run at once (default 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcome of every check to this file")
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
        print(f"different, but not listed: {each}")
    for each in differences.no_longer(outcomes):
        print(f"listed, but equal now: {each}")
    return 1 if unlisted else 0


if __name__ == "__main__":
    sys.exit(main())
