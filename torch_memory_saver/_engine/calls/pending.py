"""Resumes in the background, and the way in which pauses and other resumes treat them.

A pause waits for the pending resumes of its tags, so that calls take effect in the order in which they are made. The
after-callbacks of a pending resume are called once: by ``wait()``, or by a pause or resume of its tags that finds it ended.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from torch_memory_saver import _core
from torch_memory_saver._engine.background import after_call, explain
from torch_memory_saver._engine.calls.silent_mistakes import warn_of_unknown_tags
from torch_memory_saver._engine.native_log import passes_log_on
from torch_memory_saver._text import joined
from torch_memory_saver._torch.binding import layer
from torch_memory_saver._torch.binding.layer import eager_methods
from torch_memory_saver.errors import InvalidArgumentError, InvalidStateError, OutOfMemoryError, TorchMemorySaverError
from torch_memory_saver.reports.transitions import ResumeReport, resume_report

if TYPE_CHECKING:
    from torch_memory_saver._engine.calls.hook_calls import PendingHooks

__all__ = ["PendingResume", "PendingResumes", "handle_of", "on_main_thread"]

logger = logging.getLogger("torch_memory_saver")


@eager_methods
class PendingResume:
    """A resume in the background, returned by ``resume(wait=False)``.

    The object may be used on any thread. It may be dropped at any time: the resume continues.

    The resume covers the memory that was paused when it began. A later pause of its tags waits for its end.

    The tensors must not be accessed before :meth:`wait` has returned. Kernels may access them once the stream that they are
    launched on has been passed to :meth:`wait_stream`.
    """

    def __init__(
        self, pending: _core.Pending, hooks: PendingHooks | None = None, tags: tuple[str, ...] | None = None
    ) -> None:
        self._pending = pending
        self._hooks = hooks
        self._tags = tags
        self._failures = itertools.count()
        self._message = ""  # of the first error, with its explanation

    def __repr__(self) -> str:
        what = "everything" if self._tags is None else joined(self._tags)
        return f"<PendingResume of {what}, {'ended' if self.done else 'under way'}>"

    @property
    def done(self) -> bool:
        """Whether the resume has ended, successfully or not.

        Reading the property does not wait.
        """
        return _core.pending_done(self._pending)

    @passes_log_on
    def wait(self) -> ResumeReport:
        """Wait until the resume has ended, and return its report.

        The method may be called again.

        On the main thread a signal whose handler raises (Ctrl-C) ends the wait. The resume continues. The after-callbacks of
        :meth:`TorchMemorySaver.on_resume` are called once, by the first of these: this method, a pause of the tags, which
        waits for the resume, and the next resume of them.

        Raises:
            TorchMemorySaverError: The resume has failed, with the exceptions of ``resume``, and nothing has changed. After
                :meth:`wait_stream` the memory may be damaged instead, with its backup intact: call ``resume`` again.
            Exception: Raised by an after-callback. The resume has succeeded.
            InvalidStateError: The call comes from a callback of a pause or resume, and the callbacks of this resume have not
                been called yet.
        """
        if self._hooks is None:
            return self._wait()
        return self._hooks.wait(self._wait, lambda: self.done)

    def _concerns(self, tags: tuple[str, ...] | None) -> bool:
        return tags is None or self._tags is None or not set(tags).isdisjoint(self._tags)

    def _await(self, operation: str, deadline: float) -> None:
        """Wait for the end of the resume, successful or not.

        Raises:
            InvalidStateError: It has not ended by the deadline, in seconds of :func:`time.monotonic`.
        """
        if self.done or _core.pending_await(self._pending, max(0.0, deadline - time.monotonic()), on_main_thread()):
            return
        names = "every tag" if self._tags is None else ", ".join(map(repr, self._tags))
        raise InvalidStateError(
            f"{operation}: a resume(wait=False) of {names} has not ended within the timeout. Call its wait() first, or pass "
            "a longer timeout",
            operation=operation,
        )

    def _call_hooks(self) -> None:
        """Call the after-callbacks of the ended resume, unless they were called. Wait if another thread is calling them.

        Failures are logged: they concern the caller of :meth:`wait`, which raises the failure of the resume again.
        """
        if self._hooks is None or self._hooks.finished:
            return
        try:
            self.wait()
        except TorchMemorySaverError as error:
            logger.warning("a resume(wait=False) has failed: %s", error)
        except Exception:  # an after-callback's, which is in the log already
            logger.debug("an after-callback of a resume(wait=False) has raised", exc_info=True)

    def _wait(self) -> ResumeReport:
        try:
            done = _core.pending_wait(self._pending, on_main_thread())
            return resume_report(done, warn_of_unknown_tags("resume", self._tags) if done.unknown_tags else "")
        except OutOfMemoryError as error:
            self._explain(error)
            raise
        finally:
            after_call.run()

    @passes_log_on
    def wait_stream(self, stream: Any = None) -> None:
        """Make a CUDA stream wait for the resume: kernels that are launched on it afterwards find memory and contents.

        The method returns once the memory is mapped on every device and all copies are queued. With a ``timeout`` this
        includes the wait for memory. The copies then run in the background. From then on the resume is not undone: if a copy
        fails, :meth:`wait` raises, and the memory is damaged, with its backup intact. The method may be called for several
        streams in turn.

        Args:
            stream: Stream that waits, as a ``torch.cuda.Stream`` or as a handle. None selects PyTorch's current stream. On a
                thread without a CUDA context the default stream is that of device 0, as in the CUDA runtime.

        Raises:
            InvalidArgumentError: The argument is not a stream.
            InvalidStateError: The default stream was given on a thread without a CUDA context while device 0 is not in use.
            TorchMemorySaverError: The resume has failed and is undone; or the driver failed to make the stream wait, and
                kernels must not be launched on it before :meth:`wait` has returned.
        """
        try:
            _core.pending_wait_stream(self._pending, handle_of(stream), on_main_thread())
        except OutOfMemoryError as error:
            self._explain(error)
            raise

    def _explain(self, error: OutOfMemoryError) -> None:
        """Explain a failure of the resume, with one report however often the failure is raised."""
        if next(self._failures) == 0:
            explain(error, self._tags)
            self._message = str(error)
        elif self._message:
            error.args = (self._message,)


class PendingResumes:
    """The pending resumes of this process whose end no call has seen yet.

    Any thread may use the object. It has no lock, because each change of the list is one operation.
    """

    def __init__(self) -> None:
        self._resumes: list[PendingResume] = []

    def add(self, begun: _core.Pending, hooks: PendingHooks | None, tags: tuple[str, ...] | None) -> PendingResume:
        """Add a resume that has begun, whose end later calls handle, and return it."""
        pending = PendingResume(begun, hooks, tags)
        self._resumes.append(pending)
        return pending

    def settle(self, operation: str, tags: tuple[str, ...] | None, deadline: float) -> None:
        """Wait for the resumes of `tags`, and call their after-callbacks.

        A pause calls this method before it takes its turn.

        Raises:
            InvalidStateError: A resume has not ended by the deadline, in seconds of :func:`time.monotonic`.
        """
        for pending in self._of(tags):
            pending._await(operation, deadline)
        self.see_ended(tags)

    def see_ended(self, tags: tuple[str, ...] | None) -> None:
        """Call the after-callbacks of the ended resumes of `tags`."""
        for pending in self._of(tags):
            if pending.done:
                pending._call_hooks()  # first: a signal handler that raises must not lose the callbacks
                with contextlib.suppress(ValueError):  # another thread was first
                    self._resumes.remove(pending)

    def _of(self, tags: tuple[str, ...] | None) -> list[PendingResume]:
        return [pending for pending in list(self._resumes) if pending._concerns(tags)]

    def after_fork_in_child(self) -> None:
        """Forget the parent's resumes, which do not continue in a forked child."""
        self._resumes = []


def handle_of(stream: Any) -> int:
    """Return the handle of a stream: a ``torch.cuda.Stream``, a handle, or None for PyTorch's current one.

    Raises:
        InvalidArgumentError: It is none of these.
    """
    if stream is None:
        torch = layer.in_use()
        return (None if torch is None else torch.current_stream()) or 0
    handle = getattr(stream, "cuda_stream", stream)
    if isinstance(handle, bool) or not isinstance(handle, int) or handle < 0:
        raise InvalidArgumentError(f"stream must be a torch.cuda.Stream or the handle of one, not {stream!r}")
    return handle


def on_main_thread() -> bool:
    """Return whether this is the main thread, the only one on which signal handlers run."""
    return threading.get_ident() == threading.main_thread().ident
