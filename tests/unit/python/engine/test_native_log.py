"""Guards that lines of the native log reach Python's logging, or stderr, and never both."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from processes import Program
from recorded_hooks import Recorder

from torch_memory_saver import _core

#: Part of a line, of level error, that each pause writes which skips damaged memory.
SKIPPED = "still damaged; later calls try again"
ERROR_UNKNOWN = 999


@pytest.fixture
def logger(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """The logger of the package, whose level and handlers are restored afterwards."""
    found = logging.getLogger("torch_memory_saver")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("level", "handlers", "propagate"):
            patch.setattr(found, name, getattr(found, name))
        yield found
    found.manager._clear_cache()  # type: ignore[attr-defined]


@pytest.fixture
def noisy(hooks: Recorder, simulator: Any, capfd: Any) -> Iterator[Callable[[], object]]:
    """A call of the core that writes one line, because the driver does not release damaged memory."""
    hooks.allocate("a")
    simulator.fail_after("cuMemUnmap", 0, 1 << 30, ERROR_UNKNOWN)
    for _ in range(2):  # what is logged once has been logged
        with pytest.raises(Exception, match="cuMemUnmap"):
            _core.pause(None, None)
            _core.resume(None, None)
    capfd.readouterr()
    yield lambda: _core.pause((hooks.tag("a"),), None)
    simulator.stop_failing()
    _core.resume(None, None)


def test_a_line_of_a_call_is_a_record(
    hooks: Recorder, noisy: Callable[[], object], caplog: pytest.LogCaptureFixture, capfd: Any
) -> None:
    hooks.saver.pause()
    (record,) = [record for record in caplog.records if SKIPPED in record.getMessage()]
    assert (record.name, record.levelno) == ("torch_memory_saver", logging.ERROR)
    assert record.getMessage().startswith("pause: a CUDA driver call failed")
    assert capfd.readouterr().err == ""


def test_lines_of_a_call_that_raises(
    hooks: Recorder, noisy: Callable[[], object], caplog: pytest.LogCaptureFixture, capfd: Any
) -> None:
    hooks.on_pause("p")
    hooks.allocate("resident")
    hooks.does["p", "after"] = noisy  # which is refused; the pause has written its line before
    with pytest.raises(Exception, match="cuMemUnmap"):
        hooks.saver.pause()
    assert any(record.name == "torch_memory_saver" for record in caplog.records)
    assert capfd.readouterr().err == ""


def test_lines_of_other_threads_come_with_a_call(noisy: Callable[[], object], capfd: Any) -> None:
    lines: list[tuple[int, str]] = []

    def call() -> int:
        thread = threading.Thread(target=noisy)
        thread.start()
        thread.join()
        return 7

    assert _core.collect_log(call, lines) == 7
    assert [(level, SKIPPED in text) for level, text in lines] == [(1, True)]
    assert capfd.readouterr().err == ""


def test_lines_outside_of_calls_go_to_stderr_at_once(
    noisy: Callable[[], object], caplog: pytest.LogCaptureFixture, capfd: Any
) -> None:
    noisy()
    assert capfd.readouterr().err.count(SKIPPED) == 1
    assert caplog.records == []


def test_without_a_handler_they_go_to_stderr(
    hooks: Recorder, noisy: Callable[[], object], logger: logging.Logger, capfd: Any
) -> None:
    logger.handlers, logger.propagate = [], False
    hooks.saver.pause()
    (line,) = [line for line in capfd.readouterr().err.splitlines() if SKIPPED in line]
    assert line.startswith("torch_memory_saver[") and "] error: pause: " in line


def test_a_program_that_turns_errors_off(
    hooks: Recorder, noisy: Callable[[], object], logger: logging.Logger, caplog: pytest.LogCaptureFixture, capfd: Any
) -> None:
    logger.setLevel(logging.CRITICAL)
    hooks.saver.pause()
    assert (caplog.records, capfd.readouterr().err) == ([], "")


def test_an_exception_is_the_one_that_is_raised(noisy: Callable[[], object]) -> None:
    lines: list[tuple[int, str]] = []

    def call() -> None:
        noisy()
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        _core.collect_log(call, lines)
    assert len(lines) == 1
    with pytest.raises(TypeError, match="lines must be a list"):
        _core.collect_log(call, ())  # type: ignore[arg-type]


# In programs TMS_LOG_LEVEL is info: each pause and each resume writes a line.

PAUSE = """
import logging, sys
from torch_memory_saver import _core, torch_memory_saver as saver
{setup}
level = _core.region_enter("a", _core.BACKUP_NONE, True)
address = _core.allocate(2 << 20, 0)
saver.pause("a")
saver.resume("a")
"""


@pytest.mark.parametrize(
    ("setup", "native", "records"),
    [
        ("", 2, 0),
        ("logging.basicConfig(stream=sys.stdout, level=logging.INFO)", 0, 2),
    ],
    ids=["no-logging", "info"],
)
def test_lines_that_a_variable_asks_for(program: Program, setup: str, native: int, records: int) -> None:
    """TMS_LOG_LEVEL=info shows them without any set-up of logging."""
    done = program(PAUSE.format(setup=setup), TMS_LOG_LEVEL="info")
    assert done.stderr.count("] info: ") == native
    assert (done.stdout + done.stderr).count("INFO:torch_memory_saver:") == records


@pytest.mark.parametrize(("level", "lines"), [("info", ["published 'ä'"]), ("warning", [])])
def test_lines_of_python_code_follow_the_variable(program: Program, level: str, lines: list[str]) -> None:
    text = "from torch_memory_saver._engine.native_log import log_info; log_info(\"published 'ä'\")"
    done = program(text, TMS_LOG_LEVEL=level)
    assert [line.split("] info: ")[1] for line in done.stderr.splitlines()] == lines


def test_what_is_left_at_exit_is_written(program: Program) -> None:
    """A thread is still inside a call when the process exits."""
    done = program(
        """
import threading
from torch_memory_saver import _core
reached = threading.Event()
def call():
    _core.pause(None, None)
    reached.set()
    threading.Event().wait()
threading.Thread(target=_core.collect_log, args=(call, []), daemon=True).start()
assert reached.wait(60)
""",
        preloaded=False,
        TMS_LOG_LEVEL="info",
    )
    assert done.stderr.count("] info: pause: ") == 1


def test_a_child_forked_during_a_call_leaves_its_parents_lines(program: Program) -> None:
    done = program(
        """
import os
from torch_memory_saver import _core
lines = []
def call():
    _core.pause(None, None)
    child = os.fork()
    if child == 0:
        _core.resume(None, None)
        return
    os.waitpid(child, 0)
pid = os.getpid()
_core.collect_log(call, lines)
if os.getpid() == pid:
    print([text[:7] for _, text in lines])
else:
    assert lines == [], lines
    os._exit(0)
""",
        preloaded=False,
        TMS_LOG_LEVEL="info",
    )
    assert done.stdout == "['pause: ']\n"
    assert done.stderr.count("] info: ") == done.stderr.count("] info: resume: ") == 1
