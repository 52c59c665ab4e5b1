"""examples/trl_grpo.py with everything kept on the GPU: all memory is ordinary."""

from __future__ import annotations

import sys
from contextlib import ContextDecorator, nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

import torch_memory_saver


class NoRegion(nullcontext, ContextDecorator):  # type: ignore[type-arg]
    """A region in which memory is ordinary."""


class KeepEverything:
    """The part of torch_memory_saver's interface that the example uses."""

    def region(self, **options: Any) -> Any:
        return NoRegion()

    def manage(self, what: Any, **options: Any) -> None:
        """Do nothing."""

    def pause(self, tags: Any) -> None:
        """Do nothing."""

    def resume(self, tags: Any) -> None:
        """Do nothing."""


torch_memory_saver.torch_memory_saver = KeepEverything()  # type: ignore[assignment]
if __name__ == "__main__":
    import trl_grpo

    trl_grpo.main()
