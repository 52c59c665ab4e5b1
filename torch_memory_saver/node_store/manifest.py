"""The manifest of a published name: JSON, which the core completes with the names of the objects.

It says from what the weights were made (`identity`), what the tensors and storages look like, and carries the publisher's
`extra`. A manifest is read as if anybody had written it: everything that is used is checked first.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch_memory_saver.errors import InvalidArgumentError

from .pieces import MAX_BYTES, Plan, plan
from .tensors import Found, StorageShape, TensorShape

__all__ = ["FORMAT", "MAX_EXTRA_BYTES", "Manifest", "ManifestError", "contents_of", "read"]

FORMAT = 1
#: The JSON text of `extra` may have so many bytes.
MAX_EXTRA_BYTES = 1 << 20
_OBJECT = re.compile(r"[0-9a-f]{32}")


class ManifestError(ValueError):
    """A manifest is damaged or of another format. The message says in what way."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """A manifest that has been read.

    Attributes:
        identity: Identity that the publisher has given.
        extra: Value that the publisher has given.
        tensors: Tensors by name.
        shapes: Storages.
        objects: Names of the objects: pieces, then packs.
    """

    identity: str
    extra: Any
    tensors: dict[str, TensorShape]
    shapes: list[StorageShape]
    objects: list[str]

    def difference(self, identity: str, found: Found) -> str:
        """Return a sentence about the first thing in which a model differs from what was published, or ""."""
        if self.identity != identity:
            return _other_identity(self.identity, identity)
        return next(_differences(self, found), "")

    def plan(self) -> Plan:
        """Return the objects that the storages are cut into.

        Raises:
            ManifestError: Their number is not that of the names.
        """
        if sum(shape.bytes for shape in self.shapes) <= len(self.objects) * MAX_BYTES:  # otherwise the plan may be huge
            made = plan(self.shapes)
            if len(made.pieces) + len(made.packs) == len(self.objects):
                return made
        raise _damaged("the number of objects is wrong")

    def damage(self, sizes: Mapping[str, int]) -> str:
        """Return a sentence about the first object that has a wrong size, or "". Missing objects are skipped.

        Args:
            sizes: Sizes of the objects of the store, by name.

        Raises:
            ManifestError: The number of objects is wrong.
        """
        made = self.plan()
        wanted = [*(piece.bytes for piece in made.pieces), *(pack.bytes for pack in made.packs)]
        for name, size in zip(self.objects, wanted, strict=True):
            found = sizes.get(name, size)
            if found != size:
                return f"an object has {found} bytes instead of {size}"
        return ""


def _other_identity(there: str, here: str) -> str:
    """Return a sentence about two identities: about the words that differ, if both are words such as `name=value`."""
    words, own = there.split(" "), here.split(" ")
    if all("=" in word for word in (*words, *own)) and {*words} != {*own}:
        lacking = [word for word in words if word not in own], [word for word in own if word not in words]
        one, other = (" ".join(each) or "nothing else" for each in lacking)
        return f"its identity has {one}, and that of this call has {other}"
    return f"it was published with the identity '{there}', and this call has '{here}'"


def _differences(manifest: Manifest, found: Found) -> Iterator[str]:
    for name in sorted(manifest.tensors.keys() ^ found.tensors.keys()):
        yield f"the model has no tensor '{name}'" if name in manifest.tensors else f"it has no tensor '{name}'"
    for name, here in found.tensors.items():
        there = manifest.tensors[name]
        for what in ("dtype", "shape", "strides"):
            one, other = getattr(there, what), getattr(here, what)
            if one != other:
                yield f"'{name}' was published with the {what} {_text(one)}, and the model has {_text(other)}"
        if (there.storage, there.offset) != (here.storage, here.offset):
            yield f"'{name}' shares its storage with other tensors, or lies elsewhere in it"
        one, other = manifest.shapes[there.storage], found.shapes[here.storage]
        if (one.bytes, one.device) != (other.bytes, other.device):
            yield f"the storage of '{name}' had {one.bytes} bytes and has {other.bytes}, or is on another device"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else str(list(value))


def contents_of(identity: str, found: Found, extra: Any) -> str:
    """Return the JSON text that the core puts into the manifest.

    Raises:
        InvalidArgumentError: `extra` is no JSON value, or is too large.
    """
    try:
        text = json.dumps(extra, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"publish: extra must be a JSON value: {error}", operation="publish") from error
    if len(text) > MAX_EXTRA_BYTES:
        raise InvalidArgumentError(
            f"publish: extra has {len(text)} bytes as JSON; it may have {MAX_EXTRA_BYTES}", operation="publish"
        )
    contents = {
        "format": FORMAT,
        "identity": identity,
        "extra": extra,
        "tensors": {name: dataclasses.astuple(shape) for name, shape in found.tensors.items()},
        "storages": [dataclasses.astuple(shape) for shape in found.shapes],
    }
    return json.dumps(contents, sort_keys=True, separators=(",", ":"))


def read(text: bytes) -> Manifest:
    """Return what a manifest says.

    Raises:
        ManifestError: The manifest is damaged, or of another format.
    """
    try:
        whole = _json(text)
        contents = whole["contents"]
        if contents["format"] != FORMAT:
            raise ManifestError(f"its manifest has the format {contents['format']!r}, and this version reads {FORMAT}")
        tensors = {name: TensorShape(*_checked_tensor(*row)) for name, row in contents["tensors"].items()}
        shapes = [StorageShape(*_checked_storage(*row)) for row in contents["storages"]]
        return Manifest(
            _text_in(contents["identity"]), contents["extra"], _with_storages(tensors, shapes), shapes, _objects(whole)
        )
    except KeyError as error:
        raise _damaged(f"it has no {error}") from error
    except (TypeError, AttributeError) as error:
        raise _damaged("a list or an object is missing in it, or has the wrong length") from error


def _damaged(reason: str) -> ManifestError:
    return ManifestError(f"its manifest is damaged: {reason}")


def _json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _damaged("it is no JSON text") from error


def _checked_tensor(dtype: Any, shape: Any, strides: Any, storage: Any, offset: Any) -> tuple[Any, ...]:
    return _text_in(dtype), tuple(map(_number, shape)), tuple(map(_number, strides)), _number(storage), _number(offset)


def _checked_storage(size: Any, aligned: Any, device: Any) -> tuple[Any, ...]:
    if not isinstance(aligned, bool):
        raise _damaged(f"{aligned!r} is not true or false")
    return _number(size), aligned, _number(device)


def _with_storages(tensors: dict[str, TensorShape], shapes: list[StorageShape]) -> dict[str, TensorShape]:
    if {tensor.storage for tensor in tensors.values()} != set(range(len(shapes))):
        raise _damaged("its tensors have other storages than it lists")
    return tensors


def _objects(whole: dict[str, Any]) -> list[str]:
    names = list(whole["objects"])
    for name in names:
        if not _OBJECT.fullmatch(_text_in(name)):
            raise _damaged(f"{name!r} is no name of an object")
    return names


def _text_in(value: Any) -> str:
    if not isinstance(value, str):
        raise _damaged(f"{value!r} is not a text")
    return value


def _number(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise _damaged(f"{value!r} is not a whole number of at least 0")
    return value
