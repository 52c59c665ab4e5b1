"""Guards what is read of the shared store: each object once, who lives, which folders are refused; and nothing changes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from made_store import MadeStore, killed, start_holder, tree
from users import USER, as_user

from torch_memory_saver._shared_folder import store_path
from torch_memory_saver.observe._store.contents import PublishedName, StoredObject, read_store

MIB = 1 << 20


def test_an_object_counts_once_however_many_processes_hold_it(made: MadeStore) -> None:
    first, second, dead = made.holder("1"), made.holder("2"), made.holder("3", alive=False)
    made.object("a", 4 * MIB, first, second)
    made.object("b", MIB, second, dead)
    made.object("c", MIB, dead)
    contents = read_store(made.path)
    assert contents.path == made.path
    assert contents.objects == (
        StoredObject("a" * 32, 4 * MIB, holders=2, listed=True),
        StoredObject("b" * 32, MIB, holders=1, listed=True),
        StoredObject("c" * 32, MIB, holders=0, listed=True),
    )
    assert (contents.bytes, contents.holders, contents.dead) == (6 * MIB, 2, 1)


def test_reading_changes_nothing(made: MadeStore) -> None:
    made.object("a", MIB, made.holder("1", alive=False))
    made.object("b", MIB)
    made.part("c", MIB, alive=False)
    before = tree(made.path)
    assert read_store(made.path).bytes == 3 * MIB
    assert tree(made.path) == before


def test_an_object_that_has_lost_its_name_still_has_its_bytes(made: MadeStore) -> None:
    """Another process has written the same contents since, under the same name."""
    made.object("a", MIB, made.holder("1"), listed=False)
    made.object("a", MIB, made.holder("2"))
    contents = read_store(made.path)
    assert [(each.holders, each.listed) for each in contents.objects] == [(1, True), (1, False)]
    assert contents.bytes == 2 * MIB


def test_published_names(made: MadeStore) -> None:
    both, published = made.object("a", 2 * MIB, made.holder("1")), made.published("qwen")
    os.link(both, published / both.name)
    made.object("b", MIB, published)
    (made.published("removed") / "manifest.json").unlink()
    contents = read_store(made.path)
    assert contents.names == (PublishedName("qwen", 3 * MIB, 2, 0, "files=made rank=0", ""),)
    assert [each.holders for each in contents.objects] == [1, 0]
    assert contents.bytes == 3 * MIB, "what is published and held is there once"


def test_an_object_counts_as_missing_where_no_process_finds_it(made: MadeStore) -> None:
    """A process that adopts weights finds their objects by their names in the folder, whatever the published name links."""
    made.object("a", MIB)
    made.published("without links", "a" * 32)
    made.object("b", MIB, made.published("linked only", "b" * 32), listed=False)
    found = {each.name: each.damage for each in read_store(made.path).names}
    assert found == {"without links": "", "linked only": "of its 1 object 1 is missing"}


def test_unfinished_objects(made: MadeStore) -> None:
    made.part("a", MIB)
    made.part("b", 2 * MIB, alive=False)
    os.link(made.part("c", 4 * MIB), made.path / "objects" / ("c" * 32))  # it gets its name at this moment
    contents = read_store(made.path)
    assert (contents.unfinished, contents.unfinished_bytes, contents.bytes) == (2, 3 * MIB, 7 * MIB)


def test_what_is_no_object_is_ignored(made: MadeStore) -> None:
    objects, holder = made.path / "objects", made.holder("1")
    for folder in (objects, holder):
        (folder / "README").write_text("text")
        (folder / ("A" * 32)).write_text("text")
        (folder / ("a" * 32)).mkdir()
        (folder / ("b" * 32)).symlink_to(made.path / "key")
        os.mkfifo(folder / ("c" * 32))
    (made.path / "holders" / "file").write_text("text")
    (made.path / "holders" / "link").symlink_to(objects)
    contents = read_store(made.path)
    assert (contents.objects, contents.holders, contents.dead) == ((), 1, 0)


def test_the_lock_of_a_process_that_is_starting_is_not_tried(made: MadeStore) -> None:
    """It would find its lock taken, and would have to begin again."""
    made.holder(".1", alive=False)
    contents = read_store(made.path)
    assert (contents.holders, contents.dead) == (0, 0)


def test_the_lock_tells_whether_a_process_lives(made: MadeStore) -> None:
    process: subprocess.Popen[str] = start_holder(made.path, "1")
    try:
        assert (read_store(made.path).holders, read_store(made.path).dead) == (1, 0), "to look does not take the lock"
    finally:
        killed(process)
    assert (read_store(made.path).holders, read_store(made.path).dead) == (0, 1)


def test_a_store_that_is_being_made(memory: Path) -> None:
    contents = read_store(memory)
    assert (contents.objects, contents.bytes, contents.holders) == ((), 0, 0)
    assert list(memory.iterdir()) == []


def test_which_folder_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMS_SHARED_DIR", "/memory/of/mine")
    assert store_path() == Path("/memory/of/mine")
    assert store_path("/other") == Path("/other")
    assert store_path("here") == Path.cwd() / "here"
    for unset in ("", None):
        monkeypatch.setenv("TMS_SHARED_DIR", unset) if unset is not None else monkeypatch.delenv("TMS_SHARED_DIR")
        assert store_path() == Path(f"/dev/shm/torch_memory_saver-store-{os.geteuid()}")
    monkeypatch.setenv("TMS_SHARED_DIR", "relative")
    with pytest.raises(OSError, match="TMS_SHARED_DIR must be an absolute path"):
        store_path()


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_a_folder_that_others_can_write_to_is_refused(made: MadeStore, mode: int) -> None:
    made.path.chmod(mode)
    with pytest.raises(PermissionError, match="no other user can write to it"):
        read_store(made.path)


def test_a_link_is_refused(made: MadeStore, memory: Path) -> None:
    (memory / "link").symlink_to(made.path)
    with pytest.raises(PermissionError, match="symbolic link"):
        read_store(memory / "link")


def test_a_folder_that_does_not_exist_is_not_made(memory: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_store(memory / "missing")
    assert list(memory.iterdir()) == []


def refusal(path: Path) -> str:
    """Why a folder is refused; "" if it is not."""
    try:
        read_store(path)
    except PermissionError as error:
        return str(error.strerror)
    return ""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as two users")
def test_the_store_of_another_user_is_refused(made: MadeStore, memory: Path) -> None:
    """Root gets no exception. A process that can write to a store can change the weights of all that use it."""
    memory.chmod(0o711)
    made.path.chmod(0o755)
    assert refusal(made.path) == ""
    assert "it belongs to uid 0" in as_user(USER, refusal, made.path)
    os.chown(made.path, USER, USER)
    assert "the check that it is this user's or root's failed" in refusal(made.path)
