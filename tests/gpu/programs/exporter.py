"""Sends a managed tensor and ends, or is killed, when its input does: the importer keeps what it has mapped.

python exporter.py VALUE
"""

from __future__ import annotations

import sys
from multiprocessing.reduction import ForkingPickler

import torch

from torch_memory_saver import torch_memory_saver as saver

SIZE = 4 << 20


def main() -> None:
    with saver.region("weights"):
        weights = torch.full((SIZE,), int(sys.argv[1]), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    print(bytes(ForkingPickler.dumps(weights)).hex(), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
