"""With TMS_INIT_ENABLE=1: a worker that inherits the environment and never imports the package sends tensors, by a pipe and
by a queue, and receives one.

python send_unaware.py spawn|fork|forkserver
"""

from __future__ import annotations

import sys
from typing import Any

import torch

SIZE = 3 << 20
SECONDS = 100  # reached only by a receiver that would wait for ever


def full(value: int) -> torch.Tensor:
    return torch.full((SIZE,), value, dtype=torch.uint8, device="cuda")


def work(pipe: Any, queue: Any, requests: Any) -> None:
    assert not hasattr(torch.UntypedStorage._share_cuda_, "__wrapped__")
    pipe.send(full(1))  # the first allocation of the process
    assert requests.get() is None
    queue.put(full(2))
    queue.put(requests.get() + 1)
    assert requests.get() is None


def check(tensor: torch.Tensor, value: int) -> None:
    assert int(tensor.min()) == int(tensor.max()) == value


def main(how: str) -> None:
    context = torch.multiprocessing.get_context(how)
    reader, writer = context.Pipe(duplex=False)
    queue, requests = context.Queue(), context.Queue()
    worker = context.Process(target=work, args=(writer, queue, requests))
    worker.start()
    writer.close()
    assert reader.poll(SECONDS)
    check(reader.recv(), 1)
    requests.put(None)
    check(queue.get(timeout=SECONDS), 2)
    sent = full(3)
    requests.put(sent)
    check(queue.get(timeout=SECONDS), 4)
    requests.put(None)
    worker.join()
    assert worker.exitcode == 0
    print("sent")


if __name__ == "__main__":
    main(sys.argv[1])
