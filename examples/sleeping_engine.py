"""What survives a sleep: an engine with FP8 weights, their scales, a rope table, a KV cache and a CUDA graph.

An engine that sleeps drops its weights, because the trainer sends new ones, and its KV cache, because its contents are not
needed. Tensors that it computed once lie in the same memory and are lost, too: the rope table, and the scales of the FP8
weights. After the wake-up the answers are garbage, without any error. This program shows that, lets check_fresh() list what
was forgotten, and fixes it in two ways: with the clones that engines make by hand, and with one line of preserve().

The calls are in the order in which SGLang and vLLM make them. Each hook mode runs in its own process.

    python examples/sleeping_engine.py
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from _common import GIB, check, check_bytes, free_bytes, options
from torch import nn

from torch_memory_saver import configure_subprocess, torch_memory_saver
from torch_memory_saver.reports import FreshReport

WIDTH, LAYERS, WORDS, LENGTH = 256, 2, 512, 32
PROMPT, ANSWERS = 7, 8
Tensors = dict[str, torch.Tensor]


# The engine.


class Fp8Linear(nn.Module):
    """Weights in FP8, with a scale for each row, which is computed once."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        weight = torch.randn(outputs, inputs, device="cuda") / inputs**0.5
        scale = weight.abs().amax(dim=1, keepdim=True) / 448
        self.weight = nn.Parameter((weight / scale).to(torch.float8_e4m3fn), requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.weight.to(torch.float32) * self.scale).t()


class Rope(nn.Module):
    """The angles of every position. They are computed once, and are not part of a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        frequencies = 10_000 ** (-torch.arange(0, WIDTH, 2, device="cuda") / WIDTH)
        angles = torch.arange(LENGTH, device="cuda")[:, None] * frequencies
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        cos, sin = self.cos[position], self.sin[position]
        even, odd = x[:, ::2], x[:, 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(1)


class Layer(nn.Module):
    def __init__(self, rope: Rope) -> None:
        super().__init__()
        self.rope = rope
        self.qkv, self.out = Fp8Linear(WIDTH, 3 * WIDTH), Fp8Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, position: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(x).chunk(3, dim=1)
        keys.index_copy_(0, position, self.rope(key, position))
        values.index_copy_(0, position, value)
        seen = torch.arange(LENGTH, device="cuda") <= position
        scores = (self.rope(query, position) @ keys.t()).masked_fill(~seen, float("-inf"))
        # Positions that were not written yet are masked, whatever they hold.
        mixed = (scores / WIDTH**0.5).softmax(dim=1) @ values.masked_fill(~seen[:, None], 0)
        return x + self.out(mixed)


class Engine(nn.Module):
    """An engine that answers one token at a time, by replays of one graph."""

    def __init__(self, cache_bytes: int) -> None:
        super().__init__()
        with torch_memory_saver.region(tag="weights"):
            self.words = nn.Parameter(torch.randn(WORDS, WIDTH, device="cuda"), requires_grad=False)
            rope = Rope()
            self.layers = nn.ModuleList(Layer(rope) for _ in range(LAYERS))
            self.head = Fp8Linear(WIDTH, WORDS)
        with torch_memory_saver.region(tag="kv_cache"):
            sequences = max(1, cache_bytes // (LAYERS * 2 * LENGTH * WIDTH * 4))
            self.cache = torch.empty(sequences, LAYERS, 2, LENGTH, WIDTH, device="cuda")
        self.token, self.position = (torch.zeros(1, dtype=torch.long, device="cuda") for _ in range(2))
        self.decode()  # loads the kernels, because a capture must not load them
        self.graph = torch.cuda.CUDAGraph()
        with torch_memory_saver.cuda_graph(self.graph, tag="cuda_graph"):
            self.answer = self.decode()

    def decode(self) -> torch.Tensor:
        x = self.words[self.token]
        for layer, (keys, values) in zip(self.layers, self.cache[0], strict=True):
            x = layer(x, self.position, keys, values)
        return self.head(x).argmax(dim=1)

    def answers(self) -> list[int]:
        """Return the engine's answer to the prompt."""
        self.token.fill_(PROMPT)
        tokens = []
        for position in range(ANSWERS):
            self.position.fill_(position)
            self.graph.replay()
            self.token.copy_(self.answer)
            tokens.append(int(self.answer))
        return tokens


def load(engine: Engine, checkpoint: Tensors) -> None:
    """Load the trainer's weights. A checkpoint has parameters only, and no buffers."""
    for name, parameter in engine.named_parameters():
        parameter.copy_(checkpoint[name])


# Sleep and wake-up. Each is a context: inside, the engine sleeps.


def trainer_works(size: int) -> None:
    """Overwrite released memory, as a trainer would do."""
    torch.full((size,), 0xEE, dtype=torch.uint8, device="cuda").sum().item()
    torch.cuda.empty_cache()


@contextmanager
def sglang(engine: Engine, checkpoint: Tensors) -> Iterator[None]:
    """Sleep like SGLang: release_memory_occupation(), resume_memory_occupation(), and the weight update in between."""
    for tag in ("kv_cache", "weights", "cuda_graph"):
        torch_memory_saver.pause(tag)
    yield
    for tag in ("cuda_graph", "weights"):
        torch_memory_saver.resume(tag)
    load(engine, checkpoint)
    torch_memory_saver.resume("kv_cache")


@contextmanager
def vllm(engine: Engine, checkpoint: Tensors, level: int) -> Iterator[None]:
    """Sleep like vLLM: sleep(level), wake_up(tags=...). Level 1 keeps the weights in host memory, level 2 drops them."""
    torch_memory_saver.pause("weights", backup="host" if level == 1 else None)
    torch_memory_saver.pause("kv_cache")
    yield
    torch_memory_saver.resume(["weights"])
    if level == 2:
        load(engine, checkpoint)
    torch_memory_saver.resume(["kv_cache"])


@contextmanager
def cloned(engine: Engine) -> Iterator[None]:
    """Clone all buffers and write them back in place, as engines do by hand."""
    clones = {name: buffer.cpu().clone() for name, buffer in engine.named_buffers()}
    yield
    for name, buffer in engine.named_buffers():
        buffer.copy_(clones[name])


# The program.


def managed_bytes() -> int:
    return torch_memory_saver.stats().total.resident_bytes


def sleep(asleep: Any) -> None:
    """Sleep once, while a trainer works."""
    held, before = managed_bytes(), free_bytes()
    with asleep:
        if not torch_memory_saver.guard:  # guard mode keeps one page of 2 MiB
            check_bytes(free_bytes() - before, held, "given back by the engine")
        trainer_works(held // 2)


def check_awake(engine: Engine, expected: list[int]) -> None:
    """Check that the engine is awake and has forgotten nothing."""
    check(torch_memory_saver.check_fresh(ignore="kv_cache").is_fresh, "nothing was forgotten")
    check(engine.answers() == expected, "the answers are right")


def check_forgotten(engine: Engine, report: FreshReport) -> None:
    print(report)
    found = {name for block in report.unwritten for name in block.names}
    named = {f"Engine.{name}" for name, _ in engine.named_buffers()}  # a path begins with the class of the outermost module
    check(found == named, f"check_fresh() names all {len(report.unwritten)} forgotten buffers, and no parameter")
    check([block.tag for block in report.ignored] == ["kv_cache"], "the cache that was not written yet is no finding")
    check(report.graph_bytes > 0, "neither is the memory of the graph")


@torch.no_grad()
def show(cache_bytes: int) -> None:
    """Show all of it, in a child process."""
    torch.manual_seed(0)
    engine = Engine(cache_bytes)
    print(f"Hook mode {torch_memory_saver.hook_mode}. {managed_bytes() / GIB:.2f} GiB of weights, cache and graph.")
    expected = engine.answers()
    checkpoint = {name: parameter.cpu() for name, parameter in engine.named_parameters()}
    buffers = {name: buffer.cpu() for name, buffer in engine.named_buffers()}

    def repair() -> None:
        for name, buffer in engine.named_buffers():
            buffer.copy_(buffers[name])

    print("SGLang's order, without care for the buffers:")
    sleep(sglang(engine, checkpoint))
    check(engine.answers() != expected, "the answers are wrong, and there was no error")
    repair()
    check(engine.answers() == expected, "with the buffers as they were the answers are right")

    print("The same in guard mode:")
    torch_memory_saver.guard = True
    sleep(sglang(engine, checkpoint))
    check_forgotten(engine, torch_memory_saver.check_fresh(ignore="kv_cache"))
    check(engine.answers() != expected, "the answers are wrong")
    repair()

    print("With clones of the buffers, by hand:")
    with cloned(engine):
        sleep(sglang(engine, checkpoint))
    check_awake(engine, expected)

    print("With preserve(engine), in SGLang's order:")
    torch_memory_saver.preserve(engine)
    sleep(sglang(engine, checkpoint))
    check_awake(engine, expected)

    print("With preserve(engine), in vLLM's order:")
    for level in (1, 2):
        sleep(vllm(engine, checkpoint, level))
        check_awake(engine, expected)
    torch_memory_saver.guard = False


def run(cache_bytes: int, around: Callable[[], Any]) -> None:
    with around():
        child = multiprocessing.get_context("spawn").Process(target=show, args=(cache_bytes,))
        child.start()
    child.join()
    if child.exitcode != 0:
        sys.exit(f"FAILED: the child ended with status {child.exitcode}")


def main() -> None:
    size = int(options(__doc__, gib=0.25).parse_args().gib * GIB)
    for around in (nullcontext, configure_subprocess):
        run(size, around)


if __name__ == "__main__":
    main()
