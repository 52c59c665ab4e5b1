"""The report for people, from its data: the paragraph about what to do first, then tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch_memory_saver._text import counted, mebibytes, table, wrapped
from torch_memory_saver.reports.ledger import Ledger

__all__ = ["format_report"]

_WIDTH = 88
_NS_PER_SECOND = 1_000_000_000
#: The number of latest events, and of frames of a call stack, that are shown. The data has more.
_MAX_EVENTS, _MAX_FRAMES = 20, 6
#: Columns of the table of tags.
_STATES = ("resident", "slack", "paused", "backup", "damaged")
#: Events that say what happened; the others are their details.
_SHOWN_EVENTS = ("allocate", "free", "end", "repair")
#: Frames of PyTorch, which every stack has.
_FRAMEWORK = "/torch/"
_UNKNOWN = "not known"


def format_report(report: dict[str, Any], ledger: Ledger | None) -> str:
    """Return the text of a report, which ends with a newline and names the parts that are missing. `ledger` is the ledger
    whose data the report contains."""
    sections = [
        _title(report),
        *_paragraph(report["summary"] or ""),
        *_section("What failed", _failure(report)),
        *_section("Who holds the device's memory", () if ledger is None else str(ledger).splitlines()),
        *_section("Managed memory (MiB)", _tags(report)),
        *_section("PyTorch's counters (MiB)", _torch(report)),
        *_section("Call stacks that hold most", _stacks(report)),
        *_section("Latest events", _events(report)),
        *_section("Settings", _settings(report)),
        *_section("Missing in this report", [f"{name}: {reason}" for name, reason in report["missing"].items()]),
    ]
    return "".join(map(_shown, "\n\n".join(sections) + "\n"))


def _shown(character: str) -> str:
    """Return a character, escaped if it is no text or a terminal would obey it. Names of files and tags may contain such."""
    return character if character == "\n" or character.isprintable() else character.encode("unicode_escape").decode()


def _paragraph(text: str) -> list[str]:
    """Return a paragraph; none without text."""
    return ["\n".join(wrapped(text, _WIDTH))] if text else []


def _section(title: str, lines: Iterable[str]) -> list[str]:
    """Return a section; none without lines."""
    body = list(lines)
    return ["\n".join([title, *(f"  {line}".rstrip() for line in body)])] if body else []


def _title(report: dict[str, Any]) -> str:
    device = report["failure"]["device"]
    where = "" if device is None else f" on device {device}"
    moment = f"{report['time'][:10]} {report['time'][11:23]} UTC"
    return f"Out of memory{where}, {moment}, report {report['number']} of this process"


def _failure(report: dict[str, Any]) -> Iterator[str]:
    failure, process = report["failure"], report["process"] or {}
    rows = [
        ("operation", f"{failure['operation']}, by {failure['source']}"),
        ("requested", _bytes(failure["requested_bytes"])),
    ]
    if failure["needed_bytes"] != failure["requested_bytes"]:
        rows.append(("needed in all", _bytes(failure["needed_bytes"])))
    if report["device"]:
        rows.append(("free", f"{_bytes(report['device']['free_bytes'])} of {_bytes(report['device']['total_bytes'])}"))
    if failure["driver_call"]:
        rows.append(("driver call", f"{failure['driver_call']}: {failure['error_name']}"))
    if process:
        rank = "" if process["rank"] is None else f", rank {process['rank']}"
        rows += [
            ("process", f"pid {process['pid']}{rank}, {process['role']}, on {process['host']}"),
            ("thread", f"{process['thread']} ({process['native_thread']})"),
            ("hook mode", process["hook_mode"]),
            (
                "releases",
                ", ".join(f"{name} {process[name] or _UNKNOWN}" for name in ("torch_memory_saver", "torch", "python")),
            ),
        ]
        if process["visible_captures"]:
            rows.append(("captures", str(process["visible_captures"])))
    yield from _pairs(rows)
    if failure["message"]:
        yield from wrapped(failure["message"], _WIDTH, indent=" " * 15, first="message        ")


def _tags(report: dict[str, Any]) -> Iterator[str]:
    rows = [
        (
            f"tag {row['tag']}, device {row['device']}",
            *(mebibytes(row[f"{state}_bytes"]) for state in _STATES),
        )
        for row in report["tags"] or ()
    ]
    if rows:
        yield from table([("", *_STATES), *rows])


def _torch(report: dict[str, Any]) -> Iterator[str]:
    counters = report["torch"]
    if not counters:
        return
    yield from _pairs(
        [
            ("allocated", mebibytes(counters["allocated_bytes"])),
            ("reserved", f"{mebibytes(counters['reserved_bytes'])}, paused memory included"),
            (
                "releasable",
                f"{mebibytes(counters['releasable_bytes'])}, which empty_cache() releases, but not of pools in use",
            ),
            ("fragmented", f"{mebibytes(counters['fragmented_bytes'])}, free in segments that are partly in use"),
        ]
    )


def _stacks(report: dict[str, Any]) -> Iterator[str]:
    stacks = report["stacks"]
    if not stacks:
        return
    if stacks["note"]:
        yield from wrapped(stacks["note"], _WIDTH)
    for row in stacks["rows"]:
        yield f"{mebibytes(row['bytes'])} MiB in {counted(row['blocks'], 'block')}"
        frames = [frame for frame in row["frames"] if _FRAMEWORK not in frame] or row["frames"] or [row["origin"]]
        yield from (f"  {frame}" for frame in frames[:_MAX_FRAMES])
        if len(frames) > _MAX_FRAMES:
            yield f"  ... {len(frames) - _MAX_FRAMES} more"


def _events(report: dict[str, Any]) -> Iterator[str]:
    if not report["events"]:
        return
    shown = [event for event in report["events"]["events"] if event["kind"] in _SHOWN_EVENTS][-_MAX_EVENTS:]
    rows = [
        (
            event.get("operation", "") or event["kind"],
            _event_object(event),
            event.get("status", ""),
            f"{(event.get('ended_ns', 0) - report['events']['taken_ns']) / _NS_PER_SECOND:.3f} s",
            mebibytes(event.get("bytes", 0)) + " MiB",
        )
        for event in shown
    ]
    if rows:
        yield from table(rows, left=3)


def _event_object(event: dict[str, Any]) -> str:
    if event["kind"] == "end":
        return counted(event.get("allocations", 0), "allocation")
    return f"tag {event.get('tag')}, device {event.get('device', -1)}"


def _settings(report: dict[str, Any]) -> Iterator[str]:
    settings = report["settings"]
    if not settings:
        return
    yield from (f"{name}={value}" for name, value in settings["environment"].items())
    yield f"memory_margin_bytes {settings['memory_margin_bytes']}"
    yield f"guard {'on' if settings['guard'] else 'off'}"
    yield f"expandable segments {'on' if settings['expandable_segments'] else 'off'}"


def _pairs(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    yield from (f"{name:<14} {value}" for name, value in rows)


def _bytes(size: int) -> str:
    return f"{mebibytes(size)} MiB ({size} bytes)"
