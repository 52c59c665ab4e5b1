"""Guards the command line on a machine without a GPU: help, bad commands, `info`, and Ctrl-C."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from processes import Program, environment

import torch_memory_saver
from torch_memory_saver import _core
from torch_memory_saver._cli import commands


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
    known = commands._COMMANDS
    assert len({command.name for command in known}) == len(known)
    assert all(type(command) is not commands.Command and command.name and command.help for command in known)


def test_info(command: Program) -> None:
    text = command("info", TMS_LOG_LEVEL="error", TMS_HOST_MEMORY="pool").stdout
    assert torch_memory_saver.__version__ in text
    assert "hook mode" in text
    assert "0.5 GiB" in text
    assert "TMS_LOG_LEVEL" in text
    assert "after a resume: pool" in text
    assert re.search(rf"^NVTX ranges +{'built in' if _core.NVTX else 'not built in: no nvtx3'}", text, re.MULTILINE)


def test_info_without_a_driver(command: Program) -> None:
    assert "could not be loaded" in command("info", TMS_CUDA_DRIVER="/nonexistent.so").stdout


def test_info_explains_why_an_installed_torch_cannot_be_imported(command: Program, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open\\nshared object file')")
    path = os.pathsep.join(filter(None, [str(tmp_path), environment(False).get("PYTHONPATH")]))
    text = command("info", PYTHONPATH=path).stdout
    assert "PyTorch" in text
    assert "installed, but cannot be imported: libcudart.so.13: cannot open shared object file\n" in text
    (tmp_path / "torch.py").write_text("import no_such_module")
    assert "cannot be imported: No module named 'no_such_module'\n" in command("info", PYTHONPATH=path).stdout


def test_ctrl_c_in_a_command_is_a_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands.InfoCommand, "run", interrupted)
    assert commands.main(["info"]) == 130
