"""What a check of the doctor is."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

__all__ = ["Check", "Result", "Status"]


class Status:
    """OK; WARN: something does not work in some cases, which are named; FAIL: it does not work."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Result(NamedTuple):
    """What a check has found. The texts are one sentence each, without a full stop.

    Attributes:
        name: What was checked.
        status: One of Status.
        found: What is the case.
        advice: What to do; "" if the status is OK.
    """

    name: str
    status: str
    found: str
    advice: str = ""


#: Looks at one thing. Changes nothing, and raises nothing.
Check = Callable[[], Result]
