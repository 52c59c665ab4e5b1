"""The command `ask`: have another process write a file at its next pause or resume, and move the file to its destination."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from torch_memory_saver._cli.output import writing
from torch_memory_saver.observe._processes.requests import request_file

__all__ = ["Answer"]

_TRACE_SUFFIX = ".trace.json"


@dataclass(frozen=True)
class Answer:
    """The file that a process is asked for.

    Attributes:
        kind: "snapshot" or "events".
        output: The path of the wanted file. None: the path at which the process writes it.
        as_trace: Events are wanted as a Chrome trace.
    """

    pid: int
    kind: str
    output: Path | None = None
    as_trace: bool = False

    def wait(self, timeout: float | None) -> Path:
        """Request the file, wait for it, and return its path. `timeout`: seconds; None waits until the process ends."""

        def tell() -> None:
            print(
                f"process {self.pid}: requested; served at its next pause or resume (Ctrl-C withdraws it)",
                file=sys.stderr,
                flush=True,
            )

        delivered = None
        while delivered is None:  # again where another command has moved the file
            delivered = self._deliver(request_file(self.pid, self.kind, timeout, on_wait=tell))
        return delivered

    def _deliver(self, written: Path) -> Path | None:
        """Put the file where it is wanted, and return its path; None if another command was faster."""
        if self.output is None and not self.as_trace:
            return written
        return self._move(written)

    def _move(self, written: Path) -> Path | None:
        # The process writes one file for all requests. No other command moves it under this name.
        taken = written.with_name(f"{written.stem}.{os.getpid()}{written.suffix}")
        try:
            os.replace(written, taken)
        except FileNotFoundError:
            return None
        try:
            target = self._convert(taken)
        except BaseException:
            os.replace(taken, written)
            raise
        taken.unlink(missing_ok=True)
        return target

    def _convert(self, taken: Path) -> Path:
        """Write what is wanted from the file, and return its path."""
        if self.as_trace:
            from torch_memory_saver.observe.events import load_events, write_chrome_trace

            target = self.output or taken.with_name(f"{taken.name.partition('.')[0]}{_TRACE_SUFFIX}")
            with writing("ask", target):
                write_chrome_trace(target, log=load_events(taken))
            return target
        from torch_memory_saver._files import copy_file

        assert self.output is not None
        with writing("ask", self.output):
            copy_file(taken, self.output, "ask", "the file was")
        return self.output
