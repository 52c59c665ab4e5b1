"""Guards that lines of the native log reach Python's logging, or stderr, and never both."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
from processes import Program
from recorded_hooks import Recorder

from torch_memory_saver import _core

NEVER = "no allocation ever had the tag"


@pytest.fixture
def logger(monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    """The logger of the package, whose level and handlers are restored afterwards."""
    found = logging.getLogger("torch_memory_saver")
    for name in ("level", "handlers", "propagate"):
        monkeypatch.setattr(found, name, getattr(found, name))
    yield found  # type: ignore[misc]
    found.manager._clear_cache()  # type: ignore[attr-defined]


def test_a_warning_is_a_record(hooks: Recorder, caplog: pytest.LogCaptureFixture, capfd: Any) -> None:
    hooks.saver.pause("no such tag 1")
    (record,) = [record for record in caplog.records if NEVER in record.getMessage()]
    assert (record.name, record.levelno) == ("torch_memory_saver", logging.WARNING)
    assert record.getMessage() == f"pause: {NEVER} 'no such tag 1'; nothing to do for it"
    assert capfd.readouterr().err == ""


def test_lines_of_a_call_that_raises(hooks: Recorder, simulator: Any, caplog: pytest.LogCaptureFixture, capfd: Any) -> None:
    hooks.allocate("a")
    simulator.fail_after("cuMemUnmap", 0, 1, 999)
    with pytest.raises(Exception, match="cuMemUnmap"):
        hooks.saver.pause()
    simulator.stop_failing()
    (record,) = caplog.records  # a summary, if an earlier test of this process had the same failure
    assert "damaged" in record.getMessage() and capfd.readouterr().err == ""
    hooks.saver.resume()


def test_the_end_of_a_pending_resume(hooks: Recorder, simulator: Any, caplog: pytest.LogCaptureFixture, capfd: Any) -> None:
    hooks.allocate("a")
    hooks.saver.pause()
    hooks.saver.resume(["no such tag 2", hooks.tag("a")], wait=False).wait()
    text = caplog.text + capfd.readouterr().err
    assert text.count(NEVER) == 1, "its thread may have written it before the wait"


def test_lines_of_other_threads_come_with_a_call(hooks: Recorder, capfd: Any) -> None:
    lines: list[tuple[int, str]] = []

    def call() -> None:
        thread = threading.Thread(target=_core.pause, args=(("no such tag 3",), None))
        thread.start()
        thread.join()

    _core.collect_log(call, lines)
    assert lines == [(2, f"pause: {NEVER} 'no such tag 3'; nothing to do for it")]
    assert capfd.readouterr().err == ""


def test_lines_outside_of_calls_go_to_stderr_at_once(hooks: Recorder, caplog: pytest.LogCaptureFixture, capfd: Any) -> None:
    _core.pause(("no such tag 5",), None)
    assert capfd.readouterr().err.count(NEVER) == 1
    assert caplog.records == []


def test_without_a_handler_they_go_to_stderr(hooks: Recorder, logger: logging.Logger, capfd: Any) -> None:
    logger.handlers, logger.propagate = [], False
    hooks.saver.pause("no such tag 6")
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("torch_memory_saver[") and f"] warning: pause: {NEVER} 'no such tag 6'" in line


def test_a_program_that_turns_warnings_off(
    hooks: Recorder, logger: logging.Logger, caplog: pytest.LogCaptureFixture, capfd: Any
) -> None:
    logger.setLevel(logging.ERROR)
    hooks.saver.pause("no such tag 7")
    assert (caplog.records, capfd.readouterr().err) == ([], "")


def test_an_exception_is_the_one_that_is_raised() -> None:
    lines: list[tuple[int, str]] = []

    def call() -> None:
        _core.pause(("no such tag 8",), None)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        _core.collect_log(call, lines)
    assert len(lines) == 1
    with pytest.raises(TypeError, match="lines must be a list"):
        _core.collect_log(call, ())  # type: ignore[arg-type]


PAUSE = """
import logging, sys
from torch_memory_saver import _core, torch_memory_saver as saver
{setup}
depth = _core.region_push("a", _core.BACKUP_NONE, True)
address = _core.allocate(2 << 20, 0)
saver.pause("a")
saver.resume("a")
"""


@pytest.mark.parametrize(
    ("setup", "native", "records"),
    [
        ("", 2, 0),
        ("logging.basicConfig(stream=sys.stdout)", 2, 0),
        ("logging.basicConfig(stream=sys.stdout, level=logging.INFO)", 0, 2),
    ],
    ids=["no-logging", "warnings", "info"],
)
def test_lines_that_a_variable_asks_for(program: Program, setup: str, native: int, records: int) -> None:
    """TMS_LOG_LEVEL=info shows them without any set-up of logging."""
    done = program(PAUSE.format(setup=setup), TMS_LOG_LEVEL="info")
    assert done.stderr.count("] info: ") == native
    assert (done.stdout + done.stderr).count("INFO:torch_memory_saver:") == records


def test_what_is_left_at_exit_is_written(program: Program) -> None:
    """A thread is still inside a call when the process exits."""
    done = program(
        """
import threading
from torch_memory_saver import _core
reached = threading.Event()
def call():
    _core.pause(("never",), None)
    reached.set()
    threading.Event().wait()
threading.Thread(target=_core.collect_log, args=(call, []), daemon=True).start()
assert reached.wait(60)
""",
        preloaded=False,
    )
    assert done.stderr.count(f"warning: pause: {NEVER} 'never'") == 1


def test_a_child_forked_during_a_call_leaves_its_parents_lines(program: Program) -> None:
    done = program(
        """
import os
from torch_memory_saver import _core
lines = []
def call():
    _core.pause(("parent",), None)
    child = os.fork()
    if child == 0:
        _core.pause(("child",), None)
        return
    os.waitpid(child, 0)
pid = os.getpid()
_core.collect_log(call, lines)
if os.getpid() == pid:
    print("lines", [text for _, text in lines])
else:
    assert lines == [], lines
    os._exit(0)
""",
        preloaded=False,
    )
    assert done.stdout == f"lines [\"pause: {NEVER} 'parent'; nothing to do for it\"]\n"
    assert done.stderr.count(NEVER) == 1 and f"warning: pause: {NEVER} 'child'" in done.stderr
