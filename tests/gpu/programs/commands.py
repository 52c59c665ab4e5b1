"""Executes the commands on its standard input, one a line, and answers each with `ok` or with the error, on a line.

allocate TAG BYTES BACKUP   a tensor with known contents; BACKUP is none, pinned, mmap or disk
check                       whether every tensor has its contents, where it has a backup, and can be written to
directory PATH              of the disk backups
hold BYTES                  takes all memory of the device but this much, in an ordinary tensor
give_back                   gives that back
pause
resume SECONDS EXCLUSIVE    EXCLUSIVE is 0 or 1
resume_reporting SECONDS EXCLUSIVE
                            the same; writes `waiting` once, when it waits
rounds N SECONDS EXCLUSIVE PATH
                            N times: resume, check, new contents, pause. EXCLUSIVE: the file PATH exists in between, and
                            it is an error if it is there already
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))

from gpu_support import core, empty, saver, state_of, take_all_but, torch
from waiting import while_waiting

BACKUPS = {
    "none": {},
    "pinned": {"enable_cpu_backup": True},
    "mmap": {"enable_cpu_backup": True, "cpu_backup_backend": "mmap"},
    "disk": {"enable_disk_backup": True},
}
kept: list[tuple[torch.Tensor, str]] = []
held: list[torch.Tensor] = []
#: What every byte of the tensors is.
contents = 1


def allocate(tag: str, size: str, backup: str) -> None:
    with saver.region(tag=tag, **BACKUPS[backup]):  # type: ignore[arg-type]
        kept.append((empty(int(size)), backup))
    kept[-1][0].fill_(contents)
    torch.cuda.synchronize()


def expect(tensor: torch.Tensor, value: int) -> None:
    least, greatest = int(tensor.min()), int(tensor.max())
    if (least, greatest) != (value, value):
        raise ValueError(f"bytes from {least} to {greatest} instead of {value}")


def check() -> None:
    for tensor, backup in kept:
        if backup == "none":
            tensor.fill_(contents)
        expect(tensor, contents)


def directory(path: str) -> None:
    saver.set_disk_backup_dir(path)


def hold(left: str) -> None:
    held.append(take_all_but(int(left)))


def give_back() -> None:
    held.clear()
    torch.cuda.empty_cache()


def pause() -> None:
    saver.pause()


def resume(seconds: str, exclusive: str) -> None:
    saver.resume(timeout=float(seconds), exclusive=exclusive == "1")


def resume_reporting(seconds: str, exclusive: str) -> None:
    def tell() -> None:
        print("waiting", flush=True)

    with while_waiting(tell, lambda: state_of(kept[0][0]) == core.STATE_PAUSED):
        resume(seconds, exclusive)


def rounds(count: str, seconds: str, exclusive: str, path: str) -> None:
    global contents
    for _ in range(int(count)):
        resume(seconds, exclusive)
        if exclusive == "1":
            os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))
        check()
        contents = contents % 250 + 1
        for tensor, _backup in kept:
            tensor.fill_(contents)
        if exclusive == "1":
            os.unlink(path)
        pause()


COMMANDS = {
    "allocate": allocate,
    "check": check,
    "directory": directory,
    "give_back": give_back,
    "hold": hold,
    "pause": pause,
    "resume": resume,
    "resume_reporting": resume_reporting,
    "rounds": rounds,
}

for line in sys.stdin:
    name, *arguments = line.split()
    try:
        COMMANDS[name](*arguments)  # type: ignore[operator]
    except Exception as error:  # whatever the exception is, the test needs to see it
        print(f"{type(error).__name__}: {str(error).replace(chr(10), ' ')}", flush=True)
    else:
        print("ok", flush=True)
