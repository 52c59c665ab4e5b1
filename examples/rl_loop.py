"""The main use: a trainer and an inference engine take turns on one GPU.

A small transformer learns by reinforcement, as in GRPO: the engine samples a group of answers to each prompt. The trainer
makes the answers that are better than the mean of their group more likely. Both are processes. The trainer's memory is kept
in host memory while it is parked. The engine's is dropped while it sleeps, because each wake-up fills it again. A step has
three stages, and the memory in use by both processes is printed in each:

  update    the engine wakes its weights only, and copies the actor's from the trainer's memory (CUDA IPC)
  rollout   the trainer is parked; the engine wakes the rest, and samples by replaying its CUDA graph
  train     the engine sleeps; the trainer resumes and makes a step of the optimizer

Rewards and losses depend on the number of threads (OMP_NUM_THREADS) with which a simulated GPU computes.

    python examples/rl_loop.py
    python -m torch_memory_saver simulate -- python examples/rl_loop.py
"""

import argparse
import os
from concurrent.futures import ProcessPoolExecutor
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it, matrix products may differ from run to run

import torch
import torch.multiprocessing as mp
from _common import MIB, used_mib
from transformer import Shape, Transformer

from torch_memory_saver import torch_memory_saver

PROMPTS, GROUP = 8, 32
SHAPE = Shape(width=256, vocab_size=16, max_length=8)


class Engine:
    """The engine: weights, a KV cache, and the decode step as a CUDA graph. It begins asleep."""

    def __init__(self, cache_bytes: int) -> None:
        with torch_memory_saver.region(tag="weights"):
            self.model = Transformer(SHAPE).to("cuda", torch.bfloat16).requires_grad_(False)
        with torch_memory_saver.region(tag="kv_cache"):
            pages = torch.zeros(cache_bytes // torch.bfloat16.itemsize, dtype=torch.bfloat16, device="cuda")
        sizes = torch.Size(self.model.cache_sizes(PROMPTS * GROUP))
        self.cache = pages[: sizes.numel()].view(sizes)
        self.tokens = torch.zeros(PROMPTS * GROUP, dtype=torch.int64, device="cuda")
        self.position = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.decode()  # loads the kernels, because a capture must not load them
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch_memory_saver.cuda_graph(self.graph, tag="cuda_graph"):
            self.decode()
        self.sleep()

    def decode(self) -> None:
        """Sample the next token of every sequence."""
        probs = self.model.decode(self.tokens, self.cache, self.position).float().softmax(dim=-1)
        noise = torch.empty_like(probs).exponential_()  # the largest of probs / noise is a sample; a graph can contain this
        self.tokens.copy_((probs / noise).argmax(dim=-1))
        self.position += 1

    def wake(self, *tags: str) -> None:
        torch_memory_saver.resume(tags)

    def sleep(self) -> None:
        torch_memory_saver.pause(["weights", "kv_cache", "cuda_graph"])

    def load(self, actor: dict[str, torch.Tensor]) -> None:
        """Copy the weights of the trainer, whose memory this process maps."""
        for name, weight in actor.items():
            self.model.get_parameter(name).copy_(weight)
        torch.cuda.synchronize()

    def answer(self, prompts: torch.Tensor) -> torch.Tensor:
        """Return a group of sampled sequences for each prompt, which is one token. Their shape is [sequences, tokens]."""
        self.cache.zero_()  # it has undefined contents after a resume without a backup
        self.position.zero_()
        self.tokens.copy_(prompts.repeat_interleave(GROUP))
        sequences = [self.tokens.clone()]
        for _ in range(SHAPE.max_length):
            self.graph.replay()
            sequences.append(self.tokens.clone())
        return torch.stack(sequences, dim=1).cpu()


class RemoteEngine:
    """An engine in its own process: `engine(method, ...)` calls a method there. GPU tensors travel as memory handles."""

    local: Engine  # in the engine's process

    def __init__(self, cache_bytes: int) -> None:
        self.pool = ProcessPoolExecutor(1, mp.get_context("spawn"), self.start, (cache_bytes,))

    @classmethod
    def start(cls, cache_bytes: int) -> None:
        make_reproducible()
        cls.local = Engine(cache_bytes)

    @classmethod
    def run(cls, method: str, *arguments: Any) -> Any:
        return getattr(cls.local, method)(*arguments)

    def __call__(self, method: str, *arguments: Any) -> Any:
        return self.pool.submit(self.run, method, *arguments).result()


def make_reproducible() -> None:
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)


def rewards_of(sequences: torch.Tensor) -> torch.Tensor:
    """Return the rewards: the share of each sequence's tokens that repeat the prompt."""
    return (sequences[:, 1:] == sequences[:, :1]).float().mean(dim=1)


def loss_of(actor: Transformer, sequences: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
    """Return the loss. The advantage of an answer is its reward relative to the other rewards of its group."""
    groups = rewards.view(PROMPTS, GROUP)
    advantages = (groups - groups.mean(dim=1, keepdim=True)) / (groups.std(dim=1, keepdim=True) + 1e-4)
    log_probs = actor(sequences[:, :-1]).log_softmax(dim=-1).gather(2, sequences[:, 1:, None])[:, :, 0]
    return -(log_probs * advantages.view(-1, 1)).mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="default %(default)s")
    parser.add_argument("--kv-mib", type=int, default=512, help="size of the KV cache, in MiB (default %(default)s)")
    options = parser.parse_args()

    engine = RemoteEngine(options.kv_mib * MIB)
    make_reproducible()
    with torch_memory_saver.region(tag="actor", backup="host", runs=False):  # runs=False: its tensors are sent
        actor = Transformer(SHAPE).to("cuda")
    optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-3)
    parked = ["actor"]  # and "optimizer", once there is memory with this tag
    print("step  reward       loss  MiB in use: update  rollout  train")
    for step in range(options.steps):
        engine("wake", "weights")
        engine("load", {name: weight.detach() for name, weight in actor.named_parameters()})
        update = used_mib()

        torch.cuda.empty_cache()  # releases the ordinary memory of the last activations and gradients for the engine
        torch_memory_saver.pause(parked, if_shared="wait", timeout=60)  # waits until the engine has unmapped the actor
        engine("wake", "kv_cache", "cuda_graph")
        sequences = engine("answer", torch.randint(SHAPE.vocab_size, (PROMPTS,)))
        rollout = used_mib()

        engine("sleep")
        torch_memory_saver.resume(parked)
        rewards = rewards_of(sequences)
        loss = loss_of(actor, sequences.cuda(), rewards.cuda())
        loss.backward()
        with torch_memory_saver.region(tag="optimizer", backup="host"):  # AdamW makes its moments in the first step()
            optimizer.step()
        parked = ["actor", "optimizer"]
        train = used_mib()
        optimizer.zero_grad()
        print(f"{step:4}  {rewards.mean():6.3f}  {loss.item():9.6f}  {update:18}  {rollout:7}  {train:5}", flush=True)
    engine.pool.shutdown()


if __name__ == "__main__":
    main()
