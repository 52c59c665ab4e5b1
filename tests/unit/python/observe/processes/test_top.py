"""Guards `top`: its output without a terminal, its screen in one, the keys, and that the terminal is restored."""

from __future__ import annotations

import curses
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from jobs import Job, start_command
from made_store import MadeStore
from processes import ELSEWHERE, TIMEOUT_S, environment

from torch_memory_saver._cli import main
from torch_memory_saver.observe._processes import top_screen
from torch_memory_saver.observe._processes.view import View

MIB = 1 << 20
#: What a terminal is sent to leave the screen of a program, by terminfo's entry of xterm.
LEAVE_SCREEN = b"\x1b[?1049l"


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path, RANK="4") as job:
        job.do("sys.argv = ['trainer.py']")
        job.allocate("weights", 4)
        job.allocate("kv_cache", 6)
        job.do("module.pause('kv_cache')")
        yield job


# Without a terminal.


def test_once_as_a_table_and_as_json(command: Any, job: Job) -> None:
    done = command("top", "--once", TMS_SHARED_PAGE=str(job.directory), COLUMNS="80")
    lines = done.stdout.splitlines()
    assert done.stderr == ""
    assert any(line.split()[:4] == [str(job.pid), "trainer", "#4", "partly"] for line in lines)
    assert any(line.split()[:4] == ["weights", "resident", "4M", "0"] for line in lines)
    assert any(line.split()[:4] == ["kv_cache", "paused", "0", "6M"] for line in lines)
    assert max(len(line) for line in lines) <= 80
    assert any("NVML" in line for line in lines[-3:]), "why other processes are missing"
    done = command("top", "--once", "--json", TMS_SHARED_PAGE=str(job.directory))
    (line,) = done.stdout.splitlines()
    data = json.loads(line)
    assert data["format"] == 1
    (gpu,) = [gpu for gpu in data["gpus"] if gpu["processes"]]
    assert gpu["total_bytes"] == 512 * MIB
    assert (gpu["used_bytes"], gpu["other_bytes"]) == (None, None), "unknown without NVML, and not made up"
    (process,) = gpu["processes"]
    assert (process["pid"], process["rank"], process["resident_bytes"], process["paused_bytes"]) == (
        job.pid,
        4,
        4 * MIB,
        6 * MIB,
    )
    assert [tag["tag"] for tag in process["tags"]] == ["weights", "kv_cache"]


def test_nothing_to_show(command: Any, tmp_path: Path) -> None:
    done = command("top", "--once", TMS_SHARED_PAGE=str(tmp_path / "missing"))
    assert "no GPU and no process with a page is known" in done.stdout
    assert not (tmp_path / "missing").exists(), "looking makes nothing"


def test_the_shared_store_is_read_and_not_made(command: Any, tmp_path: Path) -> None:
    variables = {"TMS_SHARED_PAGE": str(tmp_path / "missing"), "TMS_SHARED_DIR": str(tmp_path / "store"), "COLUMNS": "200"}
    assert "shared store" not in command("top", "--once", **variables).stdout
    assert not (tmp_path / "store").exists()
    with MadeStore(tmp_path / "store") as store:
        store.object("a", 3 * MIB, store.holder("1"), store.holder("2"))
        lines = command("top", "--once", **variables).stdout.splitlines()
        assert f"shared store: 3 MiB in 1 object, each counted once, for 2 processes: {store.path}" in lines
        data = json.loads(command("top", "--once", "--json", **variables).stdout)
        assert data["store"] == {"path": str(store.path), "bytes": 3 * MIB, "objects": 1, "processes": 2}
        store.path.chmod(0o777)
        assert any(
            f"note: {store.path} is not shown: the check" in line
            for line in command("top", "--once", **variables).stdout.splitlines()
        )


def test_a_pipe_gets_one_table_after_the_other(job: Job) -> None:
    top = start_command("top", "--interval", "0.1", "--filter", "kv", directory=job.directory)
    assert top.stdout is not None
    seen = 0
    while seen < 2:  # tables
        line = top.stdout.readline()
        assert line, "top has ended"
        seen += "kv_cache" in line
    job.do("module.resume()")
    while "resident" not in (line := top.stdout.readline()) or "kv_cache" not in line:
        assert line and "weights" not in line
    top.send_signal(signal.SIGINT)
    assert top.wait(TIMEOUT_S) == 130
    top.stdout.close()
    assert top.stderr is not None and top.stderr.read() == ""
    top.stderr.close()


#: A process that holds 6 MiB of GPU 1 as managed memory, and another one that holds 10 MiB, and what `top` says.
ON_SIMULATED_GPUS = """
import ctypes, json, os, subprocess, sys
from torch_memory_saver import _core
address = _core.allocate(6 << 20, 1)
other = subprocess.Popen([sys.executable, "-c", '''
import ctypes, os, sys
cuda, handle, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64(), ctypes.c_void_p()
assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 1) == 0
assert cuda.cuCtxSetCurrent(context) == 0 and cuda.cuMemAlloc_v2(ctypes.byref(handle), ctypes.c_size_t(10 << 20)) == 0
print("ready", flush=True)
sys.stdin.read()
'''], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
assert other.stdout.readline() == "ready\\n"
done = subprocess.run([sys.executable, "-m", "torch_memory_saver", "top", "--once", "--json"], stdout=subprocess.PIPE)
data = json.loads(done.stdout)
other.communicate()
first, second = data["gpus"]
assert (first["index"], first["used_bytes"], first["processes"]) == (0, 0, []), data
assert (second["index"], second["name"]) == (1, "Simulated GPU"), data
mib = 1 << 20
assert [second[name] // mib for name in ("total_bytes", "used_bytes", "free_bytes", "resident_bytes", "other_bytes")] == [
    64, 16, 48, 6, 10], data
rows = {row["pid"]: row for row in second["processes"]}
"""


def run_on_simulated_gpus(text: str, pages: Path) -> None:
    variables = environment(False, TMS_SHARED_PAGE=str(pages), CUDA_VISIBLE_DEVICES="0,1")
    del variables["TMS_SIMULATED_MEMORY"], variables["TMS_CUDA_DRIVER"]
    simulated = [sys.executable, "-m", "torch_memory_saver", "simulate", "--devices", "2", "--memory", "64MiB", "--"]
    done = subprocess.run(
        [*simulated, sys.executable, "-c", ON_SIMULATED_GPUS + text],
        env=variables,
        cwd=ELSEWHERE,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_on_simulated_gpus_nvml_says_what_others_use(job: Job) -> None:
    """Under `simulate` all processes share the simulated GPUs, and NVML is the simulated one. The job is on another
    simulated machine, and is not shown."""
    text = f"""
assert data["notes"] == [], data
assert set(rows) == {{os.getpid(), other.pid}}
assert (rows[os.getpid()]["managed"], rows[os.getpid()]["used_bytes"]) == (True, 6 * mib)
assert (rows[other.pid]["managed"], rows[other.pid]["used_bytes"]) == (False, 10 * mib)
assert rows[other.pid]["name"], "from /proc"
assert os.path.exists({str(job.directory)!r}) and os.environ["TMS_SHARED_PAGE"] == {str(job.directory)!r}
"""
    run_on_simulated_gpus(text, job.directory)


# In a terminal.


class Terminal:
    """A program in a pseudo-terminal with lines of 80 characters."""

    def __init__(self, arguments: list[str], directory: Path, lines: int = 24, **variables: str) -> None:
        self.master, self.slave = pty.openpty()
        self.resize(lines, 80)
        self.before = termios.tcgetattr(self.slave)
        self.output = b""
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            env=environment(False, TMS_SHARED_PAGE=str(directory), **{"TERM": "xterm", **variables}),
            cwd=ELSEWHERE,
            stdin=self.slave,
            stdout=self.slave,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def resize(self, lines: int, columns: int) -> None:
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def type(self, text: bytes) -> None:
        os.write(self.master, text)

    def wait_for(self, *texts: bytes) -> None:
        """Reads until each of the texts came, from here on."""
        seen, end = b"", time.monotonic() + TIMEOUT_S
        while not all(text in seen for text in texts):
            assert time.monotonic() < end and self.process.poll() is None, seen
            seen += self._read(0.1)

    def finish(self) -> int:
        """The exit status, when all output has been read."""
        end = time.monotonic() + TIMEOUT_S
        while self.process.poll() is None:
            assert time.monotonic() < end
            self._read(0.1)
        while self._read(0):
            pass
        return self.process.returncode

    def _read(self, seconds: float) -> bytes:
        ready = select.select([self.master], [], [], seconds)[0]
        data = os.read(self.master, 1 << 16) if ready else b""
        self.output += data
        return data

    def assert_restored(self) -> None:
        assert termios.tcgetattr(self.slave) == self.before
        if b"\x1b[?1049h" in self.output:
            assert LEAVE_SCREEN in self.output[self.output.rindex(b"\x1b[?1049h") :]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(TIMEOUT_S)
        assert self.process.stderr is not None
        self.process.stderr.close()
        self.hang_up()
        os.close(self.slave)

    def hang_up(self) -> None:
        if self.master >= 0:
            os.close(self.master)
        self.master = -1


@pytest.fixture
def terminal(job: Job) -> Iterator[Terminal]:
    """`top`, which does not look again on its own."""
    terminal = Terminal(["-m", "torch_memory_saver", "top", "--interval", "3600"], job.directory)
    terminal.wait_for(b"trainer #4", b"weights", b"kv_cache", b"q quit")
    yield terminal
    terminal.close()


@pytest.mark.slow
def test_the_screen_and_the_keys(terminal: Terminal) -> None:
    assert b"managed: resident 4 MiB  paused 6 MiB" in terminal.output
    assert b"sorted by memory" in terminal.output
    terminal.type(b"s")
    terminal.wait_for(b"paused")  # only what differs is written: "sorted by memory" becomes "sorted by paused"
    terminal.type(b"/nobody")
    terminal.wait_for(b"filter: ", b"y_  (Enter: done, Esc: none)")  # the end of what was typed, after the rest
    terminal.type(b"\x7f" * 6 + b"kv")
    terminal.wait_for(b"kv_cache")
    terminal.type(b"q\x1b")  # part of the filter, and then none
    terminal.wait_for(b"q quit")
    terminal.type(b"q")
    assert terminal.finish() == 0
    terminal.assert_restored()


def test_the_interval_has_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("curses.curs_set", lambda _: None)
    screen = top_screen._Screen(Mock(), Mock(), 1.5, "memory", "")
    intervals = []
    for key in "-" * 5 + "+" * 9:
        assert screen._obey(key)
        intervals.append(screen._interval)
    assert intervals == [1.0, 0.5, 0.2, 0.1, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 60.0]


@pytest.mark.parametrize("width", [80, 120])
def test_the_help_key_shows_the_keys_until_the_next_one(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setattr("curses.curs_set", lambda _: None)
    window = Mock()
    window.getmaxyx.return_value = (24, width)
    screen = top_screen._Screen(window, Mock(), 1.5, "memory", "")
    view = View((), None, ())
    shown = []
    for key in ("?", "q"):
        assert screen._obey(key)
        screen._draw(view)
        shown.append("\n".join(call.args[2].rstrip() for call in window.addstr.call_args_list))
        window.addstr.reset_mock()
    assert "s        sort the processes by the next of memory, paused, pid, name, failures" in shown[0]
    words = " ".join(shown[0].split())
    for _, text in top_screen._KEYS:
        assert text in words, "nothing is cut"
    assert "sort the processes" not in shown[1] and not screen._obey("q")


def test_the_keys_of_the_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key without a character, such as an arrow, is not typed."""
    monkeypatch.setattr("curses.curs_set", lambda _: None)
    window = Mock()
    window.getmaxyx.return_value = (24, 80)
    screen = top_screen._Screen(window, Mock(), 1.5, "memory", "")
    for key in ("/", "k", curses.KEY_LEFT, curses.KEY_F1, "ü", "\x7f", "v", "q", "\t", curses.KEY_DOWN):
        assert screen._obey(key)
    assert (screen._pattern, screen._typing, screen._top) == ("kvq", True, 1)
    assert screen._obey(curses.KEY_ENTER) and not screen._obey("q")
    assert screen._pattern == "kvq"


@pytest.mark.slow
def test_a_filter_of_other_than_ascii(job: Job) -> None:
    job.allocate("größe")
    terminal = Terminal(["-m", "torch_memory_saver", "top", "--interval", "3600"], job.directory, LC_ALL="C.UTF-8")
    terminal.wait_for(b"trainer #4", "größe".encode())
    terminal.type(b"/nothing\x1bODhere")
    terminal.resize(24, 100)  # only what differs is written, but with another size everything
    terminal.wait_for(b"no process has 'nothinghere'", b"filter: nothinghere_")
    terminal.type(b"\x7f" * 11 + "röß".encode())
    terminal.resize(24, 110)
    terminal.wait_for("filter: röß_".encode(), "größe".encode())
    assert b"weights" not in terminal.output[terminal.output.rindex(b"trainer") :]
    terminal.type(b"\nq")
    assert terminal.finish() == 0
    terminal.assert_restored()
    terminal.close()


@pytest.mark.slow
def test_the_end_and_the_begin_of_what_is_shown(job: Job) -> None:
    for tag in ("first", *map(str, range(6)), "zebra"):
        job.allocate(tag)
    terminal = Terminal(["-m", "torch_memory_saver", "top", "--interval", "3600"], job.directory, lines=12)
    terminal.wait_for(b"trainer #4", b"first")
    assert b"zebra" not in terminal.output
    terminal.type(b"\x1bOF")
    terminal.wait_for(b"zebra")
    terminal.type(b"\x1bOH")
    terminal.wait_for(b"trainer #4")
    terminal.type(b"q")
    assert terminal.finish() == 0
    terminal.close()


def test_a_closed_input(job: Job) -> None:
    """As of a program that a daemon starts."""
    top = [sys.executable, "-m", "torch_memory_saver", "top"]
    process = subprocess.Popen(
        ["sh", "-c", 'exec "$@" <&-', "sh", *top],
        env=environment(False, TMS_SHARED_PAGE=str(job.directory)),
        cwd=ELSEWHERE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    while (line := process.stdout.readline()) and "trainer #4" not in line:
        pass
    process.send_signal(signal.SIGINT)
    assert "trainer #4" in line, process.communicate(timeout=TIMEOUT_S)
    process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130


@pytest.mark.slow
def test_another_size_of_the_terminal(terminal: Terminal) -> None:
    terminal.resize(4, 200)
    terminal.process.send_signal(signal.SIGWINCH)  # as the terminal does
    terminal.wait_for(b"total 512 MiB")
    terminal.type(b"\x1bOB" * 4)  # four lines down
    terminal.wait_for(b"trainer #4")
    terminal.resize(1, 1)
    terminal.process.send_signal(signal.SIGWINCH)
    terminal.type(b"q")
    assert terminal.finish() == 0
    terminal.assert_restored()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_it(terminal: Terminal, number: signal.Signals) -> None:
    terminal.process.send_signal(number)
    assert terminal.finish() == 128 + number
    terminal.assert_restored()
    assert terminal.process.stderr is not None and terminal.process.stderr.read() == b""


@pytest.mark.slow
def test_top_ends_with_its_terminal(terminal: Terminal) -> None:
    """Also where it is not the controlling terminal, which sends no signal."""
    terminal.hang_up()
    assert terminal.process.wait(TIMEOUT_S) == 128 + signal.SIGHUP


@pytest.mark.slow
def test_a_failure_restores_the_terminal(tmp_path: Path) -> None:
    text = "from torch_memory_saver.observe._processes.top_screen import show; show(lambda: 1 / 0, 1.0, 'memory', '')"
    terminal = Terminal(["-c", text], tmp_path)
    assert terminal.finish() == 1
    terminal.assert_restored()
    assert terminal.process.stderr is not None and b"ZeroDivisionError" in terminal.process.stderr.read()
    terminal.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dumb", "no-such-terminal", ""])
def test_a_terminal_without_a_cursor_gets_lines(job: Job, name: str) -> None:
    terminal = Terminal(["-m", "torch_memory_saver", "top", "--interval", "3600"], job.directory, TERM=name)
    terminal.wait_for(b"trainer #4", b"kv_cache")
    assert b"\x1b" not in terminal.output
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.finish() == 130
    terminal.assert_restored()
    terminal.close()


@pytest.mark.parametrize("arguments", [["--interval", "0"], ["--interval", "nan"], ["--sort", "size"]])
def test_wrong_arguments(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main.main(["top", *arguments])
