"""Processes whose weights have shared backups, and what they have in the store: programs/replica.py."""

from __future__ import annotations

import os
from pathlib import Path

from gpu_support import MIB
from second_process import SecondProcess

#: The bytes of the weights of programs/replica.py that are in objects, which processes share, and those in smaller pieces.
OBJECTS = (65 + 6 + 6 + 3) * MIB + 16 + 512 * 1024
PRIVATE = 8192 + 8


class Replica(SecondProcess):
    """programs/replica.py with its store in `folder`."""

    def __init__(self, folder: Path) -> None:
        super().__init__((("TMS_SHARED_DIR", str(folder)),), "replica.py")

    def ask(self, *words: object) -> list[int]:
        """A command that has to succeed; its numbers."""
        self.tell(*words)
        return self.numbers_of(self.answer(), *words)

    def numbers_of(self, answer: str, *words: object) -> list[int]:
        first, *numbers = answer.split()
        assert first == "ok", f"{' '.join(map(str, words))}: {answer}"
        return [int(number) for number in numbers]


def objects(folder: Path) -> dict[str, int]:
    """The sizes of the objects by their names."""
    return {entry.name: entry.stat().st_size for entry in os.scandir(folder / "objects")}


def holders(folder: Path) -> int:
    return len(os.listdir(folder / "holders"))
