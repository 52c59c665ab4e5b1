"""What a check of the doctor is, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

__all__ = ["Check", "Finding", "Status", "fail", "ok", "skip", "warn"]


class Status:
    """OK; WARN: something does not work in some cases, which are named; FAIL: it does not work; SKIP: it does not apply
    here, or it cannot be known because something else is missing."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


class Finding(NamedTuple):
    """What a check has found. The texts are one sentence each, without a full stop.

    Attributes:
        status: One of Status.
        found: What is the case.
        advice: What to do; "" only if the status is OK.
        details: Further lines, such as one for each GPU.
    """

    status: str
    found: str
    advice: str = ""
    details: tuple[str, ...] = ()


def ok(found: str, details: Sequence[str] = ()) -> Finding:
    return Finding(Status.OK, found, "", tuple(details))


def warn(found: str, advice: str, details: Sequence[str] = ()) -> Finding:
    return Finding(Status.WARN, found, advice, tuple(details))


def fail(found: str, advice: str, details: Sequence[str] = ()) -> Finding:
    return Finding(Status.FAIL, found, advice, tuple(details))


def skip(found: str, advice: str, details: Sequence[str] = ()) -> Finding:
    return Finding(Status.SKIP, found, advice, tuple(details))


class Check(NamedTuple):
    """One thing that the doctor looks at.

    Attributes:
        name: Programs that read the doctor's JSON rely on it.
        look: Changes nothing. What it raises is shown as a failure of the check.
    """

    name: str
    look: Callable[[], Finding]
