"""The process whose managed weights the case `synchronise` sends: `python -m torch_memory_saver._bench.trainer COUNT BYTES`.

It prints "ready". Then it answers each line of its input: "send" by the pickled weights, and "pause" by a pause and a
resume, after which what was sent before is no longer theirs, and the bytes that were possibly shared.
"""

from __future__ import annotations

import importlib
import sys
from multiprocessing.reduction import ForkingPickler

__all__ = ["value_of"]


def value_of(index: int) -> int:
    """What every byte of a tensor is."""
    return index % 251 + 1


def main(count: int, size: int) -> None:
    torch = importlib.import_module("torch")
    saver = importlib.import_module("torch_memory_saver").torch_memory_saver
    with saver.region("trainer"):
        weights = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(count)]

    def fill() -> None:
        for index, weight in enumerate(weights):
            weight.fill_(value_of(index))
        torch.cuda.synchronize()

    fill()
    print("ready", flush=True)
    for line in sys.stdin:
        if line.strip() == "send":
            print(bytes(ForkingPickler.dumps(weights)).hex(), flush=True)
        else:
            report = saver.pause("trainer")
            saver.resume("trainer")
            fill()
            print(report.possibly_shared_bytes, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
