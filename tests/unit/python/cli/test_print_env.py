"""Guards `run --print-env`: what it prints, evaluated by a shell or read as JSON, is the
environment that `run` gives to a program."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from processes import ELSEWHERE, SIMULATOR, Program, environment, run_python

from torch_memory_saver._engine import preload

#: Each starts programs.
pytestmark = pytest.mark.slow

HOOK = str(preload.library_path())
#: What a shell would take for something else, in the name of a folder.
AWKWARD = [b"plain", b"two words", b"it's", b'"$HOME" `id` \\ *;&|#', b"line\nline", b"~", b"\xff\xfe", b"-n", b"a=b"]


def printed(*options: str | bytes, **variables: str) -> bytes:
    done = run_python("-m", "torch_memory_saver", "run", *options, text=False, **variables)
    assert done.stderr == b""
    output: bytes = done.stdout
    return output


def variables_after(script: bytes) -> dict[bytes, bytes]:
    """The environment that a shell gives to a program after, or by, the script."""
    done = subprocess.run(["sh", "-c", script], env=environment(False), cwd=ELSEWHERE, capture_output=True, check=True)
    return dict(entry.split(b"=", 1) for entry in done.stdout.split(b"\0") if entry)  # type: ignore[misc]


@pytest.mark.parametrize("name", AWKWARD)
@pytest.mark.parametrize(("format", "script"), [("shell", b"%s env -0"), ("torchrun", b"%s env -0")])
def test_a_shell_gives_a_program_these_variables(tmp_path: Path, name: bytes, format: str, script: bytes) -> None:
    folder = os.fsencode(tmp_path) + b"/" + name
    text = printed("--manage", "--record", "events", "--directory", folder, "--print-env", format)
    if format == "torchrun":
        text = text.removesuffix(b"\n")  # the line goes on
        assert text.startswith(b"env ")
    found = variables_after(script % text)
    assert found[b"TMS_DEBUG_DIR"] == folder
    assert (found[b"TMS_DEBUG"], found[b"TMS_INIT_ENABLE"]) == (b"events", b"1")
    assert found[b"LD_PRELOAD"] == HOOK.encode()
    assert found[b"PYTHONPATH"].split(b":")[0].endswith(b"/torch_memory_saver/_site")
    assert not os.path.exists(folder)  # it may be for another machine


def test_ray_takes_the_object(tmp_path: Path) -> None:
    folder = f'{tmp_path}/it\'s "here"'
    environment_of_ray = json.loads(printed("--preload", "--record", "events", "--directory", folder, "--print-env", "json"))
    assert list(environment_of_ray) == ["env_vars"]
    assert environment_of_ray["env_vars"]["TMS_DEBUG_DIR"] == folder
    assert all(isinstance(value, str) for value in environment_of_ray["env_vars"].values())


def test_printed_variables_are_those_that_run_sets(tmp_path: Path, command: Program) -> None:
    options = ["--manage", "--record", "events,history", "--directory", str(tmp_path / "here")]
    given = command("run", *options, "--", "env", "-0").stdout
    result = dict(entry.split("=", 1) for entry in given.split("\0") if entry)
    variables = json.loads(printed(*options, "--print-env", "json"))["env_vars"]
    assert variables.items() <= result.items()
    assert {name for name, value in result.items() if environment(False).get(name) != value} == set(variables) - {"_"}


def test_what_is_preloaded_already_is_kept() -> None:
    text = printed("--preload", "--print-env", LD_PRELOAD=str(SIMULATOR)).decode()
    assert text == f"export LD_PRELOAD={HOOK}:{SIMULATOR}\n"


def test_nothing_to_print_is_an_error(command: Program) -> None:
    done = command("run", "--print-env", status=2)
    assert "there is nothing to set: give --preload" in done.stderr
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)
    assert "invalid choice" in command("run", "--preload", "--print-env", "yaml", status=2).stderr


def test_print_env_runs_nothing(command: Program) -> None:
    done = command("run", "--preload", "--print-env", "--", "echo", "ran", status=2)
    assert "--print-env runs nothing: leave the command out" in done.stderr
    assert done.stdout == ""
