"""Guards published weights: a new process adopts them with equal logits and its pause copies nothing of them; whatever
differs or is damaged is noticed. Each process runs programs/node_store.py."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from second_process import SecondProcess

from torch_memory_saver._text import binary_size
from torch_memory_saver.observe._store.contents import read_store

#: The bytes of the model: the embedding, which the head shares; up, down, odd; their biases and the buffer.
EMBEDDING, LINEAR, ODD = 1000 * 512 * 4, 512 * 1024 * 4, 100_003 * 4
SMALL = (1024 + 512 + 3) * 4
TOTAL = EMBEDDING + 2 * LINEAR + ODD + SMALL
#: The pieces that are objects: all but the biases, the buffer, and the end of odd.
OBJECTS = EMBEDDING + 2 * LINEAR + ODD // 16 * 16
PRIVATE = TOTAL - OBJECTS


class Adopted(NamedTuple):
    adopted: bool
    bytes: int
    extra: Any
    reason: str
    warnings: list[str]


class Process(SecondProcess):
    """programs/node_store.py with its store in `folder`."""

    def __init__(self, folder: Path, *environment: tuple[str, str]) -> None:
        super().__init__((("TMS_SHARED_DIR", str(folder)), *environment), "node_store.py")

    def ask(self, *words: object) -> str:
        self.tell(*words)
        answer = self.answer()
        assert answer.startswith("ok"), f"{' '.join(map(str, words))}: {answer}"
        return answer.removeprefix("ok").strip()

    def adopt(self, name: str, identity: str) -> Adopted:
        return Adopted(*json.loads(self.ask("adopt", name, identity)))

    def misses(self, name: str, identity: str, *texts: str) -> None:
        """Asserts that nothing is adopted, and that one warning has these texts."""
        found = self.adopt(name, identity)
        assert not found.adopted and found.extra is None
        (warning,) = found.warnings
        for text in (name, *texts):
            assert text in warning
        assert found.reason in warning


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return tmp_path / "model.bin"


def publish(
    folder: Path, weights: Path, seed: int = 1, *, name: str = "qwen/rank0", identity: str = "one", extra: str = "null"
) -> str:
    """A process publishes weights and ends. Returns its logits."""
    with Process(folder) as process:
        process.do("make")
        process.do("save", weights, seed)
        process.do("publish", name, identity, extra)
        return process.ask("logits")


@contextlib.contextmanager
def restarted(folder: Path, *environment: tuple[str, str], managed: bool = True) -> Iterator[Process]:
    with Process(folder, *environment) as process:
        process.do("make", *(["managed"] if managed else []))
        yield process


def objects(folder: Path) -> dict[str, int]:
    return {entry.name: entry.stat().st_size for entry in os.scandir(folder / "objects")}


def manifest_of(folder: Path, name: str = "qwen%2Frank0") -> Path:
    return folder / "names" / name / "manifest.json"


def flip_bit(path: Path) -> None:
    path.chmod(0o600)
    with open(path, "r+b") as file:
        file.seek(1_000_000)
        byte = file.read(1)
        file.seek(1_000_000)
        file.write(bytes([byte[0] ^ 16]))


def replace_manifest(folder: Path, **changes: Any) -> None:
    path = manifest_of(folder)
    manifest = json.loads(path.read_text())
    manifest["contents"].update(changes)
    path.chmod(0o600)
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize("managed", [True, False])
def test_a_new_process_has_equal_logits(managed: bool, folder: Path, weights: Path) -> None:
    expected = publish(folder, weights, extra='{"scales":[1,2.5]}')
    assert len(os.listdir(folder / "holders")) == 0
    with restarted(folder, managed=managed) as process:
        assert process.ask("logits") != expected
        found = process.adopt("qwen/rank0", "one")
        assert found == (True, TOTAL, {"scales": [1, 2.5]}, "", [])
        assert process.ask("logits") == expected


def test_the_first_pause_copies_what_is_private(folder: Path, weights: Path) -> None:
    expected = publish(folder, weights)
    before = objects(folder)
    with restarted(folder) as process:
        assert process.adopt("qwen/rank0", "one").adopted
        assert process.ask("pause") == f"{PRIVATE} {OBJECTS}"
        assert process.ask("numbers") == f"{OBJECTS} 0"
        process.do("resume")
        assert process.ask("logits") == expected
        assert process.ask("pause") == f"{PRIVATE} {OBJECTS}"
        process.do("resume")
        assert objects(folder) == before
    assert objects(folder) == before


def test_publishing_paused_contents_writes_only_small_tensors(folder: Path, weights: Path) -> None:
    with restarted(folder) as process:
        process.do("save", weights, 1)
        process.ask("pause")
        process.do("resume")
        before = set(objects(folder))
        process.do("publish", "a", "one")
        (pack,) = set(objects(folder)) - before
        assert objects(folder)[pack] == 256 * 1024
        assert process.ask("pause") == f"{PRIVATE} {OBJECTS}"
        process.do("resume")


def test_a_checkpoint_that_is_replaced_under_its_path_is_a_miss(folder: Path, weights: Path, tmp_path: Path) -> None:
    with restarted(folder) as process:
        process.do("save", weights, 1)
        first = process.ask("identity", weights, 0)
        assert process.ask("identity", weights, 0) == first != process.ask("identity", weights, 1)
        process.do("publish", "qwen/rank0", first)
        process.do("save", tmp_path / "other", 2)
        os.replace(tmp_path / "other", weights)
        second = process.ask("identity", weights, 0)
        assert second != first
        process.do("load", weights)
        expected = process.ask("logits")
    with restarted(folder) as process:
        process.misses("qwen/rank0", second, "identity", first, second)
        process.do("load", weights)
        assert process.ask("logits") == expected
        process.do("publish", "qwen/rank0", second)
        process.do("zero")
        assert process.adopt("qwen/rank0", second).adopted
        assert process.ask("logits") == expected


def test_a_damaged_object_is_named(folder: Path, weights: Path) -> None:
    expected = publish(folder, weights)
    name = next(name for name, size in objects(folder).items() if size == LINEAR)
    flip_bit(folder / "objects" / name)
    with restarted(folder) as process:
        process.misses("qwen/rank0", "one", name, "damaged", "The address is in '")
        process.do("load", weights)
        assert process.ask("logits") == expected
        process.misses("qwen/rank0", "one", name, "missing")


@pytest.mark.parametrize("healed_by", ["publish", "adopt_or_load"])
def test_a_damaged_object_is_written_again_although_others_hold_it(healed_by: str, folder: Path, weights: Path) -> None:
    """The holder has adopted the weights before the damage. Another name has the object as well."""
    expected = publish(folder, weights, name="a")
    publish(folder, weights, name="b")
    with restarted(folder) as holder, restarted(folder) as process:
        assert holder.adopt("a", "one").adopted
        name = next(name for name, size in objects(folder).items() if size == LINEAR)
        flip_bit(folder / "objects" / name)
        if healed_by == "publish":
            process.misses("a", "one", name, "damaged")
            process.do("load", weights)
            process.do("publish", "a", "one")
        else:
            found = Adopted(*json.loads(process.ask("either", "a", "nothing", weights)))
            assert found[:2] == (False, 1)
            (warning,) = found.warnings
            assert name in warning and "damaged" in warning
        for each in ("a", "b"):
            process.do("zero")
            assert process.adopt(each, "one").adopted
            assert process.ask("logits") == expected
    with restarted(folder) as process:
        assert process.adopt("a", "one").adopted
        assert process.ask("logits") == expected


@pytest.mark.parametrize("copies", [1, 2])
def test_a_cut_object_is_one_warning_and_written_again(copies: int, folder: Path, weights: Path) -> None:
    """Another name has the object as well, or nothing has."""
    for name in ("a", "b")[:copies]:
        expected = publish(folder, weights, name=name)
    name = next(name for name, size in objects(folder).items() if size == LINEAR)
    (folder / "objects" / name).chmod(0o600)
    os.truncate(folder / "objects" / name, 1000)
    with restarted(folder) as process:
        found = Adopted(*json.loads(process.ask("either", "a", "nothing", weights)))
        (warning,) = found.warnings
        assert warning.startswith("'a' is not adopted: ") and f"{name}' is damaged: it has 1000 bytes instead of" in warning
        for each in ("a", "b")[:copies]:
            process.do("zero")
            assert process.adopt(each, "one").adopted
            assert process.ask("logits") == expected


def test_store_agrees_with_an_adopter_after_links_were_deleted(folder: Path, weights: Path) -> None:
    """The adopter finds the objects, and releases them when it ends, because nothing else links them any longer."""
    publish(folder, weights)
    for link in manifest_of(folder).parent.iterdir():
        if link.name != "manifest.json":
            link.unlink()
    (seen,) = read_store(folder).names
    assert seen.damage == ""
    with restarted(folder) as process:
        assert process.adopt("qwen/rank0", "one").adopted
    (seen,) = read_store(folder).names
    assert seen.damage == "of its 5 objects 5 are missing"
    with restarted(folder) as process:
        process.misses("qwen/rank0", "one", "missing")


def test_weights_that_a_process_has_no_memory_to_adopt_stay(folder: Path, weights: Path, tmp_path: Path) -> None:
    expected = publish(folder, weights)
    before = objects(folder)
    with restarted(folder) as process:
        process.do("lack")
        process.refuses("FileNotFoundError", "either", "qwen/rank0", "nothing", tmp_path / "missing")
        assert json.loads(process.ask("names")) == ["qwen/rank0"] and objects(folder) == before
        found = Adopted(*json.loads(process.ask("either", "qwen/rank0", "nothing", weights)))
        assert found[:2] == (False, 1) and found.warnings == ["'qwen/rank0' is not adopted: no scratch memory"]
        assert objects(folder) == before
    with restarted(folder) as process:
        assert process.adopt("qwen/rank0", "one").adopted
        assert process.ask("logits") == expected


def test_a_refused_folder_is_one_warning(folder: Path, weights: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    with restarted(folder, managed=False) as process:
        process.do("save", weights, 1)
        found = Adopted(*json.loads(process.ask("either", "a", "nothing", weights)))
        assert found[:2] == (False, 1)
        (warning,) = found.warnings
        assert f"'a' is loaded and not published: {folder}: " in warning and "Errno" not in warning
    assert os.listdir(folder) == []


def test_a_damaged_or_foreign_manifest_is_a_miss(folder: Path, weights: Path) -> None:
    publish(folder, weights)
    intact = manifest_of(folder).read_text()
    tensors = json.loads(intact)["contents"]["tensors"]
    with restarted(folder) as process:
        empty = process.ask("logits")
        for changes, text in (
            ({"format": 2}, "format 2"),
            ({"identity": "other"}, "identity 'other'"),
            ({"identity": 3}, "damaged"),
            ({"storages": []}, "damaged"),
            ({"tensors": {**tensors, "more": tensors["scale"]}}, "no tensor 'more'"),
            ({"tensors": {name: row for name, row in tensors.items() if name != "odd"}}, "damaged"),
            ({"tensors": {**tensors, "scale": ["torch.float16", *tensors["scale"][1:]]}}, "dtype torch.float16"),
            ({"tensors": {**tensors, "scale": ["torch.float32", [4], *tensors["scale"][2:]]}}, "shape [4]"),
            ({"tensors": {**tensors, "scale": ["torch.float32", [3], [2], *tensors["scale"][3:]]}}, "strides [2]"),
            ({"tensors": {**tensors, "head.weight": tensors["up.weight"]}}, "head.weight"),
        ):
            replace_manifest(folder, **changes)
            process.misses("qwen/rank0", "one", text)
            manifest_of(folder).write_text(intact)
        manifest_of(folder).write_text("[]")
        process.misses("qwen/rank0", "one", "damaged")
        assert process.ask("logits") == empty
        manifest_of(folder).write_text(intact)
        assert process.adopt("qwen/rank0", "one").adopted


def test_another_name_is_no_warning(folder: Path) -> None:
    with restarted(folder) as process:
        found = process.adopt("never", "one")
        assert not found.adopted and not found.warnings and "nothing is published" in found.reason


def test_names_are_listed_and_removed(folder: Path, weights: Path) -> None:
    with restarted(folder) as process:
        assert json.loads(process.ask("names")) == []
    publish(folder, weights, name="../b")
    publish(folder, weights, name=".a")
    publish(folder, weights, 2, name="ü%2F")
    with restarted(folder) as process:
        assert json.loads(process.ask("names")) == ["../b", ".a", "ü%2F"]
        assert sum(objects(folder).values()) == 2 * (OBJECTS + 256 * 1024)
        assert process.ask("remove", ".a") == "True"
        assert process.ask("remove", ".a") == "False"
        assert process.ask("remove", "ü%2F") == "True"
        assert json.loads(process.ask("names")) == ["../b"]
        assert sum(objects(folder).values()) == OBJECTS + 256 * 1024
        assert process.adopt("../b", "one").adopted
        assert process.ask("remove", "../b") == "True"
    assert objects(folder) == {} and os.listdir(folder / "names") == []


def test_new_weights_replace_those_of_the_name(folder: Path, weights: Path) -> None:
    publish(folder, weights, 1)
    expected = publish(folder, weights, 2)
    assert sum(objects(folder).values()) == OBJECTS + 256 * 1024
    with restarted(folder) as process:
        assert process.adopt("qwen/rank0", "one").adopted
        assert process.ask("logits") == expected


def test_adopting_while_others_publish_remove_and_pause(folder: Path, weights: Path, tmp_path: Path) -> None:
    """Each attempt has one of the two models, whole, or says why it has none."""
    files, expected, outcomes = [weights, tmp_path / "other.bin"], [], set()
    with restarted(folder) as publisher, restarted(folder) as pauser, restarted(folder) as adopter:
        for seed, file in enumerate(files):
            publisher.do("save", file, seed)
            expected.append(publisher.ask("logits"))
        for number in range(24):
            file = files[number % 2]
            started: list[tuple[SecondProcess, tuple[object, ...]]] = [
                (publisher, ("load", file)),
                (publisher, ("remove", "a") if number % 6 == 5 else ("publish", "a", "one")),
                (pauser, ("load", file)),
                (pauser, ("pause",)),
                (pauser, ("resume",)),
                (adopter, ("zero",)),
                (adopter, ("adopt", "a", "one")),
                (adopter, ("logits",)),
            ]
            for process, words in started:
                process.tell(*words)
            answers = [process.answer() for process, _ in started]
            assert all(answer.startswith("ok") for answer in answers), answers
            found = Adopted(*json.loads(answers[-2].removeprefix("ok")))
            outcomes.add(found.adopted)
            if found.adopted:
                assert answers[-1].removeprefix("ok").strip() in expected and not found.warnings
            else:
                assert "nothing is published" in found.reason or "is missing" in found.reason
        assert True in outcomes
        assert publisher.ask("remove", "a") in ("True", "False")
    assert objects(folder) == {} and os.listdir(folder / "holders") == [] == os.listdir(folder / "names")


@pytest.mark.parametrize("change", ["nothing", "same", "tensor", "buffer"])
def test_a_load_that_sets_tensors_is_published(change: str, folder: Path, weights: Path) -> None:
    with restarted(folder) as process:
        process.do("save", weights, 1)
        assert Adopted(*json.loads(process.ask("either", "a", change, weights)))[:2] == (False, 1)
        expected = process.ask("logits")
        process.do("zero")
        assert Adopted(*json.loads(process.ask("either", "a", change, weights))) == (True, 0, None, "", [])
        assert process.ask("logits") == expected


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("attribute", "changed 'up.in_features'"),
        ("new", "added 'up.table'"),
        ("element", "changed 'table.scale'"),
        ("parameter", "replaced 'up.bias'"),
        ("mark", "added 'up.weight.state'"),
        ("module", "replaced 'down'"),
        ("shape", "changed the shape of 'odd' from (100003,) to (5,)"),
        ("half", "changed the dtype of 'down.bias' from torch.float32 to torch.float16"),
        ("frozen", "changed 'up.weight.requires_grad'"),
        ("hook", "added 'odd._backward_hooks."),
        ("more", "added 'more'"),
        ("tied", "tied 'up.weight' to 'down.weight'"),
        ("class", "changed 'up.__class__'"),
        ("eval", "changed 'training', which adopting would not: call eval() after adopt_or_load()"),
    ],
)
def test_a_load_that_sets_more_is_named_and_not_published(change: str, text: str, folder: Path, weights: Path) -> None:
    with restarted(folder) as process:
        process.do("save", weights, 1)
        found = Adopted(*json.loads(process.ask("either", "a", change, weights)))
        assert found[:2] == (False, 1)
        (warning,) = found.warnings
        assert f"'a' is not published: loading has {text}" in warning and "after adopt_or_load()" in warning
        assert json.loads(process.ask("names")) == []


def test_the_log_says_what_was_published_and_adopted(folder: Path, weights: Path) -> None:
    with restarted(folder) as process:
        process.do("save", weights, 1)
        process.do("verbose")
        missed, published = Adopted(*json.loads(process.ask("either", "a", "nothing", weights))).warnings
        assert missed == "nothing is published as 'a'"
        size, written = binary_size(TOTAL), binary_size(OBJECTS + 256 * 1024)
        begin = f"published 'a': {size} in 8 tensors, {written} of objects written, in "
        assert published.startswith(begin) and published.endswith("s")
        (adopted,) = Adopted(*json.loads(process.ask("either", "a", "nothing", weights))).warnings
        assert adopted.startswith(f"adopted {size} of 'a' in ") and adopted.endswith("s")


def test_a_model_without_tensors_is_refused(folder: Path) -> None:
    with restarted(folder) as process:
        assert "no parameters and no buffers" in process.refuses("InvalidArgumentError", "publish_nothing")
        assert json.loads(process.ask("names")) == []


@pytest.mark.parametrize(("what", "text"), [("cpu", "device cpu"), ("meta", "device meta"), ("subclass", "a Subclass")])
def test_tensors_that_cannot_be_published_are_refused(what: str, text: str, folder: Path) -> None:
    with restarted(folder) as process:
        messages = json.loads(process.ask("refuse", what))
        assert len(messages) == 2
        for message in messages:
            assert f"'{what}'" in message and text in message
    assert not folder.exists()


def test_paused_tensors_are_refused(folder: Path, weights: Path) -> None:
    publish(folder, weights)
    with restarted(folder) as process:
        process.ask("pause")
        assert "paused" in process.refuses("InvalidStateError", "publish", "other", "one")
        assert "paused" in process.refuses("InvalidStateError", "adopt", "qwen/rank0", "one")
        assert "paused" in process.refuses("InvalidStateError", "either", "qwen/rank0", "nothing", weights)
        process.do("resume")
        assert process.adopt("qwen/rank0", "one").adopted


def test_a_disabled_process_neither_publishes_nor_adopts(folder: Path, weights: Path) -> None:
    publish(folder, weights)
    with restarted(folder, ("TMS_DISABLE", "1"), managed=False) as process:
        found = process.adopt("qwen/rank0", "one")
        assert not found.adopted and not found.warnings and "TMS_DISABLE" in found.reason
        process.do("publish", "other", "one")
        assert json.loads(process.ask("names")) == ["qwen/rank0"]
