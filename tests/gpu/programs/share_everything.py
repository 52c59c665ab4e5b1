"""With TMS_INIT_ENABLE=1 in both processes: tensors of PyTorch's default pool are sent, and the trainer is paused.

python share_everything.py
"""

from __future__ import annotations

from typing import Any

import torch

from torch_memory_saver import _core
from torch_memory_saver import torch_memory_saver as saver

SIZE = 32 << 20


def receive(queue: Any, answers: Any) -> None:
    """Adds 1 to each tensor that comes, until None does, and reports its sum."""
    while (tensor := queue.get()) is not None:
        tensor.add_(1)
        own = tensor.clone()
        assert _core.find(own.data_ptr()) is not None
        answers.put(int(own.sum(dtype=torch.int64)))
        del tensor, own
        torch.cuda.ipc_collect()


def main() -> None:
    saver.stats()  # from here on managed tensors can be sent
    weights = torch.full((SIZE,), 3, dtype=torch.uint8, device="cuda")
    assert _core.find(weights.data_ptr()) is not None
    context = torch.multiprocessing.get_context("spawn")
    queue, answers = context.Queue(), context.Queue()
    receiver = context.Process(target=receive, args=(queue, answers))
    receiver.start()
    for value in (4, 5):
        queue.put(weights)
        assert answers.get() == value * SIZE
        assert saver.pause(if_shared="wait", timeout=60).possibly_shared_bytes == 0
        saver.resume()
        assert int(weights.min()) == int(weights.max()) == value
    queue.put(None)
    receiver.join()
    assert receiver.exitcode == 0
    print("shared")


if __name__ == "__main__":
    main()
