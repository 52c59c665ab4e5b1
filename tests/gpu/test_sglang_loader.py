"""Guards examples/sglang_published_loader.py, which gives SGLang its weights from the shared store. Each process runs
programs/sglang_loader.py, with a stand-in for SGLang."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from gpu_support import torch
from second_process import SecondProcess


class Loaded(NamedTuple):
    loads: int
    warnings: list[str]
    contents: list[Any]


class Process(SecondProcess):
    """programs/sglang_loader.py with its store in `parent`."""

    def __init__(self, parent: Path, checkpoint: Path, *environment: tuple[str, str]) -> None:
        super().__init__((("TMS_SHARED_DIR", str(parent / "store")), *environment), "sglang_loader.py")
        self.ask("start", checkpoint)

    def ask(self, *words: object) -> Any:
        self.tell(*words)
        answer = self.answer()
        assert answer.startswith("ok"), f"{' '.join(map(str, words))}: {answer}"
        return json.loads(answer.removeprefix("ok"))

    def load(self, rank: int = 0) -> Loaded:
        return Loaded(*self.ask("load", rank))


@pytest.fixture
def parent() -> Iterator[Path]:
    """Makes a folder for the store."""
    made = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield made
    shutil.rmtree(made)


def save(checkpoint: Path, seed: int) -> None:
    numbers = torch.Generator().manual_seed(seed)
    weight = torch.randn(512, 512, generator=numbers)
    torch.save({"weight": weight, "scale": torch.full((1,), 2.0 * seed)}, checkpoint / "model.bin")


def test_the_example_adopts_in_a_new_process(parent: Path, tmp_path: Path) -> None:
    save(tmp_path, 1)
    with Process(parent, tmp_path) as process:
        first = process.load()
        assert (first.loads, first.warnings, first.contents[1]) == (1, [], 2.0)
    with Process(parent, tmp_path) as process:
        assert process.load() == (0, [], first.contents)
        other = process.load(rank=1)
        assert (other.loads, other.warnings) == (1, [])
        assert process.load(rank=1) == (0, [], first.contents)


def test_the_example_loads_a_changed_checkpoint(parent: Path, tmp_path: Path) -> None:
    save(tmp_path, 1)
    with Process(parent, tmp_path) as process:
        first = process.load()
        save(tmp_path, 2)
        changed = process.load()
        assert changed.loads == 1 and changed.contents != first.contents
        (warning,) = changed.warnings
        assert "identity" in warning
        assert process.load() == (0, [], changed.contents)


def test_an_update_from_disk_loads_and_publishes_nothing(parent: Path, tmp_path: Path) -> None:
    save(tmp_path, 1)
    with Process(parent, tmp_path) as process:
        first = process.load()
        (manifest,) = parent.glob("store/names/*/manifest.json")
        before = manifest.read_bytes()
        save(tmp_path, 2)
        updated = Loaded(*process.ask("update"))
        assert updated.loads == 1 and updated.contents != first.contents
        assert manifest.read_bytes() == before


def test_the_example_loads_in_a_disabled_process(parent: Path, tmp_path: Path) -> None:
    save(tmp_path, 1)
    with Process(parent, tmp_path, ("TMS_DISABLE", "1")) as process:
        first, second = process.load(), process.load()
        assert first == second and first.loads == 1
    assert not (parent / "store").exists()
