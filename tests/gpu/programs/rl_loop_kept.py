"""examples/rl_loop.py with everything kept on the GPU: all memory is ordinary. The engine's process runs this file, too."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

import rl_loop
import torch


class KeepEverything:
    """The part of torch_memory_saver's interface that the example uses."""

    def region(self, **options: Any) -> Any:
        return nullcontext()

    def cuda_graph(self, graph: torch.cuda.CUDAGraph, tag: str) -> Any:
        return torch.cuda.graph(graph)

    def pause(self, tags: Any, **options: Any) -> None:
        """Do nothing."""

    def resume(self, tags: Any) -> None:
        """Do nothing."""


rl_loop.torch_memory_saver = KeepEverything()  # type: ignore[assignment]
if __name__ == "__main__":
    rl_loop.main()
