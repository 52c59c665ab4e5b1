"""The tensors that an inference engine forgets when it sleeps: check_fresh() finds them, and preserve() keeps them.

An engine that sleeps drops its weights, because the trainer sends new ones, and its KV cache, because its contents are not
needed. Tensors that it computed once lie in the same memory and are lost, too: here the rope table, and the scales of the
FP8 weights. After the wake-up the answers are garbage, without any error. This program shows that, lets check_fresh() list
the forgotten tensors, and fixes it in two ways: with clones by hand, and with one line of preserve(). The calls are in the
order in which SGLang and vLLM make them.

    python examples/sleeping_engine.py
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from _common import GIB, check, check_bytes, free_bytes, options, show
from torch import nn

from torch_memory_saver import torch_memory_saver

WIDTH, LAYERS, WORDS, LENGTH = 256, 2, 512, 32
PROMPT, ANSWERS = 7, 8


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
    def __init__(self) -> None:
        super().__init__()
        self.rope = Rope()
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
            self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
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


def load(engine: Engine, checkpoint: dict[str, torch.Tensor]) -> None:
    """Load the trainer's weights. A checkpoint has parameters only, and no buffers."""
    for name, parameter in engine.named_parameters():
        parameter.copy_(checkpoint[name])


@contextmanager
def sglang(engine: Engine, checkpoint: dict[str, torch.Tensor]) -> Iterator[None]:
    """Sleep like SGLang: release_memory_occupation(), resume_memory_occupation(), and the weight update in between."""
    torch_memory_saver.pause(["kv_cache", "weights", "cuda_graph"])
    yield
    torch_memory_saver.resume(["cuda_graph", "weights"])
    load(engine, checkpoint)
    torch_memory_saver.resume("kv_cache")


@contextmanager
def vllm(engine: Engine, checkpoint: dict[str, torch.Tensor], level: int) -> Iterator[None]:
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
    """Clone all buffers, and write them back in place at the end, as engines do by hand."""
    clones = {name: buffer.cpu() for name, buffer in engine.named_buffers()}
    yield
    for name, buffer in engine.named_buffers():
        buffer.copy_(clones[name])


def sleep(asleep: AbstractContextManager[None]) -> None:
    """Sleep once. Meanwhile a trainer takes half of the released memory and overwrites it."""
    held, before = torch_memory_saver.stats().total.resident_bytes, free_bytes()
    with asleep:
        show("the engine sleeps")
        if not torch_memory_saver.guard:  # guard mode keeps one page of 2 MiB
            check_bytes(free_bytes() - before, held, "given back by the engine")
        torch.full((held // 2,), 0xEE, dtype=torch.uint8, device="cuda").sum().item()
        torch.cuda.empty_cache()
    show("the engine is awake")


def check_awake(engine: Engine, expected: list[int]) -> None:
    check(torch_memory_saver.check_fresh(ignore="kv_cache").is_fresh, "nothing was forgotten")
    check(engine.answers() == expected, "the answers are right")


@torch.no_grad()
def main() -> None:
    cache_bytes = int(options(__doc__, gib=0.25).parse_args().gib * GIB)
    torch.manual_seed(0)
    engine = Engine(cache_bytes)
    expected = engine.answers()
    checkpoint = {name: parameter.cpu() for name, parameter in engine.named_parameters()}

    show("the engine is awake")
    print("SGLang's order, without care for the buffers:")
    with cloned(engine):
        sleep(sglang(engine, checkpoint))
        check(engine.answers() != expected, "as expected, the answers are wrong, without any error")
    check(engine.answers() == expected, "the answers are right once clones of the buffers are written back by hand")

    print("The same in guard mode:")
    torch_memory_saver.guard = True
    with cloned(engine):
        sleep(sglang(engine, checkpoint))
        report = torch_memory_saver.check_fresh(ignore="kv_cache")
    print(report)
    found = {name for block in report.unwritten for name in block.names}
    named = {f"Engine.{name}" for name, _ in engine.named_buffers()}  # a path begins with the class of the outermost module
    check(found == named, f"check_fresh() names all {len(report.unwritten)} forgotten buffers, and no parameter")
    check([block.tag for block in report.ignored] == ["kv_cache"], "it ignores the cache, which was not written yet")
    check(report.graph_bytes > 0, "it reports nothing in the memory of the graph")
    check_awake(engine, expected)

    print("With preserve(engine), in SGLang's order:")
    torch_memory_saver.preserve(engine)
    sleep(sglang(engine, checkpoint))
    check_awake(engine, expected)

    print("With preserve(engine), in vLLM's order:")
    for level in (1, 2):
        sleep(vllm(engine, checkpoint, level))
        check_awake(engine, expected)


if __name__ == "__main__":
    main()
