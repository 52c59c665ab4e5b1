"""Guards shared memory against a model: random allocations, writes, sends, pauses, resumes and frees here, and imports,
writes and drops in another process, with the bytes of both compared."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass

import pytest
from gpu_support import MIB, SIMULATED, empty, errors, saver, torch
from importers import Importer, message

OPERATIONS = 300
SIZES = (MIB // 2, 2 * MIB, 12 * MIB)
MAX_TENSORS, MAX_IMPORTS = 6, 8
#: A pause of the one keeps contents, of the other discards them.
KEPT, DISCARDED = "kept", "discarded"


@dataclass
class Bytes:
    """What a piece of physical memory holds in a tensor's place: one value in every byte, or None if it is undefined."""

    value: int | None = None


@dataclass
class Owned:
    """A tensor here, and its bytes while it is resident."""

    tensor: torch.Tensor
    tag: str
    bytes: Bytes


class Shared:
    """Both processes and the model of them."""

    def __init__(self, importer: Importer, seed: int) -> None:
        self.random = random.Random(seed)
        self.importer = importer
        self.owned: list[Owned] = []
        self.imported: dict[str, tuple[int, Bytes]] = {}
        self.paused: set[str] = set()
        self.names = 0

    def resident(self) -> list[Owned]:
        return [each for each in self.owned if each.tag not in self.paused]

    # operations

    def allocate(self) -> None:
        tag = self.random.choice((KEPT, DISCARDED))
        if len(self.owned) == MAX_TENSORS or tag in self.paused:
            return
        with saver.region(tag=tag, enable_cpu_backup=tag == KEPT):
            tensor = empty(self.random.choice(SIZES))
        self.owned.append(Owned(tensor, tag, Bytes()))
        self.write(self.owned[-1])

    def write(self, owned: Owned | None = None) -> None:
        if owned is None and not self.resident():
            return
        target = owned or self.random.choice(self.resident())
        target.bytes.value = self.random.randrange(256)
        target.tensor.fill_(target.bytes.value)
        torch.cuda.synchronize()

    def free(self) -> None:
        if self.owned:
            self.owned.pop(self.random.randrange(len(self.owned)))

    def send(self) -> None:
        if not self.owned or len(self.imported) == MAX_IMPORTS:
            return
        owned = self.random.choice(self.owned)
        if owned.tag in self.paused:
            with pytest.raises(errors.InvalidStateError, match="paused"):
                message(owned.tensor)
            return
        self.names += 1
        name = f"t{self.names}"
        self.importer.take(name, message(owned.tensor))
        self.imported[name] = (owned.tensor.numel(), owned.bytes)

    def write_there(self) -> None:
        if self.imported:
            name = self.random.choice(list(self.imported))
            value = self.random.randrange(256)
            self.importer.fill(name, value)
            self.imported[name][1].value = value

    def drop(self) -> None:
        if self.imported:
            name = self.random.choice(list(self.imported))
            self.importer.drop(name)
            del self.imported[name]

    def move(self) -> None:
        tag = self.random.choice((KEPT, DISCARDED))
        if tag in self.paused:
            saver.resume(tag)
            self.paused.discard(tag)
            return
        saver.pause(tag)
        self.paused.add(tag)
        for owned in self.owned:
            if owned.tag == tag:  # what is resumed is other memory, with the contents of the pause or none
                owned.bytes = Bytes(owned.bytes.value if tag == KEPT else None)

    def forget(self) -> None:
        torch.cuda.ipc_collect()

    # the comparison

    def check(self) -> None:
        for owned in self.resident():
            if owned.bytes.value is not None:
                assert int(owned.tensor.min()) == int(owned.tensor.max()) == owned.bytes.value
        for name, (size, content) in self.imported.items():
            if content.value is not None:
                assert self.importer.read(name) == expected(size, content.value), name

    def end(self) -> None:
        for name in self.imported:
            self.importer.drop(name)
        saver.resume()
        self.owned.clear()
        torch.cuda.ipc_collect()


def expected(size: int, value: int) -> str:
    return f"{size} {zlib.crc32(bytes([value]) * size)}"


@pytest.mark.parametrize("seed", range(3 if SIMULATED else 6))
def test_random_operations_of_two_processes(importer: Importer, seed: int) -> None:
    shared = Shared(importer, seed)
    weights = {
        shared.allocate: 5,
        shared.write: 3,
        shared.free: 1,
        shared.send: 5,
        shared.write_there: 3,
        shared.drop: 2,
        shared.move: 2,
        shared.forget: 1,
    }
    counts = dict.fromkeys((operation.__name__ for operation in weights), 0)
    for number in range(OPERATIONS):
        (operation,) = shared.random.choices(list(weights), list(weights.values()))
        operation()
        counts[operation.__name__] += 1
        if number % 3 == 0:
            shared.check()
    assert shared.names > OPERATIONS // 20 and min(counts.values()) > 0, (shared.names, counts)
    shared.check()
    shared.end()
