"""One of eight ranks that train a 64th of Qwen2.5-32B and roll it out, in turn: ``PROGRAM RANK FILE``, where FILE is new and
the same for all.

The trainer is sharded by FSDP2 over all ranks: float32 parameters, gradients and Adam's state, and bfloat16 in the forward
and backward passes. The engine is tensor-parallel over two ranks, in bfloat16. The last line of the output is a JSON object:
sizes by component, memory in use by phase, losses, and what was out of memory.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ["NCCL_GRAPH_REGISTER"] = "0"
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

import torch
import torch.distributed as dist
from _qwen import Engine, Model, Shape
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from torch_memory_saver import OutOfMemoryError, torch_memory_saver

RANKS = 8
#: Of an engine.
PARTS = 2
STEPS = 2
#: With an eighth of each width matrices have a 64th of the parameters.
SHAPE = Shape().divided(8)
#: Of the device's memory, for the engine's weights and KV cache.
RATIO = 0.9
#: The graph's own memory: a 64th of 2 GiB.
WORKSPACE = 32 << 20
SEQUENCES, TOKENS = 4, 8
ENGINE = ("weights", "kv_cache", "cuda_graph")
TRAINER = ("parameters", "gradients", "optimizer")

rank = int(sys.argv[1])
device = torch.device("cuda", rank)


def used() -> int:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def bits(tensors: Iterable[torch.Tensor]) -> int:
    """A checksum."""
    return sum(int(tensor.view(-1).view(torch.int64).sum()) * (index + 1) for index, tensor in enumerate(tensors))


class Trainer:
    def __init__(self) -> None:
        with torch.device("meta"):
            self.model = Model(SHAPE)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in self.model.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(self.model, mp_policy=policy)
        with torch_memory_saver.region(tag="parameters", enable_cpu_backup=True):
            self.model.to_empty(device=device)
        with torch_memory_saver.region(tag="gradients"):
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.0, fused=True)
        self.reset()
        with torch_memory_saver.region(tag="optimizer", enable_cpu_backup=True):
            self.optimizer.step()  # makes its state, and changes nothing else
        self.optimizer.param_groups[0]["lr"] = 1e-3
        self.words = torch.randint(SHAPE.words, (1, TOKENS + 1), generator=torch.Generator().manual_seed(rank)).to(device)

    @torch.no_grad()
    def reset(self) -> None:
        torch.manual_seed(rank)
        for name, parameter in self.model.named_parameters():
            local = parameter.to_local()
            local.fill_(1.0) if "norm" in name else local.uniform_(-0.03, 0.03)

    def step(self) -> float:
        self.optimizer.zero_grad(set_to_none=False)  # gradients come back with any contents
        logits = self.model(self.words[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), self.words[0, 1:])
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def bits(self) -> int:
        state = [entry[name] for entry in self.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        return bits(tensor.to_local() for tensor in [*self.model.parameters(), *state])


class Rollout:
    """The engine with its KV cache and the graph of a decode step."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        with torch_memory_saver.region(tag="weights"):
            self.engine = Engine(SHAPE, rank % PARTS, PARTS, group)
        weights = self.engine.weights.values()
        for weight in weights:
            weight.zero_()
        budget = int(RATIO * torch.cuda.mem_get_info()[1]) - sum(weight.nbytes for weight in weights)
        heads = SHAPE.kv_heads // PARTS
        tokens = budget // (SHAPE.layers * 2 * heads * SHAPE.head * torch.bfloat16.itemsize)
        # One allocation: rounding each layer's to 2 MiB would weigh 64 times as much as on a real GPU.
        with torch_memory_saver.region(tag="kv_cache"):
            self.cache = torch.empty(SHAPE.layers, 2, tokens, heads, SHAPE.head, dtype=torch.bfloat16, device=device)
        self.tokens = torch.arange(SEQUENCES, device=device)
        # From the first to the last token of the cache.
        self.slots = torch.linspace(0, tokens - 1, SEQUENCES * TOKENS).long().view(SEQUENCES, TOKENS).to(device)
        self.answer_eagerly()
        self.graph = torch.cuda.CUDAGraph()
        with torch_memory_saver.cuda_graph(self.graph, capture_error_mode="thread_local", tag="cuda_graph"):
            self.workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
            self.workspace.zero_()
            self.logits = self.engine.decode(self.tokens, self.cache, self.slots)

    def clear(self) -> None:
        for layer in self.cache:
            layer[:, self.slots.flatten()] = 0

    def answer_eagerly(self) -> torch.Tensor:
        self.clear()
        return self.engine.decode(self.tokens, self.cache, self.slots)

    def answer(self) -> torch.Tensor:
        self.clear()
        self.graph.replay()
        torch.cuda.synchronize()
        return self.logits

    @torch.no_grad()
    def update_weights(self, model: torch.nn.Module) -> None:
        for name, parameter in model.named_parameters():
            whole = parameter.to(torch.bfloat16).full_tensor()
            self.engine.weights[name].copy_(self.engine.mine(name, whole))


def sizes(tag: str) -> dict[str, int]:
    """Bytes of a tag's tensors as they were requested, and of its physical memory."""
    mine = [row for row in torch_memory_saver.stats().allocations if row.tag == tag]
    segments = {segment["address"]: segment for segment in torch.cuda.memory_snapshot()}
    blocks = [block for row in mine for block in segments[row.address]["blocks"] if block["state"] == "active_allocated"]
    return {
        "requested": sum(block["requested_size"] for block in blocks),
        "reserved": sum(row.reserved_bytes for row in mine),
    }


def out_of_memory(what: str) -> str:
    """The error of waking the whole engine at once, which changes nothing."""
    asleep = torch_memory_saver.stats().total.paused_bytes
    try:
        torch_memory_saver.resume(ENGINE)
    except OutOfMemoryError as error:
        assert torch_memory_saver.stats().total.paused_bytes == asleep
        return str(error)
    raise AssertionError(f"{what}: the engine has woken")


def roll_out(trainer: Trainer, rollout: Rollout, phases: dict[str, int]) -> None:
    """In stages: the trainer's optimizer goes, the weights come, the trainer's parameters go, the rest comes."""
    before = trainer.bits()
    torch_memory_saver.pause(["gradients", "optimizer"])
    torch_memory_saver.resume("weights")
    rollout.update_weights(trainer.model)
    phases["update"] = used()
    sent = bits(rollout.engine.weights.values())
    torch.cuda.empty_cache()
    torch_memory_saver.pause("parameters")
    torch_memory_saver.resume(["kv_cache", "cuda_graph"])
    replayed = rollout.answer().clone()
    assert torch.equal(replayed, rollout.answer_eagerly()) and replayed.isfinite().all() and replayed.any()
    assert bits(rollout.engine.weights.values()) == sent
    phases["rollout"] = used()
    torch.cuda.empty_cache()
    torch_memory_saver.pause(ENGINE)
    torch_memory_saver.resume(TRAINER)
    assert trainer.bits() == before


def main() -> None:
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=RANKS)
    groups = [dist.new_group([first, first + 1]) for first in range(0, RANKS, PARTS)]
    rollout = Rollout(groups[rank // PARTS])
    result: dict[str, Any] = {"capacity": torch.cuda.mem_get_info()[1]}
    result["components"] = {tag: sizes(tag) for tag in ENGINE}
    torch_memory_saver.pause(ENGINE)
    torch.cuda.empty_cache()
    trainer = Trainer()
    result["components"] |= {tag: sizes(tag) for tag in TRAINER}
    result["losses"], result["phases"] = [], {}
    for step in range(STEPS):
        result["losses"].append(trainer.step())
        result["phases"]["train"] = used()
        torch.cuda.empty_cache()
        if step == 0:
            result["kept"] = out_of_memory("everything kept")
            torch_memory_saver.pause(["gradients", "optimizer"])
            result["one stage"] = out_of_memory("one stage")
            torch_memory_saver.resume(["gradients", "optimizer"])
        roll_out(trainer, rollout, result["phases"])
    torch.cuda.synchronize()
    del rollout.graph
    dist.destroy_process_group()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
