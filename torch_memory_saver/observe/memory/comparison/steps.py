"""The choice of snapshots that show a process at the same point of each step of its program.

A snapshot before each pause is a moment, and a step may have several pauses. What is in flight differs from one to the next,
so only snapshots of one *point* are compared. The point of a snapshot follows from the pattern of the names: the tags of the
pause before which it was taken, or the name that the program gave to it. If the names repeat with a period, the point is the
place in the period, so that two pauses of the same tags in one step are two points. Otherwise, as in a step that sometimes
has a further pause, the point is the name.

The chosen point is the one with the least live memory, of those that occur throughout the recording and at least half as
often as the most frequent one. If there is none, all snapshots are compared.

The module owns this choice. It reads the names and the live bytes of snapshots.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import pairwise

from ..model import Snapshot
from .processes import Series

__all__ = ["at_one_point", "point_name"]

#: A point occurs throughout a recording if it is never absent for more than this share of the snapshots. Then it occurs at
#: least three times.
_MAX_ABSENCE = 1 / 3


def at_one_point(series: Series) -> Series:
    """Return the snapshots of one point of a step, or all if the series has no pattern."""
    places: dict[Hashable, list[int]] = {}
    for place, point in enumerate(_points([(snapshot.tag, snapshot.pausing) for snapshot in series.snapshots])):
        places.setdefault(point, []).append(place)
    most = max(map(len, places.values()))
    length = len(series.snapshots)
    candidates = [found for found in places.values() if 2 * len(found) >= most and _occurs_throughout(found, length)]
    if len(places) == 1 or not candidates:
        return series
    chosen = min(candidates, key=lambda found: sum(_live_bytes(series.snapshots[place]) for place in found) / len(found))
    return Series(
        series.process,
        tuple(series.moments[place] for place in chosen),
        tuple(series.snapshots[place] for place in chosen),
    )


def point_name(snapshot: Snapshot) -> str:
    """Return a phrase for the point of a step at which a snapshot was taken."""
    if snapshot.pausing is None:
        return f'with the tag "{snapshot.tag}"' if snapshot.tag else "that the program took"
    return f"before a pause of {', '.join(snapshot.pausing) or 'everything'}"


def _points(names: Sequence[Hashable]) -> Sequence[Hashable]:
    """Return the point of each snapshot, given the names of the snapshots in order of time."""
    for period in range(1, int(len(names) * _MAX_ABSENCE) + 1):
        if all(before == after for before, after in zip(names, names[period:], strict=False)):
            return [place % period for place in range(len(names))]
    return names


def _occurs_throughout(places: Sequence[int], length: int) -> bool:
    absences = [after - before for before, after in pairwise([-1, *places, length])]
    return max(absences) <= length * _MAX_ABSENCE


def _live_bytes(snapshot: Snapshot) -> int:
    return sum(segment.live_bytes for segment in snapshot.segments)
