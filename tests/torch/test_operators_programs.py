"""Programs that use operators on the simulated GPU: what they print, and what they fall back to."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch

pytestmark = pytest.mark.skipif(
    os.environ.get("TMS_SIMULATED_KERNELS", "") != "cpu", reason="needs simulate --kernels cpu, the default"
)

TIMEOUT_S = 120


def run(program: str, **variables: str) -> tuple[str, str]:
    """What a program writes to stdout and stderr. It fails if it does not end, or not well."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_an_unknown_release_has_its_kernels_interpreted_and_says_so() -> None:
    """Its operators work where they are elementwise, and others fail, as with --kernels error."""
    stdout, stderr = run(
        """
        import os
        import torch
        from torch_memory_saver._simulate.operators import install, special
        def fail(replace):
            raise AttributeError("torch has no such function")
        special.install = fail
        os.environ["TMS_SIMULATED_KERNELS"] = "cpu"
        install.install()
        install.install()
        ones = torch.ones(4, 4, device="cuda")
        assert (ones + ones).cpu().sum().item() == 32
        try:
            ones @ ones
        except RuntimeError:
            print("refused")
        """,
        TMS_SIMULATED_KERNELS="error",
    )
    assert stdout == "refused\n"
    sentence = "simulated GPU: --kernels cpu does not know PyTorch"
    assert stderr.count(sentence) == 1
    assert f"{sentence} {torch.__version__} (AttributeError: torch has no such function)" in stderr
