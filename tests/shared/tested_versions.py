"""Results of whole runs of tests with a release of PyTorch: tests/versions.json, for the table of docs/tested-versions.md.

With ``TMS_GPU_RECORD=FILE`` a whole run of tests/gpu adds its result to that file (``make record-versions``). A program that
runs an engine calls `record` itself. A result replaces the one of the same versions.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "TMS_GPU_RECORD"
FILE = Path(__file__).resolve().parents[1] / "versions.json"
GPU_TESTS = FILE.parent / "gpu"

#: The fields that say what was run. Every other field is the result.
VERSIONS = ("torch", "cuda", "python", "gpu", "driver", "mode", "engine")
RESULTS = ("passed", "failed", "skipped", "date")


def this_machine() -> dict[str, str]:
    """The versions of this process: PyTorch, the CUDA that it was built for, Python, the GPU and its driver."""
    import torch

    driver = re.search(r"\b\d+\.\d+(?:\.\d+)?\b", _read("/proc/driver/nvidia/version"))
    simulated = os.path.basename(os.environ.get("TMS_CUDA_DRIVER", "")) == "_simulated_cuda.so"
    return {
        "torch": torch.__version__.partition("+")[0],
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        "gpu": "simulated" if simulated else torch.cuda.get_device_name(),
        "driver": "simulated" if simulated else driver[0] if driver else "unknown",
    }


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def record(file: Path, versions: Mapping[str, str], *, passed: int, failed: int, skipped: int = 0) -> None:
    """Add a result of today. `versions` has the fields of VERSIONS; "engine" is "" for tests/gpu."""
    row: dict[str, Any] = {name: versions[name] for name in VERSIONS}
    row |= {"passed": passed, "failed": failed, "skipped": skipped, "date": datetime.date.today().isoformat()}
    rows = [row, *json.loads(file.read_text(encoding="utf-8"))] if file.exists() else [row]
    kept = {tuple(each[name] for name in VERSIONS): each for each in reversed(rows)}
    lines = ",\n".join(json.dumps(kept[key]) for key in sorted(kept))
    file.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def refuse_a_part(config: pytest.Config) -> None:
    """Raise UsageError if pytest was asked for a part of tests/gpu only."""
    parts = ("keyword", "deselect", "ignore", "ignore_glob", "maxfail", "lf", "collectonly")
    whole = [Path(argument).resolve() for argument in config.args] == [GPU_TESTS] and config.option.markexpr in (
        "",
        "not slow",
    )
    if not whole or any(getattr(config.option, part, None) for part in parts):
        raise pytest.UsageError(f"{VARIABLE} records whole runs: start pytest with --gpu tests/gpu, and choose no tests")


class Recorder:
    """A plugin of pytest that adds the result of its run to a file, in the process that reports it."""

    def __init__(self, file: Path, mode: str) -> None:
        self.file = file
        self._mode = mode

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
        count = {name: len(terminalreporter.stats.get(name, ())) for name in ("passed", "failed", "error", "skipped")}
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            terminalreporter.write_line(f"{VARIABLE}: the run did not end, so nothing was recorded")
            return
        versions = this_machine() | {"mode": self._mode, "engine": ""}
        failed = count["failed"] + count["error"]
        record(self.file, versions, passed=count["passed"], failed=failed, skipped=count["skipped"])
        terminalreporter.write_line(f"recorded in {self.file}")
