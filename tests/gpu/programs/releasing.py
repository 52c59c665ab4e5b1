"""A program that does not know of release_cached: releasing.py pauses|captures, with TMS_RELEASE_CACHED set.

pauses     a block that PyTorch caches goes back to the driver at each pause
captures   graphs are captured and replayed while a thread releases; blocks go back without a call
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))

from gpu_support import MIB, empty, saver, torch

SIZE = 64 * MIB
GRAPHS = 8
#: Seconds after which the release counts as never done.
PATIENCE_S = 60


def pauses() -> None:
    with saver.region("a"):
        kept = empty(2 * MIB)
    for _ in range(2):
        cached = empty(SIZE)
        del cached
        assert torch.cuda.memory_reserved() >= SIZE
        saver.pause("a")
        assert torch.cuda.memory_reserved() < SIZE, torch.cuda.memory_reserved()
        saver.resume("a")
    kept.fill_(1)


def captures() -> None:
    saver.stats()  # the first use
    source = torch.ones(MIB, device="cuda")
    for number in range(GRAPHS):
        cached = empty(SIZE)
        del cached
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="global"):
            result = source + number
            source * 2
        graph.replay()
        assert float(result.min()) == float(result.max()) == 1 + number
        del graph, result
    end = time.monotonic() + PATIENCE_S
    while torch.cuda.memory_reserved() >= SIZE:
        assert time.monotonic() < end, "nothing was released"


{"pauses": pauses, "captures": captures}[sys.argv[1]]()
