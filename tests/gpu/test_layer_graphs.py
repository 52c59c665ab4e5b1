"""Guards captured layers: replays in a pipeline's order compute what eager layers do, before and after a pause; gradients do
not lie in the pool; and the pool does not grow with the micro-batches."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
from gpu_support import core, errors, hold_stream, release_everything, saver, torch
from layer_runs import assert_equal, chunks_of_blocks, numbers, run_order, sample_of

from torch_memory_saver.layer_graphs.plan import pipeline_order
from torch_memory_saver.layer_graphs.plan.buffers import graph_uses

GRAPHS = ("per_microbatch", "shared")
ORDERS: dict[str, tuple[int, ...]] = {
    "no pipeline": (1, -1) * 8,
    "PP4 rank 0": pipeline_order(4, 0, 8),
    "PP4/VP2/M8 rank 0": pipeline_order(4, 0, 8, 2),
    "PP4/VP2/M8 rank 3": pipeline_order(4, 3, 8, 2),
    "PP4/VP2/M16 rank 0": pipeline_order(4, 0, 16, 2),
}


def capture_layers(*arguments: Any, **keywords: Any) -> Any:
    from torch_memory_saver.layer_graphs import capture_layers

    return capture_layers(*arguments, **({"tag": "graphs"} | keywords))


def parameters_of(modules: list[list[Any]]) -> list[Any]:
    return [parameter for row in modules for module in row for parameter in module.parameters()]


def captured(modules: list[list[Any]], order: tuple[int, ...], **keywords: Any) -> Any:
    return capture_layers(modules, [[sample_of() for _ in row] for row in modules], order, **keywords)


def resident_bytes(tag: str = "graphs") -> int:
    return sum(row.reserved_bytes for row in core.segments() if row.tag == tag and row.state == core.STATE_ACTIVE)


@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS.keys())
def test_a_step_computes_what_eager_layers_do(order: tuple[int, ...], graphs: str) -> None:
    modules = chunks_of_blocks(max(order), 2)
    parameters = parameters_of(modules)
    expected = run_order(modules, order, parameters)
    layers = captured(modules, order, graphs=graphs)
    for _ in range(3):
        assert_equal(run_order(layers.layers, order, parameters), expected)
        assert saver.pause("graphs").bytes > 0 and resident_bytes() == 0
        saver.resume("graphs")
    assert layers.memory_report().graphs == len({use.graph for use in graph_uses(order, 2, graphs)})


@pytest.mark.parametrize("graphs", GRAPHS)
def test_training_is_the_same_with_the_pool_paused_for_the_optimizers_step(graphs: str) -> None:
    order = pipeline_order(4, 0, 8, 2)
    modules = chunks_of_blocks(2, 2)
    start = [parameter.detach().clone() for parameter in parameters_of(modules)]

    def train(layers: Any, pauses: bool) -> list[Any]:
        parameters = parameters_of(modules)
        with torch.no_grad():
            for parameter, value in zip(parameters, start, strict=True):
                parameter.copy_(value)
        optimizer = torch.optim.Adam(parameters, lr=0.01)
        for _ in range(3):
            run_order(layers, order, parameters)
            if pauses:
                saver.pause("graphs")
            optimizer.step()
            if pauses:
                saver.resume("graphs")
        return [parameter.detach().clone() for parameter in parameters]

    expected = train(modules, pauses=False)
    found = train(captured(modules, order, graphs=graphs).layers, pauses=True)
    assert all(map(torch.equal, found, expected))
    assert not torch.equal(expected[0], start[0])


def test_gradients_of_parameters_do_not_lie_in_the_pool() -> None:
    """PyTorch keeps the tensor that a backward returns as .grad, and would add the next ones to the pool's memory."""
    modules = chunks_of_blocks(1, 1)
    [[layer]] = captured(modules, (1, -1)).layers
    leaf = numbers(0).requires_grad_()
    layer(leaf).backward(numbers(1))
    kept = [leaf, *modules[0][0].parameters()]
    before = [each.grad.clone() for each in kept]
    assert all(core.find(each.grad.data_ptr()) is None for each in kept)
    first = [each.grad for each in kept]
    for each in kept:
        each.grad = None
    layer(leaf).backward(numbers(2))
    assert all(map(torch.equal, first, before)), "a gradient that was kept changes with the next replay"
    assert not torch.equal(kept[1].grad, before[1])


def test_shared_graphs_in_one_pool_would_overwrite_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Naive weak references: memory is reused as soon as its backward is captured, without a look at later replays."""
    from torch_memory_saver.layer_graphs.captured import capture

    order = pipeline_order(4, 0, 16, 2)
    modules = chunks_of_blocks(2, 2)
    parameters = parameters_of(modules)
    expected = run_order(modules, order, parameters)
    planned = capture._pool_numbers
    monkeypatch.setattr(capture, "_pool_numbers", lambda *arguments: dict.fromkeys(planned(*arguments), 0))
    naive = run_order(captured(modules, order, graphs="shared").layers, order, parameters)
    assert not all(map(torch.equal, naive.passes, expected.passes))


# ---- memory ----


def wide_report(microbatches: int, width: int, **keywords: Any) -> Any:
    """What layers take whose results, of 512 KiB, are large enough to see."""
    order = pipeline_order(2, 0, microbatches, 2)
    modules = chunks_of_blocks(2, 1, width=width)
    samples = [[sample_of(width).repeat((1 << 17) // width, 1)] for _ in modules]
    layers = capture_layers(modules, samples, order, **keywords)
    report = layers.memory_report()
    segments = sum(row.reserved_bytes for row in core.segments() if row.tag == "graphs")
    assert report.pool_bytes + report.static_input_bytes + report.static_gradient_bytes <= segments
    in_flight = max(accumulate(1 if entry > 0 else -1 for entry in order))
    assert report.static_inputs == in_flight or keywords.get("graphs") == "shared"
    assert 0 <= report.fragmentation < 1 and 0 < report.result_bytes <= report.pool_bytes
    assert "part without results (fragmentation)" in str(report)
    assert report.boundary_tensors == report.graphs, "an output for each forward, a gradient for each backward"
    assert 0 < report.boundary_bytes <= report.pool_bytes
    if not keywords.get("reuse_memory", True):
        assert report.boundary_bytes == report.graphs * samples[0][0].nbytes
    del layers
    release_everything()
    return report


@pytest.mark.parametrize("graphs", GRAPHS)
def test_the_pool_does_not_grow_with_the_microbatches(graphs: str) -> None:
    eight, sixteen, more = (wide_report(number, 512, graphs=graphs) for number in (8, 16, 32))
    assert abs(sixteen.pool_bytes / eight.pool_bytes - 1) <= 0.02
    assert abs(more.pool_bytes / eight.pool_bytes - 1) <= 0.02
    assert more.static_input_bytes == eight.static_input_bytes
    assert more.result_bytes == eight.result_bytes
    assert more.boundary_bytes < 2 * eight.boundary_bytes, "memory that several have in turn counts once"


def test_without_reuse_the_pool_grows_with_the_microbatches() -> None:
    four, eight = (wide_report(number, 2048, reuse_memory=False) for number in (4, 8))
    assert eight.pool_bytes > 1.9 * four.pool_bytes
    assert eight.result_bytes == 2 * four.result_bytes


def test_an_input_that_a_layer_passes_on_is_no_result_of_it() -> None:
    class PassOn(torch.nn.Module):  # type: ignore[name-defined, misc]
        def forward(self, x: Any) -> tuple[Any, Any]:
            return x, x * 2

    report = captured([[PassOn()]], (1, -1)).memory_report()
    assert report.boundary_tensors == 2, "the second output, and the gradient of the input"
    assert report.boundary_bytes == 2 * sample_of().nbytes
    assert "boundary tensors" in str(report)


def overwrite_what_is_free() -> None:
    """Writes to the memory that a pause has released."""
    other = torch.full((64 << 20,), 7, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    del other
    torch.cuda.empty_cache()


def step_of_two_layers(layers: Any, between: Any) -> Any:
    """A forward of two layers, with a call after each of them; returns the loss."""
    first, second = layers
    found = first(numbers(0))
    between("layers")
    loss = second(found).square().mean()
    between("passes")
    return loss


def a_pair_of_layers() -> tuple[Any, list[Any], list[Any]]:
    modules = chunks_of_blocks(1, 2)
    graphs = captured(modules, (1, -1))
    parameters = parameters_of(modules)
    step_of_two_layers(graphs.layers[0], lambda where: None).backward()
    expected = [parameter.grad.clone() for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return graphs, parameters, expected


@pytest.mark.parametrize("where", ["layers", "passes"])
@pytest.mark.parametrize("later", ["nothing", "another pause, with a backup"])
def test_a_pause_that_discards_what_a_step_still_reads_is_refused(where: str, later: str) -> None:
    graphs, parameters, expected = a_pair_of_layers()

    def pause(here: str) -> None:
        if here == where:
            saver.pause("graphs")
            overwrite_what_is_free()
            saver.resume("graphs")
            if later != "nothing":
                saver.pause("graphs", backup="host")
                saver.resume("graphs")

    with pytest.raises(errors.InvalidStateError, match="a pause of tag 'graphs' has discarded results") as failure:
        step_of_two_layers(graphs.layers[0], pause).backward()
    assert failure.value.tag == "graphs"
    assert all(parameter.grad is None for parameter in parameters), "nothing was computed"
    graphs.restart()
    step_of_two_layers(graphs.layers[0], lambda here: None).backward()
    assert all(torch.equal(parameter.grad, gradient) for parameter, gradient in zip(parameters, expected, strict=True))


@pytest.mark.parametrize("where", ["layers", "passes"])
@pytest.mark.parametrize("backup", ["host", "disk"])
def test_a_pause_that_keeps_what_a_step_reads_changes_nothing(where: str, backup: str) -> None:
    graphs, parameters, expected = a_pair_of_layers()

    def pause(here: str) -> None:
        if here == where:
            saver.pause("graphs", backup=backup)
            overwrite_what_is_free()
            saver.resume("graphs")

    step_of_two_layers(graphs.layers[0], pause).backward()
    assert all(torch.equal(parameter.grad, gradient) for parameter, gradient in zip(parameters, expected, strict=True))


def test_pauses_of_other_tags_within_a_step_change_nothing() -> None:
    with saver.region(tag="other"):
        other = torch.ones(1 << 20, device="cuda")
    graphs, parameters, expected = a_pair_of_layers()

    def pause(here: str) -> None:
        saver.pause("other")
        saver.resume("other")

    step_of_two_layers(graphs.layers[0], pause).backward()
    assert all(torch.equal(parameter.grad, gradient) for parameter, gradient in zip(parameters, expected, strict=True))
    del other


def test_a_pause_gives_everything_back() -> None:
    order = pipeline_order(2, 0, 4, 2)
    layers = captured(chunks_of_blocks(2, 2), order)
    held = resident_bytes()
    assert held > 0
    assert saver.pause("graphs").bytes == held
    assert resident_bytes() == 0
    with pytest.raises(errors.InvalidStateError, match="is paused: resume tag"):
        layers.layers[0][0](numbers(0))
    saver.resume("graphs")
    assert resident_bytes() == held


# ---- what is in flight ----


@pytest.mark.parametrize("what", ["output", "gradient"])
def test_a_send_is_waited_for_before_its_memory_is_used_again(what: str) -> None:
    """The send is another stream's copy, and is held up until the device is waited for."""
    modules = chunks_of_blocks(1, 1)
    order = (1, -1) * 3
    layers = captured(modules, order)
    [[layer]] = layers.layers
    link = torch.cuda.Stream()
    sent, expected, received = [], [], []
    works: list[Work] = []
    for seed in range(3):
        x = numbers(seed).requires_grad_() * 1.0
        x.register_hook(received.append)
        y = layer(x)
        assert [work.waits for work in works] == [1] * seed, "the stream waits before the memory is used again"
        if what == "output":
            sent.append(send(layers, y, link, works))
            expected.append(modules[0][0](numbers(seed)).detach())
        y.backward(numbers(seed + 9))
        if what == "gradient":
            sent.append(send(layers, received[0], link, works))
            other = numbers(seed).requires_grad_()
            modules[0][0](other).backward(numbers(seed + 9))
            expected.append(other.grad)
        received.clear()
    torch.cuda.synchronize()
    assert all(map(torch.equal, sent, expected))


class Work:
    """An event that counts how often it was waited for."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event()
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1
        self.event.wait()


def send(layers: Any, tensor: Any, link: Any, works: list[Work]) -> Any:
    arrived = torch.empty_like(tensor)
    link.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(link):
        hold_stream()
        arrived.copy_(tensor.detach())
        work = Work()
        work.event.record(link)
    layers.in_flight(tensor, work)
    works.append(work)
    return arrived


def test_only_results_can_be_in_flight() -> None:
    layers = captured(chunks_of_blocks(1, 1), (1, -1))
    with pytest.raises(errors.InvalidArgumentError, match="no output of a captured layer"):
        layers.in_flight(numbers(0), torch.cuda.Event())
