"""Compares two records of the same behaviours: a real GPU's and the simulation's.

    python tests/conformance/compare.py tests/conformance/driver/recorded_h100.json simulated.json

A known difference, with its reason, is in known_differences.json beside the record: a list of {"behaviour", "observation",
"reason"}. The behaviour is a shell pattern. The observation is the label of what was seen, or labels joined by " / ", and
covers what is below it too; "*" is the whole behaviour; a list stands for an entry for each. An entry without a difference
must go. What an entry with "varies": true covers depends on time, and is not compared. Entries for behaviours that need two
devices have "devices": 2.

Texts that differ and say the same are made equal on both sides by same_meaning.json beside the record: a list of {"pattern",
"meaning", "reason"}. What the regular expression matches is replaced by the meaning. A pattern that matches nothing must go.

Behaviours that were added to the table since the record was made are pending: they are listed with what the simulation does,
and are no differences until they are recorded.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KNOWN_DIFFERENCES = "known_differences.json"
SAME_MEANING = "same_meaning.json"

#: Stands for an observation that one of the two does not have.
ABSENT = "(not observed)"


@dataclass(frozen=True)
class Difference:
    behaviour: str
    observation: str
    recorded: Any
    simulated: Any

    def __str__(self) -> str:
        return f"{self.behaviour}: {self.observation}: recorded {self.recorded}, simulated {self.simulated}"


@dataclass
class Comparison:
    unexpected: list[Difference] = field(default_factory=list)
    known: list[Difference] = field(default_factory=list)
    #: Known differences and patterns, as text, that were not found.
    outdated: list[str] = field(default_factory=list)
    #: Behaviours of the table that are not recorded yet.
    pending: list[str] = field(default_factory=list)
    #: Observations that are the same.
    equal: int = 0
    #: Observations that are not compared.
    varying: int = 0


def flatten(seen: Any, path: tuple[str, ...] = ()) -> dict[str, Any]:
    """One entry for each observation, labels of nested ones joined."""
    if not isinstance(seen, dict):
        return {" / ".join(path): seen}
    flat: dict[str, Any] = {}
    for label, value in seen.items():
        flat.update(flatten(value, (*path, label)))
    return flat


def covers(entry: dict[str, Any], difference: Difference) -> bool:
    if not fnmatch.fnmatchcase(difference.behaviour, entry["behaviour"]):
        return False
    named, found = entry["observation"], difference.observation
    return named in ("*", found) or found.startswith(f"{named} / ")


class Meanings:
    """Replaces texts by what they mean."""

    def __init__(self, entries: list[dict[str, str]]) -> None:
        self._patterns = {each["pattern"]: (re.compile(each["pattern"]), each["meaning"]) for each in entries}
        self.unused = set(self._patterns)

    def of(self, seen: Any) -> Any:
        if not isinstance(seen, str):
            return seen
        for name, (pattern, meaning) in self._patterns.items():
            seen, count = pattern.subn(meaning, seen)
            if count:
                self.unused.discard(name)
        return seen


def compare(
    recorded: dict[str, Any],
    simulated: dict[str, Any],
    known: list[dict[str, Any]],
    same_meaning: list[dict[str, str]] | None = None,
) -> Comparison:
    """Of the behaviours that were recorded and those that were simulated. One that needs more devices than the recording
    machine had is in neither."""
    result = Comparison()
    used: set[int] = set()
    meanings = Meanings(same_meaning or [])
    result.pending = [name for name in simulated["behaviours"] if name not in recorded["behaviours"]]
    for name in recorded["behaviours"]:
        left = flatten(recorded["behaviours"][name])
        right = flatten(simulated["behaviours"].get(name, {ABSENT: "no such behaviour"}))
        if ABSENT in right:
            left = dict.fromkeys(right, "recorded, and no longer in the table")
        for label in dict.fromkeys([*left, *right]):
            difference = Difference(name, label, left.get(label, ABSENT), right.get(label, ABSENT))
            entries = [index for index, entry in enumerate(known) if covers(entry, difference)]
            if any(known[index].get("varies") for index in entries):
                used.update(entries)
                result.varying += 1
            elif meanings.of(difference.recorded) == meanings.of(difference.simulated):
                result.equal += 1
            else:
                used.update(entries)
                (result.known if entries else result.unexpected).append(difference)
    names = {*recorded["behaviours"], *simulated["behaviours"]}
    for index, entry in enumerate(known):
        # Of a behaviour that needs more devices than there were, nothing is known.
        there = fnmatch.filter(names, entry["behaviour"]) or entry.get("devices", 1) <= recorded["machine"]["devices"]
        if index not in used and there:
            result.outdated.append(f"{entry['behaviour']}: {entry['observation']}")
    result.outdated += [f"pattern {pattern}" for pattern in sorted(meanings.unused)]
    return result


def read_known(folder: Path) -> list[dict[str, Any]]:
    """The known differences of the suite in a folder, one entry for each observation."""
    entries = []
    for entry in _read(folder / KNOWN_DIFFERENCES):
        observations = entry["observation"]
        for each in observations if isinstance(observations, list) else [observations]:
            entries.append(entry | {"observation": each})
    return entries


def read_same_meaning(folder: Path) -> list[dict[str, str]]:
    """The texts that say the same in the suite in a folder."""
    return _read(folder / SAME_MEANING)


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    entries: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    for entry in entries:
        if not entry.get("reason"):
            raise ValueError(f"an entry of {path.name} without a reason: {entry}")
    return entries


def compare_in(folder: Path, recorded: dict[str, Any], simulated: dict[str, Any]) -> Comparison:
    """Compares a record of the suite in a folder with what was simulated."""
    return compare(recorded, simulated, read_known(folder), read_same_meaning(folder))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("recorded", type=Path)
    parser.add_argument("simulated", type=Path)
    options = parser.parse_args()
    recorded, simulated = (json.loads(path.read_text(encoding="utf-8")) for path in (options.recorded, options.simulated))
    result = compare_in(options.recorded.parent, recorded, simulated)
    for difference in result.unexpected:
        print(difference)
    for entry in result.outdated:
        print(f"no longer different: {entry}")
    for name in result.pending:
        print(f"to be recorded: {name}: simulated {json.dumps(simulated['behaviours'][name])}")
    print(
        f"{len(recorded['behaviours'])} behaviours: {result.equal} observations the same, {len(result.known)} known to "
        f"differ, {result.varying} not compared, {len(result.unexpected)} unexpected; "
        f"{len(result.pending)} behaviours to be recorded",
        file=sys.stderr,
    )
    return 1 if result.unexpected or result.outdated else 0


if __name__ == "__main__":
    sys.exit(main())
