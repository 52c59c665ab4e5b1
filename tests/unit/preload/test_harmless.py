"""Guards that processes without CUDA that inherit LD_PRELOAD are not affected."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

Compile = Callable[..., Path]
Run = Callable[..., "subprocess.CompletedProcess[str]"]

#: Every variable that could make the library act.
EVERYTHING_ON = {
    "TMS_INIT_ENABLE": "1",
    "TMS_INIT_ENABLE_CPU_BACKUP": "1",
    "TMS_LOG_LEVEL": "debug",
    "TMS_HOST_MEMORY_LIMIT_MB": "malformed",
    "TMS_INIT_ENABEL": "1",
    "TMS_CUDA_DRIVER": "/nonexistent/libcuda.so.1",
}


def assert_the_same(run: Run, command: Sequence[str | Path], cwd: Path | None = None) -> Any:
    without = run(command, preload=[], cwd=cwd)
    preloaded = run(command, env=EVERYTHING_ON, cwd=cwd)
    assert (preloaded.returncode, preloaded.stdout, preloaded.stderr) == (
        without.returncode,
        without.stdout,
        without.stderr,
    )
    return preloaded


@pytest.mark.parametrize(
    "command",
    [
        ["bash", "-c", "echo out; echo err >&2; (exit 3); echo $?; exit 4"],
        ["bash", "-c", "x=$(ls -a /); printf '%s\\n' \"$x\" | sort | head -n 3; wait"],
        ["ls", "-l", "/usr"],
        ["ls", "/does/not/exist"],
        ["git", "--version"],
        ["git", "status", "--short", "/does/not/exist"],
        ["gcc", "--version"],
        [sys.executable, "-c", "import sys; print('out'); print('err', file=sys.stderr); sys.exit(6)"],
        [sys.executable, "-c", "import threading; threading.Thread(target=print, args=('thread',)).start()"],
        [
            sys.executable,
            "-c",
            "import subprocess as s, sys; sys.exit(s.run(['bash', '-c', 'echo child; exit 9']).returncode)",
        ],
        [
            sys.executable,
            "-c",
            "import os; pid = os.fork(); pid or os._exit(8); print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))",
        ],
        [
            sys.executable,
            "-c",
            "import multiprocessing as m; p = m.get_context('spawn').Process(target=print, args=(1,)); p.start(); p.join()",
        ],
    ],
    ids=lambda command: f"{Path(command[0]).name} {command[-1][:30]}",
)
def test_programs_without_cuda_do_not_notice(run: Run, command: list[str]) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"needs {command[0]}")
    assert_the_same(run, command)


def test_a_compiler_makes_the_same_program(run: Run, compiler: str, tmp_path: Path) -> None:
    (tmp_path / "hello.c").write_text('#include <stdio.h>\nint main(void) { puts("hello"); return 7; }\n')
    assert_the_same(run, [compiler, "hello.c", "-o", "hello"], cwd=tmp_path)
    done = run([tmp_path / "hello"])
    assert (done.returncode, done.stdout, done.stderr) == (7, "hello\n", "")


@pytest.mark.parametrize("flags", [[], ["-static"]], ids=["dynamic", "static"])
def test_threads_that_run_during_exit(compile_program: Compile, run: Run, flags: list[str]) -> None:
    program = compile_program("plain", *flags, output="plain" + "".join(flags), or_skip="needs a static C library")
    for _ in range(5):
        done = assert_the_same(run, [program])
        assert (done.returncode, done.stdout, done.stderr) == (5, "on standard output\n", "on standard error\n")


def test_loading_changes_nothing_in_the_process(run: Run) -> None:
    """No thread, no file descriptor, no handler, no other library."""
    script = (
        "import os, signal\n"
        "maps = {line.split()[5] for line in open('/proc/self/maps') if len(line.split()) > 5}\n"
        "print(sorted(p for p in maps if p.startswith('/') and 'torch_memory_saver' not in p))\n"
        "print(len(os.listdir('/proc/self/task')), sorted(os.listdir('/proc/self/fd')))\n"
        "print([signal.getsignal(s) for s in (signal.SIGSEGV, signal.SIGBUS, signal.SIGPIPE, signal.SIGTERM)])\n"
    )
    assert_the_same(run, [sys.executable, "-c", script])


def test_the_library_is_really_loaded_in_them(run: Run) -> None:
    """Otherwise the tests above would compare nothing."""
    script = "import sys; sys.exit('hook_mode_preload' not in open('/proc/self/maps').read())"
    assert run([sys.executable, "-c", script]).returncode == 0
    assert run([sys.executable, "-c", script], preload=[]).returncode == 1


def test_ctypes_finds_the_functions_in_the_process(run: Run) -> None:
    script = (
        "import ctypes\n"
        "process = ctypes.CDLL(None)\n"
        "process.tms_get_interesting_region.restype = ctypes.c_bool\n"
        "process.tms_get_current_tag.restype = ctypes.c_char_p\n"
        "process.tms_set_interesting_region(True)\n"
        "process.tms_set_current_tag(b'weights')\n"
        "print(process.tms_get_interesting_region(), process.tms_get_current_tag())\n"
        "print(process.tms_pause(None), process.tms_resume(None))\n"
    )
    done = run([sys.executable, "-c", script])
    assert (done.returncode, done.stdout, done.stderr) == (0, "True b'weights'\n0 0\n", "")
