"""A stand-in for the part of torch that records allocations and takes snapshots, with the signatures of its releases."""

from __future__ import annotations

import inspect
import sys
from types import SimpleNamespace
from typing import Any

#: The parameters of ``torch.cuda.memory._record_memory_history``, read from the wheels of these releases. Those of 2.6 are
#: those of 2.1. (From 2.1 on, ``inspect.signature`` shows them although the function itself has ``*args``.)
SIGNATURES: dict[str, dict[str, Any]] = {
    "2.0.1": {
        "enabled": inspect.Parameter.empty,
        "record_context": True,
        "trace_alloc_max_entries": 1,
        "trace_alloc_record_context": False,
        "device": None,
        "_enable_expensive_cpp": False,
    },
    "2.1.2": {"enabled": "all", "context": "all", "stacks": "all", "max_entries": sys.maxsize, "device": None},
}
SIGNATURES["2.6.0"] = SIGNATURES["2.1.2"]
SIGNATURES["2.11.0"] = SIGNATURES["2.6.0"] | {
    "clear_history": False,
    "compile_context": False,
    "global_record_annotations": False,
    "skip_actions": None,
}
SIGNATURES["2.14.0"] = SIGNATURES["2.11.0"] | {"record_pinned_host_memory": False, "record_cuda": True}


class RecordingTorch:
    """Looks like the module torch with CUDA initialised. `calls` holds the arguments of each call by name."""

    def __init__(self, release: str, devices: int = 1) -> None:
        self.__version__ = release
        self.calls: list[dict[str, Any]] = []
        self.failure: Exception | None = None
        self.snapshot: dict[str, Any] = {"segments": [], "device_traces": []}
        self.synchronized: list[int] = []
        self.capturing = False
        self.recording = False
        self.ranks: SimpleNamespace = SimpleNamespace(is_available=lambda: False)
        parameters = [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
            for name, default in SIGNATURES[release].items()
        ]
        signature = inspect.Signature(parameters)

        def record(*arguments: Any, **keywords: Any) -> None:
            bound = signature.bind(*arguments, **keywords)  # TypeError for what this release does not accept
            self.calls.append(dict(bound.arguments))
            if self.failure is not None:
                raise self.failure
            if not bound.arguments["enabled"] and bound.arguments.get("record_pinned_host_memory"):
                raise RuntimeError("record_pinned_host_memory requires memory history recording to be enabled")
            self.recording = bool(bound.arguments["enabled"])

        record.__signature__ = signature  # type: ignore[attr-defined]
        self._C = SimpleNamespace(_cuda_isHistoryEnabled=lambda: self.recording)
        if release.startswith("2.0"):
            del self._C._cuda_isHistoryEnabled
        self.cuda = SimpleNamespace(
            device_count=lambda: devices,
            is_initialized=lambda: True,
            is_current_stream_capturing=lambda: self.capturing,
            synchronize=self.synchronized.append,
            memory=SimpleNamespace(_record_memory_history=record, _snapshot=lambda: self.snapshot),
        )

    @property
    def distributed(self) -> SimpleNamespace:
        return self.ranks
