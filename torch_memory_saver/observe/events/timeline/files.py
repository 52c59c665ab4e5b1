"""Functions that read event files, and write the page."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from torch_memory_saver._files import write_text_file
from torch_memory_saver.errors import InvalidArgumentError, rename_operation
from torch_memory_saver.observe.events.event_file import load_events
from torch_memory_saver.observe.events.log import EventLog, events
from torch_memory_saver.observe.events.timeline.html import page
from torch_memory_saver.observe.events.timeline.merge import hosts_of, same_process

__all__ = ["read_logs", "write_timeline"]

logger = logging.getLogger("torch_memory_saver")


def read_logs(paths: Iterable[str | os.PathLike[str]]) -> list[EventLog]:
    """Return the logs of event files, one for each process.

    If several files are of one process, the latest of them is used.

    Args:
        paths: Files of :func:`write_events`, and folders of ``TMS_DEBUG=events``, or ``TMS_DEBUG_DIR``, of which every
            ``.json`` file is read. The log has a warning of each that is no event file.

    Raises:
        InvalidArgumentError: A file cannot be read or is no event file, a folder has none, or no file has an event. The
            message names it.
    """
    logs: list[EventLog] = []
    for path, is_named in _files(paths):
        try:
            log = load_events(path)
        except InvalidArgumentError as error:
            rename_operation(error, "timeline")
            if is_named:
                raise
            logger.warning("%s. It is skipped", str(error).removesuffix("."))
            continue
        except OSError as error:
            raise InvalidArgumentError(f"timeline: {path} cannot be read: {error.strerror}", operation="timeline") from error
        earlier = next((number for number, one in enumerate(logs) if same_process(one, log)), None)
        if earlier is None:
            logs.append(log)
        elif log.taken_ns > logs[earlier].taken_ns:
            logs[earlier] = log
    if not any(log.events for log in logs):
        raise InvalidArgumentError("timeline: no file has an event: nothing was allocated", operation="timeline")
    return logs


def _files(paths: Iterable[str | os.PathLike[str]]) -> list[tuple[Path, bool]]:
    """Return the files, each with whether its own path was given."""
    files: list[tuple[Path, bool]] = []
    for path in map(Path, paths):
        if not path.is_dir():
            files.append((path, True))
            continue
        found = _in_folder(path) or _in_folder(path / "events")  # the folder of `run --record`
        if not found:
            raise InvalidArgumentError(
                f"timeline: {path} has no event file (*.json): name the folder events of TMS_DEBUG_DIR",
                operation="timeline",
            )
        files += [(file, False) for file in found]
    return files


def _in_folder(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("*.json") if file.is_file())  # opening a FIFO would wait


def write_timeline(path: str | os.PathLike[str], *, logs: Sequence[EventLog] | None = None) -> Path:
    """Write a page that shows memory over time, as one HTML file that needs no other file and no network.

    An existing file is replaced. A missing folder is created.

    Args:
        path: Path of the file.
        logs: Logs to show (:func:`load_events`). Processes of one machine are drawn on one axis of time, and added up for
            each GPU. The default is the latest events of this process.

    Returns:
        The path.

    Raises:
        OSError: The file could not be written. Nothing is left behind.
    """
    target = Path(path)
    shown = [events()] if logs is None else logs
    write_text_file(page(hosts_of(shown)), target, "write_timeline", "the page was")
    return target
