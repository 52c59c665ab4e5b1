"""Grouping of snapshots by process: from files and folders to one series for each process.

A *moment* is one step at which every process writes a snapshot: a folder, or files that carry the same step. Processes are
matched from moment to moment by role and rank. If a moment has several processes with the same role and rank, their pids
distinguish them, else their tags, else the names of their files.

The module owns the interpretation of the inputs of `compare`. It knows nothing about the comparison itself.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch_memory_saver.errors import InvalidArgumentError, rename_operation

from ..model import Snapshot
from ..snapshot_reader import load_snapshot

__all__ = ["Moment", "Process", "Series", "read_moments", "series_of"]

#: Suffix of the files of a moment.
_SUFFIX = ".pickle"


@dataclass(frozen=True)
class Process:
    """The identity of a process.

    A value that its snapshots do not report is "" or None.

    Attributes:
        role: The role of the process, such as "trainer".
        rank: The rank of the process.
        pid: The process id in its last snapshot.
        tag: The tag of its snapshots, where one process has several in a moment.
        file: The name of its files, where nothing else distinguishes it from others.
    """

    role: str = ""
    rank: int | None = None
    pid: int | None = None
    tag: str = ""
    file: str = ""

    def __str__(self) -> str:
        parts = [self.role or self.file or "process"]
        parts += [f"rank {self.rank}"] if self.rank is not None else []
        parts += [f"pid {self.pid}"] if self.pid is not None else []
        parts += [f'tag "{self.tag}"'] if self.tag else []
        return ", ".join(parts)


@dataclass(frozen=True)
class Moment:
    """The snapshots of all processes at one moment."""

    label: str
    snapshots: tuple[Snapshot, ...]


@dataclass(frozen=True)
class Series:
    """The snapshots of one process.

    Attributes:
        process: The process.
        moments: The numbers of the moments that have a snapshot of it, ascending.
        snapshots: One snapshot for each of these moments.
    """

    process: Process
    moments: tuple[int, ...]
    snapshots: tuple[Snapshot, ...]

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices of any of its snapshots."""
        return tuple(sorted({device for snapshot in self.snapshots for device in snapshot.devices}))


def _load(file: str | os.PathLike[str]) -> Snapshot:
    try:
        return load_snapshot(file)
    except InvalidArgumentError as error:
        rename_operation(error, "compare")
        raise


def read_moments(inputs: Sequence[str | os.PathLike[str] | Snapshot]) -> tuple[tuple[Moment, ...], tuple[str, ...]]:
    """Return the moments that the inputs name, in their order, and notes about the runs that are not among them.

    A folder is a moment, or contains folders that are moments: it stands for those of its newest run. A file is a moment of
    its own, unless it has the same step as a file of another process.

    Raises:
        InvalidArgumentError: There is no input, a folder has no snapshot, or a file is not one.
    """
    if not inputs:
        raise InvalidArgumentError("compare: there is no snapshot: name files, or folders of moments.", operation="compare")
    moments: list[tuple[str, list[Snapshot]]] = []
    files: list[Snapshot] = []
    by_step: dict[int, list[Snapshot]] = {}
    notes: list[str] = []
    for given in inputs:
        if not isinstance(given, Snapshot) and os.path.isdir(given):
            found = [(folder.name, [_load(file) for file in _files(folder)]) for folder in _moments_of(Path(given))]
            newest = _newest_run(found)
            moments += newest
            if len(newest) < len(found):
                notes.append(
                    f"{os.fspath(given)} has several runs. Compared is the newest: {len(newest)} of {len(found)} moments. "
                    "To compare others, name their folders."
                )
            continue
        snapshot = given if isinstance(given, Snapshot) else _load(given)
        files.append(snapshot)
        joined = by_step.get(snapshot.step) if snapshot.step is not None else None
        if joined is not None and all(_who(other) != _who(snapshot) for other in joined):
            joined.append(snapshot)
            continue
        moments.append((_stem(snapshot.source), [snapshot]))
        if snapshot.step is not None:
            by_step[snapshot.step] = moments[-1][1]
    labelled = zip(_labels(moments), moments, strict=True)
    return tuple(Moment(label, tuple(snapshots)) for label, (_, snapshots) in labelled), tuple(notes)


def _newest_run(moments: list[tuple[str, list[Snapshot]]]) -> list[tuple[str, list[Snapshot]]]:
    """Return the moments without snapshots of earlier runs.

    A run begins with a process whose first snapshot is later than every snapshot of the processes before it. Its first
    moment may be the last one of the run before. If each process took one snapshot only, the processes are of one run.
    """
    taken: dict[tuple[object, ...], list[int]] = {}
    for _, snapshots in moments:
        for snapshot in snapshots:
            taken.setdefault(_who(snapshot), []).append(snapshot.time_ns)
    begin = ended = 0
    for times in sorted(taken.values(), key=min):
        if min(times) > ended:
            begin = min(times)
        ended = max(ended, *times)
    if all(len(times) == 1 for times in taken.values() if min(times) >= begin):
        return moments
    kept = [(name, [snapshot for snapshot in snapshots if snapshot.time_ns >= begin]) for name, snapshots in moments]
    return [(name, snapshots) for name, snapshots in kept if snapshots]


def _who(snapshot: Snapshot) -> tuple[object, ...]:
    return snapshot.role, snapshot.rank, snapshot.pid, snapshot.started_ns


def _stem(source: str) -> str:
    return Path(source).name.removesuffix(_SUFFIX) or "snapshot"


def _moments_of(folder: Path) -> list[Path]:
    """Return the folder itself, or the folders in it or in its folder ``snapshots`` that have snapshots."""
    if _files(folder):
        return [folder]
    found = sorted((path for path in folder.iterdir() if path.is_dir() and _files(path)), key=_natural)
    if not found and (folder / "snapshots").is_dir():  # the folder of `run --record`
        return _moments_of(folder / "snapshots")
    if not found:
        raise InvalidArgumentError(
            f"compare: {folder} has no file that ends with {_SUFFIX}, nor a folder with one: name a folder of "
            "`run --record snapshots`, which writes a snapshot before each pause, or of MemorySnapshotSampler, or files.",
            operation="compare",
        )
    return found


def _files(folder: Path) -> list[Path]:
    """Return the snapshots of a moment.

    Hidden files are still being written, so they are skipped.
    """
    return sorted(path for path in folder.glob(f"*{_SUFFIX}") if path.is_file() and not path.name.startswith("."))


def _natural(path: Path) -> list[tuple[int, str]]:
    """Return a key that orders step-9 before step-10."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", path.name)]


def _labels(moments: Sequence[tuple[str, list[Snapshot]]]) -> list[str]:
    """Return a short name for each moment: its number, else the name of its file or folder, made unique.

    The number counts steps of the program, or pauses if the snapshots were taken before pauses.
    """
    labels = []
    for name, snapshots in moments:
        steps = {snapshot.step for snapshot in snapshots}
        step = steps.pop() if len(steps) == 1 else None
        counted = "step" if all(snapshot.pausing is None for snapshot in snapshots) else "pause"
        labels.append(name if step is None else f"{counted} {step}")
    number = Counter(labels)
    seen: Counter[str] = Counter()
    for at, label in enumerate(labels):
        if number[label] > 1:
            seen[label] += 1
            tags = {snapshot.tag for snapshot in moments[at][1]} - {""}
            labels[at] = f"{label} {tags.pop()}" if len(tags) == 1 else f"{label} ({seen[label]})"
    return labels


def series_of(moments: Sequence[Moment]) -> tuple[Series, ...]:
    """Return one series for each process, in the order of their roles and ranks.

    Raises:
        InvalidArgumentError: A moment has two snapshots that nothing distinguishes.
    """
    groups = _split([(at, snapshot) for at, moment in enumerate(moments) for snapshot in moment.snapshots], _LEVELS)
    return tuple(sorted((_series(group, level) for group, level in groups), key=_order))


#: Properties that distinguish processes, in the order in which they are tried.
_LEVELS: tuple[Callable[[Snapshot], Hashable], ...] = (
    lambda snapshot: (snapshot.role, snapshot.rank),
    lambda snapshot: snapshot.pid,
    lambda snapshot: snapshot.tag,
    lambda snapshot: _stem(snapshot.source),
)

_Numbered = list[tuple[int, Snapshot]]


def _split(
    group: _Numbered, levels: Sequence[Callable[[Snapshot], Hashable]], level: int = 0
) -> Iterable[tuple[_Numbered, int]]:
    """Divide the group into parts that have at most one snapshot for each moment, by as few levels as possible."""
    if level > 0 and max(Counter(at for at, _ in group).values()) == 1:
        yield group, level
        return
    if level == len(levels):
        names = " and ".join(snapshot.source or "a snapshot without a file" for _, snapshot in group[:2])
        raise InvalidArgumentError(
            f"compare: {names} are of one process and one moment: give each process one snapshot a moment.",
            operation="compare",
        )
    parts: dict[Hashable, _Numbered] = {}
    for at, snapshot in group:
        parts.setdefault(levels[level](snapshot), []).append((at, snapshot))
    for part in parts.values():
        yield from _split(part, levels, level + 1)


def _series(group: _Numbered, level: int) -> Series:
    group = sorted(group, key=lambda numbered: numbered[0])
    last = group[-1][1]
    by_tag, by_file = level > 2, level > 3
    unnamed = not last.role and last.rank is None and last.pid is None
    process = Process(
        last.role, last.rank, last.pid, last.tag if by_tag else "", _stem(last.source) if by_file and unnamed else ""
    )
    return Series(process, tuple(at for at, _ in group), tuple(snapshot for _, snapshot in group))


def _order(series: Series) -> tuple[object, ...]:
    process = series.process
    return process.role, -1 if process.rank is None else process.rank, process.pid or 0, process.tag, process.file
