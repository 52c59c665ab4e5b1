"""Guards the command line on a machine without a GPU: help, bad commands, errors, lost readers, and Ctrl-C."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TextIO

import pytest
from processes import ELSEWHERE, Program, environment

import torch_memory_saver
from torch_memory_saver._additions import added
from torch_memory_saver._cli import commands, main
from torch_memory_saver.errors import InvalidArgumentError, InvalidStateError

REPOSITORY = Path(__file__).resolve().parents[4]


Capture = pytest.CaptureFixture[str]


def run_here(*arguments: str) -> int:
    """The exit status of a command in this process."""
    try:
        return main.main(arguments)
    except SystemExit as end:
        assert isinstance(end.code, int)
        return end.code


def test_help_and_version(command: Program, capsys: Capture) -> None:
    assert run_here("--help") == 0
    text = capsys.readouterr().out
    assert "demo" in text
    assert "doctor" in text
    assert run_here() == 0
    assert capsys.readouterr().out == text, "no command is a request for help"
    assert run_here("demo", "--help") == 0
    assert "--device" in capsys.readouterr().out
    assert run_here("help", "demo") == run_here("demo", "--help") == 0
    help_of_demo, again = capsys.readouterr().out.split("usage: ")[1:]
    assert help_of_demo == again
    assert run_here("help") == 0 and capsys.readouterr().out == text
    assert (
        command("-v").stdout
        == command("-V").stdout
        == command("--version").stdout
        == f"torch_memory_saver {torch_memory_saver.__version__}\n"
    )


@pytest.mark.parametrize("arguments", [[], *([name] for name in added("command"))])
def test_help_fits_on_a_terminal(arguments: list[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run_here(*arguments, "--help") == 0
    usage, about, *_ = (text := capsys.readouterr().out).split("\n\n")
    assert max(map(len, text.splitlines())) <= 80
    assert usage.startswith("usage: ") and " ".join(about.split()) in [
        "Pause and resume the GPU memory of tensors without changing their addresses.",
        *(make().help for make in added("command").values()),
    ]


def test_bad_commands(capsys: Capture) -> None:
    assert run_here("doctr") == run_here("--debug", "nonsense") == run_here("demo", "--device", "other") == 2
    error = capsys.readouterr().err
    assert "there is no command 'doctr'; did you mean doctor?\n" in error
    assert "there is no command 'nonsense'; there are demo, doctor," in error
    assert run_here("help", "nonsense") == 2
    assert "there is no command 'nonsense'; there are demo, doctor," in capsys.readouterr().err
    assert run_here("store", "list") == 2
    error = capsys.readouterr().err
    assert "store [-h] [--dir PATH]" in error, "the usage is that of the command"
    assert error.endswith("store: error: unrecognized arguments: list\n")


@pytest.mark.parametrize(
    ("arguments", "parser", "meant"),
    [
        (["doctor", "--jsn"], "doctor", "--json"),
        (["store", "--dri=/x"], "store", "--dir"),
        (["--verson"], "", "--version"),
        (["--dbug", "doctor"], "doctor", "--debug"),
        (["doctor", "--xyz"], "doctor", None),
    ],
)
def test_a_misspelled_option(arguments: list[str], parser: str, meant: str | None, capsys: Capture) -> None:
    assert run_here(*arguments) == 2
    wrong = next(word for word in arguments if word.startswith("--"))
    text = f"{parser}: error: unrecognized arguments: {wrong}" + (f"; did you mean {meant}?" if meant else "")
    assert capsys.readouterr().err.endswith(f"{text}\n")


def test_an_option_before_its_command(capsys: Capture) -> None:
    assert run_here("--json", "doctor") == 2
    assert capsys.readouterr().err.endswith("error: unrecognized arguments: --json; write it after the command\n")


@pytest.mark.parametrize("arguments", [["store", "--remov", "name"], ["--debu", "doctor"]])
def test_a_part_of_an_option_is_none(arguments: list[str], capsys: Capture) -> None:
    assert run_here(*arguments) == 2
    assert "unrecognized arguments: --" in capsys.readouterr().err


def test_options_without_a_command(capsys: Capture) -> None:
    assert run_here("--debug") == 2
    assert capsys.readouterr().err.endswith(": error: the following arguments are required: command\n")


def test_every_command_has_a_class() -> None:
    known = {name: make() for name, make in added("command").items()}
    assert list(known) == ["demo", "doctor", "run", "top", "ask", "store", "compare", "timeline", "simulate"]
    assert all(isinstance(command, commands.Command) and command.help for command in known.values())
    assert all(command.name == name for name, command in known.items())


def test_a_command_loads_no_other() -> None:
    text = (
        "from torch_memory_saver._cli.main import main; import sys, contextlib\n"
        "with contextlib.suppress(SystemExit):\n    main(['run', '--help'])\n"
        "sys.exit('torch_memory_saver.observe.memory._command' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", text], env=environment(False), capture_output=True, text=True)
    assert "--preload" in done.stdout
    assert done.returncode == 0


class Raising(commands.Command):
    """A command that fails with `error`, or prints "output"."""

    name, help = "raising", "fails"
    error: BaseException | None = None

    def run(self, arguments: argparse.Namespace) -> int:
        if self.error is not None:
            raise self.error
        print("output")
        return 0


@pytest.fixture
def raising(monkeypatch: pytest.MonkeyPatch) -> type[Raising]:
    monkeypatch.setattr(main, "added", lambda event: {"raising": Raising})
    monkeypatch.setattr(Raising, "error", None)
    return Raising


def test_ctrl_c_in_a_command_is_a_status(raising: type[Raising]) -> None:
    raising.error = KeyboardInterrupt()
    assert main.main(["raising"]) == 130


@pytest.mark.parametrize(
    ("error", "status", "sentence"),
    [
        (InvalidArgumentError("the tag is wrong:\n  use another"), 2, "the tag is wrong: use another"),
        (InvalidStateError("a capture is under way"), 1, "a capture is under way"),
        (InvalidStateError("raising: nothing is there", operation="raising"), 1, "nothing is there"),
        (FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "/a file"), 1, "/a file: No such file or directory"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), 1, "No space left on device"),
        (RuntimeError("a\nb"), 1, "unexpected RuntimeError: a b; --debug prints the traceback"),
        (MemoryError(), 1, "unexpected MemoryError: no message; --debug prints the traceback"),
    ],
)
def test_an_error_is_one_sentence(
    raising: type[Raising], capsys: pytest.CaptureFixture[str], error: Exception, status: int, sentence: str
) -> None:
    raising.error = error
    assert main.main(["raising"]) == status
    assert capsys.readouterr() == ("", f"torch-memory-saver raising: error: {sentence}\n")


@pytest.mark.parametrize("arguments", [["--debug", "raising"], ["raising", "--debug"]])
def test_the_traceback_is_shown_on_request(
    raising: type[Raising], capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    raising.error = RuntimeError("it failed")
    assert main.main(arguments, main.MODULE) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-2:] == [
        "RuntimeError: it failed",
        "python -m torch_memory_saver raising: error: unexpected RuntimeError: it failed",
    ]


def run_with_output_to(output: TextIO, *arguments: str, unbuffered: str) -> tuple[int, str]:
    """The exit status, and what went to stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "torch_memory_saver", *arguments],
        env=environment(False, PYTHONUNBUFFERED=unbuffered),
        cwd=ELSEWHERE,
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["--help"], ["doctor"]])
def test_a_reader_that_has_gone_is_silent(arguments: list[str], unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as output:
        status, text = run_with_output_to(output, *arguments, unbuffered=unbuffered)
    assert text == ""
    # Python's own help ignores a failed write, where output is not buffered.
    assert status == 141 or (unbuffered and "--help" in arguments)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_cannot_be_written_is_an_error(unbuffered: str) -> None:
    with open("/dev/full", "w") as full:
        done = run_with_output_to(full, "doctor", unbuffered=unbuffered)
    assert done == (1, "python -m torch_memory_saver doctor: error: No space left on device\n")


def test_the_script_is_the_same_program() -> None:
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    name, target = re.search(r'^\[project\.scripts\]\n(\S+) = "(\S+)"$', text, re.MULTILINE).groups()
    module, function = target.split(":")
    assert (name, getattr(importlib.import_module(module), function)) == (main.SCRIPT, main.main)
