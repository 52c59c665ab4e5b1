"""Guards published names: which ones there can be, their files, and what a removal removes."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import pytest
from made_store import MadeStore

from torch_memory_saver import node_store
from torch_memory_saver._published import file_name, published_names, read_manifest, remove_published
from torch_memory_saver.errors import BackupIOError, InvalidArgumentError

MIB = 1 << 20


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen-32b/rank0", "qwen-32b%2Frank0"),
        (".", "%2E"),
        ("..", "%2E."),
        ("a b%2F", "a%20b%252F"),
        ("ü", "%C3%BC"),
        ("\0\n", "%00%0A"),
    ],
)
def test_the_file_name_of_a_name(name: str, expected: str, made: MadeStore) -> None:
    assert file_name(name) == expected
    folder = made.published(expected)
    assert node_store.names() == [name]
    assert read_manifest(made.path, name) == (folder / "manifest.json").read_bytes()
    assert node_store.remove(name) and node_store.names() == []


@pytest.mark.parametrize("name", ["", None, 7, b"a", "a" * 256, "/" * 86, "\ud800"])
def test_names_that_cannot_be(name: object) -> None:
    for call in (
        lambda: file_name(name),  # type: ignore[arg-type]
        lambda: node_store.remove(name),  # type: ignore[arg-type]
        lambda: node_store.publish(name, {}, identity="x"),  # type: ignore[arg-type]
        lambda: node_store.adopt(name, {}, identity="x"),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidArgumentError, match="name"):
            call()


@pytest.mark.parametrize("identity", ["", None, 7])
def test_an_identity_is_a_text(identity: object) -> None:
    for call in (node_store.publish, node_store.adopt):
        with pytest.raises(InvalidArgumentError, match="identity"):
            call("name", {}, identity=identity)  # type: ignore[arg-type]


def test_a_load_is_a_function() -> None:
    with pytest.raises(InvalidArgumentError, match="load must be a function, not 3"):
        node_store.adopt_or_load("name", {}, 3, identity="x")  # type: ignore[arg-type]


def test_only_a_module_can_be_adopted_or_loaded() -> None:
    with pytest.raises(InvalidArgumentError, match=r"model must be a module, not dict\. Use adopt"):
        node_store.adopt_or_load("name", {}, print, identity="x")


def test_errors_of_names_name_the_call_and_are_short(made: MadeStore) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"^remove: the first argument, the name, must be a str that is not empty, not 5$"
    ):
        node_store.remove(5)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"^publish: the first argument, the name, .*, not a MadeStore$"):
        node_store.publish(made, "a", identity="x")  # type: ignore[arg-type]
    text = f"publish: the name '{'a' * 40}'... is too long: percent-encoded it has 5000 bytes, and may have 255"
    with pytest.raises(InvalidArgumentError, match=f"^{re.escape(text)}$"):
        node_store.publish("a" * 5000, {}, identity="x")


def test_adoptions_are_printed_as_sentences() -> None:
    assert str(node_store.Adoption(True, 61 << 30)) == "adopted 61 GiB"
    assert str(node_store.Adoption(False, reason="it is gone")) == "adopted nothing: it is gone"


def test_a_removal_releases_what_nothing_else_links(made: MadeStore) -> None:
    live, one, two = made.holder("1"), made.published("one"), made.published("two")
    made.object("a", MIB, one)
    made.object("b", MIB, one, two)
    made.object("c", MIB, one, live)
    assert node_store.remove("one") and not node_store.remove("one")
    assert sorted(os.listdir(made.path / "objects")) == ["b" * 32, "c" * 32]
    assert node_store.names() == ["two"]


def test_a_removal_leaves_what_is_published_meanwhile(made: MadeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another publisher exchanges the directory after the manifest has gone."""
    old = made.published("one")
    made.object("a", MIB, old)
    unlink = os.unlink

    def exchange(name: str, **options: int) -> None:
        unlink(name, **options)
        if name == "manifest.json":
            old.rename(made.path / "old")
            made.object("b", MIB, made.published("one"))

    monkeypatch.setattr(os, "unlink", exchange)
    assert remove_published(made.path, "one")
    assert published_names(made.path) == ["one"]
    assert os.listdir(made.path / "objects") == ["b" * 32]
    assert os.listdir(made.path / "old") == []


def test_a_name_without_a_manifest_is_none(made: MadeStore) -> None:
    (made.published("one") / "manifest.json").unlink()
    assert node_store.names() == [] and read_manifest(made.path, "one") is None and not node_store.remove("one")


def test_without_a_folder_there_are_no_names(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMS_SHARED_DIR", str(memory / "none"))
    assert node_store.names() == [] and not node_store.remove("one")
    assert not (memory / "none").exists()


def test_a_folder_on_another_file_system_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as other:
        monkeypatch.setenv("TMS_SHARED_DIR", other)
        with pytest.raises(BackupIOError, match=f"^names: {other}: it is on .*, and the shared store keeps"):
            node_store.names()


def test_a_folder_that_is_refused_is_an_error(made: MadeStore) -> None:
    made.path.chmod(0o777)
    for call in (node_store.names, lambda: node_store.remove("one")):
        with pytest.raises(BackupIOError, match=f"^(names|remove): {made.path}: the check"):
            call()
