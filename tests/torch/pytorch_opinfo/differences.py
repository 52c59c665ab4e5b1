"""The known differences, listed with their causes in tests/torch/opinfo_differences.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pytorch_opinfo.report import EQUAL, failures

__all__ = ["no_longer", "unlisted"]

_FILE = Path(__file__).resolve().parents[1] / "opinfo_differences.json"

Outcome = dict[str, Any]


def _listed() -> set[tuple[str, str]]:
    """The listed pairs of entry and check."""
    return {
        (entry, check) for each in json.loads(_FILE.read_text()) for entry in each["operators"] for check in each["checks"]
    }


def unlisted(outcomes: list[Outcome]) -> list[str]:
    """The differences that are not listed, one line of text for each."""
    listed = _listed()
    new = [each for each in failures(outcomes) if (each["entry"], each["check"]) not in listed]
    return [f"{each['entry']} {each['dtype']} {each['check']}: {each['cause']}" for each in new]


def no_longer(outcomes: list[Outcome]) -> list[str]:
    """The listed pairs of entry and check that are equal with every type, as text."""
    different = {(each["entry"], each["check"]) for each in failures(outcomes)}
    equal = {(each["entry"], each["check"]) for each in outcomes if each["outcome"] == EQUAL}
    return [" ".join(each) for each in sorted(_listed() & equal - different)]
