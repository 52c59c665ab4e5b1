"""A sharded trainer and an engine on every GPU, in turn: FSDP2 trains a transformer, and each GPU's engine answers with it.

Each GPU has two processes. The trainer has its shards of the parameters, gradients and Adam's state, all managed under one
tag and kept in host memory while it is parked. The engine has its own weights in bfloat16, a KV cache and the CUDA graph of
a decode step, each under its own tag and without a backup. A step has these stages:

  train    the engine sleeps; the trainer learns from the last answers of the engine
  update   the engine wakes its weights only; all ranks gather the parameters, a bucket at a time, and each trainer
           sends them to its GPU's engine over CUDA IPC, in managed memory
  rollout  the trainer is parked; the engine wakes its KV cache and graph, and answers by replaying the graph

The whole program runs twice: first with everything kept on the GPUs, without torch_memory_saver. Each loss of the second run
must equal that of the first, bit for bit. The losses depend on the engine as well: the trainer learns from its answers.

With --model 32b each GPU has as many bytes as for Qwen2.5-32B on eight GPUs, with tensor-parallel engines. One strategy
runs, at one ratio of weights and KV cache to the device, or at the largest one that fits (--ratio largest). To find that
ratio, a trial runs first with a small KV cache, at the same ratio for all strategies. A file of results has losses, memory
and times of the run and of its trial; --compare shows several files, and checks that losses at equal ratios are equal.

    python examples/rl_sharded.py
    python -m torch_memory_saver simulate --devices 2 -- python examples/rl_sharded.py
    python examples/rl_sharded.py --model 32b --gpus 8 --strategy stages --ratio 0.9 --json stages.json
    python examples/rl_sharded.py --compare kept.json whole.json stages.json
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, replace
from math import prod

import _sharding
import torch
from _common import MIB, check
from _sharding import GRAPH, KV_CACHE, PHASES, WEIGHTS, Shard, Step, checksum, run, start, used_bytes
from transformer import Shape, Transformer

SEQUENCES = 8


@dataclass(frozen=True)
class Setup(_sharding.Setup):
    shape: Shape = field(kw_only=True)
    cache_bytes: int = field(kw_only=True)

    def make_trainer(self, rank: int) -> Trainer:
        return Trainer(rank, self)

    def make_engine(self, rank: int, rendezvous: str) -> Engine:
        return Engine(rank, self)

    def first_sequences(self, source: torch.Generator) -> torch.Tensor:
        return torch.randint(self.shape.vocab_size, (SEQUENCES, self.shape.max_length + 1), generator=source)

    def prompts(self, source: torch.Generator) -> torch.Tensor:
        return torch.randint(self.shape.vocab_size, (SEQUENCES,), generator=source)


class Engine(_sharding.Engine):
    """A replica of the model, a KV cache, and a decode step that was captured once."""

    def __init__(self, rank: int, setup: Setup) -> None:
        self.saver = start(rank, setup.strategy)
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

    def decode(self) -> None:
        self.tokens.copy_(self.model.decode(self.tokens, self.cache, self.position).argmax(dim=-1))
        self.position += 1

    def elements(self, name: str) -> int:
        return self.model.get_parameter(name).numel()

    def load(self, name: str, whole: torch.Tensor) -> None:
        weight = self.model.get_parameter(name)
        weight.copy_(whole.view(weight.shape))

    def generate(self, prompts: torch.Tensor) -> torch.Tensor:
        self.cache.zero_()  # it may have any contents after a resume without a backup
        self.tokens.copy_(prompts)
        self.position.zero_()
        sequences = [prompts]
        for _ in range(self.shape.max_length):
            self.graph.replay()
            sequences.append(self.tokens.cpu())
        return torch.stack(sequences, dim=1)

    def checksum(self) -> int:
        return sum(checksum(index, weight) for index, weight in enumerate(self.model.parameters()))


class Trainer(_sharding.Trainer):
    """A transformer sharded over all ranks, and its optimizer. Memory allocated during training is managed as well."""

    def __init__(self, rank: int, setup: Setup) -> None:
        from torch.distributed.fsdp import fully_shard  # takes a second to import, and only trainers need it

        self.saver = start(rank, setup.strategy)
        with self.region():
            self.model = Transformer(setup.shape).cuda()
            for block in self.model.blocks:
                fully_shard(block)
            fully_shard(self.model)
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)

    def shards(self) -> dict[str, Shard]:
        return dict(self.model.named_parameters())

    def train(self, sequences: torch.Tensor, step: Step) -> float:
        """Train on a toy task: after each token t of the answers, 3 t + 1 would have been right."""
        with self.region():
            tokens = sequences[:, :-1].cuda()
            logits = self.model(tokens)
            right = (tokens * 3 + 1) % logits.shape[-1]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), right.flatten())
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        step.bytes["train"] = used_bytes()
        return loss.item()


def show(steps: list[list[Step]]) -> None:
    titles = ("step", "rank", "loss", *PHASES, "released")
    print("MiB of device memory in use in each phase, and released by parking the trainer:")
    print("  " + "".join(title.rjust(10) for title in titles))
    for number in range(len(steps[0])):
        for rank, of_rank in enumerate(steps):
            step = of_rank[number]
            sizes = [step.bytes[phase] for phase in PHASES]
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
    parser.add_argument("--bucket-mib", type=float, default=1, help="of the update (default %(default)s; 32b: 2048)")
    parser.add_argument("--model", choices=("toy", "32b"), default="toy", help="default %(default)s")
    full = parser.add_argument_group("with --model 32b")
    full.add_argument("--strategy", choices=("kept", "whole", "stages"), default="stages", help="default %(default)s")
    full.add_argument("--ratio", default="largest", help="of weights and KV cache to the device, or: largest (the default)")
    full.add_argument("--tp", type=int, help="GPUs of one replica of the engine (default: all)")
    full.add_argument("--divided", type=int, default=1, help="divide all widths, to run on a small or simulated GPU")
    full.add_argument("--depth", type=int, default=2, help="layers that compute; the rest only take memory (default 2)")
    full.add_argument("--json", help="write losses, memory and times to this file")
    full.add_argument("--compare", nargs="+", metavar="JSON", help="show such files, check their losses, and run nothing")
    full.add_argument("--plot", help="with --compare: draw the memory of each phase to this file (needs matplotlib)")
    return parser.parse_args()


def main() -> None:
    arguments = options()
    if arguments.compare or arguments.model == "32b":
        import _sharded_32b

        _sharded_32b.main(arguments)
        return
    if torch.cuda.device_count() < arguments.gpus:
        raise SystemExit(f"this needs {arguments.gpus} GPUs, real or simulated: see --gpus, and simulate --devices")
    setup = Setup(
        ranks=arguments.gpus,
        steps=arguments.steps,
        bucket_elements=int(arguments.bucket_mib * MIB / torch.bfloat16.itemsize),
        strategy="stages",
        shape=Shape(arguments.width),
        cache_bytes=arguments.kv_mib * MIB,
    )
    print("Everything kept on the GPUs.", flush=True)
    kept = run(replace(setup, strategy="kept"))
    show(kept)
    print("Trainers and engines in turn.", flush=True)
    managed = run(setup)
    show(managed)
    for number in range(arguments.steps):
        for rank in range(arguments.gpus):
            check_step(managed[rank][number], kept[rank][number], f"step {number}, rank {rank}")


if __name__ == "__main__":
    main()
