"""Runs out of memory in a region, outside, at a resume, and in a child process, and says whose error each was.

Writes its process id and the child's, then a line for each error: "torch" or "ours". The messages go to standard error.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))

from gpu_support import GIB, LARGE, empty, errors, saver, take_all_but, torch

import torch_memory_saver

MORE_THAN_ANY_GPU = 1024 * GIB
CHILD = "child"
lines: list[str] = []


def expect(error: torch.OutOfMemoryError) -> None:
    print(error, file=sys.stderr)
    lines.append("ours" if isinstance(error, errors.OutOfMemoryError) else "torch")


def run_out() -> None:
    try:
        empty(MORE_THAN_ANY_GPU)
    except torch.OutOfMemoryError as error:
        expect(error)
    else:
        raise AssertionError("there was enough memory")


def run_out_at_resume() -> None:
    with saver.region(tag="weights"):
        weights = empty(4 * LARGE)
    saver.pause("weights")
    other = take_all_but(LARGE)
    try:
        saver.resume("weights")
    except torch.OutOfMemoryError as error:
        expect(error)
    else:
        raise AssertionError("there was enough memory")
    del other, weights


assert torch_memory_saver.torch_memory_saver._impl is None
assert "torch_memory_saver.observe._out_of_memory.content" not in sys.modules, "nothing at import"
assert torch.cuda.is_available() and not torch.cuda.is_initialized()
if sys.argv[1:] == [CHILD]:
    saver.pause()  # the first use of the package, which does not use CUDA
    assert not torch.cuda.is_initialized()
    run_out()
    print(os.getpid(), *lines)
else:
    with saver.region(tag="weights"):
        run_out()
    run_out()
    run_out_at_resume()
    child = subprocess.run([sys.executable, __file__, CHILD], stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    print(os.getpid(), child[0])
    print(*lines, *child[1:], sep="\n")
