"""What a 2 MiB allocation through the C core costs over the same driver calls (reserve, create, map, set access).

Both sides are loops in C (bare_driver.c), in one process, in turns; no Python and no torch in between. The frees are shown
too: the core's free waits for the device first, as cudaFree does, which the bare calls do not. The project's limit for the
allocation is 5 %.
"""

from __future__ import annotations

import ctypes

from common import MIB, Table, arguments, open_yardstick, paired_ratio, ratio, samples, succeeded

WARM_UP = 3


def main() -> None:
    parser = arguments(__doc__, repetitions=31)
    parser.add_argument("--count", type=int, default=500, help="allocations in one measurement (default %(default)s)")
    parser.add_argument("--mib", type=int, default=2, help="size of one, MiB (default %(default)s)")
    options = parser.parse_args()
    library = open_yardstick()
    sides = {"bare": library.bare_allocate_and_free, "core": library.core_allocate_and_free}
    allocations: dict[str, list[float]] = {name: [] for name in sides}
    frees: dict[str, list[float]] = {name: [] for name in sides}
    for repetition in range(WARM_UP + options.repetitions):
        for name in sorted(sides, reverse=repetition % 2 == 1):
            allocated, freed = ctypes.c_uint64(), ctypes.c_uint64()
            result = sides[name](options.count, options.mib * MIB, ctypes.byref(allocated), ctypes.byref(freed))
            succeeded(result, f"the {name} loop")
            if repetition >= WARM_UP:
                allocations[name].append(allocated.value / options.count / 1e3)
                frees[name].append(freed.value / options.count / 1e3)
    table = Table(
        f"{options.mib} MiB allocations, {options.count} in a row",
        ("what", "us", "spread", "ratio", "ratio of each repetition"),
    )
    for operation, measured in (("allocate", allocations), ("free", frees)):
        bare = samples(measured["bare"])
        for name in sides:
            mine = samples(measured[name])
            paired = paired_ratio(mine, bare)
            table.add(
                (
                    f"{operation}, {name}",
                    f"{mine.median:.2f}",
                    mine.spread,
                    f"{ratio(mine, bare):.3f}",
                    f"{paired.median:.3f} ({paired.spread})",
                ),
                operation=operation,
                side=name,
                microseconds=mine,
                ratio=ratio(mine, bare),
                paired_ratio=paired,
            )
    table.show(options.json)


if __name__ == "__main__":
    main()
