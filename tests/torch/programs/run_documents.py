"""Runs programs of the documentation, each in a process of its own, and imports PyTorch once for all of them.

Arguments: files, each a Python program. For each, one line on stdout: its exit status and its path. What a program prints
goes to the path with .log behind it. A child is forked before anything uses the GPU, so that it may use it.
"""

import os
import runpy
import sys
import traceback

import torch  # imported for the children

import torch_memory_saver  # noqa: F401


def run(path: str) -> int:
    """In the child: the program as the main module. Returns its exit status."""
    log = os.open(path + ".log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main() -> None:
    assert not torch.cuda.is_initialized()
    for path in sys.argv[1:]:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            status = run(path)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), path, flush=True)


if __name__ == "__main__":
    main()
