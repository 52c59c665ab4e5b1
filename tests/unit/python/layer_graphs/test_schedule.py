"""Guards the schedules: the published sequences, what holds for every order, and the bubble against a simulated timeline."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_memory_saver import layer_graphs
from torch_memory_saver.errors import InvalidArgumentError
from torch_memory_saver.layer_graphs.plan import Timeline, bubble_fraction, pipeline_order
from torch_memory_saver.layer_graphs.plan.orders import passes
from torch_memory_saver.layer_graphs.plan.schedule import schedule_table, warmup_count
from torch_memory_saver.layer_graphs.plan.timeline import run_orders

#: Ranks, chunks, group, micro-batches.
Shape = tuple[int, int, int, int]


def order_of(text: str) -> tuple[int, ...]:
    return tuple(int(entry) for entry in text.split())


def orders(pp: int, microbatches: int, vpp: int = 1, group: int | None = None) -> list[tuple[int, ...]]:
    return [pipeline_order(pp, rank, microbatches, vpp, group) for rank in range(pp)]


@st.composite
def shapes(draw: st.DrawFn, regular: bool = True) -> Shape:
    """Pipelines. Regular: each group has as many micro-batches as there are ranks, or more."""
    pp, vpp = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    group = draw(st.integers(pp if regular else 1, 9))
    most = draw(st.integers(0, 3)) * group
    microbatches = draw(st.integers(pp, group)) + most if regular and vpp > 1 else draw(st.integers(1, 24))
    return pp, vpp, group, microbatches


def test_the_number_of_warm_up_forwards() -> None:
    assert [warmup_count(4, rank) for rank in range(4)] == [3, 2, 1, 0]
    assert [warmup_count(4, rank, 2, 4) for rank in range(4)] == [10, 8, 6, 4]
    assert warmup_count(4, 0, 2) == 10, "the group is the pipeline's size"
    assert warmup_count(2, 0, 2, 3) == 5
    assert warmup_count(8, 3, 3, 10) == 2 * 4 + 2 * 10
    assert warmup_count(1, 0) == 0
    assert warmup_count(4, 0, 1, 100) == 3, "one chunk has no groups"


def test_the_table_runs_a_group_in_each_chunk() -> None:
    first = [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
    assert schedule_table(5, 2, 3) == (*first, (3, 0), (4, 0), (3, 1), (4, 1))
    assert schedule_table(2, 1, 5) == ((0, 0), (1, 0))


def test_a_last_group_that_is_smaller() -> None:
    assert warmup_count(2, 0, 2, 3) == 5
    assert pipeline_order(2, 0, 5, 2, 3) == order_of("1 1 1 2 2 2 -2 1 -2 1 -2 2 -1 2 -1 -1 -2 -2 -1 -1")


def test_four_ranks_with_two_chunks() -> None:
    warm_up, steady = "1 1 1 1 2 2 2 2 1 1", "1 -2 1 -2 2 -2 2 -2 2 -1 2 -1"
    assert pipeline_order(4, 0, 8, 2) == order_of(f"{warm_up} {steady} -1 -1 -2 -2 -2 -2 -1 -1 -1 -1")
    assert pipeline_order(4, 3, 8, 2)[:10] == order_of("1 1 1 1 2 -2 2 -2 2 -2")


def test_plain_1f1b() -> None:
    assert pipeline_order(4, 0, 5) == order_of("1 1 1 1 -1 1 -1 -1 -1 -1")
    assert pipeline_order(4, 3, 3) == order_of("1 -1 1 -1 1 -1")
    assert pipeline_order(4, 0, 2) == order_of("1 1 -1 -1"), "fewer micro-batches than warm-up forwards"


@pytest.mark.parametrize("microbatches", [1, 2, 5])
def test_without_a_pipeline(microbatches: int) -> None:
    assert pipeline_order(1, 0, microbatches) == (1, -1) * microbatches


def peak_in_flight(order: Sequence[int]) -> int:
    """The most micro-batches that are in flight at once, over all chunks."""
    return max(accumulate(1 if entry > 0 else -1 for entry in order))


@pytest.mark.parametrize("microbatches", [8, 16, 32])
def test_the_peak_does_not_grow_with_the_microbatches(microbatches: int) -> None:
    assert [peak_in_flight(order) for order in orders(4, microbatches, 2)] == [11, 9, 7, 5]


@given(shapes())
def test_every_order_is_whole_and_can_run(shape: Shape) -> None:
    pp, vpp, group, microbatches = shape
    made = orders(pp, microbatches, vpp, group)
    entries = {entry: microbatches for chunk in range(1, vpp + 1) for entry in (chunk, -chunk)}
    for rank, order in enumerate(made):
        assert Counter(order) == entries
        assert all(item.forward < item.backward for item in passes(order))
        warmup = warmup_count(pp, rank, vpp, group)
        assert peak_in_flight(order) == min(warmup + 1, vpp * microbatches)
        assert order[: min(warmup, vpp * microbatches)] == tuple(entry for entry in order if entry > 0)[:warmup]
    check_dependencies(run_orders(made, 3, 5), pp)


def check_dependencies(timeline: Timeline, pp: int) -> None:
    """Nothing runs before what it needs, and a rank does one thing at a time."""
    ends = {
        (work.backward, work.chunk * pp + rank, work.microbatch): work.end
        for rank, row in enumerate(timeline.ranks)
        for work in row
    }
    last = max(stage for _, stage, _ in ends)
    for rank, row in enumerate(timeline.ranks):
        assert all(before.end <= work.start for before, work in pairwise(row))
        for work in row:
            assert work.end - work.start == (5 if work.backward else 3)
            stage = work.chunk * pp + rank
            if work.backward:
                assert work.start >= ends[False, stage, work.microbatch]
            if 0 <= (other := stage + (1 if work.backward else -1)) <= last:
                assert work.start >= ends[work.backward, other, work.microbatch]


@given(shapes(), st.integers(1, 5), st.integers(1, 5))
def test_the_bubble_is_that_of_the_timeline(shape: Shape, forward: int, backward: int) -> None:
    pp, vpp, group, microbatches = shape
    timeline = run_orders(orders(pp, microbatches, vpp, group), forward, backward)
    assert timeline.ideal == vpp * microbatches * (forward + backward)
    assert timeline.step - timeline.ideal == (pp - 1) * (forward + backward)
    bubble = bubble_fraction(pp, microbatches, vpp, group, forward=forward, backward=backward)
    assert bubble.of_ideal == (pp - 1) / (vpp * microbatches) == pytest.approx(timeline.bubble.of_ideal)
    assert bubble.of_step == pytest.approx(timeline.bubble.of_step)
    idle = [timeline.step - sum(work.end - work.start for work in row) for row in timeline.ranks]
    assert idle == [timeline.step - timeline.ideal] * pp


@given(shapes(regular=False))
def test_an_irregular_group_waits_longer_or_is_refused(shape: Shape) -> None:
    pp, vpp, group, microbatches = shape
    remainder = microbatches % group
    least = (pp - 1) / (vpp * microbatches)
    try:
        bubble = bubble_fraction(pp, microbatches, vpp, group)
    except InvalidArgumentError as error:
        assert "for ever" in str(error)
        with pytest.raises(InvalidArgumentError, match="for ever"):
            pipeline_order(pp, 0, microbatches, vpp, group)
        assert vpp > 1 and (group < pp or 0 < remainder < pp)
        return
    measured = run_orders(orders(pp, microbatches, vpp, group)).bubble
    assert (bubble.of_ideal, bubble.of_step) == pytest.approx((measured.of_ideal, measured.of_step))
    if vpp > 1 and pp > 1 and (group < pp or 0 < remainder < pp):
        assert bubble.of_ideal > least
    else:
        assert bubble.of_ideal == least


def test_the_bubble_of_a_last_group() -> None:
    assert bubble_fraction(4, 8, 2).of_ideal == 3 / 16
    assert bubble_fraction(4, 8, 2).of_step == 3 / 19
    assert bubble_fraction(2, 5, 2, 3).of_ideal == 1 / 10, "the last group has as many as there are ranks"
    assert bubble_fraction(2, 5, 2, 2).of_ideal > 1 / 10, "the last group has fewer"
    with pytest.raises(InvalidArgumentError, match="for ever"):
        pipeline_order(4, 0, 5, 3, 4)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ([], "must be a rank"),
        ([(1, -1), ()], "must be a rank"),
        ([(1, -1), (1, -1, 1, -1)], "rank 1 has other"),
        ([(1, 1, -1, -1), (1, 2, -2, -1)], "rank 1 has other"),
        ([(1, 2, -2, -1), (2, 1, -2, -1)], "rank 0 at position 1, .* rank 1 at position 0, the forward of chunk 1"),
    ],
)
def test_orders_that_cannot_run(made: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        run_orders(made)


@pytest.mark.parametrize("durations", [(0, 1), (1, 0), (-1, 2), (float("nan"), 1)])
def test_durations_are_positive(durations: tuple[float, float]) -> None:
    with pytest.raises(InvalidArgumentError, match="above 0"):
        run_orders([(1, -1)], *durations)
    with pytest.raises(InvalidArgumentError, match="above 0"):
        bubble_fraction(2, 2, forward=durations[0], backward=durations[1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0, 1), "pp is 0"),
        ((2, 2, 1), "rank is 2"),
        ((2, -1, 1), "rank is -1"),
        ((2, True, 1), "rank is True"),
        ((2, 0, 0), "microbatches is 0"),
        ((2, 0, 1, 0), "vpp is 0"),
        ((2, 0, 1, 1, 0), "group is 0"),
        ((2, 0, 1.0), "microbatches is 1.0"),
    ],
)
def test_arguments_out_of_range(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        pipeline_order(*arguments)


def test_the_import_needs_neither_torch_nor_matplotlib() -> None:
    program = "import sys, torch_memory_saver.layer_graphs\nprint({'torch', 'matplotlib', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout == "set()\n"


def test_every_public_name_is_there_and_explained() -> None:
    for name in sorted(set(layer_graphs.__all__) - set(layer_graphs._NEED_TORCH)):
        assert getattr(layer_graphs, name).__doc__, name
