"""What the layers above the engine register with it when the package is imported: functions that the engine calls without
knowing who answers.

What most processes never need is imported by these functions, when they are called.
"""

from __future__ import annotations

from typing import Any

from torch_memory_saver._diagnostics.out_of_memory.reporter import attach_observer, reporter
from torch_memory_saver._engine import background, engine
from torch_memory_saver._torch import layer

__all__ = ["connect"]


def connect() -> None:
    """Register everything."""
    background.recordings.update(
        {"events": _event_files, "snapshots": _snapshots, "history": _history, "oom": _out_of_memory_reports}
    )
    background.starters.update({"TMS_METRICS_FILE": _metrics, "TMS_RELEASE_CACHED": _releases})
    background.always.append(_serve_requests)
    background.explain_errors_by(reporter.explain)
    layer.at_first_use(attach_observer)
    engine.private_attributes.append(_private_attribute)


def _history(folder: str) -> None:
    from torch_memory_saver.memory.sampler import start_history

    start_history(folder)


def _snapshots(folder: str) -> None:
    from torch_memory_saver.memory.sampler import start_snapshots

    start_snapshots(folder)


def _event_files(folder: str) -> None:
    from torch_memory_saver.events.from_environment import start_event_files

    start_event_files(folder)


def _metrics(value: str) -> None:
    from torch_memory_saver.events.from_environment import start_metrics

    start_metrics(value)


def _out_of_memory_reports(folder: str) -> None:
    from torch_memory_saver._diagnostics.out_of_memory.reporter import start_reports

    start_reports(folder)


def _releases(value: str) -> None:
    from torch_memory_saver.memory.release import start_releases

    start_releases(value)


def _serve_requests() -> None:
    from torch_memory_saver._diagnostics.processes.requests import start_serving

    start_serving()


def _private_attribute(implementation: Any, name: str) -> Any:
    from torch_memory_saver._compat.cpp_package import corner_of

    return corner_of(implementation, name)
