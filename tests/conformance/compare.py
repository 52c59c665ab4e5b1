"""Compares two records of the same behaviours: a real GPU's and the simulation's.

    python tests/conformance/compare.py tests/conformance/driver/recorded_h200.json simulated.json

A known difference, with its reason, is in known_differences.json beside the record: a list of {"behaviour", "observation",
"reason"}. The observation is the label of what was seen, or labels joined by " / ", and covers what is below it too; "*" is
the whole behaviour. An entry without a difference must go. Entries for behaviours that need two devices have "devices": 2.

Behaviours that were added to the table since the record was made are pending: they are listed with what the simulation does,
and are no differences until they are recorded.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KNOWN_DIFFERENCES = "known_differences.json"

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
    #: Known differences, as text, that were not found.
    outdated: list[str] = field(default_factory=list)
    #: Behaviours of the table that are not recorded yet.
    pending: list[str] = field(default_factory=list)
    #: Observations that are the same.
    equal: int = 0


def flatten(seen: Any, path: tuple[str, ...] = ()) -> dict[str, Any]:
    """One entry for each observation, labels of nested ones joined."""
    if not isinstance(seen, dict):
        return {" / ".join(path): seen}
    flat: dict[str, Any] = {}
    for label, value in seen.items():
        flat.update(flatten(value, (*path, label)))
    return flat


def covers(entry: dict[str, str], difference: Difference) -> bool:
    if entry["behaviour"] != difference.behaviour:
        return False
    named, found = entry["observation"], difference.observation
    return named in ("*", found) or found.startswith(f"{named} / ")


def compare(recorded: dict[str, Any], simulated: dict[str, Any], known: list[dict[str, str]]) -> Comparison:
    """Of the behaviours that were recorded and those that were simulated. One that needs more devices than the recording
    machine had is in neither."""
    result = Comparison()
    used: set[int] = set()
    result.pending = [name for name in simulated["behaviours"] if name not in recorded["behaviours"]]
    for name in recorded["behaviours"]:
        left = flatten(recorded["behaviours"][name])
        right = flatten(simulated["behaviours"].get(name, {ABSENT: "no such behaviour"}))
        if ABSENT in right:
            left = dict.fromkeys(right, "recorded, and no longer in the table")
        for label in dict.fromkeys([*left, *right]):
            difference = Difference(name, label, left.get(label, ABSENT), right.get(label, ABSENT))
            if difference.recorded == difference.simulated:
                result.equal += 1
                continue
            entries = [index for index, entry in enumerate(known) if covers(entry, difference)]
            used.update(entries)
            (result.known if entries else result.unexpected).append(difference)
    names = {*recorded["behaviours"], *simulated["behaviours"]}
    for index, entry in enumerate(known):
        # Of a behaviour that needs more devices than there were, nothing is known.
        if index not in used and (entry["behaviour"] in names or entry.get("devices", 1) <= recorded["machine"]["devices"]):
            result.outdated.append(f"{entry['behaviour']}: {entry['observation']}")
    return result


def read_known(folder: Path) -> list[dict[str, str]]:
    """The known differences of the suite in a folder."""
    path = folder / KNOWN_DIFFERENCES
    if not path.exists():
        return []
    entries: list[dict[str, str]] = json.loads(path.read_text(encoding="utf-8"))
    for entry in entries:
        if not entry.get("reason"):
            raise ValueError(f"a known difference without a reason: {entry}")
    return entries


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("recorded", type=Path)
    parser.add_argument("simulated", type=Path)
    options = parser.parse_args()
    recorded, simulated = (json.loads(path.read_text(encoding="utf-8")) for path in (options.recorded, options.simulated))
    result = compare(recorded, simulated, read_known(options.recorded.parent))
    for difference in result.unexpected:
        print(difference)
    for entry in result.outdated:
        print(f"no longer different: {entry}")
    for name in result.pending:
        print(f"to be recorded: {name}: simulated {json.dumps(simulated['behaviours'][name])}")
    print(
        f"{len(recorded['behaviours'])} behaviours: {result.equal} observations the same, {len(result.known)} known to "
        f"differ, {len(result.unexpected)} unexpected; {len(result.pending)} behaviours to be recorded",
        file=sys.stderr,
    )
    return 1 if result.unexpected or result.outdated else 0


if __name__ == "__main__":
    sys.exit(main())
