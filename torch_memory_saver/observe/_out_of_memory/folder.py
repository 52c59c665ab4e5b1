"""The files of the reports. Names begin with the time, so that a listing shows them in order; a container gives each start
of a program the same process id, and only the time tells those apart.

Their number is bounded. A process keeps its first report, which shows how it began, and its latest: the error that
ended the process is the last. A folder keeps the latest reports of all processes, so that a job that crashes and is
restarted for a whole night does not fill the disk, and its last crashes can be read.

Any thread may call. There is no lock: the list of this process's reports is changed by single operations only.
"""

from __future__ import annotations

import logging
import os
import re
from datetime import datetime, timezone
from pathlib import Path

from torch_memory_saver._files import write_text_file
from torch_memory_saver._folders import Folder, opened_folder

__all__ = ["MAX_IN_FOLDER", "MAX_OF_PROCESS", "ReportFolder"]

logger = logging.getLogger("torch_memory_saver")

#: The maximum number of reports of one process: the first and the latest are kept.
MAX_OF_PROCESS = 10
#: The maximum number of reports of all processes together.
MAX_IN_FOLDER = 256

#: The files of each report: the one that people read, and the one for programs.
_SUFFIXES = (".txt", ".json")
#: A report's name without its suffix, in the names of its files. A process that was killed leaves one with the ending .tmp.
_FILE = re.compile(r"\.?(oom-\d{8}T\d{6}\.\d{3}Z(?:-rank\d+)?-pid\d+-\d+)\.(?:txt|json)(?:\.[\da-f-]+\.tmp)?")
_NS_PER_SECOND = 1_000_000_000
_NS_PER_MS = 1_000_000


class ReportFolder:
    """The folder of this process's reports, which other processes may share.

    Args:
        directory: Path of the folder, which is created with the first report.

    Attributes:
        failures: Number of reports that could not be written.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory)
        self._own: list[str] = []
        self._logged: set[int | None] = set()
        self.failures = 0

    def write(self, text: str, data: str, *, number: int, rank: int | None, time_ns: int) -> Path | None:
        """Write a report, readable by this user only, and remove surplus reports.

        Args:
            text: Report for people.
            data: Report as JSON.
            number: Number of the report in this process.
            rank: Rank of the process.
            time_ns: Time of the report, in nanoseconds since 1970.

        Returns:
            The path of the text. None if the report could not be written, which is logged once for each cause.
        """
        name = _name(number, rank, time_ns)
        paths = [self._directory / f"{name}{suffix}" for suffix in _SUFFIXES]
        written = None
        try:
            for path, content in zip(paths, (text, data), strict=True):
                write_text_file(content, path, "out-of-memory report", "the report was")
                written = paths[0]
        except OSError as error:
            self._count(error)
        if written is not None:
            self._own.append(name)
            self._remove_surplus(name)
        return written

    def restart(self) -> None:
        """Begin again without reports, in a forked child, which has none of its parent's."""
        self._own = []

    def _count(self, error: OSError) -> None:
        self.failures += 1
        if error.errno not in self._logged:
            self._logged.add(error.errno)
            logger.warning("%s; later failures for this reason are only counted", error)

    def _remove_surplus(self, newest: str) -> None:
        try:
            with opened_folder(self._directory, exact=True) as folder:
                while len(self._own) > MAX_OF_PROCESS:
                    name = self._own.pop(1)
                    for suffix in _SUFFIXES:
                        folder.remove(f"{name}{suffix}")
                _remove_oldest(folder, newest)
        except (OSError, IndexError) as error:  # the folder cannot be changed; or another thread was faster
            logger.info("out-of-memory report: older ones were not removed: %s", error)


def _remove_oldest(folder: Folder, newest: str) -> None:
    """Remove reports of this user beyond the limit of the folder."""
    found: dict[str, list[str]] = {}
    for entry in folder.names():
        match = _FILE.fullmatch(entry)
        if match and match[1] != newest:
            found.setdefault(match[1], []).append(entry)
    for name in sorted(found)[: max(0, len(found) + 1 - MAX_IN_FOLDER)]:
        for entry in found[name]:
            folder.remove(entry)


def _name(number: int, rank: int | None, time_ns: int) -> str:
    moment = datetime.fromtimestamp(time_ns // _NS_PER_SECOND, timezone.utc)
    milliseconds = time_ns % _NS_PER_SECOND // _NS_PER_MS
    rank_part = "" if rank is None else f"-rank{rank}"
    return f"oom-{moment:%Y%m%dT%H%M%S}.{milliseconds:03d}Z{rank_part}-pid{os.getpid()}-{number}"
