"""Guards the end of programs with tensors: silent and with their own status, in both hook modes (that in which these tests
run)."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
from warm_python import torch_programs

PROGRAM = Path(__file__).parent / "programs" / "exit_state.py"
TIMEOUT_S = 300

STATES = [
    "active",
    "paused",
    "inside_region",
    "inside_paused_region",
    "inside_disable",
    "thread_in_region",
    "pause_on_another_thread",
    "graph",
    "forked",
]
#: The status of each, and the last line of stderr.
ENDINGS = {
    "fall_off": (0, ""),
    "exit_3": (3, ""),
    "exit_text": (1, "the program's own words"),
    "exception": (1, "KeyError: 'missing'"),
    "_exit": (4, ""),
}


def run(state: str, ending: str, directory: Path) -> tuple[int, str, str]:
    # A process with several threads that forks is warned by Python 3.12 and later, whichever threads they are.
    variables = os.environ | {"TMS_DISK_BACKUP_DIR": str(directory), "PYTHONWARNINGS": "ignore::DeprecationWarning"}
    process = torch_programs.start([str(PROGRAM), state, ending], variables, Path.cwd())
    output, error = process.communicate(TIMEOUT_S)
    return process.wait(), output, error


@pytest.fixture(scope="module")
def words_of_torch(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The output of PyTorch itself in a process that uses the simulated GPU and ends."""
    status, stdout, stderr = run("control", "fall_off", tmp_path_factory.mktemp("control"))
    assert (status, stdout) == (0, "")
    return stderr


def check(state: str, ending: str, words_of_torch: str, directory: Path) -> None:
    status, stdout, stderr = run(state, ending, directory)
    expected_status, last_line = ENDINGS[ending]
    assert (status, stdout) == (expected_status, ""), stderr
    output = stderr.removeprefix(words_of_torch)
    if ending == "exception":
        assert output.startswith("Traceback"), stderr
        assert output.count("Traceback") == 1, stderr
        assert output.splitlines()[-1] == last_line, stderr
        assert "torch_memory_saver[" not in output, stderr
    else:
        assert output.strip() == last_line, stderr
    if ending != "_exit":
        assert not directory.exists() or not list(directory.iterdir())


#: An ending for each state, every ending with paused tensors, and an exception in each state that is hard to end.
CASES = [
    *zip(STATES, itertools.cycle(ENDINGS)),
    *(("paused", ending) for ending in ENDINGS),
    *((state, "exception") for state in ("inside_paused_region", "pause_on_another_thread", "thread_in_region")),
]


@pytest.mark.parametrize(("state", "ending"), dict.fromkeys(CASES))
def test_a_program_ends_silently_and_with_its_own_status(
    state: str, ending: str, words_of_torch: str, tmp_path: Path
) -> None:
    check(state, ending, words_of_torch, tmp_path / "backups")
