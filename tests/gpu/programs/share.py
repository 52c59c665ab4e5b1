"""Sends paused tensors to another process: an error that names this package, and a receiver that does not wait for ever.

python share.py
"""

from __future__ import annotations

from typing import Any

import torch

from torch_memory_saver import errors
from torch_memory_saver import torch_memory_saver as saver

SIZE = 2 << 20


def receive(queue: Any, answers: Any) -> None:
    """Reports the result of get() for each message, until None comes."""
    while True:
        try:
            message = queue.get()
        except errors.InvalidStateError as error:
            answers.send(f"{error.operation} {error.tag}: {error}")
        else:
            answers.send("end" if message is None else "a message")
            if message is None:
                return


def main() -> None:
    with saver.region("weights", enable_cpu_backup=True):
        weights = torch.full((SIZE,), 7, dtype=torch.uint8, device="cuda")
    saver.pause("weights")
    context = torch.multiprocessing.get_context("spawn")
    queue, answers = context.Queue(), context.Pipe(duplex=False)
    receiver = context.Process(target=receive, args=(queue, answers[1]))
    receiver.start()
    for message in (weights, {"deep": [(1, weights[5:])]}, torch.zeros(1), None):
        queue.put(message)
    replies = [answers[0].recv() for _ in range(4)]
    receiver.join()
    for answer in replies[:2]:
        assert answer.startswith("share weights: share: ") and "this memory is paused" in answer, answer
    assert replies[2:] == ["a message", "end"], replies
    assert receiver.exitcode == 0
    saver.resume("weights")
    assert int(weights.min()) == 7
    print("ready")


if __name__ == "__main__":
    main()
