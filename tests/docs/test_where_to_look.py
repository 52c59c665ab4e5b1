"""Guards that the files and functions in docs/where-to-look.md exist: a change that moves one also changes the page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "where-to-look.md"
FOLDERS = ("csrc", "torch_memory_saver", "tests")

pytestmark = pytest.mark.skipif(not (REPOSITORY / "csrc").is_dir(), reason="needs the source tree")


def quoted() -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", PAGE.read_text()))


def sources() -> list[Path]:
    return [path for folder in FOLDERS for path in (REPOSITORY / folder).rglob("*") if path.suffix in (".c", ".h", ".py")]


def test_files_that_the_page_names_exist() -> None:
    names = {name for name in quoted() if re.fullmatch(r"[\w/]+\.(c|h|py)", name)}
    paths = [path.relative_to(REPOSITORY).as_posix() for path in sources()]
    assert len(names) > 20
    assert {name for name in names if not any(f"/{path}".endswith(f"/{name}") for path in paths)} == set()


def test_functions_that_the_page_names_exist() -> None:
    names = {
        name.removeprefix("PoolStore.")
        for name in quoted()
        if re.fullmatch(r"(PoolStore\.)?[a-z_]*_[a-z_]+|quiesce|undo", name)
    }
    texts = [path.read_text() for path in sources()]
    assert len(names) > 10
    assert {name for name in names if not any(re.search(rf"\b{name}\b", text) for text in texts)} == set()
