"""The command line and the demo, on a machine without a GPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import TIMEOUT_S, Program, environment

import torch_memory_saver
from torch_memory_saver import cli, demo_chart

GIB = 1 << 30
MIB = 1 << 20


def test_help_and_version(command: Program) -> None:
    text = command("--help").stdout
    assert "demo" in text
    assert "info" in text
    assert "--device" in command("demo", "--help").stdout
    assert command("--version").stdout == f"torch_memory_saver {torch_memory_saver.__version__}\n"


def test_bad_commands(command: Program) -> None:
    assert "usage" in command(status=2).stderr
    assert "nonsense" in command("nonsense", status=2).stderr
    command("demo", "--device", "other", status=2)


def test_every_command_has_a_class() -> None:
    commands = cli._COMMANDS
    assert len({command.name for command in commands}) == len(commands)
    assert all(type(command) is not cli.Command and command.name and command.help for command in commands)


def test_info(command: Program) -> None:
    text = command("info", TMS_LOG_LEVEL="error", TMS_HOST_MEMORY="pool").stdout
    assert torch_memory_saver.__version__ in text
    assert "hook mode" in text
    assert "0.5 GiB" in text
    assert "TMS_LOG_LEVEL" in text
    assert "after a resume: pool" in text


def test_info_without_a_driver(command: Program) -> None:
    assert "could not be loaded" in command("info", TMS_CUDA_DRIVER="/nonexistent.so").stdout


def test_info_says_why_an_installed_torch_cannot_be_imported(command: Program, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open\\nshared object file')")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    text = command("info", PYTHONPATH=path).stdout
    assert "PyTorch" in text
    assert "installed, and cannot be imported: libcudart.so.13: cannot open shared object file\n" in text
    (tmp_path / "torch.py").write_text("import no_such_module")
    assert "cannot be imported: No module named 'no_such_module'\n" in command("info", PYTHONPATH=path).stdout


@pytest.mark.parametrize("group", [True, False], ids=["Ctrl-C", "only the command"])
def test_ctrl_c_ends_the_demo(group: bool) -> None:
    """While a copy goes on that takes longer than the test may, in the process that the command has started."""
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


def test_ctrl_c_in_a_command_is_a_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.InfoCommand, "run", interrupted)
    assert cli.main(["info"]) == 130


def test_the_demo_on_the_simulated_gpu(command: Program) -> None:
    done = command("demo", "--device", "simulated")
    assert "the simulated GPU" in done.stdout
    assert done.stdout.count("    ok    ") == 9
    assert "FAIL" not in done.stdout
    assert "released 192 MiB of kv_cache" in done.stdout
    assert done.stdout.endswith("Every check held.\n")
    assert done.stderr == ""


def test_the_demo_draws_with_what_the_terminal_has(command: Program) -> None:
    plain = command("demo", "--device", "simulated", "--ascii").stdout
    assert plain.isascii()
    assert "# weights" in plain
    assert command("demo", "--device", "simulated", PYTHONIOENCODING="ascii").stdout.isascii()
    assert "█ weights" in command("demo", "--device", "simulated", PYTHONIOENCODING="utf-8").stdout


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("cuMemCreate:2:100:2", "OutOfMemoryError"),  # After weights and cache were made.
        ("cuCtxSynchronize:0:100:719", "DeviceLostError"),
    ],
)
def test_a_demo_that_fails_says_so(command: Program, fault: str, words: str) -> None:
    done = command("demo", "--device", "simulated", status=1, TMS_SIMULATED_FAULT=fault)
    assert words in done.stderr
    assert "Every check held" not in done.stdout


def test_the_demo_fails_if_a_check_does(capsys: pytest.CaptureFixture[str]) -> None:
    from torch_memory_saver.demo import _Demo

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


# The chart


def test_bars_are_as_long_as_the_memory() -> None:
    stages = [("all", {"a": GIB, "b": GIB}), ("half", {"a": GIB, "b": 0}), ("none", {"a": 0, "b": 0})]
    lines = demo_chart.draw(stages, 2 * GIB, ascii_only=True, width=60)
    cells = lines[0].index("|", lines[0].index("|") + 1) - lines[0].index("|") - 1
    assert lines[0].count("#") + lines[0].count("=") == cells
    for line, share in zip(lines, (0.5, 0.5, 0), strict=False):
        assert abs(line.count("#") - cells * share) <= 0.5
    assert {len(line) for line in lines[:3]} == {len(lines[0])}
    assert len(lines[0]) <= 60
    assert lines[0].endswith("2.0 GiB")
    assert "# a" in lines[3]
    assert "= b" in lines[3]


def test_a_chart_never_overflows() -> None:
    for line in demo_chart.draw([("more than there is", {"a": 5 * GIB, "b": GIB})], GIB, ascii_only=False, width=50)[:1]:
        assert len(line) <= 50
        assert "▓" not in line


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (3 << 10, "3 KiB"), (512 * MIB, "512 MiB"), (1.5 * GIB, "1.5 GiB")]
)
def test_sizes(size: float, text: str) -> None:
    assert demo_chart.format_bytes(size) == text
