"""Guards the command `store`: what it prints, its exit statuses, and that it makes nothing."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_store import MadeStore
from processes import Program

from torch_memory_saver.observe._store.cleaning import Removed
from torch_memory_saver.observe._store.command import lines_of, sentence_of
from torch_memory_saver.observe._store.contents import Contents, PublishedName, StoredObject

MIB = 1 << 20
ERROR = "python -m torch_memory_saver store: error: "


@pytest.fixture
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def test_the_listing(made: MadeStore, command: Program) -> None:
    first, second = made.holder("1"), made.holder("2")
    made.object("b", 3 * MIB, first)
    made.object("a", 64 * MIB, first, second)
    done = command("store", TMS_SHARED_DIR=str(made.path))
    assert done.stdout.splitlines() == [
        f"{made.path}: 67 MiB in 2 objects; 2 processes use the store",
        "",
        "OBJECT                              SIZE  HOLDERS",
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa  64 MiB        2",
        "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb   3 MiB        1",
    ]
    assert done.stderr == ""
    assert command("store", "--dir", str(made.path)).stdout == done.stdout


def test_everything_that_can_be_on_it(utc: None) -> None:
    objects = (StoredObject("a" * 32, MIB, holders=1, listed=False),)
    names = (
        PublishedName("red\x1b[31m/rank0", 5 * MIB, 7, 0, "files=qwen@0123456789abcdef rank=0", ""),
        PublishedName("b", 0, 0, 60, "", "it is damaged"),
    )
    contents = Contents(Path("/memory"), objects, names, holders=1, dead=2, unfinished=3, unfinished_bytes=4 * MIB)
    assert lines_of(contents) == [
        "/memory: 5 MiB in 1 object; 1 process uses the store",
        "",
        "OBJECT                             SIZE  HOLDERS",
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa  1 MiB        1",
        "",
        "PUBLISHED NAME        SIZE  OBJECTS  PUBLISHED         IDENTITY",
        "'red\\x1b[31m/rank0'  5 MiB        7  1970-01-01 00:00  files=qwen@0123456789abcdef rank=0",
        "b                      0 B        0  1970-01-01 00:01",
        "",
        "b cannot be adopted: it is damaged. Publish it again, as adopt_or_load() does, or remove it with --remove",
        "3 unfinished objects: 4 MiB",
        "1 object can be found by no other process, and will be released with the last holder or name",
        "2 holders of dead processes: the next pause of any process removes them, or --clean",
    ]
    assert (
        sentence_of(Removed(1, 2, 3, MIB)) == "removed 1 holder of a dead process, 3 unfinished objects and 2 objects: 1 MiB"
    )


def test_cleaning(made: MadeStore, command: Program) -> None:
    made.object("a", MIB, made.holder("1", alive=False))
    made.object("b", MIB, made.holder("2"))
    found = command("store", TMS_SHARED_DIR=str(made.path)).stdout
    assert "1 holder of a dead process: the next pause of any process removes it, or --clean" in found
    lines = command("store", "--clean", TMS_SHARED_DIR=str(made.path)).stdout.splitlines()
    assert lines[0] == "removed 1 holder of a dead process, 0 unfinished objects and 1 object: 1 MiB"
    assert lines[1] == f"{made.path}: 1 MiB in 1 object; 1 process uses the store"
    assert len(lines) == 5


def test_damage_is_named(made: MadeStore, command: Program) -> None:
    made.object("a", MIB, made.published("lacking", "a" * 32, "b" * 32))
    made.object("c", 1000, made.published("cut", "c" * 32))
    (made.published("torn") / "manifest.json").write_text("{")
    lines = command("store", TMS_SHARED_DIR=str(made.path)).stdout.splitlines()
    advice = "Publish it again, as adopt_or_load() does, or remove it with --remove"
    assert lines[-3] == f"cut cannot be adopted: an object has 1000 bytes instead of {MIB}. {advice}"
    assert lines[-2] == f"lacking cannot be adopted: of its 2 objects 1 is missing. {advice}"
    assert lines[-1].startswith("torn cannot be adopted: its manifest is damaged: it is no JSON text. ")


def test_a_folder_on_another_file_system(command: Program) -> None:
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as other:
        (Path(other) / "objects").mkdir()
        done = command("store", "--dir", other, status=1)
    assert done.stdout.startswith(f"{other}: 0 B")
    assert done.stderr.startswith(f"{ERROR}no process can use this store: it is on ")


def test_removing_published_weights(made: MadeStore, command: Program) -> None:
    made.object("a", MIB, made.published("qwen%2Frank0"))
    assert "qwen/rank0" in command("store", TMS_SHARED_DIR=str(made.path)).stdout
    lines = command("store", "--remove", "qwen/rank0", "--dir", str(made.path)).stdout.splitlines()
    assert lines == [
        "removed the published weights 'qwen/rank0'",
        f"{made.path}: 0 B in 0 objects; 0 processes use the store",
    ]
    for path in (made.path, made.path / "missing"):  # in a store, and without one
        done = command("store", "--remove", "qwen/rank0", TMS_SHARED_DIR=str(path), status=1)
        assert done.stderr == f"{ERROR}nothing is published as 'qwen/rank0'\n"


def test_several_names_are_removed(made: MadeStore, command: Program) -> None:
    for name in ("a", "b", "c"):
        made.object(name, MIB, made.published(name))
    done = command("store", "--remove", "a", "c", TMS_SHARED_DIR=str(made.path))
    assert done.stdout.startswith("removed the published weights 'a'\nremoved the published weights 'c'\n")
    assert sorted(os.listdir(made.path / "names")) == ["b"]
    done = command("store", "--remove", "a\nb", "x" * 256, "--remove", "b", TMS_SHARED_DIR=str(made.path), status=1)
    assert done.stdout.startswith("removed the published weights 'b'\n"), "a wrong name does not keep the others"
    wrong = done.stderr.splitlines()
    assert wrong[0] == f"{ERROR}nothing is published as 'a\\nb'"
    assert wrong[1].startswith(f"{ERROR}'{'x' * 256}' was not removed: the name ") and len(wrong) == 2
    assert os.listdir(made.path / "names") == []


def test_a_name_that_cannot_be_removed(made: MadeStore, command: Program) -> None:
    (made.published("a") / "folder").mkdir()
    done = command("store", "--remove", "a", TMS_SHARED_DIR=str(made.path), status=1)
    assert done.stderr == f"{ERROR}'a' was not removed: folder: Is a directory\n"


def test_an_empty_name(made: MadeStore, command: Program) -> None:
    done = command("store", "--remove", "", TMS_SHARED_DIR=str(made.path), status=2)
    text = "argument --remove: the name is empty; without options, `store` lists the published names"
    assert done.stderr.endswith(f"\n{ERROR}{text}\n") and done.stdout == ""


def test_a_file_is_no_store(memory: Path, command: Program) -> None:
    (memory / "file").touch()
    for arguments, variable in (("--dir", str(memory / "file")), ""), ((), str(memory / "file")):
        done = command("store", *arguments, TMS_SHARED_DIR=variable, status=2)
        text = f"{memory}/file is no folder: name the folder of a shared store, by --dir or TMS_SHARED_DIR"
        assert done.stderr == f"{ERROR}{text}\n" and done.stdout == ""


@pytest.mark.parametrize("options", [(), ("--clean",), ("--remove", "a")])
def test_a_folder_that_is_no_store(memory: Path, command: Program, options: tuple[str, ...]) -> None:
    done = command("store", *options, "--dir", str(memory), status=2)
    text = f"{memory} is no shared store: it has no folder 'objects'"
    assert done.stderr == f"{ERROR}{text}\n" and done.stdout == ""


def test_in_a_sticky_folder_of_root_the_store_has_the_usual_name(memory: Path, command: Program) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make such a folder")
    own = MadeStore(memory / "torch_memory_saver-store-0")
    own.object("a", MIB, own.published("weights"))
    memory.chmod(0o1777)
    done = command("store", "--dir", str(memory))
    assert done.stdout.startswith(f"{own.path}: 1 MiB in 1 object")


def test_what_cannot_be_removed_is_a_failure(made: MadeStore, command: Program) -> None:
    (made.holder("1", alive=False) / "folder" / "in it").mkdir(parents=True)
    done = command("store", "--clean", TMS_SHARED_DIR=str(made.path), status=1)
    assert done.stderr == f"{ERROR}{made.path}/holders/1 was not removed: Is a directory\n"
    assert "removed 0 holders" in done.stdout


@pytest.mark.parametrize("option", [(), ("--clean",)])
def test_a_folder_that_does_not_exist(memory: Path, command: Program, option: tuple[str, ...]) -> None:
    missing = memory / "missing"
    done = command("store", *option, TMS_SHARED_DIR=str(missing))
    assert done.stdout == f"{missing} does not exist: no process of this user has used the shared store here\n"
    done = command("store", *option, "--dir", str(missing), status=2)
    assert done.stderr == f"{ERROR}there is no folder {missing}\n"
    assert list(memory.iterdir()) == []


def test_a_folder_that_is_refused(made: MadeStore, command: Program) -> None:
    made.path.chmod(0o777)
    done = command("store", TMS_SHARED_DIR=str(made.path), status=1)
    check = "the check that no other user can write to it (chmod go-w) failed"
    assert done.stderr.startswith(f"{ERROR}{made.path}: {check} (owner: uid {os.geteuid()}, mode 777)")
    done = command("store", TMS_SHARED_DIR="relative", status=1)
    assert done.stderr == f"{ERROR}relative: TMS_SHARED_DIR must be an absolute path\n"


@pytest.mark.parametrize(
    ("contents", "mode", "why"),
    [
        (b"secret", 0o400, "is no key of this package"),
        (b"TMSSTORE" + (2).to_bytes(4, "little") + bytes(12), 0o400, "has format 2, and this release needs format 1"),
        (b"secret", 0o444, "is no file that only this user can use"),
    ],
)
def test_a_key_that_no_process_can_use(made: MadeStore, command: Program, contents: bytes, mode: int, why: str) -> None:
    made.object("a", MIB, made.holder("1", alive=False))
    (made.path / "key").write_bytes(contents)
    (made.path / "key").chmod(mode)
    done = command("store", "--clean", TMS_SHARED_DIR=str(made.path), status=1)
    assert done.stdout.splitlines()[1] == f"{made.path}: 0 B in 0 objects; 0 processes use the store"
    assert done.stderr == (
        f"{ERROR}no process can use this store: a backup could not be used: the key '{made.path}/key' {why}. "
        "Remove the folder when no process uses it, or set TMS_SHARED_DIR to another\n"
    )
