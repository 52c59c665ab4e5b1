"""A sharded trainer and an engine on every GPU, in turn: FSDP2 trains a transformer, and each GPU's engine answers with it.

Each GPU has two processes. The trainer has its shards of the parameters, gradients and Adam's state, all managed under one
tag and kept in host memory while it is parked. The engine has a replica of the weights in bfloat16, a KV cache and the CUDA
graph of a decode step, each under its own tag and without a backup. A step has these stages:

  train    the engine sleeps; the trainer learns from the last answers of the engine
  update   the engine wakes its weights only; all ranks gather the parameters, a bucket at a time, and each trainer
           sends them to its GPU's engine over CUDA IPC, in managed memory
  rollout  the trainer is parked; the engine wakes its KV cache and graph, and answers by replaying the graph

The whole program runs twice: first with everything kept on the GPUs, without torch_memory_saver. Each loss of the second run
must equal that of the first, bit for bit. The losses depend on the engine as well: the trainer learns from its answers.

ShardingManager corresponds to the class of that name in verl, and its rollout() and update_weights() to verl's rollout mode
and bucketed update.

    python examples/rl_sharded.py
    python -m torch_memory_saver simulate --devices 2 -- python examples/rl_sharded.py
"""

from __future__ import annotations

import argparse
import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from math import prod
from multiprocessing.connection import Connection
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it, matrix products may differ from run to run

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _common import MIB, check
from transformer import Shape, Transformer

from torch_memory_saver import torch_memory_saver

TRAINER, WEIGHTS, KV_CACHE, GRAPH = "trainer", "weights", "kv_cache", "cuda_graph"
SEQUENCES = 8


@dataclass(frozen=True)
class Setup:
    shape: Shape
    ranks: int
    steps: int
    cache_bytes: int
    bucket_elements: int
    managed: bool = True


@dataclass
class Step:
    """The values that a rank reports for one step."""

    loss: float = 0.0
    bytes: dict[str, int] = field(default_factory=dict)
    """Device memory that both processes use, by phase."""
    released: int = 0
    """Bytes that parking the trainer released, according to its report."""
    freed: int = 0
    """Bytes that parking the trainer released, according to the free memory of the device."""
    sent: str = ""
    """The digest of the weights that the trainer sent."""
    answered: str = ""
    """The digest of the weights that the engine answered with."""


class KeepEverything:
    """A stand-in for torch_memory_saver in the run with which the managed run is compared."""

    def region(self, tag: str, backup: str | None = None) -> AbstractContextManager[None]:
        return nullcontext()

    def cuda_graph(self, graph: torch.cuda.CUDAGraph, tag: str) -> AbstractContextManager[None]:
        return torch.cuda.graph(graph)

    def pause(self, tag: Any, **options: Any) -> None:
        """Do nothing: all memory stays on the GPU."""

    resume = pause


def start(rank: int, setup: Setup) -> Any:
    """Set up one of the two processes of a GPU. Returns torch_memory_saver or its stand-in."""
    torch.cuda.set_device(rank)
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    return torch_memory_saver if setup.managed else KeepEverything()


class Engine:
    """The weights, a KV cache, and a decode step that was captured once."""

    def __init__(self, rank: int, setup: Setup) -> None:
        self.saver = start(rank, setup)
        self.shape = setup.shape
        with self.saver.region(tag=WEIGHTS):
            self.model = Transformer(setup.shape).to("cuda", torch.bfloat16).requires_grad_(False)
        with self.saver.region(tag=KV_CACHE):
            cache = torch.empty(setup.cache_bytes // torch.bfloat16.itemsize, dtype=torch.bfloat16, device="cuda")
        sizes = self.model.cache_sizes(SEQUENCES)
        self.cache = cache[: prod(sizes)].view(sizes)
        self.tokens = torch.zeros(SEQUENCES, dtype=torch.int64, device="cuda")
        self.position = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.cache.zero_()
        self.decode()  # loads the kernels, because a capture must not load them
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with self.saver.cuda_graph(self.graph, tag=GRAPH):
            self.decode()
        self.bucket: torch.Tensor | None = None

    def decode(self) -> None:
        self.tokens.copy_(self.model.decode(self.tokens, self.cache, self.position).argmax(dim=-1))
        self.position += 1

    def sleep(self) -> None:
        self.saver.pause([KV_CACHE, GRAPH, WEIGHTS])

    def wake(self, *tags: str) -> None:
        self.saver.resume(tags)

    def open_bucket(self, bucket: torch.Tensor) -> None:
        self.bucket = bucket  # the trainer's memory, mapped by this process

    def load_bucket(self, names: list[str]) -> None:
        assert self.bucket is not None
        weights = [self.model.get_parameter(name) for name in names]
        for weight, part in zip(weights, parts(self.bucket, weights), strict=True):
            weight.copy_(part)
        torch.cuda.synchronize()  # the trainer will overwrite the bucket

    def close_bucket(self) -> None:
        self.bucket = None

    def generate(self, prompts: torch.Tensor) -> torch.Tensor:
        """Generate sequences, each of which begins with a prompt of one token."""
        self.cache.zero_()  # it may have any contents after a resume without a backup
        self.tokens.copy_(prompts)
        self.position.zero_()
        sequences = [prompts]
        for _ in range(self.shape.max_length):
            self.graph.replay()
            sequences.append(self.tokens.cpu())
        return torch.stack(sequences, dim=1)

    def digest(self) -> str:
        digest = hashlib.sha256()
        for weight in self.model.parameters():
            add_bits(digest, weight)
        return digest.hexdigest()


def parts(bucket: torch.Tensor, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return consecutive parts of a bucket with the shapes of the tensors."""
    sizes = [tensor.numel() for tensor in tensors]
    return [part.view(tensor.shape) for part, tensor in zip(bucket[: sum(sizes)].split(sizes), tensors, strict=True)]


def add_bits(digest: Any, tensor: torch.Tensor) -> None:
    digest.update(tensor.detach().view(torch.int16).cpu().numpy().tobytes())


def serve(rank: int, setup: Setup, connection: Connection) -> None:
    """Run the engine's process: carry out the calls of its trainer until the trainer ends."""
    engine = Engine(rank, setup)
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        connection.send(getattr(engine, method)(*arguments))
        del arguments  # releases the bucket now, not at the next message


class RemoteEngine:
    """The trainer's proxy of its engine: `engine(method, ...)` calls a method. GPU tensors are sent as memory handles."""

    def __init__(self, rank: int, setup: Setup) -> None:
        context = mp.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(rank, setup, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def __call__(self, method: str, *arguments: Any) -> Any:
        self.connection.send((method, arguments))
        return self.connection.recv()

    def stop(self) -> None:
        self.connection.close()
        self.process.join()


class Trainer:
    """A transformer sharded over all ranks, and its optimizer. Memory allocated during training is managed as well."""

    def __init__(self, rank: int, setup: Setup) -> None:
        from torch.distributed.fsdp import fully_shard  # takes a second to import, and only trainers need it

        self.saver = start(rank, setup)
        with self.region():
            self.model = Transformer(setup.shape).cuda()
            for block in self.model.blocks:
                fully_shard(block)
            fully_shard(self.model)
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)

    def region(self) -> AbstractContextManager[None]:
        region: AbstractContextManager[None] = self.saver.region(tag=TRAINER, backup="host")
        return region

    def train(self, sequences: torch.Tensor) -> float:
        """Train on a toy task: after each token t of the answers, 3 t + 1 would have been right."""
        with self.region():
            tokens = sequences[:, :-1].cuda()
            logits = self.model(tokens)
            right = (tokens * 3 + 1) % logits.shape[-1]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), right.flatten())
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            return loss.item()


class ShardingManager:
    """A manager that hands the GPU from the trainer to the engine and back."""

    def __init__(self, trainer: Trainer, engine: RemoteEngine, setup: Setup) -> None:
        self.trainer, self.engine, self.saver = trainer, engine, trainer.saver
        largest = max(parameter.numel() for parameter in trainer.model.parameters())
        self.bucket_elements = max(setup.bucket_elements, largest)
        self.engine("sleep")

    @contextmanager
    def rollout(self, step: Step) -> Iterator[RemoteEngine]:
        """Give the GPU to the engine, with the trainer's weights, inside the context. Outside, the trainer has the GPU."""
        self.engine("wake", WEIGHTS)
        self.update_weights(step)
        self.park_trainer(step)
        self.engine("wake", KV_CACHE, GRAPH)
        yield self.engine
        self.engine("sleep")
        self.saver.resume(TRAINER)

    def buckets(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the trainer's parameters by name, in groups that fit into the bucket. All ranks have equal groups."""
        group: dict[str, torch.Tensor] = {}
        for name, parameter in self.trainer.model.named_parameters():
            if group and sum(each.numel() for each in group.values()) + parameter.numel() > self.bucket_elements:
                yield group
                group = {}
            group[name] = parameter
        yield group

    @torch.no_grad()
    def update_weights(self, step: Step) -> None:
        digest = hashlib.sha256()
        with self.trainer.region():
            bucket = torch.empty(self.bucket_elements, dtype=torch.bfloat16, device="cuda")
            self.engine("open_bucket", bucket)
            for group in self.buckets():
                shards = list(group.values())
                for part, shard in zip(parts(bucket, shards), shards, strict=True):
                    part.copy_(shard.full_tensor())  # gathered from all ranks, each of which calls this
                    add_bits(digest, part)
                torch.cuda.synchronize()  # the engine's process cannot wait for this one's stream
                self.engine("load_bucket", list(group))
            step.bytes["update"] = used_bytes()
            self.engine("close_bucket")
        step.sent = digest.hexdigest()

    def park_trainer(self, step: Step) -> None:
        """Pause the trainer. This also releases the free memory that the gathered parameters have left."""
        dist.barrier(device_ids=[torch.cuda.current_device()])  # all ranks are then in the phase that the table shows
        before = used_bytes()
        # This waits until the engine has unmapped the bucket: a pause cannot release memory that is still mapped there.
        report = self.saver.pause(TRAINER, if_shared="wait", timeout=60)
        step.released = 0 if report is None else report.bytes
        step.freed = before - used_bytes()


def used_bytes() -> int:
    """Return the device memory that all processes use."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def train_and_roll_out(rank: int, setup: Setup, rendezvous: str, results: Any) -> None:
    """Run the program of a rank."""
    dist.init_process_group("nccl", init_method=f"file://{rendezvous}", rank=rank, world_size=setup.ranks)
    trainer = Trainer(rank, setup)
    manager = ShardingManager(trainer, RemoteEngine(rank, setup), setup)
    source = torch.Generator().manual_seed(rank)
    sequences = torch.randint(setup.shape.vocab_size, (SEQUENCES, setup.shape.max_length + 1), generator=source)
    steps = []
    for _ in range(setup.steps):
        step = Step(loss=trainer.train(sequences))
        step.bytes["train"] = used_bytes()
        with manager.rollout(step) as engine:
            prompts = torch.randint(setup.shape.vocab_size, (SEQUENCES,), generator=source)
            sequences = engine("generate", prompts)
            step.answered = engine("digest")
            step.bytes["rollout"] = used_bytes()
        steps.append(step)
    results.put((rank, steps))
    manager.engine.stop()
    dist.destroy_process_group()


def run(setup: Setup) -> list[list[Step]]:
    """Run all ranks. Returns the steps of each rank."""
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train_and_roll_out, args=(setup, f"{folder}/rendezvous", results), nprocs=setup.ranks)
    by_rank = dict(results.get() for _ in range(setup.ranks))
    return [by_rank[rank] for rank in range(setup.ranks)]


def show(steps: list[list[Step]]) -> None:
    titles = ("step", "rank", "loss", "train", "update", "rollout", "released")
    print("MiB of device memory in use in each phase, and released by parking the trainer:")
    print("  " + "".join(title.rjust(10) for title in titles))
    for number in range(len(steps[0])):
        for rank, of_rank in enumerate(steps):
            step = of_rank[number]
            sizes = [step.bytes[phase] for phase in ("train", "update", "rollout")]
            cells = [str(number), str(rank), f"{step.loss:.4f}", *(f"{size / MIB:.0f}" for size in [*sizes, step.released])]
            print("  " + "".join(cell.rjust(10) for cell in cells))


def check_step(step: Step, kept: Step, where: str) -> None:
    check(step.answered == step.sent, f"{where}: the engine answered with the trainer's weights, bit for bit")
    check(step.loss == kept.loss, f"{where}: the loss is that of the unmanaged run, bit for bit")
    check(step.freed >= step.released > 0, f"{where}: parking the trainer released {step.released / MIB:.0f} MiB")
    less = all(step.bytes[phase] < kept.bytes[phase] for phase in step.bytes)
    check(less, f"{where}: each phase took less memory than where everything is kept")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2, help="one trainer and one engine on each (default %(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="default %(default)s")
    parser.add_argument("--width", type=int, default=256, help="of the transformer (default %(default)s)")
    parser.add_argument("--kv-mib", type=int, default=256, help="of each engine's KV cache (default %(default)s)")
    parser.add_argument("--bucket-mib", type=float, default=1, help="of the update (default %(default)s)")
    return parser.parse_args()


def main() -> None:
    arguments = options()
    if torch.cuda.device_count() < arguments.gpus:
        raise SystemExit(f"this needs {arguments.gpus} GPUs, real or simulated: see --gpus, and simulate --devices")
    setup = Setup(
        shape=Shape(arguments.width),
        ranks=arguments.gpus,
        steps=arguments.steps,
        cache_bytes=arguments.kv_mib * MIB,
        bucket_elements=int(arguments.bucket_mib * MIB / torch.bfloat16.itemsize),
    )
    print("Everything kept on the GPUs.", flush=True)
    kept = run(replace(setup, managed=False))
    show(kept)
    print("Trainers and engines in turn.", flush=True)
    managed = run(setup)
    show(managed)
    for number in range(arguments.steps):
        for rank in range(arguments.gpus):
            check_step(managed[rank][number], kept[rank][number], f"step {number}, rank {rank}")


if __name__ == "__main__":
    main()
