"""The two processes of rl_colocate.py: a trainer that knows nothing of torch_memory_saver, and an inference engine whose
weights, KV cache and CUDA graph are managed; and how their methods are called from a third."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from _common import fill_random

BATCH = 8
KV_CACHE, WEIGHTS, GRAPH = "kv_cache", "weights", "cuda_graph"


@dataclass(frozen=True)
class Setup:
    """The model: `layers` square matrices, applied one after the other. Their numbers are whole, so that every answer is
    exact. The KV cache and the training state are allocated in pieces of `chunk_bytes`; the last one may be smaller."""

    layers: int
    width: int
    kv_bytes: int
    bucket_layers: int
    training_bytes: int
    chunk_bytes: int

    @property
    def weight_bytes(self) -> int:
        return self.layers * self.width * self.width * 4

    @property
    def slot_bytes(self) -> int:
        """What a decode step writes to the KV cache."""
        return self.layers * BATCH * self.width * 8

    def buckets(self) -> Iterator[range]:
        for first in range(0, self.layers, self.bucket_layers):
            yield range(first, min(first + self.bucket_layers, self.layers))

    def matrices(self) -> list[torch.Tensor]:
        shape = (self.width, self.width)
        return [torch.empty(shape, dtype=torch.int32, device="cuda") for _ in range(self.layers)]

    def chunks(self, size: int) -> list[torch.Tensor]:
        sizes = [min(self.chunk_bytes, size - start) for start in range(0, size, self.chunk_bytes)]
        return [torch.empty(each, dtype=torch.uint8, device="cuda") for each in sizes]

    def decode(self, tokens: torch.Tensor, weights: list[torch.Tensor], cache: torch.Tensor) -> torch.Tensor:
        """One step: every layer writes its input to the cache, reads it from there, and adds its weights, all of them."""
        hidden = tokens
        for slot, weight in zip(cache, weights, strict=True):
            slot.copy_(hidden)
            hidden = slot * 3 + weight.sum(0)
        return hidden

    def tokens(self) -> torch.Tensor:
        return torch.arange(BATCH * self.width, device="cuda").view(BATCH, self.width)


def fingerprint(weights: list[torch.Tensor]) -> int:
    return sum(int(weight.sum()) * (index + 1) for index, weight in enumerate(weights))


class Trainer:
    """Trains, offloads its weights to pinned memory, and lends them out a bucket at a time. Nothing of it is managed."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.weights: list[torch.Tensor] = setup.matrices()
        fill_random(self.weights)
        self.host = [torch.empty(weight.shape, dtype=weight.dtype, pin_memory=True) for weight in self.weights]
        self.bucket: torch.Tensor | None = None

    def used(self) -> int:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free

    def capacity(self) -> int:
        return int(torch.cuda.mem_get_info()[1])

    def offload(self) -> None:
        if not self.weights:
            return
        for kept, weight in zip(self.host, self.weights, strict=True):
            kept.copy_(weight, non_blocking=True)
        torch.cuda.synchronize()
        self.weights = []
        torch.cuda.empty_cache()

    def load(self) -> None:
        if not self.weights:
            self.weights = self.setup.matrices()
            for kept, weight in zip(self.host, self.weights, strict=True):
                weight.copy_(kept, non_blocking=True)
            torch.cuda.synchronize()

    def train(self) -> int:
        """A step; returns the device memory in use while gradients and optimizer state are there."""
        state = self.setup.chunks(self.setup.training_bytes)
        for chunk in state:
            chunk.zero_()
        for layer, weight in enumerate(self.weights):
            weight.mul_(3).add_(layer + 1)
        used = self.used()
        del state
        torch.cuda.empty_cache()
        return used

    def answer(self) -> tuple[torch.Tensor, int]:
        """What the engine has to answer with these weights, and their fingerprint."""
        cache = torch.empty(self.setup.layers, BATCH, self.setup.width, dtype=torch.int64, device="cuda")
        output = self.setup.decode(self.setup.tokens(), self.weights, cache).cpu()
        result = (output, fingerprint(self.weights))
        del cache
        torch.cuda.empty_cache()
        return result

    def open_bucket(self) -> tuple[Any, ...]:
        """The CUDA IPC handle of the bucket."""
        from torch.multiprocessing.reductions import reduce_tensor

        shape = (self.setup.bucket_layers, self.setup.width, self.setup.width)
        self.bucket = torch.empty(shape, dtype=torch.int32, device="cuda")
        return tuple(reduce_tensor(self.bucket))

    def fill_bucket(self, layers: range) -> None:
        assert self.bucket is not None
        for slot, layer in zip(self.bucket, layers, strict=False):
            slot.copy_(self.weights[layer])
        torch.cuda.synchronize()

    def close_bucket(self) -> None:
        self.bucket = None
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


class Engine:
    """Weights, KV cache and a captured decode step, each managed under its tag."""

    def __init__(self, setup: Setup) -> None:
        from torch_memory_saver import torch_memory_saver

        self.saver = torch_memory_saver
        self.setup = setup
        self.tokens = setup.tokens()
        with self.saver.region(tag=WEIGHTS):
            self.weights = setup.matrices()
        with self.saver.region(tag=KV_CACHE):
            self.cache = setup.chunks(setup.kv_bytes)
        slots = self.cache[0][: setup.slot_bytes].view(torch.int64)
        self.slots = slots.view(setup.layers, BATCH, setup.width)
        setup.decode(self.tokens, self.weights, self.slots)  # loads the kernels, which a capture must not
        self.graph = torch.cuda.CUDAGraph()
        with self.saver.cuda_graph(self.graph, tag=GRAPH):
            self.output = setup.decode(self.tokens, self.weights, self.slots)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self.bucket: torch.Tensor | None = None

    def sleep(self) -> None:
        for tag in (KV_CACHE, WEIGHTS, GRAPH):
            self.saver.pause(tag)

    def wake(self, *tags: str) -> None:
        """No tag: everything."""
        self.saver.resume(tags or None)

    def paused_bytes(self) -> int:
        return self.saver.stats().total.paused_bytes

    def open_bucket(self, handle: tuple[Any, ...]) -> None:
        rebuild, arguments = handle
        self.bucket = rebuild(*arguments)

    def take_bucket(self, layers: range) -> None:
        assert self.bucket is not None
        for slot, layer in zip(self.bucket, layers, strict=False):
            self.weights[layer].copy_(slot)
        torch.cuda.synchronize()

    def close_bucket(self) -> None:
        self.bucket = None
        torch.cuda.ipc_collect()

    def answer(self) -> tuple[torch.Tensor, int]:
        self.graph.replay()
        torch.cuda.synchronize()
        return self.output.cpu(), fingerprint(self.weights)


def serve(role: type, setup: Setup, connection: Connection) -> None:
    """The main function of both processes: makes the object, then serves calls until the other end closes."""
    try:
        worker = role(setup)
        connection.send((True, None))
    except BaseException as error:
        connection.send((False, (type(error).__name__, traceback.format_exc())))
        return
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        if method is None:
            return
        try:
            connection.send((True, getattr(worker, method)(*arguments)))
        except Exception as error:
            connection.send((False, (type(error).__name__, traceback.format_exc())))


class RemoteError(Exception):
    """Something that a process raised: its class by name, and its traceback."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Remote:
    """A Trainer or an Engine in a process of its own; its methods are called by name."""

    def __init__(self, role: type, setup: Setup) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(role, setup, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self._receive()

    def _receive(self) -> Any:
        try:
            succeeded, result = self.connection.recv()
        except EOFError:
            raise SystemExit("FAILED: a process died") from None
        if not succeeded:
            raise RemoteError(*result)
        return result

    def __call__(self, method: str, *arguments: Any) -> Any:
        self.connection.send((method, arguments))
        return self._receive()

    def stop(self) -> None:
        self.connection.send((None, ()))
        self.process.join()
        self.connection.close()
