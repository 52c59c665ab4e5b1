"""With TMS_INIT_ENABLE=1 and backups: a process and its child, neither of which uses the package, pause in turn.

python children.py spawn|forkserver
"""

from __future__ import annotations

import ctypes
import sys
from multiprocessing.connection import Connection

import torch

SIZE = 64 << 20
#: The driver and PyTorch's pool of small tensors may hold so much more.
SLACK = 8 << 20
SECONDS = 100  # reached only by a process that would wait for ever


def full(value: int) -> torch.Tensor:
    tensor = torch.full((SIZE,), value, dtype=torch.uint8, device="cuda")
    check(tensor, value)
    return tensor


def check(tensor: torch.Tensor, value: int) -> None:
    assert int(tensor.min()) == int(tensor.max()) == value


def free_bytes() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def take_turn(tensor: torch.Tensor, value: int, other: Connection) -> None:
    """Pause, let the other process check its own tensor, and resume."""
    before = free_bytes()
    assert ctypes.CDLL(None).tms_pause(None) == 0
    assert SIZE <= free_bytes() - before <= SIZE + SLACK, (free_bytes(), before)
    other.send("paused")
    assert receive(other) == "checked"
    assert ctypes.CDLL(None).tms_resume(None) == 0
    check(tensor, value)
    other.send("resumed")


def await_turn(tensor: torch.Tensor, value: int, other: Connection) -> None:
    assert receive(other) == "paused"
    check(tensor, value)
    other.send("checked")
    assert receive(other) == "resumed"


def receive(other: Connection) -> str:
    assert other.poll(SECONDS)
    return str(other.recv())


def work(other: Connection) -> None:
    tensor = full(2)
    other.send("ready")
    await_turn(tensor, 2, other)
    take_turn(tensor, 2, other)


def main(how: str) -> None:
    context = torch.multiprocessing.get_context(how)
    tensor = full(1)
    here, there = context.Pipe()
    child = context.Process(target=work, args=(there,), daemon=True)
    child.start()
    there.close()
    assert receive(here) == "ready"
    take_turn(tensor, 1, here)
    await_turn(tensor, 1, here)
    child.join()
    assert child.exitcode == 0
    print("paused in turn")


if __name__ == "__main__":
    main(sys.argv[1])
