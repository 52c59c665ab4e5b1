"""Guards the removal of what dead processes have left: all of it goes, and nothing that a live process needs."""

from __future__ import annotations

import os
from fcntl import flock
from pathlib import Path

import pytest
from made_store import MadeStore, killed, start_holder, tree

from torch_memory_saver.observe._store import cleaning
from torch_memory_saver.observe._store.cleaning import Removed, clean_store
from torch_memory_saver.observe._store.contents import read_store

MIB = 1 << 20


def names(path: Path) -> list[str]:
    """The paths below a store, but for the folders and the key that every store has."""
    return [name for name, _, _ in tree(path) if name not in ("holders", "key", "names", "objects")]


def test_what_only_dead_processes_held_goes(made: MadeStore) -> None:
    live, dead, published = made.holder("1"), made.holder("2", alive=False), made.published("qwen")
    made.object("a", MIB, live, dead)
    made.object("b", 2 * MIB, dead)
    made.object("c", 4 * MIB, published, dead)
    made.object("d", 8 * MIB)
    (dead / "key").write_text("an unfinished key")
    assert clean_store(made.path) == Removed(holders=1, objects=2, bytes=10 * MIB)
    assert names(made.path) == [
        "holders/1",
        f"holders/1/{'a' * 32}",
        "holders/1/lock",
        "names/qwen",
        f"names/qwen/{'c' * 32}",
        "names/qwen/manifest.json",
        f"objects/{'a' * 32}",
        f"objects/{'c' * 32}",
    ]
    assert clean_store(made.path) == Removed()


def test_a_killed_process(made: MadeStore) -> None:
    process = start_holder(made.path, "1")
    try:
        made.object("a", MIB, made.path / "holders" / "1")
        before = tree(made.path)
        assert clean_store(made.path) == Removed()
        assert tree(made.path) == before
    finally:
        killed(process)
    assert clean_store(made.path) == Removed(holders=1, objects=1, bytes=MIB)
    assert names(made.path) == []


def test_unfinished_objects(made: MadeStore) -> None:
    made.part("a", MIB)
    made.part("b", 2 * MIB, alive=False)
    assert clean_store(made.path) == Removed(unfinished=1, bytes=2 * MIB)
    assert names(made.path) == [f"objects/{'a' * 32}.part"]


@pytest.mark.parametrize("published", [True, False])
def test_a_writer_that_was_killed_before_it_removed_the_unfinished_name(made: MadeStore, published: bool) -> None:
    """The object is whole. It stays if it is published."""
    part, dead = made.part("a", MIB, alive=False), made.holder("1", alive=False)
    for folder in (dead, made.path / "objects", *([made.published("qwen")] if published else [])):
        os.link(part, folder / ("a" * 32))
    removed = clean_store(made.path)
    assert (removed.holders, removed.objects, removed.unfinished) == (1, int(not published), 0)
    assert removed.bytes == (0 if published else MIB)
    assert (f"objects/{'a' * 32}" in names(made.path)) == published
    assert f"objects/{'a' * 32}.part" not in names(made.path)


def test_holders_that_were_not_finished(made: MadeStore) -> None:
    made.holder(".1", alive=False)
    made.holder(".2", alive=True)
    (made.path / "holders" / ".3").mkdir()  # killed before it made its lock
    made.object("a", MIB, made.holder("4"))
    (made.path / "holders" / "4" / "lock").unlink()  # a clean-up was killed
    assert clean_store(made.path) == Removed(holders=3, objects=1, bytes=MIB)
    assert names(made.path) == ["holders/.2", "holders/.2/lock"]


def test_a_store_without_anything(memory: Path) -> None:
    assert clean_store(memory) == Removed()
    assert list(memory.iterdir()) == []


def test_a_lock_that_is_no_longer_the_holders_says_nothing(made: MadeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has removed the holder, and a new one has its name, between the opening of the lock and the lock."""
    holder = made.holder("1", alive=False)

    def lock(descriptor: int, how: int) -> None:
        flock(descriptor, how)
        (holder / "lock").unlink()
        (holder / "lock").write_text("")

    monkeypatch.setattr(cleaning, "flock", lock)
    assert clean_store(made.path) == Removed()
    assert names(made.path) == ["holders/1", "holders/1/lock"]


def test_files_that_are_not_of_the_store_stay(made: MadeStore) -> None:
    objects = made.path / "objects"
    (objects / "README").write_text("text")
    (objects / "README.part").write_text("text")
    (objects / ("a" * 32)).symlink_to(made.path / "key")
    before = tree(made.path)
    assert clean_store(made.path) == Removed()
    assert tree(made.path) == before


def test_what_cannot_be_removed_is_named_and_the_rest_goes(made: MadeStore) -> None:
    stuck = made.holder("1", alive=False)
    (stuck / "folder" / "in it").mkdir(parents=True)  # no publisher makes such a one
    made.object("a", MIB, made.holder("2", alive=False))
    removed = clean_store(made.path)
    assert (removed.holders, removed.objects) == (1, 1)
    assert removed.failures == [f"{stuck} was not removed: Is a directory"]
    assert (stuck / "lock").exists(), "the removal is made again"
    assert read_store(made.path).dead == 1


def test_a_refused_folder_is_not_cleaned(made: MadeStore) -> None:
    made.object("a", MIB)
    made.path.chmod(0o777)
    before = tree(made.path)
    with pytest.raises(PermissionError):
        clean_store(made.path)
    assert tree(made.path) == before


def test_what_a_publisher_and_a_removal_have_left_goes(made: MadeStore) -> None:
    dead, live = made.holder("2", alive=False), made.holder("1")
    unfinished = dead / "publishing-0123456789abcdef"
    unfinished.mkdir(mode=0o700)
    made.object("a", MIB, dead, unfinished)
    removed, kept = made.published("removed"), made.published("kept")
    made.object("b", MIB, removed)
    made.object("c", MIB, removed, kept)
    made.object("d", MIB, removed, live)
    (removed / "manifest.json").unlink()
    assert [each.name for each in read_store(made.path).names] == ["kept"]
    assert clean_store(made.path) == Removed(holders=1, objects=2, bytes=2 * MIB)
    assert sorted(os.listdir(made.path / "objects")) == ["c" * 32, "d" * 32]
    assert os.listdir(made.path / "names") == ["kept"]
