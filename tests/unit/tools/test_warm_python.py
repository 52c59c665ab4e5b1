"""Guards the processes in which programs of the tests run: each behaves as `python PROGRAM` would."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from warm_python import WarmPython

TIMEOUT_S = 60
PROGRAM = """
import atexit, inspect, json, os, sys
import helper

def function():
    pass

atexit.register(print, "at exit")
print(json.dumps([
    sys.argv, sys.path[0], os.getcwd(), os.environ["TMS_TEST"], __name__, __file__, inspect.getsource(function),
    sorted(globals()), sys.modules["__main__"].__dict__ is globals(), helper.__file__, sys.stdin.read(),
]))
print("complaint", file=sys.stderr)
sys.exit(3)
"""


@pytest.fixture(scope="module")
def warm() -> WarmPython:
    return WarmPython("json")


def environment(**more: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("TMS_")} | more


def test_a_file_runs_as_in_a_process_of_its_own(warm: WarmPython, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    (tmp_path / "helper.py").write_text("")
    command, variables = [str(program), "an argument"], environment(TMS_TEST="value")
    there = subprocess.run(
        [sys.executable, *command],
        env=variables,
        cwd="/",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert there.returncode == 3, there.stderr
    process = warm.start(command, variables, Path("/"))
    assert process.communicate(TIMEOUT_S) == (there.stdout, there.stderr)
    assert process.returncode == 3 and there.stdout.endswith("at exit\n")


def test_code_runs_as_with_c(warm: WarmPython) -> None:
    code = "import sys; print(sys.argv, repr(sys.path[0]), sys.flags.utf8_mode); 1 / 0"
    process = warm.start(["-c", code, "more"], environment(), Path("/"))
    output, error = process.communicate(TIMEOUT_S)
    assert (process.returncode, output) == (1, "['-c', 'more'] '' 0\n")
    assert error.endswith("ZeroDivisionError: division by zero\n")


def test_a_module_runs_as_with_m(warm: WarmPython, tmp_path: Path) -> None:
    module = tmp_path / "package" / "__main__.py"
    module.parent.mkdir()
    module.write_text("import sys; print(sys.argv, sys.path[0], __name__, __package__)")
    process = warm.start(["-m", "package", "more"], environment(), tmp_path)
    assert process.communicate(TIMEOUT_S) == (f"{[str(module), 'more']} {tmp_path} __main__ package\n", "")


def test_a_program_talks_through_pipes(warm: WarmPython) -> None:
    code = "import sys; print(input(), flush=True); print(sys.stdin.read()); print('complaint', file=sys.stderr)"
    process = warm.start(["-c", code], environment(), Path("/"), pipes=True)
    assert process.stdin is not None and process.stdout is not None
    print("first", file=process.stdin, flush=True)
    assert process.stdout.readline() == "first\n"
    print("rest", file=process.stdin)
    assert process.communicate(TIMEOUT_S) == ("rest\n\n", "complaint\n")


def test_variables_that_python_reads_at_its_start_have_their_effect(warm: WarmPython) -> None:
    code = "import os, sys; print(sys.flags.utf8_mode, os.environ['TMS_TEST'])"
    for mode in ("1", "0", "1"):
        process = warm.start(["-c", code], environment(PYTHONUTF8=mode, TMS_TEST=mode), Path("/"))
        assert process.communicate(TIMEOUT_S)[0] == f"{mode} {mode}\n"


def test_variables_of_one_program_do_not_reach_another() -> None:
    own = WarmPython("json")
    code = "import os; print([name for name in os.environ if name.startswith('TMS_')])"
    for name in ("TMS_FIRST", "TMS_SECOND"):
        process = own.start(["-c", code], environment(**{name: "1"}), Path("/"))
        assert process.communicate(TIMEOUT_S)[0] == f"['{name}']\n"


def test_one_server_serves_programs_that_differ_in_what_is_read_late(warm: WarmPython) -> None:
    code = "import os; print(os.getppid())"
    parents = {warm.start(["-c", code], environment(TMS_TEST=value), Path("/")).communicate(TIMEOUT_S)[0] for value in "ab"}
    assert len(parents) == 1


def test_programs_run_side_by_side_and_can_be_killed(warm: WarmPython, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    waiting = warm.start(["-c", "import sys; open(sys.argv[1]).read()", str(fifo)], environment(), Path("/"))
    other = warm.start(["-c", "print('other')"], environment(), Path("/"))
    assert other.communicate(TIMEOUT_S) == ("other\n", "")
    assert waiting.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(0)
    waiting.kill()
    assert waiting.wait(TIMEOUT_S) == -signal.SIGKILL
    waiting.kill()  # it has ended


def test_a_server_that_has_ended_is_told() -> None:
    own = WarmPython("no_such_module")
    with pytest.raises(OSError):
        own.start(["-c", "pass"], environment(), Path("/")).wait(TIMEOUT_S)
