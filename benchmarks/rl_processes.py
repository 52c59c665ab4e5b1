"""The two processes of rl_colocate.py, a trainer and an inference engine, each with its memory in regions, and the classes
by which a third process calls their methods."""

from __future__ import annotations

import multiprocessing
import pickle
import time
import traceback
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from rl_sizes import BATCHES, HIDDEN, LAYERS, WORDS, Sizes, per_layer

from torch_memory_saver import torch_memory_saver

WEIGHTS, KV_CACHE, GRAPHS, GRADIENTS, OPTIMIZER = "weights", "kv_cache", "graphs", "gradients", "optimizer"
ACTIVATIONS = "activations"
#: Seconds to wait until the other process drops the tensors that were sent to it.
DROP_TIMEOUT = 60


def matrices(sizes: Sizes) -> list[torch.Tensor]:
    return [torch.empty((sizes.rows, HIDDEN), dtype=torch.int16, device="cuda") for _ in range(LAYERS)]


def chunks(total: int) -> list[torch.Tensor]:
    return [torch.empty(size, dtype=torch.uint8, device="cuda") for size in per_layer(total)]


def decode(batch: int, weights: list[torch.Tensor], cache: list[torch.Tensor], vocabulary: int) -> torch.Tensor:
    """Make a decode step of `batch` sequences. Each layer writes its input to the cache, reads it from there, and adds all
    of its weights. Returns logits [batch, vocabulary]."""
    hidden = torch.arange(batch * WORDS, device="cuda").view(batch, WORDS)
    for chunk, weight in zip(cache, weights, strict=True):
        slot = chunk[: hidden.nbytes].view(torch.int64).view(batch, WORDS)
        slot.copy_(hidden)
        hidden = slot * 3 + weight.view(torch.int64).sum(0)
    return hidden.sum(1, keepdim=True).int() + torch.arange(vocabulary, dtype=torch.int32, device="cuda")


def fingerprint(weights: list[torch.Tensor]) -> int:
    return sum(int(weight.view(torch.int64).sum()) * (layer + 1) for layer, weight in enumerate(weights))


class Process:
    """The common part of both processes: managed memory under tags, and its sizes."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.weights: list[torch.Tensor] = []
        torch_memory_saver.host_memory = "pool"  # backups keep their pinned memory from one pause to the next

    def pause(self, *tags: str) -> None:
        torch_memory_saver.pause(tags, if_shared="wait", timeout=DROP_TIMEOUT)

    def resume(self, *tags: str) -> None:
        """Resume the tags, or everything if there is no tag."""
        torch_memory_saver.resume(tags or None)

    def components(self) -> dict[str, int]:
        """Return the bytes of device memory by tag."""
        return {tag: usage.resident_bytes for tag, usage in torch_memory_saver.stats().tags.items()}

    def device_memory(self) -> tuple[int, int]:
        """Return the bytes of the device that all processes use, and its total bytes."""
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free, total


class Trainer(Process):
    """A trainer that sends its weights. Weights and optimizer state have a backup in host memory; gradients do not."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        with torch_memory_saver.region(tag=WEIGHTS, backup="host"):
            self.weights = matrices(sizes)
        with torch_memory_saver.region(tag=OPTIMIZER, backup="host"):
            self.optimizer = chunks(sizes.optimizer)
        with torch_memory_saver.region(tag=GRADIENTS):
            self.gradients = matrices(sizes)
        for weight in self.weights:
            weight.view(torch.int64).random_()
        for state in self.optimizer:
            state.zero_()
        self.activations: list[torch.Tensor] = []
        self.steps = 0

    def forward_and_backward(self) -> None:
        """Make activations and gradients. The activations stay, so that the caller can look at the memory."""
        self.activations = chunks(self.sizes.activations)
        for activation, gradient in zip(self.activations, self.gradients, strict=True):
            activation.zero_()
            gradient.fill_(1)

    def clean_up(self) -> None:
        """Drop what a failed step has left, and free the sent memory that the engine has dropped."""
        self.activations = []
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()

    def update(self) -> None:
        self.activations = []
        for state, weight, gradient in zip(self.optimizer, self.weights, self.gradients, strict=True):
            state.add_(1)
            weight.mul_(3).add_(gradient)
        self.steps += 1
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def components(self) -> dict[str, int]:
        return super().components() | {ACTIVATIONS: sum(activation.nbytes for activation in self.activations)}

    def optimizer_is_whole(self) -> bool:
        """Return whether every byte of the optimizer state has been updated at each step."""
        return all(bool((state == self.steps % 256).all()) for state in self.optimizer)

    def answer(self) -> tuple[torch.Tensor, int]:
        """Return the answer that the engine must give to the smallest batch with these weights, and their fingerprint."""
        cache = [torch.empty(min(BATCHES) * WORDS * 8, dtype=torch.uint8, device="cuda") for _ in range(LAYERS)]
        answer = (decode(min(BATCHES), self.weights, cache, self.sizes.vocabulary).cpu(), fingerprint(self.weights))
        del cache
        torch.cuda.empty_cache()
        return answer

    def send_weights(self) -> bytes:
        """Return descriptions of the live tensors, with which the engine maps the same memory."""
        return bytes(ForkingPickler.dumps(self.weights))

    def save_weights(self, path: str) -> None:
        torch.save(self.weights, path)


class Engine(Process):
    """An engine: weights from a file or from the trainer, a KV cache, and a captured decode step for each batch size."""

    def __init__(self, sizes: Sizes, weights_file: str | None = None) -> None:
        super().__init__(sizes)
        with torch_memory_saver.region(tag=WEIGHTS, backup="host"):
            self.weights = matrices(sizes)
        if weights_file is not None:
            for weight, loaded in zip(self.weights, torch.load(weights_file, mmap=True, map_location="cpu"), strict=True):
                weight.copy_(loaded)
        with torch_memory_saver.region(tag=KV_CACHE):
            self.cache = chunks(sizes.kv_cache)
        self._step(max(BATCHES))  # loads the kernels, because a capture must not load them
        torch.cuda.empty_cache()
        self.pool = torch.cuda.graph_pool_handle()
        self.graphs = {batch: self._capture(batch) for batch in reversed(BATCHES)}
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def _step(self, batch: int) -> torch.Tensor:
        return decode(batch, self.weights, self.cache, self.sizes.vocabulary)

    def _capture(self, batch: int) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """Capture a graph. Returns it and its logits, which stay in the graphs' pool, where each replay writes them."""
        graph = torch.cuda.CUDAGraph()
        # Without gradients a capture needs no workspace of cuBLAS for autograd's thread, which a pause would not release.
        with torch.no_grad(), torch_memory_saver.cuda_graph(graph, pool=self.pool, tag=GRAPHS):
            logits = self._step(batch)
        return graph, logits

    def sleep(self) -> None:
        """Pause everything. The weights are not saved, because the trainer sends new ones."""
        torch_memory_saver.pause((WEIGHTS, KV_CACHE, GRAPHS), backup="discard")

    def take_weights(self, sent: bytes) -> dict[str, float]:
        """Copy the weights that the trainer sent. Returns the seconds of each part."""
        start = _now()
        theirs = pickle.loads(sent)
        opened = _now()
        for mine, other in zip(self.weights, theirs, strict=True):
            mine.copy_(other)
        copied = _now()
        del theirs, other
        torch.cuda.ipc_collect()
        return {"open": opened - start, "copy": copied - opened, "close": _now() - copied}

    def resume_weights(self) -> float:
        """Resume the weights. Returns the seconds."""
        start = _now()
        self.resume(WEIGHTS)
        return _now() - start

    def answer(self) -> tuple[torch.Tensor, int]:
        """Replay the largest and the smallest graph. Returns the logits of the smallest, and the weights' fingerprint."""
        for batch in (max(BATCHES), min(BATCHES)):
            self.graphs[batch][0].replay()
        torch.cuda.synchronize()
        return self.graphs[min(BATCHES)][1].cpu(), fingerprint(self.weights)


def _now() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def serve(role: type[Process], arguments: tuple[Any, ...], connection: Connection) -> None:
    """Make the object of a process, then serve calls until the other end closes. Both processes run this function."""
    worker: Process | None = None
    while True:
        try:
            if worker is None:
                worker = role(*arguments)
                result = None
            else:
                method, arguments = connection.recv()
                result = getattr(worker, method)(*arguments)
        except EOFError:
            return
        except Exception as error:
            connection.send((False, (type(error).__name__, traceback.format_exc())))
            if worker is None:
                return
        else:
            connection.send((True, result))


class RemoteError(Exception):
    """An exception of a process: the name of its class, and its traceback."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Remote:
    """A Trainer or an Engine in its own process. Its methods are called by name.

    Raises:
        RemoteError: The object could not be made. Its process has ended.
    """

    def __init__(self, role: type[Process], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(role, arguments, theirs), daemon=True)
        self.process.start()
        theirs.close()
        try:
            self._receive()
        except RemoteError:
            self.stop()
            raise

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
        self.connection.close()
        self.process.join()
