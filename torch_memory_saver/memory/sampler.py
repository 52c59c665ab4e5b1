"""Series of snapshots: one folder for each moment, with a file of every process."""

from __future__ import annotations

import logging
import os
import re
import threading
from pathlib import Path
from typing import Any

from torch_memory_saver import _core
from torch_memory_saver._files import default_role, write_file
from torch_memory_saver._services import layer
from torch_memory_saver.errors import CaptureInProgressError, InvalidArgumentError
from torch_memory_saver.memory.moments import moment_folder, moments, next_moment, remove_oldest
from torch_memory_saver.memory.snapshots import KEY, take_snapshot

__all__ = ["DEFAULT_KEEP", "MemorySnapshotSampler"]

logger = logging.getLogger("torch_memory_saver")

#: Moments that are kept by default. A comparison needs three; a leak shows in a few more.
DEFAULT_KEEP = 10
#: Characters of tags and roles that file names keep.
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.]+")
#: Characters of a tag or role that a file name keeps; a name has at most 255.
_LONGEST_PART = 60


class MemorySnapshotSampler:
    """Writes snapshots of this process into folders that the processes of a job share: ``<directory>/step-000042/``.

    Each process makes its own sampler with the same directory. A file is called ``<tag>-rank<rank>-pid<pid>-<role>.pickle``,
    without the parts that do not exist. Use a new directory for each run.

    Args:
        directory: Is made if it is missing.
        tag: A name for the series: what all its snapshots have in common, such as "after_step".
        role: What this process is. Default: the process's title or program.
        keep: Moments that are kept. The oldest is removed, by whichever process first has one more. None: all are kept.
        synchronize: Before each snapshot, wait until all ranks of torch.distributed (if it is initialised) call
            :meth:`sample`, and until this process's devices are idle. All ranks must use it.
        on_error: "raise" raises a failure. "count" counts it in `failures`, and logs the first one.

    Attributes:
        failures: How many snapshots failed, with ``on_error="count"``.
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
        self._directory = Path(directory).absolute()
        self._tag = tag
        self._role = default_role() if role is None else role
        self._keep = keep
        self._synchronize = synchronize
        self._on_error = on_error
        self._found: frozenset[int] | None = None
        self._last: int | None = None
        self._lock = threading.Lock()
        self.failures = 0
        self.last_failure: Exception | None = None

    def sample(self, step: int | None = None) -> Path | None:
        """Writes a snapshot.

        Args:
            step: The number of the moment, the same in all processes, such as the training step. None: a counter that the
                processes share gives it. A process then joins the moment under way; where it has written in that one, it
                begins the next. Either all processes of a directory pass steps or none does.

        Returns:
            The path of the file. None after a failure that was counted.

        Raises:
            InvalidArgumentError: `step` is negative or no whole number. Always raised.
            CaptureInProgressError: With ``synchronize``, a capture is active: waiting would invalidate it.
            OSError: The file could not be written, or an old moment not removed.
            TorchUnavailableError: See :func:`take_snapshot`, also for the other errors.
        """
        if step is not None and (not isinstance(step, int) or isinstance(step, bool) or step < 0):
            raise InvalidArgumentError(f"step must be None or a whole number of at least 0, not {step!r}")
        try:
            with self._lock:
                return self._sample(step)
        except Exception as error:
            if self._on_error == "raise":
                raise
            self._count(error)
            return None

    def _sample(self, step: int | None) -> Path:
        if self._synchronize:
            _synchronize(layer.require_module())
        if self._found is None:
            self._found = frozenset(moments(self._directory))
        snapshot = take_snapshot(tag=self._tag, role=self._role)
        moment = next_moment(self._directory, self._last) if step is None else step
        snapshot[KEY]["step"] = moment
        folder = moment_folder(self._directory, moment)
        target = folder / self._file_name(snapshot[KEY])
        write_file(snapshot, target, aside=self._directory)
        self._last = moment
        if self._keep is not None:
            remove_oldest(self._directory, self._keep, self._found, moment)
        return target

    @staticmethod
    def _file_name(own: dict[str, Any]) -> str:
        parts = [own["tag"], f"rank{own['rank']}" if "rank" in own else "", f"pid{own['pid']}", own["role"]]
        return "-".join(_NOT_IN_NAMES.sub("_", part)[:_LONGEST_PART] for part in parts if part) + ".pickle"

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


def _synchronize(torch: Any) -> None:
    """Waits for the other ranks, and for this process's devices."""
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
