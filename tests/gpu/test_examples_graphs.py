"""Guards examples/partial_cuda_graph.py at small sizes: its own checks hold, and it makes all of them."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
from gpu_programs import subprocess_run
from gpu_support import REPOSITORY, hold_stream, torch

pytestmark = pytest.mark.timeout(300)

EXAMPLES = REPOSITORY / "examples"
STEPS, MICROBATCHES = 2, 3
SMALL = ["--width", "64", "--length", "32", "--steps", str(STEPS), "--microbatches", str(MICROBATCHES)]
FREED = re.compile(r"gave back (\d+) MiB \(reported (\d+)\)")
LOSSES = re.compile(r"step \d+: the losses .* bit for bit \((.*)\)")


def run(*arguments: str) -> str:
    done = subprocess_run([str(EXAMPLES / "partial_cuda_graph.py"), *arguments], timeout=250).check()
    print(done.output)
    return str(done.output)


def held(output: str, what: str) -> list[str]:
    """The checks that succeeded and have these words."""
    return [line for line in output.splitlines() if line.startswith("  ok: ") and what in line]


def expect_pauses(output: str, number: int) -> None:
    sizes = [tuple(map(int, found)) for found in FREED.findall(output)]
    assert len(sizes) == number and all(freed >= reported > 0 for freed, reported in sizes)
    assert len(held(output, "other numbers of tokens in each of")) == number


def expect_losses(output: str, number: int, microbatches: int) -> None:
    found = LOSSES.findall(output)
    assert len(found) == number
    assert all(len(set(losses.split(", "))) == microbatches for losses in found), "each micro-batch has a loss of its own"


@pytest.mark.outer
def test_training_with_graphs_of_parts() -> None:
    output = run(*SMALL, "--layers", "2")
    expect_pauses(output, STEPS)
    expect_losses(output, STEPS, MICROBATCHES)
    assert held(output, "the model has changed")
    assert re.search(r"^graphs +6$", output, re.MULTILINE), "a forward and a backward of two layers and the head"


@pytest.mark.slow  # nine processes import PyTorch
@pytest.mark.outer
@pytest.mark.multigpu
def test_pipeline() -> None:
    """Two chunks on each of four ranks, or of two. The simulated machine has two, because each rank imports PyTorch."""
    ranks = 4 if torch.cuda.device_count() >= 4 else 2
    arguments = [*SMALL[:-1], "8", "--layers", str(2 * ranks), "--pipeline", str(ranks), "--chunks", "2"]
    output = run(*arguments)
    expect_pauses(output, ranks * STEPS)
    expect_losses(output, STEPS, 8)


# ---- what is in flight ----

SHAPE = (8, 16)


def numbers(seed: int) -> Any:
    return torch.arange(seed, seed + SHAPE[0] * SHAPE[1], device="cuda", dtype=torch.float32).reshape(SHAPE).sin()


class SlowLinks:
    """Stands for the other ranks. What is sent arrives only when something waits for it."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.received = 0
        self.arrived: list[Any] = []
        self.gradients: list[Any] = []

    def send(self, tensor: Any, stage: int, to: int) -> Any:
        arrived, work = torch.empty_like(tensor), torch.cuda.Event()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            hold_stream()
            arrived.copy_(tensor)
            work.record()
        self.arrived.append(arrived)  # its memory is written later
        if to < stage:
            self.gradients.append(arrived)
        return work

    def receive(self, stage: int, to: int) -> Any:
        self.received += 1
        return numbers(self.received * 100)


def test_gradients_are_in_flight_until_they_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A middle rank of three sends gradients that lie in the graphs' memory, and runs the next micro-batch meanwhile. Its
    layer has no experts: at these the host waits for the GPU, and what is sent has arrived."""
    from torch_memory_saver.layer_graphs import capture_layers

    monkeypatch.syspath_prepend(str(EXAMPLES))
    model, pipeline = importlib.import_module("_moe_transformer"), importlib.import_module("_pipeline_stage")
    layer = model.make_layers(model.Shape(width=SHAPE[1], length=SHAPE[0], layers=0, experts=2))[0].cuda()
    graphs = capture_layers([layer], [torch.zeros(SHAPE, device="cuda", requires_grad=True)], tag="graphs")

    def gradients(layer: Any, graphs: Any) -> list[Any]:
        links = SlowLinks()
        chunk = [layer, torch.neg]  # what is sent forwards is no result of a graph
        stage = pipeline.Stage([chunk], (1, -1) * 3, rank=1, ranks=3, links=links, graphs=graphs)
        assert stage.step([(None, None)] * 3) == []
        torch.cuda.synchronize()
        return links.gradients

    expected = gradients(layer, None)
    found = gradients(graphs.layers[0][0], graphs)
    assert len(found) == 3 and all(map(torch.equal, found, expected))
