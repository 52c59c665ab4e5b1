"""Guards what micro-batches share: static inputs, graphs and pool memory, and the check that finds two uses at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_memory_saver.errors import InvalidArgumentError
from torch_memory_saver.layer_graphs.plan import pipeline_order
from torch_memory_saver.layer_graphs.plan.buffers import (
    Graph,
    GraphUse,
    assign_pool_memory,
    assign_static_inputs,
    find_overlap,
    graph_uses,
)

LAYERS = 3
GRAPHS = ("per_microbatch", "shared")


@st.composite
def orders(draw: st.DrawFn) -> tuple[int, ...]:
    pp, vpp = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    microbatches = pp * draw(st.integers(1, 4))
    return pipeline_order(pp, draw(st.integers(0, pp - 1)), microbatches, vpp)


def peak_in_flight(order: Sequence[int]) -> int:
    """The most micro-batches that are in flight at once, over all chunks."""
    return max(accumulate(1 if entry > 0 else -1 for entry in order))


def sum_of_peaks(order: Sequence[int]) -> int:
    """The sum of the most micro-batches that are in flight at once in each chunk."""
    return sum(peak_in_flight([entry for entry in order if abs(entry) == chunk]) for chunk in set(map(abs, order)))


def number_of_graphs(order: Sequence[int], layers: int, graphs: str = "per_microbatch") -> int:
    return len({use.graph for use in graph_uses(order, layers, graphs)})


def interleaved(rank: int, microbatches: int = 16) -> tuple[int, ...]:
    return pipeline_order(4, rank, microbatches, 2)


def static_input_of(order: Sequence[int], graphs: str) -> dict[Graph, set[int]]:
    """The static inputs that each forward graph reads."""
    numbers = assign_static_inputs(order, LAYERS, graphs=graphs).numbers
    read: dict[Graph, set[int]] = {}
    for use in graph_uses(order, LAYERS, graphs):
        if not use.graph.backward:
            number = numbers[use.graph.chunk][use.microbatch][use.graph.layer]
            read.setdefault(use.graph, set()).add(number)
    return read


def weak_references(uses: Sequence[GraphUse], kept: str) -> dict[Graph, int]:
    """The memory that a pool gives to graphs which are captured in the order of their first replays, if references are weak
    without regard to later replays: from the end of the graph's own capture, or from that of its backward."""
    memory: dict[Graph, int] = {}
    captured: list[tuple[GraphUse, int]] = []
    for use in uses:
        if use.graph in memory:
            continue
        held = {
            (other.graph.backward, number)
            for other, number in captured
            if kept == "until its backward" and other.last >= use.first
        }
        number = next(free for free in range(len(uses)) if (use.graph.backward, free) not in held)
        memory[use.graph] = number
        captured.append((use, number))
    # Forwards and backwards have memory of their own.
    return {graph: 2 * number + graph.backward for graph, number in memory.items()}


@pytest.mark.parametrize("microbatches", [8, 16, 32])
def test_static_inputs_are_in_proportion_to_what_is_in_flight(microbatches: int) -> None:
    made = [assign_static_inputs(interleaved(rank, microbatches), LAYERS) for rank in range(4)]
    assert [len(item.shapes) for item in made] == [LAYERS * peak for peak in (11, 9, 7, 5)]
    assert set(made[0].shapes) == {None}


def test_a_backward_frees_the_input_of_its_forward() -> None:
    numbers = assign_static_inputs([1, 1, -1, 1, -1, -1], 2).numbers
    assert numbers == (((0, 1), (2, 3), (0, 1)),)


def test_the_input_that_was_freed_first_is_taken_first() -> None:
    numbers = assign_static_inputs([1, 1, -1, -1, 1, -1, 1, -1]).numbers
    assert numbers == (((0,), (1,), (0,), (1,)),)


def test_inputs_of_other_shapes_are_not_taken() -> None:
    order = [1, 2, -2, -1, 1, 2, -2, -1]
    made = assign_static_inputs(order, (2, 1), shapes=[["tokens", "hidden"], ["hidden"]])
    assert made.shapes == ("tokens", "hidden", "hidden")
    assert made.numbers == (((0, 1), (0, 2)), ((2,), (1,)))


@given(orders(), st.sampled_from(GRAPHS))
def test_static_inputs_are_never_in_use_twice(order: tuple[int, ...], graphs: str) -> None:
    read = static_input_of(order, graphs)
    assert all(len(numbers) == 1 for numbers in read.values()), "a graph has its address for ever"
    uses = [use for use in graph_uses(order, LAYERS, graphs) if not use.graph.backward]
    assert find_overlap(uses, {graph: number for graph, (number,) in read.items()}) is None
    peak = sum_of_peaks(order) if graphs == "shared" else peak_in_flight(order)
    assert len(assign_static_inputs(order, LAYERS, graphs=graphs).shapes) == LAYERS * peak


def test_the_number_of_graphs() -> None:
    for microbatches in (8, 16, 32):
        shared = [number_of_graphs(interleaved(rank, microbatches), LAYERS, "shared") for rank in range(4)]
        assert shared == [2 * LAYERS * slots for slots in (12, 12, 10, 6)]
        each = {number_of_graphs(interleaved(rank, microbatches), LAYERS) for rank in range(4)}
        assert each == {2 * (2 * LAYERS) * microbatches}
    assert number_of_graphs(pipeline_order(1, 0, 9), LAYERS, "shared") == 2 * LAYERS


@given(st.integers(1, 6), st.integers(0, 5), st.integers(1, 12), st.integers(1, 4))
def test_the_number_of_graphs_of_plain_1f1b(pp: int, rank: int, microbatches: int, layers: int) -> None:
    order = pipeline_order(pp, rank % pp, microbatches)
    assert number_of_graphs(order, layers, "shared") == 2 * layers * min(pp - rank % pp, microbatches)
    assert number_of_graphs(order, layers) == 2 * layers * microbatches


@given(orders(), st.sampled_from(GRAPHS))
def test_the_graphs_that_are_used_are_as_many_as_counted(order: tuple[int, ...], graphs: str) -> None:
    uses = graph_uses(order, LAYERS, graphs)
    slots = sum_of_peaks(order) if graphs == "shared" else len(order) // 2
    assert len({use.graph for use in uses}) == 2 * LAYERS * slots
    assert len(uses) == LAYERS * len(order), "each layer runs once for each entry of the order"
    assert sorted(use.first for use in uses) == list(range(LAYERS * len(order)))


def test_the_time_in_which_memory_is_in_use() -> None:
    uses = graph_uses([1, 1, -1, -1], 2)
    assert [(use.graph.backward, use.graph.layer, use.microbatch, use.first, use.last) for use in uses] == [
        (False, 0, 0, 0, 5),
        (False, 1, 0, 1, 4),
        (False, 0, 1, 2, 7),
        (False, 1, 1, 3, 6),
        (True, 1, 0, 4, 5),
        (True, 0, 0, 5, 5),
        (True, 1, 1, 6, 7),
        (True, 0, 1, 7, 7),
    ]


def test_gradients_are_kept_until_the_chunks_backward_ends() -> None:
    """A tensor that layers 0 and 2 read has its gradient from layer 2 until layer 0 adds to it."""
    backwards = [use for use in graph_uses([1, -1], 3) if use.graph.backward]
    assert [(use.graph.layer, use.first, use.last) for use in backwards] == [(2, 3, 5), (1, 4, 5), (0, 5, 5)]


@given(orders(), st.sampled_from(GRAPHS))
def test_memory_is_shared_only_where_uses_never_overlap(order: tuple[int, ...], graphs: str) -> None:
    uses = graph_uses(order, LAYERS, graphs)
    memory = assign_pool_memory(uses)
    assert find_overlap(uses, memory) is None
    parts = len({number for graph, number in memory.items() if not graph.backward})
    if graphs == "per_microbatch":
        assert parts == LAYERS * peak_in_flight(order)
    else:
        assert LAYERS * peak_in_flight(order) <= parts <= LAYERS * sum_of_peaks(order)


@pytest.mark.parametrize("graphs", GRAPHS)
def test_the_pool_does_not_grow_with_the_microbatches(graphs: str) -> None:
    parts = [
        len(set(assign_pool_memory(graph_uses(interleaved(0, microbatches), LAYERS, graphs)).values()))
        for microbatches in (8, 16, 32)
    ]
    assert len(set(parts)) == 1


def test_weak_references_from_the_backward_on_are_enough_for_a_graph_a_microbatch() -> None:
    for rank in range(4):
        uses = graph_uses(interleaved(rank), LAYERS)
        assert find_overlap(uses, weak_references(uses, "until its backward")) is None


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize(
    ("graphs", "kept"),
    [("per_microbatch", "for its capture"), ("shared", "for its capture"), ("shared", "until its backward")],
)
def test_weak_references_without_regard_to_the_order_are_found(rank: int, graphs: str, kept: str) -> None:
    uses = graph_uses(interleaved(rank), LAYERS, graphs)
    memory = weak_references(uses, kept)
    found = find_overlap(uses, memory)
    assert found is not None
    first, second = found
    assert memory[first.graph] == memory[second.graph]
    assert first.first < second.first <= first.last
    assert (first.graph, first.microbatch) != (second.graph, second.microbatch)


def test_memory_planned_for_captures_in_another_order_is_found() -> None:
    """Forward and backward of one micro-batch after the other, as a capture without an order does it."""
    alone = (1, 2, -2, -1) * 16
    memory = assign_pool_memory(graph_uses(alone, LAYERS))
    assert find_overlap(graph_uses(alone, LAYERS), memory) is None
    found = find_overlap(graph_uses(interleaved(0), LAYERS), memory)
    assert found is not None
    assert [(use.graph.chunk, use.graph.layer, use.microbatch) for use in found] == [(0, 0, 0), (0, 0, 1)]


def test_one_graph_for_two_microbatches_in_flight_is_found() -> None:
    graph = Graph(False, 0, 0, 0)
    uses = (GraphUse(graph, 0, 0, 3), GraphUse(graph, 1, 1, 2))
    assert find_overlap(uses, {}) == uses
    assert find_overlap((GraphUse(graph, 0, 0, 3), GraphUse(graph, 1, 4, 5)), {}) is None


def test_uses_that_touch_overlap() -> None:
    """A step that reads memory cannot write it for another micro-batch."""
    uses = (GraphUse(Graph(False, 0, 0, 0), 0, 0, 1), GraphUse(Graph(False, 0, 0, 1), 1, 1, 2))
    assert find_overlap(uses, dict.fromkeys((use.graph for use in uses), "here")) == uses
    assert find_overlap(uses, {uses[0].graph: "here", uses[1].graph: "there"}) is None
    assert find_overlap(uses, {}) is None
    assert len(set(assign_pool_memory(uses).values())) == 2


def test_the_layers_must_fit_the_order() -> None:
    for layers in (0, (1,), (1, 2, 3), (1, 0), True):
        with pytest.raises(InvalidArgumentError, match="layers is"):
            graph_uses(interleaved(0), layers)
    with pytest.raises(InvalidArgumentError, match=r"shapes are for \[1, 1\] layers, but the chunks have \[2, 2\] layers"):
        assign_static_inputs(interleaved(0), 2, shapes=[["x"], ["x"]])
    with pytest.raises(InvalidArgumentError, match="graphs is 'one'"):
        graph_uses(interleaved(0), 1, "one")
    with pytest.raises(InvalidArgumentError, match="graphs is 'one'"):
        assign_static_inputs(interleaved(0), graphs="one")
    with pytest.raises(InvalidArgumentError, match="empty"):
        assign_static_inputs(())
