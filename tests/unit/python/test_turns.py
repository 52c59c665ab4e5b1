"""Guards the order of resume(exclusive=True) of several processes: however it is called, and whatever happens to those who
wait. tests/unit/device/test_device_queue.c guards it in more detail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Program = Callable[..., Any]

#: Does what its standard input says, and answers each line.
WORKER = """
import asyncio, ctypes, math, sys
from torch_memory_saver import _core, errors, torch_memory_saver as saver
level = _core.region_enter("a", _core.BACKUP_NONE, True)
_core.allocate(1 << 21, 0)
_core.region_leave(level)
saver.pause()
options = {"exclusive": True, "timeout": math.inf}
calls = {
    "plain": lambda: saver.resume(**options),
    "pending": lambda: saver.resume(wait=False, **options).wait(),
    "asyncio": lambda: asyncio.run(asyncio.to_thread(saver.resume, **options)),
    "short": lambda: saver.resume(exclusive=True, timeout=0.01),
    "pause": saver.pause,
}
print("ready", flush=True)
for line in sys.stdin:
    try:
        calls[line.strip()]()
        print("done", flush=True)
    except errors.DeviceLockedError as error:
        print("locked", flush=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""

#: Starts workers, and knows how many of them wait.
DRIVER = """
import os, signal, subprocess, sys, time
class Worker:
    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, {worker!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.answer("ready")
    def tell(self, word):
        self.process.stdin.write(word + "\\n")
        self.process.stdin.flush()
    def answer(self, word):
        assert self.process.stdout.readline().strip() == word
    def do(self, word, answer="done"):
        self.tell(word)
        self.answer(answer)
    def queue_up(self, word="plain"):
        expected = waiting() + 1
        self.tell(word)
        while waiting() < expected:
            time.sleep(0)
    def signal(self, number):
        os.kill(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.wait()
def waiting():
    return sum(name.endswith(".ticket") for name in os.listdir(os.environ["TMS_LOCK_DIR"]))
"""


@pytest.fixture
def driver(program: Program, tmp_path: Path) -> Callable[[str], None]:
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    (tmp_path / "locks").mkdir(mode=0o700)

    def run(text: str) -> None:
        text = DRIVER.format(worker=str(worker)) + text + "print('as expected')\n"
        output = program(text, preloaded=False, TMS_LOCK_DIR=str(tmp_path / "locks")).stdout
        assert output == "as expected\n"

    return run


@pytest.mark.parametrize("call", ["plain", "pending", "asyncio"])
def test_who_asks_again_comes_after_who_waits(driver: Callable[[str], None], call: str) -> None:
    driver(f"""
a, b, c = Worker(), Worker(), Worker()
a.do({call!r})
b.queue_up({call!r})
c.queue_up({call!r})
for first, second, third in ((a, b, c), (b, c, a), (c, a, b)):
    first.tell("pause")
    first.tell({call!r})
    first.answer("done")
    second.answer("done")  # `third` waits behind it, and `first` behind both
    while waiting() < 2:
        time.sleep(0)
a.tell("pause")
b.answer("done")
b.tell("pause")
c.answer("done")
assert waiting() == 0
""")


def test_who_times_out_is_interrupted_or_is_killed_keeps_nobody_waiting(driver: Callable[[str], None]) -> None:
    driver("""
holder, stopped, killed, last = Worker(), Worker(), Worker(), Worker()
holder.do("plain")
killed.do("short", "locked")
assert waiting() == 0
stopped.queue_up()
killed.queue_up()
last.queue_up()
stopped.signal(signal.SIGINT)
stopped.answer("interrupted")
killed.signal(signal.SIGKILL)
holder.signal(signal.SIGKILL)
last.answer("done")
assert waiting() == 0
stopped.do("short", "locked")
last.do("pause")
stopped.do("short")
""")


@pytest.mark.slow
def test_a_stopped_process_is_passed_after_some_seconds(driver: Callable[[str], None]) -> None:
    driver("""
holder, stopped, last = Worker(), Worker(), Worker()
holder.do("plain")
stopped.queue_up()
last.queue_up()
stopped.signal(signal.SIGSTOP)
holder.do("pause")
last.answer("done")
stopped.signal(signal.SIGCONT)
last.do("pause")
stopped.answer("done")
""")
