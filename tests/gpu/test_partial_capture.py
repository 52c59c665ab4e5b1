"""Guards partial captures: one forward for eager runs, captures and replays, and mistakes that are explained."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any

import pytest
from gpu_support import core, errors, saver, torch
from layer_runs import numbers, sample_of

EXPERTS = 4
WIDTH = 16
ALL = ("attn", "moe_router", "moe_preprocess")


def graph_part(name: str) -> Any:
    from torch_memory_saver.layer_graphs import graph_part

    return graph_part(name)


def capture_layers(*arguments: Any, **keywords: Any) -> Any:
    from torch_memory_saver.layer_graphs import capture_layers

    return capture_layers(*arguments, **({"tag": "graphs"} | keywords))


class Dispatcher:
    """Sorts tokens by expert. No module, as in frameworks."""

    def sort(self, chosen: Any) -> Any:
        self.order = torch.argsort(chosen, stable=True)
        self.counts = (chosen[:, None] == torch.arange(EXPERTS, device=chosen.device)).sum(0)
        return self.order


def moe(bodies: list[str] | None = None, sizes: list[list[int]] | None = None) -> Any:
    """An MoE layer. The names of the parts whose code ran are added to `bodies`, the tokens of the experts to `sizes`."""

    class Layer(torch.nn.Module):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mix = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, WIDTH)
            self.gate = torch.nn.Linear(WIDTH, EXPERTS)
            self.experts = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
            self.dispatcher = Dispatcher()

        def forward(self, x: Any) -> Any:
            x = self.attention(x)
            scores, chosen = self.route(x)
            tokens = self.preprocess(x, chosen)
            counts = self.dispatcher.counts.tolist()
            if sizes is not None:
                sizes.append(counts)
            results = [expert(part) for expert, part in zip(self.experts, tokens.split(counts), strict=True)]
            unsorted = torch.cat(results).index_select(0, torch.argsort(self.dispatcher.order))
            return x + unsorted * scores[:, None]

        @graph_part("attn")
        def attention(self, x: Any) -> Any:
            self._note("attn")
            return x + torch.tanh(self.mix(self.norm(x)))

        @graph_part("moe_router")
        def route(self, x: Any) -> Any:
            self._note("moe_router")
            return self.gate(x).softmax(-1).max(-1)

        @graph_part("moe_preprocess")
        def preprocess(self, x: Any, chosen: Any) -> Any:
            self._note("moe_preprocess")
            return x.index_select(0, self.dispatcher.sort(chosen))

        def _note(self, name: str) -> None:
            if bodies is not None:
                bodies.append(name)

    torch.manual_seed(7)
    return Layer().cuda()


def two_parts(first: Callable[[Any, Any], Any], behind: Callable[[Any, Any], Any] | None = None, **attributes: Any) -> Any:
    """A module with a part "a", which runs `first`, and code behind it."""

    class Made(torch.nn.Module):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(WIDTH, WIDTH)
            for name, value in attributes.items():
                setattr(self, name, value)

        def forward(self, x: Any) -> Any:
            y = self.a(x)
            return y if behind is None else behind(self, y)

        @graph_part("a")
        def a(self, x: Any) -> Any:
            return first(self, x)

        @graph_part("b")
        def b(self, x: Any) -> Any:
            return x * 2

    return Made().cuda()


def captured(module: Any, scope: Collection[str] = ("a",), **keywords: Any) -> Any:
    [[layer]] = capture_layers([module], [sample_of()], scope=scope, **keywords).layers
    return layer


def step(run: Any, module: Any, seeds: Collection[int]) -> list[Any]:
    """Losses, and the gradients of the parameters and the inputs."""
    module.zero_grad()
    found = []
    for seed in seeds:
        x = numbers(seed).requires_grad_()
        loss = run(x).square().sum()
        loss.backward()
        found += [loss.detach(), x.grad]
    return found + [None if each.grad is None else each.grad.clone() for each in module.parameters()]


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine is None) == (theirs is None) and (mine is None or torch.equal(mine, theirs))


# ---- one forward for three ways of running it ----


@pytest.mark.parametrize("scope", [ALL[:1], ALL[:2], ALL])
def test_a_replay_is_equal_to_eager_whatever_is_in_scope(scope: tuple[str, ...]) -> None:
    bodies: list[str] = []
    sizes: list[list[int]] = []
    layer = moe(bodies, sizes)
    seeds = range(4)
    expected = step(layer, layer, seeds)
    run = captured(layer, scope)
    assert len(sizes) == 4, "no run before the capture goes beyond the boundary"
    bodies.clear()
    assert_equal(step(run, layer, seeds), expected)
    assert bodies == [name for name in ALL if name not in scope] * 4
    assert sizes[:4] == sizes[4:] and len({tuple(each) for each in sizes}) > 1, "experts get other numbers of tokens"
    with torch.no_grad():
        assert torch.equal(run(numbers(1)), layer(numbers(1)))


@pytest.mark.parametrize("graphs", ["per_microbatch", "shared"])
def test_micro_batches_in_flight_and_pauses(graphs: str) -> None:
    layer = moe()
    order = (1, 1, -1, 1, -1, -1)

    def whole_step(run: Any) -> list[Any]:
        layer.zero_grad()
        waiting, losses = [], []
        for seed, run_number in enumerate(order):
            if run_number > 0:
                waiting.append(run(numbers(seed)).square().sum())
            else:
                losses.append(waiting.pop(0))
                losses[-1].backward()
        return [loss.detach() for loss in losses] + [parameter.grad.clone() for parameter in layer.parameters()]

    expected = whole_step(layer)
    run = captured(layer, ALL, order=order, graphs=graphs)
    for _ in range(3):
        assert_equal(whole_step(run), expected)
        saver.pause("graphs")
        assert (
            sum(row.reserved_bytes for row in core.segments() if row.tag == "graphs" and row.state == core.STATE_ACTIVE) == 0
        )
        saver.resume("graphs")


def test_attributes_that_a_part_sets_are_outputs_of_the_graph() -> None:
    layer = moe()
    layer(numbers(0))
    before = layer.dispatcher.counts
    run = captured(layer, ALL)
    assert layer.dispatcher.counts is before, "the capture takes back what it has set"
    layer(numbers(3))
    expected = layer.dispatcher.counts.clone()
    run(numbers(3)).square().sum().backward()
    counts = layer.dispatcher.counts
    assert torch.equal(counts, expected)
    found = core.find(counts.data_ptr())
    assert found is not None and found.tag == "graphs"


def test_layers_without_parts_are_captured_whole() -> None:
    dense = torch.nn.Linear(WIDTH, WIDTH, device="cuda")
    layer = moe()
    graphs = capture_layers([dense, layer], [sample_of()] * 2, scope=ALL)
    first, second = graphs.layers[0]
    both = torch.nn.Sequential(dense, layer)
    assert_equal(step(lambda x: second(first(x)), both, (0, 1)), step(both, both, (0, 1)))


# ---- what ends a capture ----


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_another_exception_leaves_no_capture_open() -> None:
    armed = [True]

    def first(made: Any, x: Any) -> Any:
        if armed[0] and torch.cuda.is_current_stream_capturing():
            raise LookupError("mine")
        return made.linear(x)

    made = two_parts(first)
    with pytest.raises(LookupError, match="mine"):
        captured(made)
    assert not torch.cuda.is_current_stream_capturing()
    armed[0] = False
    run = captured(made)
    assert_equal(step(run, made, (0, 1)), step(made, made, (0, 1)))


def test_a_forward_that_catches_the_signal() -> None:
    class Made(torch.nn.Module):  # type: ignore[name-defined, misc]
        def forward(self, x: Any) -> Any:
            try:
                return self.a(x)
            except BaseException:
                return x

        @graph_part("a")
        def a(self, x: Any) -> Any:
            return x * 2

    with pytest.raises(errors.InvalidArgumentError, match="has caught PartialCapture"):
        captured(Made())


def test_what_waits_for_the_gpu_belongs_behind_the_boundary() -> None:
    made = two_parts(lambda made, x: made.linear(x) * x.sum().item())
    with pytest.raises(errors.InvalidArgumentError, match=r"cannot be captured.*behind the last part that is captured"):
        captured(made)
    assert not torch.cuda.is_current_stream_capturing()
    fine = two_parts(lambda made, x: made.linear(x), lambda made, y: y * y.sum().item())
    assert_equal(step(captured(fine), fine, (0, 1)), step(fine, fine, (0, 1)))


# ---- mistakes ----


def test_another_shape() -> None:
    run = captured(moe(), ALL)
    with pytest.raises(errors.InvalidArgumentError, match="A graph has fixed shapes: pad"):
        run(torch.zeros(3, WIDTH, device="cuda"))


def test_another_address() -> None:
    made = two_parts(lambda made, x: made.linear(x))
    run = captured(made)
    made.linear.weight = torch.nn.Parameter(made.linear.weight.detach().clone())
    with pytest.raises(errors.InvalidStateError, match=r"linear\.weight changed its address"):
        run(numbers(0))


def test_a_counter_in_python() -> None:
    def count(made: Any, x: Any) -> Any:
        made.calls += 1
        return made.linear(x)

    with pytest.raises(
        errors.InvalidArgumentError, match=r"a sets calls, which changes from 3 to 4\. A replay runs no Python"
    ):
        captured(two_parts(count, calls=0))


def test_a_list_that_grows() -> None:
    def note(made: Any, x: Any) -> Any:
        made.seen.append(1)
        return made.linear(x)

    with pytest.raises(errors.InvalidArgumentError, match="a sets seen, which changes its length from 3 to 4"):
        captured(two_parts(note, seen=[]))


def test_what_is_prepared_at_the_first_call_is_no_mistake() -> None:
    def prepare(made: Any, x: Any) -> Any:
        if not made.ready:
            made.ready = True
        return made.linear(x)

    made = two_parts(prepare, ready=False)
    assert_equal(step(captured(made), made, (0,)), step(made, made, (0,)))


def test_an_attribute_that_changes_later_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    made = two_parts(lambda made, x: made.linear(x) * made.scale, scale=2)
    run = captured(made)
    with caplog.at_level(logging.WARNING, "torch_memory_saver"):
        step(run, made, (0,))
        assert not caplog.records
        made.scale = 3
        step(run, made, (0, 1))
    assert [record.getMessage().split(": ", 1)[1].partition(".")[0] for record in caplog.records] == [
        "scale has changed from 2 to 3 since the capture"
    ]


def test_random_numbers_outside_of_the_parts() -> None:
    class Made(torch.nn.Module):  # type: ignore[name-defined, misc]
        def forward(self, x: Any) -> Any:
            return self.a(torch.nn.functional.dropout(x, 0.5))

        @graph_part("a")
        def a(self, x: Any) -> Any:
            return x * 2

    with pytest.raises(errors.InvalidArgumentError, match="draws random numbers before a and outside of a part"):
        captured(Made())


def test_a_part_out_of_scope_comes_first() -> None:
    with pytest.raises(errors.InvalidArgumentError, match="attn is not in the scope, but runs before moe_router"):
        captured(moe(), ("moe_router",))


def test_a_part_of_the_scope_that_does_not_run() -> None:
    with pytest.raises(errors.InvalidArgumentError, match="did not call c, which the scope contains"):
        captured(two_parts(lambda made, x: made.linear(x)), ("a", "c"))


def test_a_captured_part_that_runs_again() -> None:
    made = two_parts(lambda made, x: made.linear(x), lambda made, y: made.a(y))
    with pytest.raises(errors.InvalidStateError, match="calls a where no part in scope was called at the capture"):
        captured(made)(numbers(0))


def test_a_forward_that_takes_another_branch() -> None:
    class Made(torch.nn.Module):  # type: ignore[name-defined, misc]
        branch = "a"

        def forward(self, x: Any) -> Any:
            return getattr(self, type(self).branch)(x)

        @graph_part("a")
        def a(self, x: Any) -> Any:
            return x * 2

        @graph_part("b")
        def b(self, x: Any) -> Any:
            return x * 3

        def neither(self, x: Any) -> Any:
            return x

    runs = {branch: captured(Made()) for branch in ("b", "neither")}
    for branch, message in (
        ("b", "calls b where a was called at the capture"),
        ("neither", "did not call a, which was captured"),
    ):
        Made.branch = branch
        with pytest.raises(errors.InvalidStateError, match=message):
            runs[branch](numbers(0))


@pytest.mark.parametrize("scope", ["attn", (), (1,)])
def test_a_scope_that_is_no_collection_of_names(scope: Any) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="it must be the names of parts"):
        captured(moe(), scope)
