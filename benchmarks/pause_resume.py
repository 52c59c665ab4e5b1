"""What pause and resume cost beside the bare driver calls for the same handles: 128 x 512 MiB and 2000 x 16 MiB.

Four ways in one process and one run, each over its own address ranges:

  bare           the driver calls in a C loop: create + map + set access; unmap + release (bare_driver.c)
  core           the native core, through torch_memory_saver._core, which waits for the device itself
  interruptible  the same as on the main thread: another thread waits for the device, and signals are asked for meanwhile
  public         torch_memory_saver.resume and .pause, on the main thread and so interruptible: what programs call

The driver clears memory that was released a moment ago before it hands it out again, which can cost a resume ten times its
own time. So that this hits all of them alike, they take turns in every repetition, each resumed and paused while the others
are paused, in every order in turn; each therefore gets the memory that another one has just released. The ratio is that of
the medians; the ratio of each repetition is given with its spread. The project's limit is 1.15.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import torch
from common import MIB, Samples, Table, arguments, open_yardstick, paired_ratio, ratio, samples, succeeded

from torch_memory_saver import _core, torch_memory_saver

SHAPES = ((128, 512 * MIB), (2000, 16 * MIB))
WARM_UP = 2


def allocate(count: int, size: int, tag: str) -> list[int]:
    depth = _core.region_push(tag, _core.BACKUP_NONE, True)
    try:
        return [_core.allocate(size, 0) for _ in range(count)]
    finally:
        _core.region_pop(depth)


def timed(work: Callable[[], object]) -> float:
    """Milliseconds."""
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e3


def measure(count: int, size: int, repetitions: int) -> dict[str, tuple[Samples, Samples]]:
    """For each side: milliseconds of its resumes and of its pauses."""
    library = open_yardstick()
    succeeded(library.bare_make(count, size), "reserving addresses")
    core_tag, interruptible_tag, public_tag = (f"{side} {count}" for side in ("core", "interruptible", "public"))
    owned = []
    for tag in (core_tag, interruptible_tag, public_tag):
        owned += allocate(count, size, tag)
        _core.pause((tag,), None)
    sides: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "bare": (
            lambda: succeeded(library.bare_resume(), "the bare resume"),
            lambda: succeeded(library.bare_pause(), "the bare pause"),
        ),
        "core": (lambda: _core.resume((core_tag,), None), lambda: _core.pause((core_tag,), None)),
        "interruptible": (
            lambda: _core.resume((interruptible_tag,), None, True),
            lambda: _core.pause((interruptible_tag,), None, True),
        ),
        "public": (lambda: torch_memory_saver.resume(public_tag), lambda: torch_memory_saver.pause(public_tag)),
    }
    names = list(sides)
    resumes: dict[str, list[float]] = {name: [] for name in names}
    pauses: dict[str, list[float]] = {name: [] for name in names}
    orders = itertools.cycle(itertools.permutations(names))
    for repetition, order in zip(range(WARM_UP + repetitions), orders, strict=False):
        for name in order:
            resume, pause = sides[name]
            resumed, paused = timed(resume), timed(pause)
            if repetition >= WARM_UP:
                resumes[name].append(resumed)
                pauses[name].append(paused)
    succeeded(library.bare_unmake(), "freeing addresses")
    for address in owned:
        _core.free(address)
    return {name: (samples(resumes[name]), samples(pauses[name])) for name in names}


def main() -> None:
    parser = arguments(__doc__, repetitions=24)
    parser.add_argument("--scale", type=float, default=1.0, help="fraction of the number of handles (default %(default)s)")
    options = parser.parse_args()
    torch.ones(1, device="cuda")  # torch's allocator is in use, as it is wherever the public functions are called
    table = Table(
        "pause and resume, contents dropped",
        ("what", "ms", "spread", "ratio", "ratio of each repetition"),
        notes="Ratio: to the bare driver calls, of medians; then median and spread over the repetitions.",
    )
    for count, size in SHAPES:
        count = max(1, int(count * options.scale))
        results = measure(count, size, options.repetitions)
        for index, operation in ((1, "pause"), (0, "resume")):
            bare = results["bare"][index]
            for name, result in results.items():
                mine = result[index]
                paired = paired_ratio(mine, bare)
                table.add(
                    (
                        f"{operation} {count} x {size // MIB} MiB, {name}",
                        f"{mine.median:.2f}",
                        mine.spread,
                        f"{ratio(mine, bare):.3f}",
                        f"{paired.median:.3f} ({paired.spread})",
                    ),
                    operation=operation,
                    count=count,
                    bytes=size,
                    side=name,
                    milliseconds=mine,
                    ratio=ratio(mine, bare),
                    paired_ratio=paired,
                )
    table.show(options.json)


if __name__ == "__main__":
    main()
