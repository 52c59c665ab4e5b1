"""Guards that an actor of Ray resumes its memory when the actor that shares its GPU has been killed, paused or not."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile

import pytest
from rank_processes import PROGRAMS

TIMEOUT_S = 300

_FOUND = importlib.util.find_spec("ray")
pytestmark = pytest.mark.skipif(
    _FOUND is None or _FOUND.origin is None,  # Ray's own folder, /tmp/ray, looks like a package to a Python started in /tmp
    reason="needs Ray: install the package with its extra test-ray",
)


def test_the_survivor_of_two_actors_resumes() -> None:
    """The driver and Ray's own processes run without the simulated GPU, which only the actors get."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("TMS_") and name not in ("LD_PRELOAD", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")
    }
    environment |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    # The paths of Ray's sockets must be short. Its processes may write there for a moment after the driver has ended.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        done = subprocess.run(
            [sys.executable, str(PROGRAMS / "ray_actors.py"), folder],
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    assert (done.returncode, done.stdout.splitlines()) == (0, ["killed_while_paused", "killed_while_resident"]), done.stderr
