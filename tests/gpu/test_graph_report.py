"""Guards the report on a plain graph: its pool, what was in use at once, workspaces, and the launches that it replaces."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_support import MIB, core, errors, release_everything, saver, torch

pytestmark = pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # of captures that fail

NUMBERS = MIB  # 4 MiB of float32
KEPT = 100


def graph_report(graph: Any, **keywords: Any) -> Any:
    from torch_memory_saver.layer_graphs import graph_report

    return graph_report(graph, **keywords)


def measure_capture(graph: Any) -> Any:
    from torch_memory_saver.layer_graphs import measure_capture

    return measure_capture(graph)


def step(x: Any) -> Any:
    """Four kernels. Two tensors of 12 MiB are alive at once, and 100 numbers stay."""
    one = x + 1
    three = one.expand(3, -1) + 1
    del one
    doubled = three * 2
    kept = doubled[0, :KEPT] + 1
    del three, doubled
    return kept


def captured(work: Any, *arguments: Any, measured: bool = True, **keywords: Any) -> tuple[Any, Any]:
    graph = torch.cuda.CUDAGraph()
    with saver.cuda_graph(graph, **({"tag": "graph"} | keywords)):
        if not measured:
            return graph, work(*arguments)
        with measure_capture(graph):
            return graph, work(*arguments)


def numbers() -> Any:
    return torch.ones(NUMBERS, device="cuda")


def managed_segments() -> list[int]:
    return [row.reserved_bytes for row in core.segments() if row.tag == "graph"]


def test_what_a_graph_takes() -> None:
    release_everything()
    graph, kept = captured(step, numbers())
    report = graph_report(graph)
    assert report.segments == len(managed_segments())
    assert report.pool_bytes == report.managed_bytes == sum(managed_segments()) > 0
    assert report.peak_bytes == 2 * 3 * NUMBERS * 4 + KEPT * 4
    assert report.held_bytes == KEPT * 4
    assert report.free_bytes == report.pool_bytes - KEPT * 4
    assert report.fragmentation == 1 - report.peak_bytes / report.pool_bytes
    assert (report.kernels, report.copies, report.other_nodes) == (4, 0, 0)
    assert report.launches == 4
    assert report.workspace_bytes is None
    assert saver.pause("graph").bytes == report.managed_bytes
    assert graph_report(graph) == report
    saver.resume("graph")
    assert graph_report(graph) == report
    graph.replay()
    assert bool((kept == 7).all())
    del kept
    assert graph_report(graph).held_bytes == 0


def test_the_report_is_a_table() -> None:
    graph, _kept = captured(step, numbers())
    lines = str(graph_report(graph)).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert any(line.split() == ["in", "use", "at", "once", "at", "most", "24.0", "MiB"] for line in lines)
    assert any(line.split() == ["kernels", "4"] for line in lines)


def test_intermediates_alive_at_once_decide_the_size_and_not_their_number() -> None:
    def many(x: Any, times: int) -> Any:
        for _ in range(times):
            x = x + 1
        return x[:KEPT].clone()

    (few, _a), (more, _b) = captured(many, numbers(), 3), captured(many, numbers(), 30)
    first, second = graph_report(few), graph_report(more)
    assert first.pool_bytes == second.pool_bytes
    assert first.peak_bytes == second.peak_bytes == 2 * NUMBERS * 4
    assert second.launches - first.launches == 27


def test_a_copy_is_a_launch_too() -> None:
    x, to = numbers(), numbers()
    graph, _ = captured(lambda: to.copy_(x + 1))
    assert graph_report(graph).launches == 2
    assert graph_report(graph).kernels >= 1


def test_a_graph_that_was_not_measured_has_no_invented_figures() -> None:
    graph, _kept = captured(step, numbers(), measured=False)
    report = graph_report(graph)
    assert report.pool_bytes == report.managed_bytes > 0 and report.held_bytes == KEPT * 4
    unknown = (report.peak_bytes, report.fragmentation, report.launches, report.kernels, report.copies, report.other_nodes)
    assert set(unknown) == {None}
    assert "not measured" in str(report)


def test_a_pool_that_graphs_share_is_reported_with_what_the_first_one_holds() -> None:
    token = torch.cuda.graph_pool_handle()
    first, kept = captured(lambda x: x * 2, numbers(), pool=token)
    alone = graph_report(first)
    second, _also_kept = captured(step, numbers(), pool=token)
    both = graph_report(second)
    assert alone.peak_bytes == alone.held_bytes == kept.nbytes
    assert both.peak_bytes == kept.nbytes + 2 * 3 * NUMBERS * 4 + KEPT * 4
    assert graph_report(first).pool_bytes == both.pool_bytes > alone.pool_bytes


def test_what_others_allocate_meanwhile_is_not_the_graphs() -> None:
    """Memory that is freed during the capture, but lies elsewhere."""
    x, other = numbers(), [numbers()]
    graph, _kept = captured(lambda: (step(x), other.clear()))
    assert graph_report(graph).peak_bytes == 2 * 3 * NUMBERS * 4 + KEPT * 4


# ---- workspaces ----


def test_clearing_workspaces_says_how_much_of_the_pool_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor stands for the workspace, which PyTorch keeps until its caller clears it."""
    workspaces: list[Any] = []

    def with_workspace(x: Any) -> Any:
        workspaces.append(torch.empty(8 * MIB, dtype=torch.uint8, device="cuda"))
        return step(x)

    graph, _kept = captured(with_workspace, numbers())
    before = graph_report(graph)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", workspaces.clear)
    after = graph_report(graph, clear_workspaces=True)
    assert before.held_bytes == 8 * MIB + KEPT * 4 and before.workspace_bytes is None
    assert after.held_bytes == KEPT * 4 and after.workspace_bytes == 8 * MIB
    assert after.peak_bytes == before.peak_bytes


def test_no_workspace_lies_in_a_graph_s_pool() -> None:
    x = torch.ones(256, 256, device="cuda", requires_grad=True)
    torch._C._cuda_clearCublasWorkspaces()

    def forward_and_backward() -> Any:
        return torch.autograd.grad(x @ x, x, torch.ones_like(x))[0]

    graph, gradient = captured(forward_and_backward, stream=torch.cuda.Stream())
    assert graph_report(graph, clear_workspaces=True).workspace_bytes == 0
    gradient.zero_()
    graph.replay()
    assert bool((gradient == 512).all())


def test_a_pause_takes_no_workspace_from_others_on_the_stream() -> None:
    x = torch.ones(256, 256, device="cuda")
    torch._C._cuda_clearCublasWorkspaces()
    stream = torch.cuda.Stream()
    _first, _product = captured(lambda: x @ x, stream=stream)
    second, other = captured(lambda: x @ x, stream=stream, tag="other")
    saver.pause("graph")
    other.zero_()
    second.replay()
    assert bool((other == 256).all())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        eager = x @ x
    torch.cuda.current_stream().wait_stream(stream)
    assert bool((eager == 256).all())
    saver.resume("graph")


# ---- what is refused ----


def test_a_graph_that_was_never_captured() -> None:
    with pytest.raises(errors.InvalidArgumentError, match="needs a graph that was captured"):
        graph_report(torch.cuda.CUDAGraph())


def test_measuring_outside_of_a_capture() -> None:
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(errors.InvalidStateError, match="must be used inside of a capture"), measure_capture(graph):
        pass


def test_a_history_that_the_program_records_goes_on() -> None:
    x = numbers()
    torch.cuda.memory._record_memory_history("all", context=None)
    try:
        with pytest.raises(errors.InvalidStateError, match="already records its allocations"):
            captured(step, x)
        assert torch._C._cuda_isHistoryEnabled()
    finally:
        torch.cuda.memory._record_memory_history(None)
    graph, kept = captured(step, x)
    graph.replay()
    assert bool((kept == 7).all())


def test_a_step_that_fails_leaves_no_history_on() -> None:
    def fails() -> None:
        raise LookupError("in the step")

    with pytest.raises(LookupError, match="in the step"):
        captured(fails)
    assert not torch._C._cuda_isHistoryEnabled()


def test_workspaces_are_not_cleared_during_a_capture() -> None:
    graph, _kept = captured(step, numbers())
    other = torch.cuda.CUDAGraph()
    with pytest.raises(errors.CaptureInProgressError, match="workspaces"), saver.cuda_graph(other, tag="other"):
        graph_report(graph, clear_workspaces=True)
