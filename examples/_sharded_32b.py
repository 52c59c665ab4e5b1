"""rl_sharded.py --model 32b: each GPU has the bytes of Qwen2.5-32B, with an FSDP2 trainer and tensor-parallel engines.

The trainer has parameters and gradients in bfloat16, and Adam's moments in float32, without a float32 copy of the
parameters. Activations are those of checkpointing: the input of each layer, and the logits. A few layers compute. Each of
the others is a flat tensor of as many parameters, which every step updates, and which is gathered, sent and loaded as well.

On fewer than eight GPUs the model has fewer layers in proportion, so that each GPU has the same bytes within a few percent.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

os.environ["NCCL_GRAPH_REGISTER"] = "0"  # NCCL would register the memory of captured all-reduces, which a pause releases

import _sharding
import torch
import torch.distributed as dist
from _common import GIB, check
from _qwen import Engine as Part
from _qwen import Model, Shape, part_of
from _sharding import GRAPH, KV_CACHE, PHASES, WEIGHTS, Shard, Step, Strategy, checksum, run, start, used_bytes

#: Ranks of the published loop, for which the model has all its layers.
PUBLISHED_RANKS = 8
SEQUENCES, TOKENS = 8, 16
#: Tokens of a rank's batch, which set the size of activations and logits.
BATCH_TOKENS = 4096
#: Memory that an engine's graphs keep beside their results; 1 to 3 GB are published.
GRAPH_BYTES = 2 * GIB
#: The phases in which the KV cache has memory.
WITH_CACHE: dict[Strategy, tuple[str, ...]] = {"kept": PHASES, "whole": ("update", "rollout"), "stages": ("rollout",)}
#: Parts of a switch: to the rollout, and back to training.
SWITCHES = {"to rollout": ("wake", "update", "park"), "to training": ("sleep", "unpark")}
#: The smallest ratio is this part of the device more than the weights; ratios are tried in steps of a hundredth.
SMALLEST_CACHE, PACE = 0.01, 100
#: The part of the device that stays free at the largest ratio, for what a driver needs at one time and not at another.
MARGIN = 0.005


@dataclass(frozen=True)
class Setup(_sharding.Setup):
    """The options of a run with the sizes of the 32B model.

    Attributes:
        shape: The model, with all its layers.
        depth: Number of layers that compute.
        tp: Number of GPUs of one engine.
        ratio: The engine's weights and KV cache, as a part of the device.
        divided: The number by which all widths were divided; sizes of other memory are divided by its square.
    """

    shape: Shape = field(kw_only=True)
    depth: int = field(kw_only=True)
    tp: int = field(kw_only=True)
    ratio: float = field(kw_only=True)
    divided: int = field(kw_only=True)

    @property
    def computing(self) -> Shape:
        """The shape of the layers that compute."""
        return replace(self.shape, layers=self.depth)

    @property
    def shard_elements(self) -> int:
        """Elements of a layer that each rank of the trainer has."""
        return -(-self.shape.layer_parameters // self.ranks)

    @property
    def trainer_bytes(self) -> int:
        """Bytes of each rank: 2 for a parameter, 2 for its gradient, 8 for its moments."""
        return self.shape.parameters * 12 // self.ranks

    @property
    def weight_bytes(self) -> int:
        return self.shape.parameters * 2 // self.tp

    @property
    def activation_bytes(self) -> int:
        """Inputs of all layers in bfloat16, and logits in bfloat16 and float32."""
        tokens = BATCH_TOKENS // self.divided
        return tokens * (2 * self.shape.layers * self.shape.hidden + 6 * self.shape.words)

    def cache_bytes(self, device_bytes: int) -> int:
        return int(self.ratio * device_bytes) - self.weight_bytes

    def make_trainer(self, rank: int) -> Trainer:
        return Trainer(rank, self)

    def make_engine(self, rank: int, rendezvous: str) -> Engine:
        return Engine(rank, self, rendezvous)

    def first_sequences(self, source: torch.Generator) -> torch.Tensor:
        return torch.randint(self.shape.words, (SEQUENCES, TOKENS + 1), generator=source)

    def prompts(self, source: torch.Generator) -> torch.Tensor:
        return torch.randint(self.shape.words, (SEQUENCES,), generator=source)

    def seed(self, rank: int) -> int:
        return rank // self.tp  # the ranks of an engine answer the same prompts


class Rest:
    """A layer that does not compute: this rank's part of its parameters, and their gradients."""

    def __init__(self, elements: int, ranks: int) -> None:
        self.ranks = ranks
        self.weight = torch.empty(elements, dtype=torch.bfloat16, device="cuda")
        self.gradient = torch.zeros_like(self.weight)

    def numel(self) -> int:
        return self.weight.numel() * self.ranks

    def full_tensor(self) -> torch.Tensor:
        whole = torch.empty(self.numel(), dtype=torch.bfloat16, device="cuda")
        dist.all_gather_into_tensor(whole, self.weight)
        return whole


class Trainer(_sharding.Trainer):
    """The model sharded over all ranks, and Adam with float32 moments."""

    def __init__(self, rank: int, setup: Setup) -> None:
        from torch.distributed.fsdp import fully_shard  # takes a second to import, and only trainers need it

        self.saver = start(rank, setup.strategy)
        self.setup, self.part = setup, rank % setup.tp
        self.steps = 0
        with self.region():
            with torch.device("meta"):
                self.model = Model(setup.computing).to(torch.bfloat16)
            for layer in self.model.layers:
                fully_shard(layer)
            fully_shard(self.model)
            self.model.to_empty(device="cuda")
            count = setup.shape.layers - setup.depth
            self.rest = [Rest(setup.shard_elements, setup.ranks) for _ in range(count)]
            self._initialize(rank)
            self.moments = [
                (torch.zeros_like(weight, dtype=torch.float32), torch.zeros_like(weight, dtype=torch.float32))
                for weight, _ in self._weights()
            ]

    @torch.no_grad()
    def _initialize(self, rank: int) -> None:
        torch.manual_seed(rank)
        for name, parameter in self.model.named_parameters():
            local = parameter.to_local()
            local.fill_(1.0) if "norm" in name else local.uniform_(-0.02, 0.02)
        for layer in self.rest:
            layer.weight.uniform_(-0.02, 0.02)

    def _weights(self) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        """Yield this rank's parameters with their gradients, if there are any yet."""
        for parameter in self.model.parameters():
            yield parameter.to_local(), None if parameter.grad is None else parameter.grad.to_local()
        for layer in self.rest:
            yield layer.weight, layer.gradient

    def shards(self) -> dict[str, Shard]:
        return {**dict(self.model.named_parameters()), **{f"rest.{index}": each for index, each in enumerate(self.rest)}}

    def kept_by_engine(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        return part_of(name, whole, self.part, self.setup.tp)

    def train(self, sequences: torch.Tensor, step: Step) -> float:
        """Train on a toy task: after each token t of the answers, 3 t + 1 would have been right."""
        with self.region():
            activations = torch.zeros(self.setup.activation_bytes, dtype=torch.uint8, device="cuda")
            tokens = sequences[:, :-1].cuda()
            logits = self.model(tokens)
            right = (tokens * 3 + 1) % logits.shape[-1]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), right.flatten())
            self.model.zero_grad()
            loss.backward()
            for layer in self.rest:
                layer.gradient.fill_(1e-3)
            step.bytes["train"] = used_bytes()
            del activations, logits
            self._adam(rate=1e-3)
        return loss.item()

    @torch.no_grad()
    def _adam(self, rate: float, betas: tuple[float, float] = (0.9, 0.95), epsilon: float = 1e-8) -> None:
        self.steps += 1
        scale = rate * (1 - betas[1] ** self.steps) ** 0.5 / (1 - betas[0] ** self.steps)
        for (weight, gradient), (first, second) in zip(self._weights(), self.moments, strict=True):
            assert gradient is not None
            first.lerp_(gradient.float(), 1 - betas[0])
            second.mul_(betas[1]).add_(gradient.float().square_(), alpha=1 - betas[1])
            weight.sub_((first / second.sqrt().add_(epsilon)).mul_(scale))


class Engine(_sharding.Engine):
    """One part of a tensor-parallel engine, and a decode step whose all-reduces are in the captured graph."""

    def __init__(self, rank: int, setup: Setup, rendezvous: str) -> None:
        self.saver = start(rank, setup.strategy)
        self.setup, shape = setup, setup.shape
        dist.init_process_group("nccl", init_method=rendezvous, rank=rank, world_size=setup.ranks)
        groups = [dist.new_group(list(range(first, first + setup.tp))) for first in range(0, setup.ranks, setup.tp)]
        self.group = groups[rank // setup.tp]
        part = rank % setup.tp
        with self.saver.region(tag=WEIGHTS):
            self.model = Part(setup.computing, part, setup.tp, self.group)
            flat = torch.empty(setup.shard_elements * setup.ranks, device="meta").chunk(setup.tp)[part]
            count = shape.layers - setup.depth
            self.rest = [torch.empty(len(flat), dtype=torch.bfloat16, device="cuda") for _ in range(count)]
        for weight in [*self.model.weights.values(), *self.rest]:
            weight.zero_()
        heads = shape.kv_heads // setup.tp
        elements = setup.cache_bytes(torch.cuda.mem_get_info()[1]) // torch.bfloat16.itemsize
        tokens = elements // (shape.layers * 2 * heads * shape.head)
        with self.saver.region(tag=KV_CACHE):
            whole = torch.zeros(shape.layers, 2, tokens, heads, shape.head, dtype=torch.bfloat16, device="cuda")
        self.cache = whole[: setup.depth]
        self.tokens = torch.zeros(SEQUENCES, dtype=torch.int64, device="cuda")
        # From the first to the last token of the cache.
        slots = torch.linspace(0, tokens - 1, SEQUENCES * TOKENS).long().view(SEQUENCES, TOKENS)
        self.slots = slots.cuda()
        self.gathered = torch.empty(setup.tp, SEQUENCES, shape.words // setup.tp, device="cuda")
        self.decode()  # loads the kernels and makes NCCL's connections, because a capture must not
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with self.saver.cuda_graph(self.graph, tag=GRAPH, capture_error_mode="thread_local"):
            self.workspace = torch.zeros(GRAPH_BYTES // setup.divided**2, dtype=torch.uint8, device="cuda")
            self.decode()

    def decode(self) -> None:
        """Continue each sequence by the most likely token. Its new key and value take the last slot."""
        logits = self.model.decode(self.tokens, self.cache, self.slots)
        dist.all_gather_into_tensor(self.gathered, logits, group=self.group)
        self.tokens.copy_(self.gathered.transpose(0, 1).flatten(1).argmax(dim=-1))

    def elements(self, name: str) -> int:
        if name.startswith("rest."):
            return self.setup.shard_elements * self.setup.ranks
        return self.model.whole[name].numel()

    def load(self, name: str, whole: torch.Tensor) -> None:
        if name.startswith("rest."):
            self.rest[int(name.removeprefix("rest."))].copy_(self.model.mine(name, whole))
        else:
            self.model.weights[name].copy_(self.model.mine(name, whole.view(self.model.whole[name].shape)))

    def close(self) -> None:
        del self.graph  # it has NCCL's all-reduces
        dist.destroy_process_group()

    def generate(self, prompts: torch.Tensor) -> torch.Tensor:
        self.cache[:, :, self.slots.flatten()] = 0  # it may have any contents after a resume without a backup
        self.tokens.copy_(prompts)
        sequences = [prompts]
        for _ in range(TOKENS):
            self.graph.replay()
            sequences.append(self.tokens.cpu())
        return torch.stack(sequences, dim=1)

    def checksum(self) -> int:
        return sum(checksum(index, weight) for index, weight in enumerate([*self.model.weights.values(), *self.rest]))


# Results.


def gb(size: float) -> str:
    return f"{size / 1e9:.2f}"


def check_host(setup: Setup) -> None:
    """Print the host memory that parked trainers take, and end the program if there is less."""
    needed = 0 if setup.strategy == "kept" else setup.ranks * setup.trainer_bytes
    with open("/proc/meminfo", encoding="ascii") as file:
        fields = dict(line.split(":") for line in file)
    available = int(fields["MemAvailable"].split()[0]) << 10
    print(
        f"{setup.strategy}: each GPU has {gb(setup.trainer_bytes)} GB of the trainer, {gb(setup.activation_bytes)} of "
        f"activations and {gb(setup.weight_bytes)} of the engine's weights. Parked trainers take {gb(needed)} GB of host "
        f"memory, of {gb(available)} available.",
        flush=True,
    )
    check(available > 1.05 * needed, "the host has memory for all trainers")


def run_once(setup: Setup) -> dict[str, Any]:
    """Run all steps at one ratio, print the time of the whole run, and check that the engines had the trainer's weights."""
    begun = time.perf_counter()
    ranks = run(setup)
    seconds = time.perf_counter() - begun
    print(f"{setup.strategy}: a run of {setup.steps} steps at a ratio of {setup.ratio:.3f} took {seconds:.1f} s", flush=True)
    for rank, steps in enumerate(ranks):
        for number, step in enumerate(steps):
            check(step.answered == step.sent, f"step {number}, rank {rank}: the engine answered with the trainer's weights")
    return {
        "strategy": setup.strategy,
        "ratio": setup.ratio,
        "ranks": [[asdict(step) for step in steps] for steps in ranks],
    }


def largest_ratio(trial: dict[str, Any], device_bytes: int) -> float:
    """Compute the largest ratio that fits from the memory that a trial takes beside its KV cache."""
    phases = WITH_CACHE[trial["strategy"]]
    peak = max(step["bytes"][phase] for steps in trial["ranks"] for step in steps for phase in phases)
    room = (1 - MARGIN) * device_bytes - peak + trial["ratio"] * device_bytes
    ratio = int(room / device_bytes * PACE) / PACE
    print(f"{trial['strategy']}: the peak of the trial is {gb(peak)} GB; a ratio of {ratio:.2f} fits", flush=True)
    return ratio


def measure(setup: Setup, wanted: str) -> dict[str, Any]:
    """Run a strategy at the wanted ratio. The largest ratio needs a trial first, at the same ratio for all strategies."""
    device = torch.cuda.get_device_properties(0)  # makes no context
    check_host(setup)
    trial = None
    if wanted == "largest":
        trial = run_once(replace(setup, ratio=setup.weight_bytes / device.total_memory + SMALLEST_CACHE))
    ratio = float(wanted) if trial is None else largest_ratio(trial, device.total_memory)
    setup = replace(setup, ratio=ratio)
    return {
        **run_once(setup),
        "device": device.name,
        "device_bytes": device.total_memory,
        "cache_bytes": setup.cache_bytes(device.total_memory),
        "layers": setup.shape.layers,
        "tp": setup.tp,
        "trial": trial,
    }


def seconds_of(result: dict[str, Any], switch: str) -> list[float]:
    """Return each rank's time of a switch, in the steps after the first, which pins host memory."""
    steps = [step for steps in result["ranks"] for step in steps[1:]]
    return [sum(step["seconds"].get(part, 0.0) for part in SWITCHES[switch]) for step in steps]


def show(results: list[dict[str, Any]]) -> None:
    """Print a table of strategies in Markdown: the peak by phase and its rank, and the times of the switches."""
    first = results[0]
    print(f"\n{len(first['ranks'])} x {first['device']}, {first['layers']} layers, engines of {first['tp']} GPUs\n")
    titles = ["strategy", "ratio", "KV cache, GB", *(f"{phase}, GB (rank)" for phase in PHASES)]
    titles += [f"{switch}, s (slowest rank)" for switch in SWITCHES]
    print(f"| {' | '.join(titles)} |\n|{' --- |' * len(titles)}")
    for result in results:
        cells = [result["strategy"], f"{result['ratio']:.2f}", gb(result["cache_bytes"])]
        for phase in PHASES:
            peaks = [max(step["bytes"][phase] for step in steps) for steps in result["ranks"]]
            cells.append(f"{gb(max(peaks))} ({peaks.index(max(peaks))})")
        for switch in SWITCHES:
            times = seconds_of(result, switch)
            cells.append(f"{statistics.median(times):.2f} ({max(times):.2f})" if times else "-")
        print(f"| {' | '.join(cells)} |")


def compare_losses(runs: list[dict[str, Any]], name: str) -> None:
    """Check that the losses of runs at equal ratios are equal, bit for bit. At different ratios, print whether they are."""
    losses = [[[step["loss"] for step in steps] for steps in each["ranks"]] for each in runs]
    ratios = [each["ratio"] for each in runs]
    for index in range(1, len(runs)):
        same_ratio = ratios[index] in ratios[:index]
        other = ratios.index(ratios[index]) if same_ratio else 0
        equal = losses[index] == losses[other]
        mine = f"{runs[index]['strategy']}: the losses of the {name} at a ratio of {ratios[index]:.3f}"
        theirs = f"those of {runs[other]['strategy']}"
        if same_ratio:
            check(equal, f"{mine} are {theirs}, bit for bit")
        else:
            print(f"  {mine} {'equal' if equal else 'differ from'} {theirs} at {ratios[other]:.3f}")


def compare(results: list[dict[str, Any]]) -> None:
    """Show the results, and compare the losses of their trials, if all have one, and of their final runs."""
    show(results)
    trials = [result["trial"] for result in results if result.get("trial")]
    if len(trials) == len(results):
        compare_losses(trials, "trial")
    compare_losses(results, "final run")


def plot(path: str, results: list[dict[str, Any]]) -> None:
    """Draw the largest memory of a GPU in each phase, and the part of it that is the KV cache."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(results), sharey=True, figsize=(3 * len(results), 3.5), layout="constrained")
    for axis, result in zip([axes] if len(results) == 1 else axes, results, strict=True):
        peaks = [max(step["bytes"][phase] for steps in result["ranks"] for step in steps) / 1e9 for phase in PHASES]
        cache = [result["cache_bytes"] / 1e9 * (phase in WITH_CACHE[result["strategy"]]) for phase in PHASES]
        axis.bar(PHASES, [peak - held for peak, held in zip(peaks, cache, strict=True)], label="everything else")
        axis.bar(PHASES, cache, bottom=[peak - held for peak, held in zip(peaks, cache, strict=True)], label="KV cache")
        axis.axhline(result["device_bytes"] / 1e9, linestyle="--", color="gray", label="device")
        axis.set_title(f"{result['strategy']}, ratio {result['ratio']:.2f}")
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.supylabel("GB")
    figure.savefig(path)


def main(arguments: argparse.Namespace) -> None:
    """Run one strategy, or compare the files of several. `arguments` are those of rl_sharded.py."""
    if arguments.compare:
        results = []
        for path in arguments.compare:
            with open(path, encoding="utf-8") as file:
                results.append(json.load(file))
        compare(results)
        if arguments.plot:
            plot(arguments.plot, results)
        return
    if torch.cuda.device_count() < arguments.gpus:
        raise SystemExit(f"this needs {arguments.gpus} GPUs, real or simulated: see --gpus, and simulate --devices")
    shape = Shape().divided(arguments.divided)
    setup = Setup(
        ranks=arguments.gpus,
        steps=arguments.steps,
        bucket_elements=GIB // arguments.divided**2,
        strategy=arguments.strategy,
        shape=replace(shape, layers=shape.layers * arguments.gpus // PUBLISHED_RANKS),
        depth=arguments.depth,
        tp=arguments.tp or arguments.gpus,
        ratio=0.0,
        divided=arguments.divided,
    )
    result = measure(setup, arguments.ratio)
    show([result])
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(result, file)
