"""The cases in which tensors are sent to another process."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .driver import PinnedCopy
from .figures import AT_MOST, Row, Target
from .memory import Block
from .savers import Unavailable
from .setting import MIB, Case, Setting, Shape
from .trainer import value_of

__all__ = ["Send", "Synchronise"]


def _torch(setting: Setting) -> Any:
    if not setting.allocator.caches:
        raise Unavailable("it needs PyTorch's tensors")
    return importlib.import_module("torch")


class Send(Case):
    """Sends alternate with those of as many ordinary tensors, which only PyTorch describes. What is sent is not received:
    its counters are released as a receiver would. Before the sends of a new generation the memory is paused and resumed."""

    name = "send"
    title = "tensors described for another process"
    #: A little more than 2 MiB, so that PyTorch lays several into a segment of 20 MiB.
    shapes = (Shape(300, 2 * MIB + 4096),)
    repetitions = 20
    peer_repetitions = 0
    warm_up = 3
    #: For all 300.
    limit_s = 5e-3

    def run(self, setting: Setting, shape: Shape) -> list[Row]:
        torch, saver, tag = _torch(setting), setting.saver, self.name
        managed = setting.allocate(tag, shape)
        ordinary = [setting.allocator.allocate(setting.device, shape.size, 0) for _ in range(shape.count)]
        release = self._release(torch)
        reduce = torch.multiprocessing.reductions.reduce_tensor
        sent: list[Any] = []

        def send(blocks: Sequence[Block]) -> float:
            seconds = setting.timed(lambda: sent.extend([reduce(block.owner) for block in blocks]))
            for _, arguments in sent:
                release(arguments)
            sent.clear()
            torch.cuda.ipc_collect()
            return seconds

        times: dict[str, list[float]] = {name: [] for name in ("warm", "first", "ordinary")}
        for repetition in range(-self.warm_up, setting.repetitions):
            measured = {"warm": send(managed), "ordinary": send(ordinary)}
            saver.pause(tag)
            saver.resume(tag)
            measured["first"] = send(managed)
            send(managed)
            for name, seconds in measured.items():
                if repetition >= 0:
                    times[name].append(seconds)
        limit = self.limit_s * shape.count / self.shapes[0].count
        own, notes = "PyTorch's own sends of ordinary memory", f"{self._segments(managed)} allocations"
        rows: list[tuple[str, str, list[float], str, float | None]] = [
            ("send", "warm", [limit], f"{limit * 1e3:.3g} ms", 1.0),
            ("send beside PyTorch's", "warm", times["ordinary"], own, None),
            ("first of a generation", "first", times["ordinary"], own, None),
        ]
        return [
            setting.row(self, shape, operation, 0, times[ours], limits, name, Target(AT_MOST, at_most), notes)
            for operation, ours, limits, name, at_most in rows
        ]

    @staticmethod
    def _segments(blocks: Sequence[Block]) -> int:
        core = importlib.import_module("torch_memory_saver._core")
        return len({core.find(block.address).address for block in blocks})

    @staticmethod
    def _release(torch: Any) -> Callable[[Sequence[Any]], None]:
        """What a receiver does when its tensor is gone, with the arguments of `rebuild_cuda_tensor`."""
        storage = torch.UntypedStorage
        release = getattr(storage, "_release_ipc_counter", None)
        if release is None:  # PyTorch 2.6
            return lambda arguments: storage._release_ipc_counter_cuda(arguments[11], arguments[12])
        return lambda arguments: release(arguments[11], arguments[12], device=0)


class Synchronise(Case):
    """An engine's weights are resumed from pooled host memory, then overwritten with those of a trainer, a process of its
    own that sends its managed tensors. The limit is one pinned copy and one copy on the device of as many bytes."""

    name = "synchronise"
    title = "weights resumed from host memory, then copied from another process"
    shapes = (Shape(30, 490 * MIB),)
    repetitions = 7
    peer_repetitions = 0
    #: For 15.4 GB: the published bound.
    limit_s = 0.5

    def run(self, setting: Setting, shape: Shape) -> list[Row]:
        torch, saver, tag = _torch(setting), setting.saver, self.name
        weights = setting.allocate(tag, shape, "pinned", "pool")
        copy = PinnedCopy(setting.device, shape.bytes)
        names = ("resume", "open", "copy", "close", "all", "bus", "device", "limit")
        times: dict[str, list[float]] = {name: [] for name in names}
        with _trainer(shape) as ask:
            for repetition in range(-1, setting.repetitions):
                measured = self._once(setting, torch, saver, weights, ask)
                self._check(setting, weights)
                left = int(ask("pause"))
                assert left == 0, f"{left} bytes count as shared after they were dropped"
                measured["bus"], measured["device"] = setting.timed(copy.back), self._copy_on_device(setting, weights)
                measured["limit"] = measured["bus"] + measured["device"]
                for name, seconds in measured.items():
                    if repetition >= 0:
                        times[name].append(seconds)
        copy.close()
        bound = self.limit_s * shape.bytes / self.shapes[0].bytes
        both = "one pinned copy and one on the device"
        rows: list[tuple[str, str, list[float] | None, str, float | None]] = [
            ("resume and copy", "all", times["limit"], both, 1.1),
            ("within the bound", "all", [bound], f"{bound * 1e3:.3g} ms", 1.0),
            ("resume", "resume", times["bus"], PinnedCopy.name, None),
            ("open", "open", None, "", None),
            ("copy", "copy", times["device"], "one copy on the device", None),
            ("close", "close", None, "", None),
        ]
        return [
            setting.row(self, shape, operation, shape.bytes, times[ours], limits, name, Target(AT_MOST, at_most))
            for operation, ours, limits, name, at_most in rows
        ]

    def _once(
        self, setting: Setting, torch: Any, saver: Any, weights: Sequence[Block], ask: Callable[[str], str]
    ) -> dict[str, float]:
        """The seconds of each part, and of all."""
        for block in weights:
            setting.device.fill(block.address, block.size, 0)
        saver.pause(self.name)
        setting.rest(sum(block.size for block in weights))
        message = bytes.fromhex(ask("send"))
        received: list[Any] = []

        def copy() -> None:
            for block, tensor in zip(weights, received, strict=True):
                block.owner.copy_(tensor)

        def close() -> None:
            received.clear()
            torch.cuda.ipc_collect()

        parts = {
            "resume": setting.timed(lambda: saver.resume(self.name)),
            "open": setting.timed(lambda: received.extend(pickle.loads(message))),
            "copy": setting.timed(copy),
            "close": setting.timed(close),
        }
        return {**parts, "all": sum(parts.values())}

    def _check(self, setting: Setting, weights: Sequence[Block]) -> None:
        for index, block in enumerate(weights):
            block.value = value_of(index)
        setting.check(weights, self.name)

    @staticmethod
    def _copy_on_device(setting: Setting, weights: Sequence[Block]) -> float:
        """The seconds for a copy of as many bytes, from half of the weights to the other half and back."""
        half = len(weights) // 2
        pairs = list(zip(weights[:half], weights[half : 2 * half], strict=True))

        def copy() -> None:
            for one, other in pairs:
                one.owner.copy_(other.owner)
            for one, other in pairs:
                other.owner.copy_(one.owner)

        return setting.timed(copy) * len(weights) / (2 * half)


@contextmanager
def _trainer(shape: Shape) -> Iterator[Callable[[str], str]]:
    """Yields a function that sends a line to the trainer and returns its answer."""
    command = [sys.executable, "-m", "torch_memory_saver._bench.trainer", str(shape.count), str(shape.size)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        answers = process.stdout

        def ask(line: str) -> str:
            print(line, file=process.stdin, flush=True)
            return answer()

        def answer() -> str:
            line = answers.readline().strip()
            assert line, "the trainer has ended"
            return line

        answer()
        yield ask
