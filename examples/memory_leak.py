"""A hunt for a leak in one of several processes, using only commands.

An inference engine of three processes (tokenizer, scheduler, detokenizer) answers requests with images. A trainer lives in
the tokenizer's process. Memory grows from step to step. This program starts the engine, never imports torch_memory_saver,
and first looks at the wrong process: the scheduler, which has most of the memory.

1. The engine runs with TMS_DEBUG=history,snapshots: each process writes a snapshot in each step.
2. `compare` finds no leak in the scheduler's snapshots: only PyTorch's cache grows there.
3. `compare` finds in all processes that the tokenizer keeps the pixels of answered images. The optimizer's blocks, which are
   allocated again in each step, rise above these pixels.
4. The engine runs again, with a fix of the tokenizer and with TMS_RELEASE_CACHED=pause: nothing grows.

    python examples/memory_leak.py --out hunt
    python examples/memory_leak.py --requests 500 --batch-mib 8192 --optimizer-mib 512    # larger
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
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from _check import MIB, check
from _image_bursts import at_once, segment_bytes, side_of
from _leak_pipeline import IMAGES, STEPS, Load, Results, recording, run

#: Bytes of the pixels of one image, which the tokenizer keeps: 3 x 224 x 224 numbers of 32 bits.
LEAKED = 3 * 224 * 224 * 4
OPTIMIZER_BLOCKS = 4
#: The folders of the snapshots, and the file of the page.
BEFORE, AFTER, PAGE = "before", "after", "leak.html"
#: The output of the command `compare` has lines of this width.
WIDTH = "88"


def compare(folder: Path, *arguments: str, show: bool = True) -> tuple[int, str]:
    """Run the command `compare` in a folder. Returns its exit status and its output. Arguments may be patterns."""
    if show:
        print(f"\n$ python -m torch_memory_saver compare {' '.join(arguments)}", flush=True)
    files = [name for text in arguments for name in _matching(folder, text)]
    command = [sys.executable, "-m", "torch_memory_saver", "compare", *files]
    environment = os.environ | {"COLUMNS": WIDTH}
    done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if not done.stdout:
        raise SystemExit(f"FAILED: the command compare ended with status {done.returncode}")
    if show:
        print(textwrap.indent(done.stdout, "  "), f"  exit status {done.returncode}", sep="", flush=True)
    return done.returncode, done.stdout


def _matching(folder: Path, text: str) -> list[str]:
    if "*" not in text:
        return [text]
    return sorted(str(path.relative_to(folder)) for path in folder.glob(text))


def findings(folder: Path, *arguments: str) -> dict[str, Any]:
    """Return the results of the command `compare` as values."""
    found: dict[str, Any] = json.loads(compare(folder, *arguments, "--json", show=False)[1])
    return found


def changes(values: list[int]) -> list[int]:
    return [after - before for before, after in pairwise(values)]


def innermost(stack: dict[str, Any]) -> tuple[str, str]:
    """Return the file and the function of the innermost frame of a call stack."""
    frame = stack["frames"][0]
    return Path(frame["filename"]).name, frame["name"].rpartition(".")[-1]


def watch_the_scheduler(folder: Path, before: Results, load: Load) -> None:
    print("\nMost memory grows in the scheduler. Is it there?")
    scheduler = before.memory["scheduler"]
    planned = [_cached(load, step) for step in range(1, STEPS)]
    grown = changes([counters.reserved for counters in scheduler])
    check(grown == planned, f"the scheduler's reserved memory grows by {in_mib(planned)} MiB, its bursts")
    check(len({counters.allocated for counters in scheduler}) == 1, "what is allocated there does not grow")
    status, _ = compare(folder, f"{BEFORE}/snapshots/step-*/*scheduler.pickle", "--fail-on-leak")
    found = findings(folder, f"{BEFORE}/snapshots/step-*/*scheduler.pickle")
    check(status == 0 and not found["leaks"], "the scheduler does not leak")
    (fragmentation,) = found["fragmentation"]
    check(fragmentation["unused_grows"], "reserved minus allocated grew in every interval")
    cached = changes(fragmentation["usage"]["cached"])
    check(cached == planned, "it is the cached memory that grew: a release gives it back")


def _cached(load: Load, step: int) -> int:
    """Return the bytes that PyTorch caches after a step's images."""
    side = side_of(step)
    return min(load.images_of_step, at_once(load.batch_mib * MIB, side)) * segment_bytes(side)


def find_the_leak(folder: Path, load: Load) -> None:
    print("\nAll processes:")
    status, _ = compare(folder, f"{BEFORE}/snapshots", "-o", PAGE, "--fail-on-leak", "--top", "3")
    found = findings(folder, f"{BEFORE}/snapshots")
    check(status == 1, "the command fails because of a leak")
    (leak, *others) = found["leaks"]
    check(
        leak["process"]["role"] == "tokenizer" and found["processes"][0]["process"] == leak["process"], "it is the tokenizer"
    )
    check(
        innermost(leak["stack"]) == ("_leak_tokenizer.py", "preprocess") and not others,
        "its first and only leak: preprocess",
    )
    planted = load.images_of_step * LEAKED
    every = changes(leak["bytes"])
    check(set(every) == {planted}, f"it grows by {planted} bytes in each step, {load.images_of_step} images of {LEAKED}")
    drift = found["drifts"][0]
    check(
        (innermost(drift["stack"])[0], drift["bytes"], drift["blocks"])
        == ("_leak_trainer.py", load.optimizer_mib * MIB, OPTIMIZER_BLOCKS),
        f"{OPTIMIZER_BLOCKS} blocks of {load.optimizer_mib} MiB of the optimizer rise",
    )
    check(changes(drift["positions"]) == every, "they rise by what leaked")
    (below,) = drift["below"]
    check(
        below["stack"] == leak["stack"] and below["growth"] == leak["growth"], "below them preprocess grew, and nothing else"
    )
    check("preprocess" in (folder / PAGE).read_text(encoding="utf-8"), f"{PAGE} shows it")


def see_that_it_is_cured(folder: Path, before: Results, after: Results) -> None:
    status, _ = compare(folder, f"{AFTER}/snapshots", "--fail-on-leak", "--top", "3")
    found = findings(folder, f"{AFTER}/snapshots")
    check(status == 0 and not found["leaks"] and not found["fragmentation"], "the command finds nothing")
    for role, counters in after.memory.items():
        check(len(set(counters)) == 1, f"{role}: {in_mib([counters[0].reserved])} MiB reserved after every step")
    released = before.memory["scheduler"][-1].reserved - after.memory["scheduler"][-1].reserved
    check(released > 0, f"the scheduler gave {in_mib([released])} MiB back")
    check(before.answers == after.answers and len(after.answers) > 0, f"all {len(after.answers)} answers are the same")


def in_mib(sizes: list[int]) -> str:
    return ", ".join(f"{size / MIB:.0f}" for size in sizes)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=8, help="requests of each step (default %(default)s)")
    parser.add_argument("--batch-mib", type=int, default=288, help="images in the scheduler (default %(default)s)")
    parser.add_argument("--optimizer-mib", type=int, default=32, help="each of its 4 blocks (default %(default)s)")
    parser.add_argument("--out", metavar="DIR", type=Path, help="keep the snapshots and the page there")
    options = parser.parse_args()
    if options.out and any((options.out / name).exists() for name in (BEFORE, AFTER)):
        parser.error(f"{options.out} has snapshots of another run")
    return options


@contextlib.contextmanager
def folder_of(options: argparse.Namespace) -> Iterator[Path]:
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        yield options.out.resolve()
    else:
        with tempfile.TemporaryDirectory() as name:
            yield Path(name)


def main() -> None:
    options = parse()
    load = Load(options.requests, options.batch_mib, options.optimizer_mib)
    with folder_of(options) as folder:
        print(f"The engine: {STEPS} steps of {load.requests} requests with {IMAGES} images.", flush=True)
        before = run(load, recording(folder / BEFORE))
        watch_the_scheduler(folder, before, load)
        find_the_leak(folder, load)
        print("\nThe engine again, with the fix, and with TMS_RELEASE_CACHED=pause.", flush=True)
        after = run(load, recording(folder / AFTER) | {"TMS_RELEASE_CACHED": "pause"}, drop_answered=True)
        see_that_it_is_cured(folder, before, after)


if __name__ == "__main__":
    main()
