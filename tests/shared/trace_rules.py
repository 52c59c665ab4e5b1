"""The rules of the trace-event format (Chrome's, which Perfetto reads), as far as this package's exports use it."""

from __future__ import annotations

from typing import Any

__all__ = ["check_trace"]

#: Microseconds: what the rounding of a timestamp may add.
_ROUNDING_US = 2e-3
_SCOPES = ("g", "p", "t")
_METADATA = ("process_name", "process_labels", "process_sort_index", "thread_name", "thread_sort_index")


def check_trace(trace: Any, category: str | None = None) -> None:
    """Fails unless the trace is an object whose events keep the rules, and whose durations nest on each track.

    Args:
        trace: The parsed file.
        category: Only events of it are checked one by one. Those of other programs must nest with them.
    """
    assert isinstance(trace, dict) and isinstance(trace["traceEvents"], list)
    assert isinstance(trace["baseTimeNanoseconds"], int)
    tracks: dict[tuple[Any, Any], list[tuple[float, float]]] = {}
    open_begins: dict[tuple[int, int], list[str]] = {}
    for event in trace["traceEvents"]:
        if category is None or event.get("cat") == category:
            _check_event(event, open_begins)
        if event["ph"] == "X":
            tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert not any(open_begins.values()), "a B without its E"
    for intervals in tracks.values():
        _check_nesting(intervals)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_event(event: dict[str, Any], open_begins: dict[tuple[int, int], list[str]]) -> None:
    kind = event["ph"]
    assert isinstance(event["name"], str) and event["name"], event
    assert type(event["pid"]) is int and type(event["tid"]) is int, event
    assert _is_number(event["ts"]), event
    assert isinstance(event.get("args", {}), dict), event
    if kind == "X":
        assert _is_number(event["dur"]) and event["dur"] >= 0, event
    elif kind == "C":
        assert event["args"] and all(_is_number(value) for value in event["args"].values()), event
        assert all(value >= 0 for value in event["args"].values()), event
    elif kind == "i":
        assert event["s"] in _SCOPES, event
    elif kind == "M":
        assert event["name"] in _METADATA, event
        assert isinstance(event["args"].get("name", ""), str), event
    elif kind == "B":
        open_begins.setdefault((event["pid"], event["tid"]), []).append(event["name"])
    elif kind == "E":
        assert open_begins.get((event["pid"], event["tid"])), f"an E without its B: {event}"
        open_begins[event["pid"], event["tid"]].pop()
    else:
        raise AssertionError(f"an event of the kind {kind!r}: {event}")


def _check_nesting(intervals: list[tuple[float, float]]) -> None:
    around: list[float] = []
    for begin, end in sorted(intervals, key=lambda interval: (interval[0], -interval[1])):
        while around and around[-1] <= begin + _ROUNDING_US:
            around.pop()
        if around:
            assert end <= around[-1] + _ROUNDING_US, f"{begin} to {end} ends after {around[-1]}, inside which it begins"
        around.append(end)
