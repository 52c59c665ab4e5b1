"""Guards random numbers of operators on the simulated GPU, and operators in CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from warm_programs import run

import torch_memory_saver
from torch_memory_saver import torch_memory_saver as saver

CYCLES = 3


def test_a_seed_gives_the_same_numbers_again_and_calls_advance() -> None:
    torch.manual_seed(3)
    first, second = torch.rand(50, device="cuda"), torch.rand(50, device="cuda")
    torch.manual_seed(3)
    assert not torch.equal(first, second)
    assert torch.equal(torch.rand(50, device="cuda"), first)
    assert torch.equal(torch.rand(50, device="cuda"), second)


def test_the_state_of_a_generator_is_its_sequence() -> None:
    state = torch.cuda.get_rng_state()
    first = torch.randn(50, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.randn(50, device="cuda"), first)
    mine = [torch.Generator("cuda").manual_seed(5) for _ in range(2)]
    before = torch.cuda.get_rng_state()
    made = [torch.randperm(50, device="cuda", generator=each) for each in mine]
    assert torch.equal(*made)
    assert torch.equal(torch.cuda.get_rng_state(), before)  # the default one was not used
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator but found 'cpu'"):
        torch.rand(3, device="cuda", generator=torch.Generator())


def test_the_host_s_generator_is_left_alone() -> None:
    state = torch.get_rng_state()
    torch.rand(3, device="cuda")
    nn.Dropout()(torch.ones(3, device="cuda"))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "function",
    [
        torch.bernoulli,
        torch.randn_like,
        nn.Dropout(),
        lambda each: torch.multinomial(each, 20, replacement=True),
        lambda each: each.clone().exponential_(),
        lambda each: torch.normal(each, each),
        lambda each: each.clone().random_(),
    ],
)
def test_random_operators_differ_from_call_to_call(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    halves = torch.full((1000,), 0.5, device="cuda")
    torch.manual_seed(0)
    first, second = function(halves), function(halves)
    torch.manual_seed(0)
    assert not torch.equal(first, second)
    assert torch.equal(function(halves), first)


class Learner:
    """A small model with its optimizer; inputs, output and gradients lie where a graph finds them."""

    def __init__(self, fused: bool) -> None:
        torch.manual_seed(1)
        layers = [nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 8), nn.Softmax(-1)]
        self.module = nn.Sequential(*layers).cuda()
        self.optimizer = torch.optim.Adam(self.module.parameters(), lr=0.01, capturable=True, fused=fused)
        self.inputs = torch.zeros(4, 8, device="cuda")

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.module(self.inputs).square().sum()
        loss.backward()
        self.optimizer.step()
        return loss

    def warm_up(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.step()
        torch.cuda.current_stream().wait_stream(side)


def new_inputs(number: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(number))


def captured(learner: Learner, how: str) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    graph = torch.cuda.CUDAGraph()
    context: Any = (
        torch.cuda.graph(graph) if how == "torch" else saver.cuda_graph(graph, tag="graph", enable_cpu_backup=True)
    )
    with context:
        loss = learner.step()
    return graph, loss


@pytest.mark.parametrize(("how", "fused"), [("torch", False), ("saver", False), ("saver", True)])
def test_a_captured_training_step_is_replayed_bit_for_bit(how: str, fused: bool) -> None:
    """Also after the graph's memory was paused, with new inputs each time."""
    eager, learner = Learner(fused), Learner(fused)
    for each in (eager, learner):
        each.warm_up()
    graph, loss = captured(learner, how)
    for number in range(CYCLES):
        if how == "saver":
            saver.pause("graph")
            saver.resume("graph")
        for each in (eager, learner):
            each.inputs.copy_(new_inputs(number))
        graph.replay()
        assert loss.item() == eager.step().item()
        for found, expected in zip(learner.module.parameters(), eager.module.parameters(), strict=True):
            assert torch.equal(found.cpu(), expected.cpu())
    del graph, loss
    torch_memory_saver.empty_cache()


def test_a_graph_s_random_numbers_advance_with_its_replays() -> None:
    dropout, ones = nn.Dropout(), torch.ones(1000, device="cuda")
    dropout(ones)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dropped = dropout(ones)
    # At the start of a capture PyTorch writes the seed on the capture's stream. A replay writes its seed on the current one.
    torch.cuda.synchronize()
    made = []
    for _ in range(2):
        torch.cuda.manual_seed(7)
        for _ in range(2):
            graph.replay()
            made.append(dropped.cpu())
    assert not torch.equal(made[0], made[1])
    assert torch.equal(made[0], made[2])
    assert torch.equal(made[1], made[3])


def test_indexing_by_integers_is_captured() -> None:
    table, indices = torch.arange(10.0, device="cuda"), torch.tensor([1, 2], device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        taken = table[indices]
    indices.copy_(torch.tensor([7, 3]))
    graph.replay()
    assert taken.tolist() == [7.0, 3.0]


REFUSED_IN_A_CAPTURE = """
import torch
tensor, graph = torch.ones(3, device="cuda"), torch.cuda.CUDAGraph()
stream = torch.cuda.current_stream()
try:
    with torch.cuda.graph(graph):
        {function}
except RuntimeError as error:
    assert "captur" in str(error), error
else:
    raise AssertionError("nothing was refused")
torch.cuda.set_stream(stream)
assert {function} is not None  # the device goes on
"""


@pytest.mark.parametrize("function", ["tensor.nonzero()", "tensor[tensor > 0]", "tensor.sum().item()"])
def test_value_dependent_operators_are_refused_in_a_capture(function: str) -> None:
    """In a process of its own: after a capture whose end has failed, PyTorch's allocator believes for ever that it is in
    flight."""
    run(REFUSED_IN_A_CAPTURE.format(function=function))


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_graphed_callables_learn_as_the_module_does() -> None:
    expected, module = Learner(False).module, Learner(False).module
    inputs = [new_inputs(0).cuda().requires_grad_() for _ in range(2)]
    graphed = torch.cuda.make_graphed_callables(module, (torch.zeros_like(inputs[0]).requires_grad_(),))
    outputs = [expected(inputs[0]), graphed(inputs[1])]
    for each in outputs:
        each.square().sum().backward()
    assert torch.equal(outputs[0].cpu(), outputs[1].cpu())
    assert inputs[0].grad is not None and inputs[1].grad is not None
    assert torch.equal(inputs[0].grad.cpu(), inputs[1].grad.cpu())
