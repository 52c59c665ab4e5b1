"""Event files: the log of a process as JSON."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from torch_memory_saver._files import write_text_file
from torch_memory_saver.errors import InvalidArgumentError
from torch_memory_saver.observe.events.log import Device, Event, EventLog, Level, events

__all__ = ["FORMAT", "VERSION", "load_events", "log_to_json", "write_events"]

#: FORMAT is the value of the key "format". VERSION is the version of that format.
FORMAT, VERSION = "torch_memory_saver.events", 1

_DEFAULTS = {field.name: field.default for field in dataclasses.fields(Event)}
#: The types of an event's fields.
_EVENT_TYPES: dict[str, tuple[type, ...]] = {
    name: {"kind": (str,), "tag": (str, type(None))}.get(name, (type(default),)) for name, default in _DEFAULTS.items()
}
#: Numbers have 64 bits, with or without a sign.
_MIN, _MAX = -(1 << 63), 1 << 64
_LISTS = ("events", "before", "after", "devices")
#: Allowed types of each field of a log that is not a list.
_TYPES: dict[str, tuple[type, ...]] = {
    "dropped": (int,),
    "capacity": (int,),
    "taken_ns": (int,),
    "wall_offset_ns": (int,),
    "pid": (int,),
    "rank": (int, type(None)),
    "role": (str,),
    "host": (str,),
    "boot_id": (str,),
    "exited": (bool,),
}
#: Value of each optional key for a file that lacks it.
_ABSENT: dict[str, Any] = {"devices": [], "exited": False}


def write_events(path: str | os.PathLike[str], *, log: EventLog | None = None) -> Path:
    """Write events to a file, which either holds all of them afterwards or is unchanged.

    The file is JSON: an object with the keys `format`, `version`, and the attributes of :class:`EventLog`. An event has
    those attributes of :class:`Event` that differ from their defaults. An existing file is replaced. A missing folder is
    created.

    Args:
        path: Path of the file.
        log: Log to write. The default is the latest events of this process.

    Returns:
        The path.

    Raises:
        OSError: The file could not be written. Nothing is left behind.
    """
    target = Path(path)
    text = json.dumps(log_to_json(events() if log is None else log), separators=(",", ":"))
    write_text_file(text, target, "write_events", "the events were")
    return target


def log_to_json(log: EventLog) -> dict[str, Any]:
    """Return the JSON object of the event file for a log."""
    return {
        "format": FORMAT,
        "version": VERSION,
        **{name: getattr(log, name) for name in _TYPES},
        "before": [vars(level) for level in log.before],
        "after": [vars(level) for level in log.after],
        "devices": [vars(device) for device in log.devices],
        "events": [{name: value for name, value in vars(event).items() if value != _DEFAULTS[name]} for event in log.events],
    }


def load_events(path: str | os.PathLike[str]) -> EventLog:
    """Read a file of :func:`write_events`, and return its log.

    Raises:
        OSError: The file cannot be read.
        InvalidArgumentError: The file is not an event file, or is one of a later version. The message names the file and
            what is wrong.
    """
    content = Path(path).read_bytes()
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _malformed(path, f"it is not JSON ({error})" if content else "it is empty") from error
    try:
        return _log_of(path, data)
    except RecursionError as error:
        raise _malformed(path, "its values are nested too deeply") from error


def _log_of(path: str | os.PathLike[str], data: Any) -> EventLog:
    """Return the log that the content of a file describes. RecursionError: a message cannot show a value."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise _malformed(path, f'its key "format" is not "{FORMAT}"')
    version = data.get("version")
    if version != VERSION:
        newer = isinstance(version, int) and version > VERSION
        advice = ": upgrade torch_memory_saver to read it" if newer else ""
        raise _malformed(path, f"its version is {version!r}, and this package reads version {VERSION}{advice}")
    data = _ABSENT | data
    for name, types in _TYPES.items():
        if not _is_a(data.get(name), types):
            raise _malformed(path, f'its key "{name}" is {data.get(name)!r}')
    for name in _LISTS:
        if not isinstance(data.get(name), list):
            raise _malformed(path, f'its key "{name}" is not a list')
    return EventLog(
        events=tuple(_read_event(path, row) for row in data["events"]),
        before=tuple(_read_level(path, row) for row in data["before"]),
        after=tuple(_read_level(path, row) for row in data["after"]),
        devices=tuple(_read_device(path, row) for row in data["devices"]),
        **{name: data.get(name) for name in _TYPES},
    )


def _is_a(value: object, types: tuple[type, ...]) -> bool:
    if isinstance(value, bool):
        return bool in types
    return isinstance(value, types) and (not isinstance(value, int) or _MIN <= value < _MAX)


def _read_event(path: str | os.PathLike[str], row: object) -> Event:
    if not isinstance(row, dict) or not isinstance(row.get("kind"), str):
        raise _malformed(path, f"{row!r} is not an event")
    known = {name: value for name, value in row.items() if name in _EVENT_TYPES}  # a later release may have more
    for name, value in known.items():
        # Exactly: True is no number.
        if type(value) not in _EVENT_TYPES[name] or (type(value) is int and not _MIN <= value < _MAX):
            raise _malformed(path, f'the "{name}" of an event is {value!r}')
    return Event(**known)


def _read_level(path: str | os.PathLike[str], row: object) -> Level:
    if not isinstance(row, dict) or not isinstance(row.get("tag"), str):
        raise _malformed(path, f"{row!r} is not a level")
    numbers: dict[str, int] = {}
    for field in dataclasses.fields(Level):
        value = row.get(field.name)
        if field.name == "tag":
            continue
        if not isinstance(value, int) or not _is_a(value, (int,)):
            raise _malformed(path, f'the "{field.name}" of a level is {value!r}')
        numbers[field.name] = value
    return Level(row["tag"], **numbers)


def _read_device(path: str | os.PathLike[str], row: object) -> Device:
    if not isinstance(row, dict) or not isinstance(row.get("uuid"), str):
        raise _malformed(path, f"{row!r} is not a device")
    for name in ("device", "total_bytes"):
        if not _is_a(row.get(name), (int,)):
            raise _malformed(path, f'the "{name}" of a device is {row.get(name)!r}')
    return Device(row["device"], row["uuid"], row["total_bytes"])


def _malformed(path: str | os.PathLike[str], what: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"load_events: {os.fspath(path)} is not a file of write_events: {what}", operation="load_events"
    )
