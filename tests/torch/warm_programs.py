"""Programs with PyTorch in processes of their own, started from one that has imported it (tests/shared/warm_python.py)."""

from __future__ import annotations

import os
import subprocess
import textwrap
from pathlib import Path

import pytest
from warm_python import torch_programs

TIMEOUT_S = 120


def run(program: str, status: int = 0, **variables: str) -> tuple[str, str]:
    """What a program writes to stdout and stderr. It fails if it does not end, or with another status."""
    process = torch_programs.start(["-c", textwrap.dedent(program)], os.environ | variables, Path.cwd())
    try:
        output, error = process.communicate(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail(f"it hangs: {process.communicate()}")
    assert process.returncode == status, error
    return output, error
