"""Guards requests: `ask` between two real processes, and every way in which they are not served."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs import Job, start_command
from processes import TIMEOUT_S, wait_until

from torch_memory_saver import _core
from torch_memory_saver._cli.main import main
from torch_memory_saver.errors import InvalidArgumentError
from torch_memory_saver.observe import events
from torch_memory_saver.observe._processes import ask, requests, shared_pages
from torch_memory_saver.observe._processes.shared_pages import read_pages

#: Each starts programs.
pytestmark = pytest.mark.slow

MIB = 1 << 20


def requested(directory: Path) -> int:
    (page,) = read_pages(directory).pages
    return page.requests


def begin(job: Job, *arguments: str) -> subprocess.Popen[str]:
    """Starts a command, and returns when it has made its request."""
    command = start_command(*arguments, directory=job.directory)
    assert command.stderr is not None
    line = command.stderr.readline()
    assert "served at its next pause or resume" in line, line
    return command


def finish(command: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, error = command.communicate(timeout=TIMEOUT_S)
    return command.returncode, out, error


def test_a_request_is_served_once(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        job.allocate("weights", 4)
        command = begin(job, "ask", "--events", str(job.pid))
        assert requested(tmp_path) == 1 << _core.PAGE_REQUESTS.index("events")
        job.do("module.pause()")
        assert requested(tmp_path) == 0
        status, out, error = finish(command)
        assert (status, error) == (0, "")
        path = Path(out.strip())
        assert path.parent == tmp_path
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        written = path.read_bytes()
        job.do("module.resume()")  # nothing is requested any more
        assert path.read_bytes() == written
        (page,) = read_pages(tmp_path).pages
        assert (page.served_total, page.unserved_total) == ((0, 1), (0, 0))


@pytest.mark.parametrize("torch", [None, "SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: False))"])
def test_a_process_in_which_pytorch_uses_no_device_has_no_snapshot(tmp_path: Path, torch: str | None) -> None:
    """tests/gpu/test_shared_page.py has one with it."""
    with Job(tmp_path) as job:
        job.allocate("a")
        if torch is not None:
            job.do(f"from types import SimpleNamespace; sys.modules['torch'] = {torch}")
        command = begin(job, "ask", "--snapshot", str(job.pid))
        job.do("module.pause()")
        status, out, error = finish(command)
        assert (status, out) == (1, "") and "could not write a file" in error and "its log says why" in error
        (page,) = read_pages(tmp_path).pages
        assert (page.served_total, page.unserved_total) == ((0, 0), (1, 0))


def test_events_go_where_they_are_wanted(tmp_path: Path) -> None:
    pages_of, target = tmp_path / "pages", tmp_path / "out" / "events.json"
    with Job(pages_of) as job:
        job.allocate("weights")
        command = begin(job, "ask", "--events", str(job.pid), "-o", str(target))
        job.do("module.pause()")
        assert finish(command) == (0, f"{target}\n", "")
        log = events.load_events(target)
        assert log.pid == job.pid and {event.kind for event in log.events} >= {"allocate", "begin", "end"}
        assert stat.S_IMODE(target.stat().st_mode) == 0o600
        assert [path.suffix for path in pages_of.iterdir()] == [".page"], "moved, not copied"

        command = begin(job, "ask", "--events", str(job.pid), "--format", "chrome")
        job.do("module.resume()")
        status, out, _ = finish(command)
        trace = json.loads(Path(out.strip()).read_text())
        assert status == 0 and any(event["name"] == "resume" for event in trace["traceEvents"])


def test_two_requests_at_once(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        job.allocate("a")
        commands = [begin(job, "ask", kind, str(job.pid)) for kind in ("--events", "--snapshot", "--events")]
        job.do("module.pause()")
        results = [finish(command) for command in commands]
        assert [status for status, _, _ in results] == [0, 1, 0]
        assert results[0][1] == results[2][1]
        (page,) = read_pages(tmp_path).pages
        assert (page.served_total, page.unserved_total) == ((0, 1), (1, 0)), "two requests for the same are one file"


@pytest.mark.parametrize("arguments", [["--snapshot"], ["--events", "--format", "chrome"]])
def test_a_file_that_another_command_has_moved_is_requested_again(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """Two commands that wait at once get one file, and each moves it."""
    written, target = (
        tmp_path / f"tms-1-0.{arguments[0].strip('-')}.json",
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.json")),
    )
    answers = []

    def request(*_arguments: object, **_options: object) -> Path:
        answers.append(written)
        if len(answers) == 2:
            events.write_events(written)
        return written

    monkeypatch.setattr(ask, "request_file", request)
    assert main(["ask", *arguments, "1", "-o", str(target)]) == 0
    assert len(answers) == 2 and json.loads(target.read_text())
    assert list(tmp_path.iterdir()) == [target]
    assert capfdbinary.readouterr().out == os.fsencode(target) + b"\n", "as it is, for a shell"


def test_a_file_that_cannot_be_moved_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "tms-1-0.snapshot.pickle"
    written.write_bytes(b"\x80\x04}.")
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(ask, "request_file", lambda *_arguments, **_options: written)
    assert main(["ask", "--snapshot", "1", "-o", str(tmp_path / "file" / "x.json")]) == 2
    reason = "Not a directory: the file was not written; choose another folder\n"
    assert f" ask: error: {tmp_path}/file/x.json: {reason}" in capsys.readouterr().err
    assert written.read_bytes() == b"\x80\x04}."


def test_a_request_that_cannot_be_written(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        job.allocate("a")
        command = begin(job, "ask", "--events", str(job.pid))
        job.do("import torch_memory_saver.observe._processes.requests as s")
        job.do("def fail(*_, **__): raise OSError(28, 'full')")
        job.do("s.write_text_file = fail")
        job.do("assert module.pause().bytes == 2 * MIB")
        status, out, error = finish(command)
        assert (status, out) == (1, "")
        assert "could not write" in error and "No space left on device" in error
        assert requested(tmp_path) == 0


def test_ctrl_c_withdraws_the_request(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        job.allocate("a")
        command = begin(job, "ask", "--snapshot", str(job.pid))
        command.send_signal(signal.SIGINT)
        assert finish(command)[0] == 130
        assert requested(tmp_path) == 0


def test_a_time_limit(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        job.allocate("a")
        status, _, error = finish(begin(job, "ask", "--events", str(job.pid), "--timeout", "0.1"))
        assert status == 1 and "did not pause or resume within 0.1 s" in error and "Traceback" not in error
        assert requested(tmp_path) == 0


def test_a_process_that_dies_while_waited_for(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        job.allocate("a")
        commands = [begin(job, "ask", what, str(job.pid)) for what in ("--snapshot", "--events")]
        job.kill()
        for status, _, error in map(finish, commands):
            assert status == 1 and f"process {job.pid} has ended before it served the request" in error


def test_a_process_that_is_stopped_while_waited_for(tmp_path: Path) -> None:
    """Each command ends by its time limit, and withdraws its own request."""
    with Job(tmp_path) as job:
        job.allocate("a")
        os.kill(job.pid, signal.SIGSTOP)
        commands = [begin(job, "ask", what, str(job.pid), "--timeout", "0.1") for what in ("--snapshot", "--events")]
        for status, _, error in map(finish, commands):
            assert status == 1 and "did not pause or resume within 0.1 s" in error
        assert requested(tmp_path) == 0
        os.kill(job.pid, signal.SIGCONT)


def test_a_process_that_never_serves(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        job.do("_core.region_enter('a', 0, True); cuda_malloc(MIB)")  # the native library alone
        wait_until(lambda: len(read_pages(tmp_path).pages) == 1)
        status, _, error = finish(start_command("ask", "--snapshot", str(job.pid), directory=tmp_path))
        assert status == 2 and "serves no requests" in error


@pytest.fixture
def why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[int], str]:
    """The message of a request that cannot be made."""
    monkeypatch.setattr(requests, "page_directory", lambda: tmp_path)
    monkeypatch.setenv("TMS_SHARED_PAGE", str(tmp_path))

    def message(pid: int) -> str:
        with pytest.raises(InvalidArgumentError) as raised:
            requests.request_file(pid, "snapshot")
        return str(raised.value)

    return message


def test_a_process_without_a_page(why: Callable[[int], str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"process {os.getpid()} has no page in" in why(os.getpid())
    assert "there is no process 4194305" in why(4194305)  # beyond the largest number
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert f"belongs to another user (uid {os.getuid()})" in why(os.getpid())


def test_a_process_of_another_namespace(why: Callable[[int], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        job.allocate("a")
        monkeypatch.setattr(shared_pages, "own_namespace", lambda: 1)
        monkeypatch.setattr(requests, "own_namespace", lambda: 1)
        assert f"process {job.pid} is in another PID namespace" in why(job.pid)


def test_a_page_of_another_release(why: Callable[[int], str], tmp_path: Path) -> None:
    (tmp_path / f"tms-{os.getpid()}-0.page").write_bytes(b"TMS_PLAY".ljust(32768))
    assert "cannot be used: it is not a shared page" in why(os.getpid())


def test_a_directory_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(requests, "page_directory", lambda: tmp_path / "file")
    with pytest.raises(InvalidArgumentError, match=r"the directory of the pages, .*/file, cannot be used: Not a directory"):
        requests.request_file(os.getpid(), "snapshot")


@pytest.mark.parametrize(
    "arguments",
    [["--snapshot", "0"], ["--events", "x"], ["--events", "1", "--timeout", "-1"], ["1"], ["--events", "--snapshot", "1"]],
)
def test_wrong_arguments(arguments: list[str], tmp_path: Path) -> None:
    status, _, error = finish(start_command("ask", *arguments, directory=tmp_path))
    assert status == 2 and "Traceback" not in error


def test_a_negative_timeout(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["ask", "--events", "1", "--timeout", "-1"])
    assert "'-1' is not a number of seconds of at least 0" in capsys.readouterr().err


def test_a_snapshot_is_no_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ask", "--snapshot", "1", "--format", "chrome"]) == 2
    assert "--format chrome is a form of events: ask with --events" in capsys.readouterr().err
