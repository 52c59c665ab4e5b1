"""A comparison of ordinary and expandable segments of PyTorch's allocator, under bursts of images that grow.

Each step's images are larger than those of the step before, and need about as much memory in all. An ordinary segment
holds one image, and no cached segment is large enough for an image of the next step, so reserved memory grows by a burst
in each step. A release returns the segments, except for those in which a small block is still in use. An expandable
segment is one range that has room for images of every size, and a release returns each free piece of 20 MiB. A third run
manages everything (``run --manage``): after a pause and a resume, a release returns as much.

    python examples/fragmentation.py
    python examples/fragmentation.py --burst-mib 8192 --out snapshots    # larger
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from _check import MIB, check
from _fragmentation_sizes import FIRST_SIDE, PREFIX_BYTES, PREFIXES, STRIDE
from _image_bursts import at_once, image_bytes, segment_bytes, side_of

#: The names of the variable. Newer releases of PyTorch read the second one, and older releases only the first.
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
#: The output of the command `compare` has lines of this width.
WIDTH = "88"
#: PyTorch maps an expandable segment of large blocks in pieces of this size.
PIECE = 20 * MIB
PROGRAM = Path(__file__).resolve().parent / "_fragmentation_program.py"
MIN, MAX = 3, 10


@dataclass(frozen=True)
class Outcome:
    """The outcome of one run. Sizes are in bytes.

    Attributes:
        expandable: Whether PyTorch made expandable segments.
        steps: PyTorch's counters "allocated" and "reserved" after each step.
        released: These counters after the release at the end.
        usage: Figures of `compare`: "cached", "held" and others, with a value for each step.
        fragmentation: The finding of `compare` about fragmentation, if there is one.
        text: The output of `compare`.
    """

    expandable: bool
    steps: list[dict[str, int]]
    released: dict[str, int]
    usage: dict[str, list[int]]
    fragmentation: dict[str, Any] | None
    text: str

    def values(self, name: str) -> list[int]:
        return [counters[name] for counters in self.steps]


def run(folder: Path, expandable: bool, options: argparse.Namespace, managed: bool = False) -> Outcome:
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environment |= dict.fromkeys(VARIABLES, "expandable_segments:True") if expandable else {}
    environment["COLUMNS"] = WIDTH
    command = [str(PROGRAM), str(folder), "--steps", str(options.steps), "--burst-mib", str(options.burst_mib)]
    if managed:
        command = ["-m", "torch_memory_saver", "run", "--manage", "--", sys.executable, *command, "--pause"]
    printed = json.loads(_output(command, environment))
    compare = ["-m", "torch_memory_saver", "compare", str(folder)]
    found = json.loads(_output([*compare, "--json"], environment))
    return Outcome(
        expandable=printed["expandable"],
        steps=printed["steps"],
        released=printed["released"],
        usage=found["processes"][0],
        fragmentation=next(iter(found["fragmentation"]), None),
        text=_output(compare, environment),
    )


def _output(arguments: Sequence[str], environment: dict[str, str]) -> str:
    done = subprocess.run([sys.executable, *arguments], env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"FAILED: {' '.join(arguments)} ended with status {done.returncode}")
    return done.stdout


def table(ordinary: Outcome, expandable: Outcome) -> str:
    """Return a table in MiB after each step and after the release, with the figures of `compare` for the last step."""
    lines = [
        "  MiB          ordinary segments       expandable segments",
        "            allocated  reserved      allocated  reserved",
    ]

    def row(name: str, values: Sequence[int]) -> str:
        first, second, third, fourth = (f"{value / MIB:.1f}" for value in values)
        return f"  {name:<9} {first:>9} {second:>9}      {third:>9} {fourth:>9}"

    for number, both in enumerate(zip(ordinary.steps, expandable.steps, strict=True), 1):
        lines.append(row(f"step {number}", [counters[name] for counters in both for name in ("allocated", "reserved")]))
    both = ordinary.released, expandable.released
    lines.append(row("released", [counters[name] for counters in both for name in ("allocated", "reserved")]))
    for name in ("cached", "held"):
        sizes = [f"{outcome.usage[name][-1] / MIB:.1f}" for outcome in (ordinary, expandable)]
        lines.append(f"  {name:<9} {'':>9} {sizes[0]:>9}      {'':>9} {sizes[1]:>9}")
    return "\n".join(lines)


def changes(values: list[int]) -> list[int]:
    return [after - before for before, after in pairwise(values)]


def check_ordinary(outcome: Outcome, options: argparse.Namespace) -> None:
    sides = [side_of(step, FIRST_SIDE, STRIDE) for step in range(options.steps)]
    bursts = [at_once(options.burst_mib * MIB, side) * segment_bytes(side) for side in sides]
    grown = ", ".join(f"{size / MIB:.0f}" for size in bursts[1:])
    check(changes(outcome.values("reserved")) == bursts[1:], f"without: reserved memory grows by {grown} MiB, all images")
    found = outcome.fragmentation
    check(not outcome.expandable and found is not None and found["unused_grows"], "`compare` reports the growth")
    assert found is not None
    holder = found["holders"][0]
    place = holder["stack"]["frames"][0]["name"]
    check(place.endswith("remember") and holder["blocks"] == PREFIXES, f"the {PREFIXES} prefixes hold segments")
    held = PREFIXES * segment_bytes(sides[0]) - holder["bytes"]
    check(outcome.usage["held"][-1] == held, f"they hold {held / MIB:.1f} MiB, the rest of {PREFIXES} segments")


def check_expandable(outcome: Outcome, ordinary: Outcome, options: argparse.Namespace) -> None:
    found = outcome.fragmentation
    check(outcome.expandable and (found is None or not found["unused_grows"]), "with: `compare` reports no growth")
    gaps = PREFIXES * (image_bytes(FIRST_SIDE) + PREFIX_BYTES)
    most = options.burst_mib * MIB + gaps + 2 * PIECE
    check(
        outcome.values("reserved")[-1] <= most,
        f"reserved memory has room for one burst beside the gaps: {most / MIB:.0f} MiB",
    )
    held, before = outcome.usage["held"][-1], ordinary.usage["held"][-1]
    check(held < before, f"the prefixes hold {held / MIB:.1f} MiB instead of {before / MIB:.1f}")
    check(outcome.released["reserved"] < ordinary.released["reserved"], "after the release less is reserved than without")


def check_managed(outcome: Outcome, expandable: Outcome) -> None:
    left = outcome.released["reserved"] / MIB
    check(outcome.steps == expandable.steps, "managed: PyTorch's counters are the same after each step")
    check(outcome.released == expandable.released, f"after a pause and a resume the release leaves {left:.1f} MiB, too")


def check_release(name: str, outcome: Outcome) -> None:
    freed = outcome.values("reserved")[-1] - outcome.released["reserved"]
    cached = outcome.usage["cached"][-1]
    check(freed == cached, f"{name}: the release gives back the {cached / MIB:.1f} MiB that `compare` calls cached")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help=f"from {MIN} to {MAX} (default %(default)s)")
    parser.add_argument("--burst-mib", type=int, default=512, help="the images of a step (default %(default)s)")
    parser.add_argument("--out", metavar="DIR", type=Path, help="keep the snapshots there (default: a temporary folder)")
    options = parser.parse_args()
    if not MIN <= options.steps <= MAX:
        parser.error(f"--steps must be from {MIN} to {MAX}")
    if options.burst_mib * MIB < PREFIXES * image_bytes(FIRST_SIDE):
        parser.error(f"--burst-mib must have room for {PREFIXES} images of {image_bytes(FIRST_SIDE) / MIB:.1f} MiB")
    return options


@contextlib.contextmanager
def folder_of(options: argparse.Namespace) -> Iterator[Path]:
    if options.out:
        yield options.out
        return
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def main() -> None:
    options = parse()
    with folder_of(options) as folder:
        ordinary = run(folder / "ordinary", False, options)
        expandable = run(folder / "expandable", True, options)
        managed = run(folder / "managed", True, options, managed=True)
    print(table(ordinary, expandable))
    for name, outcome in (("ordinary segments", ordinary), ("expandable segments", expandable)):
        print(f"\n`compare`, {name}:\n{textwrap.indent(outcome.text.rstrip(), '  ')}")
    print()
    check_ordinary(ordinary, options)
    check_expandable(expandable, ordinary, options)
    check_release("without", ordinary)
    check_release("with", expandable)
    check_managed(managed, expandable)


if __name__ == "__main__":
    main()
