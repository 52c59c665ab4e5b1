"""Programs in fresh processes: their environment, and the lines before their text."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch_memory_saver
from torch_memory_saver._engine import preload

PACKAGE = Path(torch_memory_saver.__file__).parent
SIMULATOR = PACKAGE / "_simulated_cuda.so"
TIMEOUT_S = 120
#: Where programs are started. In the repository's root Python imports the package there, and not the one under test.
ELSEWHERE = Path(__file__).parent

#: Put before every program: the CUDA runtime's functions as the preload library and the simulated GPU give them.
PRELUDE = """
import ctypes, logging, os, sys
import torch_memory_saver as module
from torch_memory_saver import torch_memory_saver, _core
MIB = 1 << 20
runtime = ctypes.CDLL(None)
def cuda_malloc(size):
    address = ctypes.c_void_p()
    result = runtime.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(size))
    assert result == 0, result
    return address.value
def cuda_free(address):
    assert runtime.cudaFree(ctypes.c_void_p(address)) == 0
def fill(address, size, value):
    assert runtime.cudaMemset(ctypes.c_void_p(address), value, ctypes.c_size_t(size)) == 0
def read(address, size):
    host = ctypes.create_string_buffer(size)
    assert runtime.cudaMemcpy(host, ctypes.c_void_p(address), ctypes.c_size_t(size), 2) == 0
    return host.raw
def free_bytes():
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    assert runtime.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)) == 0
    return free.value
"""

Program = Callable[..., subprocess.CompletedProcess[str]]


def wait_until(condition: Callable[[], bool]) -> None:
    """For the library's background work, such as releasing host memory."""
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.001)


def environment(preloaded: bool, **variables: str) -> dict[str, str]:
    """A process's environment: the package under test, the simulated GPU, and the libraries preloaded or not."""
    # Python's readline sets LINES and COLUMNS for the processes of pytest-xdist, whatever size the terminal of a test has.
    removed = ("TMS_", "LD_PRELOAD", "LINES", "COLUMNS")
    result = {name: value for name, value in os.environ.items() if not name.startswith(removed)}
    result["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PACKAGE.parent), result.get("PYTHONPATH")]))
    result["TMS_CUDA_DRIVER"] = str(SIMULATOR)
    result["TMS_SIMULATED_MEMORY"] = "512MiB"
    result["CUDA_VISIBLE_DEVICES"] = ""  # torch must not find a real GPU; the simulated one reads it under simulate only.
    if preloaded:
        result["LD_PRELOAD"] = f"{preload.library_path()}:{SIMULATOR}"
    return result | variables


def run_python(
    *arguments: str | bytes | Path,
    preloaded: bool = False,
    status: int | None = 0,
    cwd: Path = ELSEWHERE,
    text: bool = True,
    **variables: str,
) -> subprocess.CompletedProcess[Any]:
    """Runs Python with arguments in a fresh process. It must end with `status`, unless that is None."""
    done: subprocess.CompletedProcess[Any] = subprocess.run(
        [sys.executable, *arguments],
        env=environment(preloaded, **variables),
        cwd=cwd,
        capture_output=True,
        text=text,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert status in (done.returncode, None), f"{done.stdout}\n{done.stderr}"
    return done
