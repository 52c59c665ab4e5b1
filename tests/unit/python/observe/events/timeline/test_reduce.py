"""Guards that a large timeline is made smaller without changing the highest levels, their times, or what comes after."""

from __future__ import annotations

import random

from torch_memory_saver.observe.events.timeline.html.document import CELLS, reduced
from torch_memory_saver.observe.events.timeline.merge import Row

STACKS = [[0, 1, 2], [0, 3], [4]]
BANDS = 5
END = 10**9


def rows(count: int, seed: int, end: int = END) -> list[Row]:
    """Random changes, some of them several at a time."""
    chance = random.Random(seed)
    times = sorted(chance.randrange(end) for _ in range(count // 2))
    return [(times[number // 2], chance.randrange(BANDS), chance.randrange(1000)) for number in range(count)]


def cell_peaks(changes: list[Row], end: int) -> list[list[int]]:
    """The highest value of each stack in each cell of time. A level holds until the next change."""
    levels = [0] * BANDS
    peaks: list[list[int]] = [[0] * CELLS for _ in STACKS]
    row = 0
    for cell in range(CELLS):
        for stack, bands in enumerate(STACKS):
            peaks[stack][cell] = sum(levels[band] for band in bands)
        while row < len(changes) and changes[row][0] * CELLS // end <= cell:
            time_ns = changes[row][0]
            while row < len(changes) and changes[row][0] == time_ns:
                levels[changes[row][1]] = changes[row][2]
                row += 1
            for stack, bands in enumerate(STACKS):
                peaks[stack][cell] = max(peaks[stack][cell], sum(levels[band] for band in bands))
    return peaks


def last_levels(changes: list[Row]) -> dict[int, int]:
    return {band: size for _, band, size in changes}


def test_a_small_one_stays_as_it_is() -> None:
    small = rows(100, 1)
    assert reduced(small, BANDS, STACKS, 0, END, 100) == small


def test_the_highest_levels_stay_where_they_are() -> None:
    for seed in range(3):
        large = rows(60_000, seed)
        fewer = reduced(large, BANDS, STACKS, 0, END, 10_000)
        assert len(fewer) < 35_000
        assert cell_peaks(fewer, END) == cell_peaks(large, END)
        assert last_levels(fewer) == last_levels(large)
        assert [time_ns for time_ns, _, _ in fewer] == sorted(time_ns for time_ns, _, _ in fewer)


def test_a_burst_keeps_its_highest_level() -> None:
    """All of it in one cell of time, where groups are by number."""
    large = rows(40_000, 9, end=1000)
    fewer = reduced(large, BANDS, STACKS, 0, END, 2_000)
    assert len(fewer) < 4_000
    assert cell_peaks(fewer, END) == cell_peaks(large, END)


def test_changes_of_one_time_are_one_moment() -> None:
    """Memory that moves between bands of a stack is never in both."""
    moving: list[Row] = []
    for at in range(1, 20_000):
        up, down = (0, 1) if at % 2 else (1, 0)
        moving += [(at, up, at), (at, down, 0)]
    # One stack, and one cell of time: the groups are of an odd number of rows.
    fewer = reduced(moving, 2, [[0, 1]], 0, END, 1_000)
    assert len(fewer) < 2_000
    levels = [0, 0]
    for number, (time_ns, band, size) in enumerate(fewer):
        levels[band] = size
        if number + 1 == len(fewer) or fewer[number + 1][0] != time_ns:
            assert sum(levels) == time_ns
