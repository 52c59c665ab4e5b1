"""Guards the end of programs: silent and with their own status, whatever state their memory is in; by signals in the middle
of a pause; and in processes forked from them.

Without PyTorch, on the simulated GPU; with it: tests/torch/test_exit.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import core_regions
import pytest
from processes import TIMEOUT_S, environment

#: Each starts programs.
pytestmark = pytest.mark.slow

PROGRAMS = Path(__file__).parent / "programs"

#: A process with several threads that forks is warned by Python 3.12 and later, whichever threads they are.
ARGUMENTS = ["-W", "ignore::DeprecationWarning"]

STATES = [
    "unused",
    "active",
    "paused",
    "resumed",
    "region",
    "retained",
    "view",
    "capture",
    "exclusive",
    "damaged",
    "pause_on_another_thread",
]
#: The status of each, and the beginning of its stderr.
ENDINGS = {
    "fall_off": (0, ""),
    "exit_0": (0, ""),
    "exit_3": (3, ""),
    "exit_text": (1, "the program's own words\n"),
    "exception": (1, "Traceback"),
    "_exit": (4, ""),
}

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(params=["torch_mode", "preloaded"])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Start]:
    """Starts a program of the folder, with backup files and locks in directories of the test."""
    started: list[subprocess.Popen[str]] = []
    variables = {"TMS_DISK_BACKUP_DIR": str(tmp_path / "backups"), "TMS_LOCK_DIR": str(tmp_path / "locks")}

    def run(name: str, *arguments: str, **more: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *ARGUMENTS, str(PROGRAMS / name), *arguments],
            env=environment(request.param == "preloaded", **variables, **more),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, stdout, stderr


def files(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "backups").glob("*"))


# Regular ends.


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("state", STATES)
def test_a_program_ends_silently_and_with_its_own_status(start: Start, tmp_path: Path, state: str, ending: str) -> None:
    # The driver's failure to release memory is reported when it happens; only the end has to be silent.
    quiet = {"TMS_LOG_LEVEL": "silent"} if state == "damaged" else {}
    status, stdout, stderr = ended(start("exit_state.py", state, ending, **quiet))
    expected_status, beginning = ENDINGS[ending]
    assert (status, stdout) == (expected_status, ""), stderr
    if beginning == "Traceback":
        lines = stderr.splitlines()
        assert lines[0] == "Traceback (most recent call last):", stderr
        assert lines[-1] == "KeyError: 'missing'", stderr
        assert "torch_memory_saver[" not in stderr
        assert stderr.count("Traceback") == 1, stderr
    else:
        assert stderr == beginning
    if ending != "_exit":
        assert files(tmp_path) == []


def test_a_program_ends_although_a_kernel_does_not(start: Start, tmp_path: Path) -> None:
    assert ended(start("exit_state.py", "releasing", "exit_3")) == (3, "", "")
    assert files(tmp_path) == []


def test_the_next_process_removes_files_left_by_an_abrupt_end(start: Start, tmp_path: Path) -> None:
    assert ended(start("exit_state.py", "paused", "_exit")) == (4, "", "")
    assert [name.endswith(".backup") for name in files(tmp_path)].count(True) == 1
    assert ended(start("exit_state.py", "paused", "fall_off")) == (0, "", "")
    assert files(tmp_path) == []


# Signals in the middle of a pause.


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_program_killed_in_the_middle_of_a_pause(start: Start, tmp_path: Path, number: signal.Signals) -> None:
    process = start("held_pause.py", "copying")
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    process.send_signal(number)
    assert ended(process) == (-number, "", "")
    left = files(tmp_path)
    assert [name.endswith(".backup") for name in left].count(True) == 2, left
    assert ended(start("exit_state.py", "paused", "fall_off")) == (0, "", "")
    assert files(tmp_path) == []


def test_files_of_a_process_that_lives_are_left_alone(start: Start, tmp_path: Path) -> None:
    process = start("held_pause.py")
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    before = files(tmp_path)
    assert ended(start("exit_state.py", "paused", "fall_off")) == (0, "", "")
    assert files(tmp_path) == before
    process.kill()


def test_sigterm_whose_handler_exits_during_a_pause(start: Start, tmp_path: Path) -> None:
    process = start("held_pause.py", "exit")
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    process.terminate()
    assert ended(process) == (5, "", "")
    assert files(tmp_path) == []


@pytest.mark.parametrize(("number", "name"), [(signal.SIGTERM, "SystemExit"), (signal.SIGINT, "KeyboardInterrupt")])
def test_an_interrupted_pause_leaves_everything_usable(
    start: Start, tmp_path: Path, number: signal.Signals, name: str
) -> None:
    """The program catches the handler's exception, checks the states, pauses and resumes again and compares the bytes."""
    process = start("held_pause.py", "print")
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    process.send_signal(number)
    assert ended(process) == (0, f"{name} 2 files\n", "")
    assert files(tmp_path) == []


def test_ctrl_c_during_a_pause_ends_the_program_as_python_does(start: Start, tmp_path: Path) -> None:
    """Python ends itself by the signal, without the C library's exit: its files are those of a killed process."""
    process = start("held_pause.py")
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    process.send_signal(signal.SIGINT)
    status, stdout, stderr = ended(process)
    assert (status, stdout) == (-signal.SIGINT, "")
    assert stderr.splitlines()[-1] == "KeyboardInterrupt"
    assert "torch_memory_saver[" not in stderr
    assert len([name for name in files(tmp_path) if name.endswith(".backup")]) <= 1  # none of the undone pause
    assert ended(start("exit_state.py", "paused", "fall_off")) == (0, "", "")
    assert files(tmp_path) == []


# Forked and spawned processes.


@pytest.mark.parametrize("way", ["fork", "exit", "multiprocessing"])
@pytest.mark.parametrize("state", ["active", "paused", "held"])
def test_a_forked_child_leaves_its_parents_resources(start: Start, tmp_path: Path, state: str, way: str) -> None:
    assert ended(start("fork_state.py", state, way)) == (0, "ok\n", "")
    assert files(tmp_path) == []


SPAWNED = """
import ctypes, multiprocessing, os, sys
from core_regions import core_region
from torch_memory_saver import _core, torch_memory_saver as saver
MIB = 1 << 20
def use(value):
    with core_region("weights", _core.BACKUP_DISK, True):
        address = _core.allocate(2 * MIB, 0)
    ctypes.memset(address, value, 2 * MIB)
    assert saver.pause().allocations == 1
    assert saver.resume().allocations == 1
    assert ctypes.string_at(address, 2 * MIB) == bytes([value]) * 2 * MIB
    saver.pause()
    return address
def backups():
    return sum(name.endswith(".backup") for name in os.listdir(os.environ["TMS_DISK_BACKUP_DIR"]))
if __name__ == "__main__":
    use(3)
    # A child of the fork server ends by os._exit(): what it leaves is the next one's to remove.
    for method in ("forkserver", "spawn"):
        process = multiprocessing.get_context(method).Process(target=use, args=(4,))
        process.start()
        process.join()
        assert process.exitcode == 0, (method, process.exitcode)
    assert backups() == 1, os.listdir(os.environ["TMS_DISK_BACKUP_DIR"])
    saver.resume()
"""


def test_spawned_children_use_the_gpu(tmp_path: Path) -> None:
    program = tmp_path / "spawned.py"
    program.write_text(SPAWNED)
    variables = environment(False, TMS_DISK_BACKUP_DIR=str(tmp_path / "backups"))
    variables["PYTHONPATH"] += f"{os.pathsep}{Path(core_regions.__file__).parent}"
    done = subprocess.run(
        [sys.executable, str(program)],
        env=variables,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert os.listdir(tmp_path / "backups") == []
