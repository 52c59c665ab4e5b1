"""Guards the demo on the simulated GPU: it shows the real state, and reports failures."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import TIMEOUT_S, Program, environment

#: Each starts programs.
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("group", [True, False], ids=["Ctrl-C", "only the command"])
def test_ctrl_c_ends_the_demo(group: bool) -> None:
    """During a copy that takes longer than the test may, in the process that the command has started."""
    # PYTHONUNBUFFERED: the line must be there before the stage that it announces.
    slow = {"TMS_SIMULATED_BANDWIDTH": str(64 << 10), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [sys.executable, "-m", "torch_memory_saver", "demo", "--device", "simulated"],
        env=environment(False, **slow),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("1."):
            assert process.poll() is None
        (os.killpg if group else os.kill)(process.pid, signal.SIGINT)
        _, error = process.communicate(timeout=TIMEOUT_S)  # ends when both processes have closed their output
    assert process.returncode == 130
    assert error == ""


def test_the_demo_on_the_simulated_gpu(command: Program) -> None:
    done = command("demo", "--device", "simulated")
    assert "the simulated GPU" in done.stdout
    assert done.stdout.count("    ok    ") == 9
    assert "FAIL" not in done.stdout
    assert "released 192 MiB of kv_cache" in done.stdout
    assert done.stdout.endswith("Every check held.\n")
    assert done.stderr == ""


@pytest.mark.slow
def test_the_demo_draws_with_what_the_terminal_has(command: Program) -> None:
    plain = command("demo", "--device", "simulated", "--ascii").stdout
    assert plain.isascii()
    assert "# weights" in plain
    assert command("demo", "--device", "simulated", PYTHONIOENCODING="ascii").stdout.isascii()
    assert "█ weights" in command("demo", "--device", "simulated", PYTHONIOENCODING="utf-8").stdout


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("cuMemCreate:2:100:2", "too little free memory"),  # After weights and cache were made.
        ("cuCtxSynchronize:0:100:719", "CUDA_ERROR_LAUNCH_FAILED"),
    ],
)
def test_a_failed_demo_reports_it(command: Program, fault: str, words: str) -> None:
    done = command("demo", "--device", "simulated", status=1, TMS_SIMULATED_FAULT=fault)
    assert words in done.stderr
    assert "Every check held" not in done.stdout


def test_the_demo_fails_if_a_check_does(capsys: pytest.CaptureFixture[str]) -> None:
    from torch_memory_saver._cli.demo import _Demo

    class Machine:
        def used_bytes(self) -> int:
            return 0

    run = _Demo(Machine())  # type: ignore[arg-type]
    run.check("this holds", True)
    run.check("this does not", False)
    assert run.failures == 1
    assert "FAIL  this does not" in capsys.readouterr().out


def test_the_gpu_is_not_silently_replaced(command: Program) -> None:
    done = command("demo", "--device", "gpu", status=1)
    assert "no GPU" in done.stderr


def test_the_demo_says_why_it_cannot_use_pytorch(command: Program, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudnn.so.9: cannot open shared object file')")
    done = command("demo", "--device", "gpu", status=1, PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))
    assert "the demo finds no GPU: this needs PyTorch, whose import failed: libcudnn.so.9" in done.stderr
