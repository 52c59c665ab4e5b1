"""Guards what a manifest says: it is read as it was written, everything that is damaged is noticed, and the first difference
from a model is named."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest

from torch_memory_saver.errors import InvalidArgumentError
from torch_memory_saver.node_store.manifest import MAX_EXTRA_BYTES, ManifestError, contents_of, read
from torch_memory_saver.node_store.tensors import Found, StorageShape, TensorShape

NAME, OTHER = "0123456789abcdef" * 2, "f" * 32
MODEL = Found(
    {
        "a": TensorShape("torch.bfloat16", (2, 3), (3, 1), 0, 0),
        "b": TensorShape("torch.float32", (5,), (1,), 1, 4),
        "tied": TensorShape("torch.bfloat16", (2, 3), (3, 1), 0, 0),
    },
    [StorageShape(12, True, 0), StorageShape(36, False, 1)],
    [None, None],
    [3, 1],
)


def written(extra: Any = None, **changes: Any) -> bytes:
    contents = {**json.loads(contents_of("key", MODEL, extra)), **changes}
    return json.dumps({"objects": [NAME], "contents": contents}).encode()


def test_a_manifest_is_read_as_it_was_written() -> None:
    found = read(written({"scales": [1, None, "ü"]}))
    assert found.identity == "key" and found.extra == {"scales": [1, None, "ü"]} and found.objects == [NAME]
    assert found.tensors == MODEL.tensors and found.shapes == MODEL.shapes
    assert found.difference("key", MODEL) == ""
    assert contents_of("key", MODEL, None) == contents_of("key", dataclasses.replace(MODEL), None)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b'{"objects":[],"contents":null}',
        b"[" * 100_000,
        written(format="1"),
        written(format=2),
        written(identity=None),
        written(tensors=[]),
        written(tensors={"a": []}),
        written(tensors={"a": ["torch.int8", [1], [1], 0, -1]}),
        written(tensors={"a": ["torch.int8", [True], [1], 0, 0]}),
        written(tensors={"a": ["torch.int8", [1], [1], 7, 0]}),
        written(storages=[[1, 1, 0], [1, True, 0]]),
        written(storages=[[12, True, 0]]),
        written(storages=[[1.5, True, 0], [1, True, 0]]),
        written().replace(NAME.encode(), b"../../etc/passwd"),
        written().replace(f'"{NAME}"'.encode(), b"7"),
    ],
)
def test_a_damaged_manifest_is_noticed(text: bytes) -> None:
    with pytest.raises(ManifestError, match="manifest") as raised:
        read(text)
    assert not re.search("Error|takes|argument|indices|subscriptable|attribute", str(raised.value)), "no words of Python"


def changed(name: str, **changes: Any) -> Found:
    tensors = {**MODEL.tensors, name: dataclasses.replace(MODEL.tensors[name], **changes)}
    return dataclasses.replace(MODEL, tensors=tensors)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (dataclasses.replace(MODEL, tensors={**MODEL.tensors, "c": MODEL.tensors["a"]}), "it has no tensor 'c'"),
        (dataclasses.replace(MODEL, tensors={"a": MODEL.tensors["a"]}), "the model has no tensor 'b'"),
        (changed("a", dtype="torch.int8"), "'a' was published with the dtype torch.bfloat16, and the model has torch.int8"),
        (changed("a", shape=(3, 2)), "'a' was published with the shape [2, 3], and the model has [3, 2]"),
        (changed("b", strides=(2,)), "'b' was published with the strides [1], and the model has [2]"),
        (changed("b", offset=0), "'b' shares its storage"),
        (changed("tied", storage=1), "'tied' shares its storage"),
        (
            dataclasses.replace(MODEL, shapes=[StorageShape(16, True, 0), MODEL.shapes[1]]),
            "the storage of 'a' had 12 bytes and has 16",
        ),
        (dataclasses.replace(MODEL, shapes=[MODEL.shapes[0], StorageShape(36, False, 0)]), "the storage of 'b'"),
    ],
)
def test_the_first_difference_is_named(model: Found, text: str) -> None:
    assert text in read(written()).difference("key", model)


def test_another_identity_and_the_alignment() -> None:
    found = read(written())
    assert found.difference("other", MODEL) == "it was published with the identity 'key', and this call has 'other'"
    unaligned = [dataclasses.replace(shape, aligned=not shape.aligned) for shape in MODEL.shapes]
    assert found.difference("key", dataclasses.replace(MODEL, shapes=unaligned)) == ""  # the publisher's counts


def test_an_object_of_a_wrong_size_is_named() -> None:
    packs = {NAME: 256 << 10, OTHER: 256 << 10}
    found = dataclasses.replace(read(written()), objects=list(packs))
    assert found.damage(packs) == found.damage({}) == "", "a missing object has no wrong size"
    assert found.damage({**packs, OTHER: 1000}) == "an object has 1000 bytes instead of 262144"


@pytest.mark.parametrize("size", [MODEL.shapes[0].bytes, 1 << 60])
def test_a_wrong_number_of_objects_is_damage(size: int) -> None:
    found = dataclasses.replace(read(written()), shapes=[StorageShape(size, True, 0)], objects=[NAME, OTHER])
    with pytest.raises(ManifestError, match="its manifest is damaged: the number of objects is wrong"):
        found.plan()


@pytest.mark.parametrize(
    ("here", "text"),
    [
        ("files=a@1 rank=1 dtype=half", "its identity has rank=0, and that of this call has rank=1 dtype=half"),
        ("files=a@1", "its identity has rank=0, and that of this call has nothing else"),
        ("rank=0 files=a@1", "it was published with the identity 'files=a@1 rank=0', and this call has 'rank=0 files=a@1'"),
        ("mine", "it was published with the identity 'files=a@1 rank=0', and this call has 'mine'"),
    ],
)
def test_the_words_in_which_identities_differ(here: str, text: str) -> None:
    assert read(written(identity="files=a@1 rank=0")).difference(here, MODEL) == text


@pytest.mark.parametrize("extra", [object(), float("nan"), {1: {2}}, "x" * MAX_EXTRA_BYTES])
def test_extra_must_be_a_small_json_value(extra: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="extra"):
        contents_of("key", MODEL, extra)
