"""A replica whose weights have shared backups. Executes the commands on its standard input, one a line, and answers each
with `ok`, followed by what was asked for, or with the error, on a line.

load SEED [PADDING]    weights made of SEED: tensors of the sizes below, allocated after so many bytes of zeros, so that two
                       replicas place them differently
change NAME VALUE      one byte of a tensor, 0 to 255
train SEED             new contents, made of SEED, for all weights but the embedding
send FILE              writes the weights to a file
receive FILE           overwrites all weights with those of a file
digest                 answers: the CRC-32 of the bytes of all weights
pause                  answers: bytes copied, bytes unchanged
resume [POLICY]        release, pool or retain
resume_later           resume(wait=False), and the wait for it on the current stream
backup NAME            takes the copy of a paused tensor, also without a copy of its own, and overwrites it
check                  whether the weights are those of the last load or change
numbers                answers: bytes of the shared objects held, bytes of them made here, bytes of private backups
release                frees the weights
"""

from __future__ import annotations

import sys
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))

from command_loop import serve
from gpu_support import checksum, core, empty, fill_random, saver, torch

MIB = 1 << 20
#: Some tensors of a model, bytes. "odd" ends inside a vector of the kernel, "norm" is smaller than an object.
SIZES = {"embedding": 65 * MIB, "up": 6 * MIB, "down": 6 * MIB, "odd": 3 * MIB + 24, "head": 512 * 1024, "norm": 8192}

weights: dict[str, torch.Tensor] = {}
padding: list[torch.Tensor] = []
sums: dict[str, tuple[int, int, int]] = {}


def _note() -> None:
    for name, tensor in weights.items():
        sums[name] = checksum(tensor)


def load(seed: str, pad: str = "0") -> str:
    with saver.region("weights", backup="shared"):
        if int(pad):
            padding.append(empty(int(pad)))
            padding[-1].zero_()
        for name, size in SIZES.items():
            weights[name] = empty(size)
    for number, tensor in enumerate(weights.values()):
        fill_random(tensor, 100 * int(seed) + number)
    _note()
    return ""


def change(name: str, value: str) -> str:
    weights[name][MIB if name == "embedding" else 0] = int(value)
    _note()
    return ""


def train(seed: str) -> str:
    for number, (name, tensor) in enumerate(weights.items()):
        if name != "embedding":
            fill_random(tensor, 100 * int(seed) + number)
    _note()
    return ""


def send(file: str) -> str:
    torch.save({name: tensor.cpu() for name, tensor in weights.items()}, file)
    return ""


def receive(file: str) -> str:
    for name, tensor in torch.load(file).items():
        weights[name].copy_(tensor)
    _note()
    return ""


def digest() -> str:
    crc = 0
    for tensor in weights.values():
        crc = zlib.crc32(tensor.cpu().numpy().data, crc)
    return f" {crc}"


def pause() -> str:
    report = saver.pause("weights")
    return f" {report.copied_bytes} {report.unchanged_bytes}"


def resume(policy: str | None = None) -> str:
    saver.resume("weights", host_memory=policy)  # type: ignore[arg-type]
    return ""


def resume_later() -> str:
    saver.resume("weights", wait=False).wait_stream()
    return ""


def backup(name: str) -> str:
    for zero_copy in (False, True):
        copy = saver.get_cpu_backup(weights[name], zero_copy=zero_copy)
        if copy is None or checksum(copy) != sums[name]:
            raise ValueError(f"the backup of {name} is {copy}")
        copy.zero_()
    return ""


def check() -> str:
    for name, tensor in weights.items():
        if checksum(tensor) != sums[name]:
            raise ValueError(f"{name} has other contents")
    return ""


def numbers() -> str:
    counters = core.counters()
    return " " + " ".join(str(counters[name]) for name in ("shared_backup_bytes", "shared_made_bytes", "host_backup_bytes"))


def release() -> str:
    weights.clear()
    padding.clear()
    saver.empty_cache()
    torch.cuda.empty_cache()
    return ""


serve((load, change, train, send, receive, digest, pause, resume, resume_later, backup, check, numbers, release))
