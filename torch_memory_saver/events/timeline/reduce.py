"""Fewer rows for the same picture.

A pure function. The rows of a GPU are cut into groups, by time and by number. Of each group the moments stay at which a
stack is highest, and its last one. So the highest value of a stack in each cell of time stays, at its true time, and so
does the level after each group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch_memory_saver.events.timeline.merge import Row

__all__ = ["CELLS", "reduced"]

#: The cells of time: at least one for each column of pixels of a picture that shows all of it.
CELLS = 2048
#: How many bands change from one moment to the next that stays, as an estimate.
_ROWS_OF_A_MOMENT = 3


def reduced(
    rows: Sequence[Row], bands: int, stacks: Sequence[Sequence[int]], begin_ns: int, end_ns: int, most: int
) -> list[Row]:
    """At most about `most` of the rows, or all of them if they are not more.

    Args:
        rows: In the order of time.
        bands: How many bands there are.
        stacks: The numbers of the bands that are drawn on top of each other.
        begin_ns: Of the picture.
        end_ns: Of the picture.
        most: Rows that should stay. Each cell of time keeps a moment for each stack even if these are more.
    """
    if len(rows) <= most:
        return list(rows)
    stacks_of: list[list[int]] = [[] for _ in range(bands)]
    for number, stack in enumerate(stacks):
        for band in stack:
            stacks_of[band].append(number)
    in_group = max(len(rows) * (len(stacks) + 1) * _ROWS_OF_A_MOMENT // max(most, 1), 1)
    levels, totals, shown = [0] * bands, [0] * len(stacks), [0] * bands
    kept: list[Row] = []
    for start, stop in _groups(rows, begin_ns, max(end_ns - begin_ns, 1), in_group):
        at = start
        for moment in _moments(rows, start, stop, levels, totals, stacks_of):
            changed = {band: size for _, band, size in rows[at : moment + 1]}
            for band, size in changed.items():
                if shown[band] != size:
                    shown[band] = size
                    kept.append((rows[moment][0], band, size))
            at = moment + 1
    return kept


def _groups(rows: Sequence[Row], begin_ns: int, length_ns: int, most: int) -> Iterator[tuple[int, int]]:
    """The first row of each group and the one after its last. Rows of one time are not separated."""
    start = 0
    while start < len(rows):
        cell = (rows[start][0] - begin_ns) * CELLS // length_ns
        stop = start + 1
        while stop < len(rows) and (
            rows[stop][0] == rows[stop - 1][0]
            or (stop - start < most and (rows[stop][0] - begin_ns) * CELLS // length_ns == cell)
        ):
            stop += 1
        yield start, stop
        start = stop


def _moments(
    rows: Sequence[Row], start: int, stop: int, levels: list[int], totals: list[int], stacks_of: Sequence[Sequence[int]]
) -> list[int]:
    """The last rows of the moments at which a stack is highest in the group, and of its last moment. Carries `levels` and
    `totals` on."""
    best: dict[int, tuple[int, int]] = {}
    for number in range(start, stop):
        time_ns, band, size = rows[number]
        for stack in stacks_of[band]:
            totals[stack] += size - levels[band]
        levels[band] = size
        if number + 1 < stop and rows[number + 1][0] == time_ns:
            continue
        for stack, total in enumerate(totals):
            if stack not in best or total > best[stack][0]:
                best[stack] = (total, number)
    return sorted({number for _, number in best.values()} | {stop - 1})
