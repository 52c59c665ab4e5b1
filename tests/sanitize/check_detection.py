"""Guards that the sanitizers detect errors in _core: a caller makes them on purpose through the function table of tms.h.

`make sanitize-python` runs this before the tests. It does not apply to an ordinary build, and so pytest does not collect it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

#: region_enter of the settings at `address`, which the core reads: a tms_region_settings_t, 24 bytes.
PROGRAM = """
import ctypes
from torch_memory_saver import _core

class Table(ctypes.Structure):
    region_enter_type = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    _fields_ = [("allocate", ctypes.c_void_p), ("free", ctypes.c_void_p), ("region_enter", region_enter_type)]

malloc = ctypes.CDLL(None).malloc
malloc.restype = ctypes.c_void_p
get_api = ctypes.CDLL(_core.__file__).tms_get_api
get_api.restype = ctypes.POINTER(Table)
address = {address}
ctypes.memset(address, 0, 4)
get_api(ctypes.c_uint32(_core.INTERFACE)).contents.region_enter(address, None, None)
"""


@pytest.mark.parametrize(
    ("address", "report"),
    [("malloc(4)", "heap-buffer-overflow"), ("malloc(64) + 1", "misaligned address")],
    ids=["address", "undefined"],
)
def test_a_mistake_ends_the_process_with_a_report(address: str, report: str) -> None:
    environment = dict(os.environ)
    for name in ("ASAN_OPTIONS", "UBSAN_OPTIONS"):
        # Shown here, and not in the files that make the run fail.
        environment[name] = ":".join(option for option in environment[name].split(":") if not option.startswith("log_path"))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(address=address)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == -signal.SIGABRT, done.stderr
    assert report in done.stderr
    assert "csrc/core/model/region.c" in done.stderr or "csrc/abi/api.c" in done.stderr
