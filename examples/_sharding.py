"""The parts of rl_sharded.py that do not depend on the model: a trainer and an engine on each GPU, which take turns.

Each GPU has two processes. The trainer's process owns the engine's, and calls its methods by name. A `Strategy` says which
memory is on the GPU in which stage.
"""

from __future__ import annotations

import os
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Literal, Protocol

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it, matrix products may differ from run to run

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from torch_memory_saver import torch_memory_saver

TRAINER, WEIGHTS, KV_CACHE, GRAPH = "trainer", "weights", "kv_cache", "cuda_graph"
PHASES = ("train", "update", "rollout")

#: Everything stays on the GPU, without torch_memory_saver; the engine wakes whole before the update; or it wakes its weights
#: first, and the rest when the trainer is parked.
Strategy = Literal["kept", "whole", "stages"]


class Shard(Protocol):
    """A part of one weight, which each rank has. FSDP's parameters are such."""

    def numel(self) -> int:
        """Return the number of elements of the whole weight."""

    def full_tensor(self) -> torch.Tensor:
        """Gather the weight. Every rank makes this call."""


@dataclass(frozen=True)
class Setup(ABC):
    """The options of a run, which both processes of each GPU get.

    Attributes:
        ranks: Number of GPUs.
        steps: Number of steps.
        bucket_elements: Elements that an update sends at once, or as many as the largest weight has.
        strategy: The strategy, see `Strategy`.
    """

    ranks: int
    steps: int
    bucket_elements: int
    strategy: Strategy

    @abstractmethod
    def make_trainer(self, rank: int) -> Trainer: ...

    @abstractmethod
    def make_engine(self, rank: int, rendezvous: str) -> Engine: ...

    @abstractmethod
    def first_sequences(self, source: torch.Generator) -> torch.Tensor:
        """Return the tokens of the first step, before the engine has answered."""

    @abstractmethod
    def prompts(self, source: torch.Generator) -> torch.Tensor:
        """Return the first token of each sequence that the engine is to continue."""

    def seed(self, rank: int) -> int:
        """Return the seed of a rank's tokens."""
        return rank


@dataclass
class Step:
    """The values that a rank reports for one step.

    Attributes:
        loss: The trainer's loss.
        bytes: Device memory that both processes use, by phase.
        seconds: Time of each part of the switches, from when all ranks begin it.
        released: Bytes that parking the trainer released, according to its report.
        freed: Bytes that parking the trainer released, according to the free memory of the device.
        sent: A checksum of the weights that the trainer sent to its engine.
        answered: A checksum of the weights that the engine answered with.
    """

    loss: float = 0.0
    bytes: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    released: int = 0
    freed: int = 0
    sent: int = 0
    answered: int = 0

    @contextmanager
    def clock(self, part: str) -> Iterator[None]:
        """Time a part of a switch, which all ranks begin together."""
        torch.cuda.synchronize()
        dist.barrier(device_ids=[torch.cuda.current_device()])
        start = time.perf_counter()
        yield
        torch.cuda.synchronize()
        self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start


class KeepEverything:
    """A stand-in for torch_memory_saver in the run with which the managed run is compared."""

    def region(self, tag: str, backup: str | None = None, host_memory: str | None = None) -> AbstractContextManager[None]:
        return nullcontext()

    def cuda_graph(self, graph: torch.cuda.CUDAGraph, tag: str, **options: Any) -> AbstractContextManager[None]:
        return torch.cuda.graph(graph, **options)

    def pause(self, tag: Any, **options: Any) -> None:
        """Do nothing: all memory stays on the GPU."""

    resume = pause


def start(rank: int, strategy: Strategy) -> Any:
    """Set up one of the two processes of a GPU. Returns torch_memory_saver or its stand-in."""
    torch.cuda.set_device(rank)
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    return KeepEverything() if strategy == "kept" else torch_memory_saver


def used_bytes() -> int:
    """Return the device memory that all processes use."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def parts(bucket: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    """Return consecutive parts of a bucket."""
    return list(bucket[: sum(sizes)].split(sizes))


def checksum(index: int, tensor: torch.Tensor) -> int:
    """Compute a checksum of the bits of a 16-bit tensor, which depends on its number."""
    return int(tensor.detach().flatten().view(torch.int16).sum(dtype=torch.int64)) * (index + 1)


class Trainer(ABC):
    """A trainer that is sharded over all ranks. All its memory has the tag TRAINER and a backup."""

    saver: Any

    def region(self) -> AbstractContextManager[None]:
        region: AbstractContextManager[None] = self.saver.region(tag=TRAINER, backup="host", host_memory="pool")
        return region

    @abstractmethod
    def train(self, sequences: torch.Tensor, step: Step) -> float:
        """Train on sequences of tokens, and record the memory in use. Returns the loss."""

    @abstractmethod
    def shards(self) -> dict[str, Shard]:
        """Return the weights by name, in the same order on all ranks."""

    def kept_by_engine(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return the part of a weight that the engine of this GPU has."""
        return whole


class Engine(ABC):
    """An engine with weights, a KV cache and a captured decode step, each under its own tag and without a backup."""

    saver: Any
    bucket: torch.Tensor | None = None

    def sleep(self) -> None:
        self.saver.pause([KV_CACHE, GRAPH, WEIGHTS])

    def wake(self, *tags: str) -> None:
        self.saver.resume(tags)

    def open_bucket(self, bucket: torch.Tensor) -> None:
        self.bucket = bucket  # the trainer's memory, mapped by this process

    def load_bucket(self, names: list[str]) -> None:
        assert self.bucket is not None
        for name, part in zip(names, parts(self.bucket, [self.elements(name) for name in names]), strict=True):
            self.load(name, part)
        torch.cuda.synchronize()  # the trainer will overwrite the bucket

    def close_bucket(self) -> None:
        self.bucket = None

    def close(self) -> None:
        """End what this process shares with other engines."""
        return

    @abstractmethod
    def elements(self, name: str) -> int:
        """Return the number of elements of a whole weight."""

    @abstractmethod
    def load(self, name: str, whole: torch.Tensor) -> None:
        """Take the engine's part of a weight, given as a flat tensor."""

    @abstractmethod
    def generate(self, prompts: torch.Tensor) -> torch.Tensor:
        """Generate sequences, each of which begins with a prompt of one token."""

    @abstractmethod
    def checksum(self) -> int:
        """Return a checksum of the weights."""


def serve(rank: int, setup: Setup, rendezvous: str, connection: Connection) -> None:
    """Run the engine's process: carry out the calls of its trainer until the trainer ends."""
    engine = setup.make_engine(rank, rendezvous)
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            engine.close()
            return
        connection.send(getattr(engine, method)(*arguments))
        del arguments  # releases the bucket now, not at the next message


class RemoteEngine:
    """The trainer's proxy of its engine: `engine(method, ...)` calls a method. GPU tensors are sent as memory handles."""

    def __init__(self, rank: int, setup: Setup, rendezvous: str) -> None:
        context = mp.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(rank, setup, rendezvous, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def __call__(self, method: str, *arguments: Any) -> Any:
        self.connection.send((method, arguments))
        return self.connection.recv()

    def stop(self) -> None:
        self.connection.close()
        self.process.join()


class ShardingManager:
    """A manager that hands the GPU from the trainer to the engine and back. It corresponds to the class of that name in
    verl, and its rollout() and update_weights() to verl's rollout mode and bucketed update."""

    def __init__(self, trainer: Trainer, engine: RemoteEngine, setup: Setup) -> None:
        self.trainer, self.engine, self.saver = trainer, engine, trainer.saver
        self.first = (WEIGHTS,) if setup.strategy == "stages" else (WEIGHTS, KV_CACHE, GRAPH)
        largest = max(shard.numel() for shard in trainer.shards().values())
        self.bucket_elements = max(setup.bucket_elements, largest)
        self.engine("sleep")

    @contextmanager
    def rollout(self, step: Step) -> Iterator[RemoteEngine]:
        """Give the GPU to the engine, with the trainer's weights, inside the context. Outside, the trainer has the GPU."""
        with step.clock("wake"):
            self.engine("wake", *self.first)
        with step.clock("update"):
            self.update_weights(step)
        self.park_trainer(step)
        if KV_CACHE not in self.first:
            with step.clock("wake"):
                self.engine("wake", KV_CACHE, GRAPH)
        yield self.engine
        with step.clock("sleep"):
            self.engine("sleep")
        with step.clock("unpark"):
            self.saver.resume(TRAINER)

    def buckets(self) -> Iterator[dict[str, Shard]]:
        """Yield the trainer's weights by name, in groups that fit into the bucket. All ranks have equal groups."""
        group: dict[str, Shard] = {}
        for name, shard in self.trainer.shards().items():
            if group and sum(each.numel() for each in group.values()) + shard.numel() > self.bucket_elements:
                yield group
                group = {}
            group[name] = shard
        yield group

    @torch.no_grad()
    def update_weights(self, step: Step) -> None:
        index = 0
        with self.trainer.region():
            bucket = torch.empty(self.bucket_elements, dtype=torch.bfloat16, device="cuda")
            self.engine("open_bucket", bucket)
            for group in self.buckets():
                sizes = [shard.numel() for shard in group.values()]
                for part, (name, shard) in zip(parts(bucket, sizes), group.items(), strict=True):
                    whole = shard.full_tensor()  # gathered from all ranks, each of which calls this
                    part.copy_(whole.flatten())
                    step.sent += checksum(index, self.trainer.kept_by_engine(name, part.view(whole.shape)))
                    index += 1
                torch.cuda.synchronize()  # the engine's process cannot wait for this one's stream
                self.engine("load_bucket", list(group))
            step.bytes["update"] = used_bytes()
            self.engine("close_bucket")

    def park_trainer(self, step: Step) -> None:
        """Pause the trainer. This also releases the free memory that the gathered weights have left."""
        dist.barrier(device_ids=[torch.cuda.current_device()])  # all ranks are then in the phase that the table shows
        before = used_bytes()
        with step.clock("park"):
            # This waits until the engine has unmapped the bucket: a pause cannot release memory that is still mapped there.
            report = self.saver.pause(TRAINER, if_shared="wait", timeout=60)
        step.released = 0 if report is None else report.bytes
        step.freed = before - used_bytes()


def train_and_roll_out(rank: int, setup: Setup, folder: str, results: Any) -> None:
    """Run the program of a rank."""
    dist.init_process_group("nccl", init_method=f"file://{folder}/trainers", rank=rank, world_size=setup.ranks)
    engine = RemoteEngine(rank, setup, f"file://{folder}/engines")
    if setup.strategy != "kept":
        engine("sleep")  # the trainer is made where the engine was
    trainer = setup.make_trainer(rank)
    manager = ShardingManager(trainer, engine, setup)
    source = torch.Generator().manual_seed(setup.seed(rank))
    sequences = setup.first_sequences(source)
    steps = []
    for _ in range(setup.steps):
        step = Step()
        step.loss = trainer.train(sequences, step)
        with manager.rollout(step) as awake:
            sequences = awake("generate", setup.prompts(source))
            step.answered = awake("checksum")
            step.bytes["rollout"] = used_bytes()
        steps.append(step)
    results.put((rank, steps))
    engine.stop()
    dist.destroy_process_group()


def run(setup: Setup) -> list[list[Step]]:
    """Run all ranks. Returns the steps of each rank."""
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train_and_roll_out, args=(setup, folder, results), nprocs=setup.ranks)
    by_rank = dict(results.get() for _ in range(setup.ranks))
    return [by_rank[rank] for rank in range(setup.ranks)]
