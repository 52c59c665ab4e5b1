"""A program that contains its CUDA runtime, under the preload library and with everything managed, beside the doctor."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

from torch_memory_saver.observe._doctor import installation_checks
from torch_memory_saver.observe._doctor.check import Status

__all__ = ["STATIC_MAIN", "check_static_program"]

#: The source of the program, to be linked with a static runtime.
STATIC_MAIN = Path(__file__).resolve().parents[1] / "unit/preload/programs/static_main.c"


def check_static_program(program: Path, environment: Mapping[str, str]) -> None:
    """Run the program, whose environment has the preload library, and the doctor's check while it lives."""
    with subprocess.Popen(
        [str(program)],
        env={**environment, "TMS_INIT_ENABLE": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        finding = installation_checks.preloaded_programs()
        _, errors = process.communicate()
    assert (said, errors, process.returncode) == ("nothing was managed\n", "", 0)
    assert finding.status == Status.WARN
    assert f"{process.pid} ({program.name})" in f"{finding.found} {finding.details}"
