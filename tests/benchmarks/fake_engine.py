"""The engine of test_engine_turns.py, in a module that processes can import."""

from __future__ import annotations

import argparse
import os

from engine_turns import Cycle


class FakeEngine:
    """An engine whose backend is also its behaviour: "none" cannot sleep, and other names say what goes wrong."""

    def __init__(self, backend: str, parsed: argparse.Namespace) -> None:
        if backend == "broken":
            raise RuntimeError("no such backend")
        self.backend = backend
        self.about = {"pid": os.getpid()}

    def generate(self) -> str:
        return "other" if self.backend == "differs" else "first"

    def supports(self, case: str) -> bool:
        return self.backend != "none"

    def cycle(self, case: str, index: int) -> Cycle:
        if self.backend == "dies" and index == 1:
            os._exit(3)
        tokens = "first"
        if case == "update":
            tokens = "first" if self.backend == "stale" else f"new {index}"
        elif self.backend == "forgets" and index == 1:
            tokens = "lost"
        return Cycle(tokens, {"sleep": 100.0 if index == 0 else float(index)}, {"pid": os.getpid()})

    def close(self) -> None:
        if self.backend == "none":
            raise RuntimeError("a failure at the end is only printed")
