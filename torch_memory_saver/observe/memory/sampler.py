"""Series of snapshots: a folder for each moment, in which every process of a job writes a file.

Several processes work in the same folder at once, on several machines too. A file gets its place by being renamed into it,
and a moment is removed by being renamed first, so no process ever sees half of either. The counter of moments is a file
under a lock of the file system. All of them belong to one user: files and folders of other users are left unchanged.

The recordings `history` and `snapshots` of TMS_DEBUG begin here. They do not initialise CUDA, because a process that does
not use CUDA has nothing to record.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import logging
import os
import re
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch_memory_saver import _core
from torch_memory_saver._files import default_role, write_file
from torch_memory_saver._folders import PRIVATE_FOLDER, chosen_folder, opened_folder
from torch_memory_saver._services import before_pause, layer, record_history
from torch_memory_saver.errors import CaptureInProgressError, InvalidArgumentError, InvalidStateError, TorchMemorySaverError
from torch_memory_saver.observe.memory.snapshot_reader import KEY
from torch_memory_saver.observe.memory.snapshots import take_snapshot

__all__ = [
    "DEFAULT_KEEP",
    "MemorySnapshotSampler",
    "PauseSampler",
    "moment_folder",
    "moments",
    "next_moment",
    "remove_oldest",
    "start_history",
    "start_snapshots",
]

logger = logging.getLogger("torch_memory_saver")

#: Number of moments that are kept by default. A comparison needs three; a leak shows in a few more.
DEFAULT_KEEP = 10
#: Smallest and largest number of moments that a recording of pauses keeps.
MIN_PAUSES, MAX_PAUSES = 20, 50
#: Characters of tags and roles that file names do not keep.
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.]+")
#: Maximum number of characters of a tag or role in a file name, which has at most 255.
_MAX_PART = 60
_FOLDER = re.compile(r"step-(\d{6,})")
_COUNTER = ".moment"
_REMOVED = ".removed-"
#: Digits of the counter in its file. It always has the same size, so that it is replaced by a single write.
_COUNTER_DIGITS = 20
#: Errors of a removal that another process disturbs.
_TAKEN = (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST)
_HISTORY, _SNAPSHOTS = "TMS_DEBUG=history", "TMS_DEBUG=snapshots"


class MemorySnapshotSampler:
    """A writer of snapshots of this process into folders that the processes of a job share.

    The folder of a moment is ``<directory>/step-000042/``.

    Each process makes its own sampler with the same directory. A file is called ``<tag>-rank<rank>-pid<pid>-<role>.pickle``,
    without the parts that do not exist. Use a new directory for each run.

    Args:
        directory: The folder of the series. It is made if it is missing. In a folder that all users share, such as ``/tmp``,
            the series has the folder ``torch_memory_saver-<uid>``.
        tag: A name for the series, which all its snapshots have in common, such as "after_step".
        role: The role of this process. Default: the process's title, its name in multiprocessing, or its program.
        keep: The number of moments that are kept. The first process that has one more removes the oldest. None: all are
            kept.
        synchronize: Before each snapshot, wait until all ranks of torch.distributed (if it is initialised) call
            :meth:`sample`, and until this process's devices are idle. All ranks must use it.
        on_error: "raise" raises a failure. "count" counts it in `failures`, and logs the first one.

    Attributes:
        failures: The number of snapshots that failed, with ``on_error="count"``.
        last_failure: The last error.

    Raises:
        InvalidArgumentError: An argument has an unknown value.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        tag: str = "",
        role: str | None = None,
        keep: int | None = DEFAULT_KEEP,
        synchronize: bool = False,
        on_error: str = "raise",
    ) -> None:
        if on_error not in ("raise", "count"):
            raise InvalidArgumentError(f'on_error must be "raise" or "count", not {on_error!r}')
        if keep is not None and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 1):
            raise InvalidArgumentError(f"keep must be None or a whole number of at least 1, not {keep!r}")
        self._directory = chosen_folder(directory)
        self._tag = tag
        self._role = default_role() if role is None else role
        self._keep = keep
        self._synchronize = synchronize
        self._on_error = on_error
        self._found: frozenset[int] | None = None
        self._last: int | None = None
        self.failures = 0
        self.last_failure: Exception | None = None
        self._after_fork_in_child()
        _samplers.add(self)

    def _after_fork_in_child(self) -> None:
        """Replace the lock, which another thread of the parent may have held."""
        self._lock = threading.Lock()

    def sample(self, step: int | None = None) -> Path | None:
        """Write a snapshot of this process, and return the path of its file.

        Args:
            step: The number of the moment, the same in all processes, such as the training step. None: a counter that the
                processes share gives the number. A process then joins the current moment; if it has already written in that
                one, it begins the next. Either all processes of a directory pass steps or none does.

        Returns:
            The path of the file. None after a failure that was counted.

        Raises:
            InvalidArgumentError: `step` is negative or no whole number. This error is raised whatever `on_error` is.
            CaptureInProgressError: With ``synchronize``, a capture is active: waiting would invalidate it.
            OSError: The file could not be written, or an old moment could not be removed.
            TorchUnavailableError: See :func:`take_snapshot`, also for the other errors.
        """
        if step is not None and (not isinstance(step, int) or isinstance(step, bool) or step < 0):
            raise InvalidArgumentError(f"step must be None or a whole number of at least 0, not {step!r}")
        return self._sample_or_count({}, step)

    def _sample_or_count(self, own: dict[str, Any], step: int | None = None) -> Path | None:
        try:
            with self._lock:
                return self._sample(own, step)
        except Exception as error:
            if self._on_error == "raise":
                raise
            self._count(error)
            return None

    def _sample(self, own: dict[str, Any], step: int | None) -> Path:
        """Write a snapshot to which the values `own` are added."""
        if self._synchronize:
            _synchronize(layer.require_module())
        if self._found is None:
            self._found = frozenset(moments(self._directory))
        snapshot = take_snapshot(tag=self._tag, role=self._role)
        snapshot[KEY].update(own)
        moment = next_moment(self._directory, self._last) if step is None else step
        snapshot[KEY]["step"] = moment
        folder = moment_folder(self._directory, moment)
        target = folder / self._file_name(snapshot[KEY])
        write_file(snapshot, target, aside=self._directory)
        self._last = moment
        if self._keep is not None:
            remove_oldest(self._directory, self._kept(moment, self._keep), self._found, moment)
        return target

    def _kept(self, _current: int, keep: int) -> int:
        """Return the number of moments to keep."""
        return keep

    @staticmethod
    def _file_name(own: dict[str, Any]) -> str:
        parts = [own["tag"], f"rank{own['rank']}" if "rank" in own else "", f"pid{own['pid']}", own["role"]]
        return "-".join(_NOT_IN_NAMES.sub("_", part)[:_MAX_PART] for part in parts if part) + ".pickle"

    def _count(self, error: Exception) -> None:
        self.failures += 1
        self.last_failure = error
        if self.failures == 1:
            logger.warning(
                "no memory snapshot was written to %s: %s. The program goes on; later failures are only counted.%s",
                self._directory,
                error,
                " See that the folder can be written and has room" if isinstance(error, OSError) else "",
            )


_samplers: weakref.WeakSet[MemorySnapshotSampler] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for sampler in _samplers:
        sampler._after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)


class PauseSampler(MemorySnapshotSampler):
    """A sampler that takes its snapshots before pauses, and keeps about the latest ten steps of the program.

    Each pause is a moment, and a step may have several pauses. So the sampler keeps ten moments for each selection of tags
    that this process pauses, at least 20 and at most 50. Moments of which this process has no snapshot are not counted.
    """

    def __init__(self, directory: str) -> None:
        super().__init__(directory, keep=MIN_PAUSES, on_error="count")
        self._selections: set[tuple[str, ...]] = set()
        self._own_moments: deque[int] = deque(maxlen=MAX_PAUSES)

    @property
    def has_seen_pause(self) -> bool:
        """Whether this process has paused."""
        return bool(self._selections)

    def sample_before_pause(self, tags: tuple[str, ...] | None) -> Path | None:
        """Write a snapshot before a pause of `tags`, and return the path of its file. None after a failure."""
        pausing = () if tags is None else tuple(sorted(tags))
        self._selections.add(pausing)
        return self._sample_or_count({"pausing": list(pausing)})

    def _kept(self, current: int, keep: int) -> int:
        self._own_moments.append(current)
        wanted = min(max(keep, DEFAULT_KEEP * len(self._selections)), MAX_PAUSES)
        own = list(self._own_moments)[-wanted:]
        return max(keep, sum(own[0] <= step <= current for step in moments(self._directory)))


def start_history(_folder: str) -> None:
    """Begin to record allocations as soon as the package uses CUDA in this process.

    If PyTorch uses CUDA in this process already, the recording begins at once. The history needs no folder: snapshots and
    out-of-memory reports contain it.
    """

    def start(_torch: Any) -> None:
        try:
            logger.info("%s: %s", _HISTORY, record_history())
        except TorchMemorySaverError as error:
            logger.warning("%s has no effect: %s", _HISTORY, error)

    torch = layer.imported()
    if torch is not None and torch.cuda.is_initialized():
        start(torch)
    else:
        layer.at_first_use(start)


def start_snapshots(folder: str) -> None:
    """Write a snapshot to a folder before each pause from now on.

    A forked child that can use CUDA continues to write them. A process that uses CUDA and never pauses logs at its exit that
    it wrote none.
    """
    sampler, pid = PauseSampler(folder), os.getpid()

    def write() -> None:
        torch = layer.imported()
        # is_initialized() is also False in a forked child that cannot use its parent's CUDA.
        if torch is None or not torch.cuda.is_initialized():
            return
        path = sampler.sample_before_pause(before_pause.tags)
        if path is not None:
            logger.info("%s: wrote %s, %d bytes", _SNAPSHOTS, path, path.stat().st_size)

    def warn_at_exit() -> None:
        torch = layer.imported()
        if not sampler.has_seen_pause and os.getpid() == pid and torch is not None and torch.cuda.is_initialized():
            logger.warning(
                "%s: nothing was recorded in %s, because this process never paused memory. A program without pauses "
                "calls sample() of a memory.MemorySnapshotSampler after each step",
                _SNAPSHOTS,
                folder,
            )

    before_pause.add(_SNAPSHOTS, write)
    atexit.register(warn_at_exit)


def _synchronize(torch: Any) -> None:
    """Wait for the other ranks, and for this process's devices."""
    if torch.cuda.is_current_stream_capturing() or _core.counters()["visible_captures"]:
        raise CaptureInProgressError(
            "sample: a CUDA graph is being captured, and waiting for the device would invalidate it: sample before or after "
            "the capture, or without synchronize",
            operation="sample",
        )
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        distributed.barrier()
    in_use = _core.active_devices()
    for device in range(in_use.bit_length()):
        if in_use >> device & 1:
            torch.cuda.synchronize(device)


def moment_folder(directory: Path, step: int) -> Path:
    """Return the path of the folder of a moment."""
    return directory / f"step-{step:06d}"


def moments(directory: Path) -> list[int]:
    """Return the steps that have a folder, in ascending order."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return sorted(int(match[1]) for name in names if (match := _FOLDER.fullmatch(name)))


def next_moment(directory: Path, last: int | None) -> int:
    """Return the number of the moment for a process whose last moment was `last`.

    The number comes from the counter that all processes share, a locked file. A process joins the current moment, unless it
    has already been in that one: then it begins the next. So a process that is late by less than a moment joins the others,
    and no clock is needed.

    Raises:
        OSError: The counter cannot be read or written.
        InvalidStateError: The file of the counter has other contents.
    """
    with _locked(directory / _COUNTER) as descriptor:
        text = os.pread(descriptor, 2 * _COUNTER_DIGITS, 0).decode("ascii", "replace").strip()
        if text and not text.isdecimal():
            raise InvalidStateError(
                f"the file {directory / _COUNTER} holds {text!r} instead of the number of a moment: remove it",
                operation="sample",
            )
        current = int(text or "0")
        if current == 0 or (last is not None and last >= current):
            current = max(current, last or 0) + 1
            os.pwrite(descriptor, b"%0*d" % (_COUNTER_DIGITS, current), 0)
        return current


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int]:
    with opened_folder(path.parent, mode=PRIVATE_FOLDER, exact=True) as folder:
        descriptor = folder.open_own(path.name, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            yield descriptor
        finally:
            # Explicitly: a child that was forked in between has the descriptor as well, and would keep the lock.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def remove_oldest(directory: Path, keep: int, found: frozenset[int], current: int) -> None:
    """Remove all but `keep` moments, and never the current one.

    The moments of `found`, which an earlier run left, are removed first, and then the moments with the lowest steps.

    Other processes may remove moments at the same time. A process that is late puts its file into a moment that is made
    again, and the next call removes that moment.

    Raises:
        OSError: A folder cannot be removed.
    """
    steps = sorted(moments(directory), key=lambda step: (step not in found or step == current, step))
    with opened_folder(directory, exact=True) as folder:
        for step in steps[: max(0, len(steps) - keep)]:
            name = moment_folder(directory, step).name
            if step != current and folder.is_own_folder(name):
                with _undisturbed():
                    os.rename(
                        name,
                        f"{_REMOVED}{step}-{os.getpid()}",
                        src_dir_fd=folder.descriptor,
                        dst_dir_fd=folder.descriptor,
                    )
        for name in folder.names():
            if name.startswith(_REMOVED) and folder.is_own_folder(name):
                with _undisturbed():
                    folder.remove_folder(name)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignore that another process disturbs a removal.

    Other processes may be removing the folder too, or one of them may have just put a late file into it. The next call
    removes the rest.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _TAKEN:
            raise
