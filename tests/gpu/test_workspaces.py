"""Guards that no workspace of cuBLAS lies in memory that a pause unmaps, and that no captured graph loses the one that it
uses."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator
from queue import SimpleQueue
from typing import Any

import pytest
from gpu_programs import Program, run_programs
from gpu_support import (
    MIB,
    SIMULATED,
    STARTED_PRELOADED,
    core,
    empty,
    fill_random,
    is_managed,
    saver,
    skip_where_the_outer_pool_wins,
    torch,
)

#: The width of matrices whose product uses the workspace on a real GPU, and which are not of its size.
WIDTH = 64 if SIMULATED else 5120


def ones() -> Any:
    return torch.ones(WIDTH, WIDTH, device="cuda", dtype=torch.float32 if SIMULATED else torch.bfloat16)


def check_product(matrix: Any) -> None:
    """A product on this thread and its current stream is right. It comes after what other streams do."""
    torch.cuda.synchronize()
    product = matrix @ matrix
    torch.cuda.current_stream().synchronize()
    assert bool((product == WIDTH).all())


def workspaces_in(tag: str, state: int | None = None) -> list[int]:
    """The addresses of live blocks of the size of a workspace in the tag's memory, or in that in one state."""
    from torch_memory_saver._torch.graphs.kept_objects import workspace_sizes

    return blocks_in(tag, workspace_sizes(), state)


def blocks_in(tag: str, sizes: Collection[int], state: int | None = None) -> list[int]:
    """The addresses of live blocks of some sizes in the tag's memory, or in that in one state."""
    rows = [row for row in core.segments() if row.tag == tag and state in (None, row.state)]
    managed = {row.address for row in rows}
    return [
        block["address"]
        for segment in torch.cuda.memory_snapshot()
        if segment["address"] in managed
        for block in segment["blocks"]
        if block["requested_size"] in sizes and block["state"] != "inactive"
    ]


class Worker:
    """A thread that lives on between its calls."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._results: SimpleQueue[BaseException | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
                self._results.put(None)
            except BaseException as error:
                self._results.put(error)

    def call(self, work: Callable[[], None]) -> None:
        self._calls.put(work)
        error = self._results.get(timeout=60)
        if error is not None:
            raise error

    def end(self) -> None:
        self._calls.put(None)
        self._thread.join(60)


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.end()


@pytest.fixture
def side() -> Any:
    """Returns a stream that is not the current one."""
    return torch.cuda.Stream()


# ---- workspaces in the memory of a region ----


def test_the_first_product_is_in_a_region() -> None:
    ordinary = ones()
    with saver.region(tag="engine", enable_cpu_backup=True):
        kept = ones()
        check_product(kept)
    assert workspaces_in("engine")
    saver.pause("engine")
    assert not workspaces_in("engine")
    check_product(ordinary)
    saver.resume("engine")
    check_product(kept)
    check_product(ordinary)


def test_cublaslt_as_well() -> None:
    ordinary = ones()
    bias = torch.zeros_like(ordinary[0])
    with saver.region(tag="engine"):
        kept = torch.nn.functional.linear(ones(), ones(), bias)
    saver.pause("engine")
    assert not workspaces_in("engine")
    result = torch.nn.functional.linear(ordinary, ordinary, bias)
    assert bool((result == WIDTH).all())
    del kept


def test_the_thread_and_stream_of_the_pause_have_their_workspace_at_once() -> None:
    ordinary = ones()
    with saver.region(tag="engine"):
        check_product(ordinary)
    saver.pause("engine")
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.current_blas_handle()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocations


def test_another_thread_worked_in_a_region(worker: Worker) -> None:
    ordinary = ones()

    def first() -> None:
        with saver.region(tag="engine"):
            check_product(ordinary)

    worker.call(first)
    assert workspaces_in("engine")
    saver.pause("engine")
    worker.call(lambda: check_product(ordinary))
    check_product(ordinary)


def test_another_stream_was_current_in_a_region(side: Any) -> None:
    ordinary = ones()
    with saver.region(tag="engine"), torch.cuda.stream(side):
        check_product(ordinary)
    saver.pause("engine")
    with torch.cuda.stream(side):
        check_product(ordinary)


def test_the_first_product_is_in_backward() -> None:
    x = ones().requires_grad_()
    product = x @ x
    torch._C._cuda_clearCublasWorkspaces()
    with saver.region(tag="engine", enable_cpu_backup=True):
        product.sum().backward()
    assert workspaces_in("engine")
    saver.pause("engine")
    check_product(x.detach())
    product = x @ x
    (gradient,) = torch.autograd.grad(product.sum(), x)
    assert bool((gradient == 2 * WIDTH).all())
    saver.resume("engine")
    assert x.grad is not None and bool((x.grad == 2 * WIDTH).all())


def test_no_memory_is_left_to_autograd_s_thread_when_a_capture_begins() -> None:
    """Autograd's thread drops the gradients after the calling thread went on. Where PyTorch does not cache, that would free
    memory in the capture, which ends the process."""
    from torch_memory_saver._torch.graphs.kept_objects import _call_in_backward

    seen: list[int] = []
    before = torch.cuda.memory_allocated()
    _call_in_backward(torch, torch.cuda.current_device(), lambda: seen.append(torch.cuda.memory_allocated()))
    assert seen == [before]


@pytest.mark.parametrize("paused", ["inner", "outer"])
def test_nested_regions(paused: str, side: Any) -> None:
    ordinary = ones()
    with saver.region(tag="outer"):
        check_product(ordinary)
        with saver.region(tag="inner"), torch.cuda.stream(side):
            check_product(ordinary)
    saver.pause(paused)
    assert not workspaces_in(paused)
    check_product(ordinary)
    with torch.cuda.stream(side):
        check_product(ordinary)


def test_a_pause_inside_the_region() -> None:
    ordinary = ones()
    with saver.region(tag="engine"):
        check_product(ordinary)
        saver.pause("engine")
        assert not workspaces_in("engine", core.STATE_PAUSED)
        check_product(ordinary)
    saver.resume("engine")
    with saver.region(tag="engine"):
        check_product(ordinary)
    saver.pause("engine")
    check_product(ordinary)


def test_disable_inside_a_region() -> None:
    ordinary = ones()
    with saver.region(tag="engine"):
        kept = empty(2 * MIB)
        with saver.disable():
            check_product(ordinary)
    assert not workspaces_in("engine")
    saver.pause("engine")
    check_product(ordinary)
    del kept


def test_cycles_in_which_every_region_makes_one_again() -> None:
    ordinary = ones()
    for _ in range(3):
        with saver.region(tag="engine"):
            torch._C._cuda_clearCublasWorkspaces()
            check_product(ordinary)
        saver.pause("engine")
        check_product(ordinary)
        saver.resume("engine")


# ---- what must not be mistaken for a workspace, and what must not happen ----


def test_tensors_of_that_size_keep_their_contents(caplog: pytest.LogCaptureFixture) -> None:
    check_product(ones())
    with saver.region(tag="cache", enable_cpu_backup=True):
        tensors = [empty(size) for size in (32 * MIB, MIB)]
    for seed, tensor in enumerate(tensors):
        fill_random(tensor, seed)
    expected = [tensor.clone() for tensor in tensors]
    with caplog.at_level(logging.INFO, logger="torch_memory_saver"):
        saver.pause("cache")
    assert not [record for record in caplog.records if "workspace" in record.getMessage()]
    check_product(ones())
    saver.resume("cache")
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, expected, strict=True))


def test_a_region_and_a_pause_initialise_nothing() -> None:
    (done,) = run_programs([Program("no_blas.py")])
    assert done.check().output.splitlines()[-1] == "ok"


@pytest.mark.outer
def test_everything_is_managed() -> None:
    environment = (("TMS_INIT_ENABLE", "1"),)
    programs = [Program("managed_workspaces.py", arguments, environment, True) for arguments in ((), ("graph",))]
    assert [done.check().output.splitlines()[-1] for done in run_programs(programs)] == ["ok"] * 2


# ---- captured graphs ----


def captured_product(matrix: Any, stream: Any) -> tuple[Any, Any]:
    """A plain graph of a product after the usual warm-up, and its output."""
    with torch.cuda.stream(stream):
        check_product(matrix)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        output = matrix @ matrix
    return graph, output


def check_replay(graph: Any, output: Any) -> None:
    output.zero_()
    graph.replay()
    assert bool((output == WIDTH).all())


def test_a_graph_uses_the_workspace_of_a_stream_that_was_used_in_a_region(side: Any) -> None:
    ordinary = ones()
    with saver.region(tag="engine"), torch.cuda.stream(side):
        check_product(ordinary)
    graph, output = captured_product(ordinary, side)
    saver.pause("engine")
    check_replay(graph, output)
    with torch.cuda.stream(side):
        check_product(ordinary)
    saver.resume("engine")
    check_replay(graph, output)


def test_a_graph_keeps_its_workspace_when_a_pause_frees_others(side: Any, worker: Worker) -> None:
    """Neither other tensors of its stream nor the driver get the memory of the graph's workspace."""
    ordinary = ones()
    graph, output = captured_product(ordinary, side)
    worker.call(lambda: work_in_region(ordinary))
    saver.pause("engine")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        tensors = [empty(32 * MIB).fill_(1) for _ in range(4)]
    torch.cuda.current_stream().wait_stream(side)
    for _ in range(2):
        check_replay(graph, output)
    assert all(bool((tensor == 1).all()) for tensor in tensors)
    del tensors
    torch.cuda.empty_cache()
    check_replay(graph, output)
    worker.call(lambda: check_product(ordinary))


def work_in_region(matrix: Any) -> None:
    with saver.region(tag="engine"):
        check_product(matrix)


def test_captures_one_after_another_share_the_workspace_of_their_stream(side: Any) -> None:
    ordinary = ones()
    graphs = [captured_product(ordinary, side) for _ in range(2)]
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    graphs += [captured_product(ordinary, side) for _ in range(2)]
    torch.cuda.empty_cache()
    outputs = 2 * 2 * max(2 * MIB, ordinary.nbytes)
    assert torch.cuda.memory_reserved() <= reserved + outputs
    for graph, output in graphs:
        check_replay(graph, output)


def test_a_pause_frees_workspaces_while_torch_prepares_a_capture(
    side: Any, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.cuda.graph synchronizes before it begins. The graph's pool has no workspace nevertheless."""
    ordinary, graph = ones(), torch.cuda.CUDAGraph()
    worker.call(lambda: work_in_region(ordinary))
    synchronize, paused = torch.cuda.synchronize, []

    def synchronize_and_pause(*arguments: Any) -> None:
        synchronize(*arguments)
        if not paused:
            paused.append(True)
            worker.call(lambda: work_in_region(ordinary))
            worker.call(lambda: saver.pause("engine"))

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", synchronize_and_pause)
        with saver.cuda_graph(graph, tag="graphs", stream=side):
            output = ordinary @ ordinary
    assert paused and workspaces_in("graphs") == []
    saver.pause("graphs")
    with torch.cuda.stream(side):
        check_product(ordinary)
    saver.resume()
    check_replay(graph, output)
    worker.call(lambda: check_product(ordinary))


def test_a_graph_s_pool_has_the_workspace_of_another_stream(side: Any) -> None:
    """A stream that takes part in a capture gets its workspace inside it, from the graph's pool."""
    ordinary = ones()
    check_product(ordinary)
    graph, capturing = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with saver.cuda_graph(graph, tag="graphs", stream=capturing):
        first = ordinary @ ordinary
        side.wait_stream(capturing)
        with torch.cuda.stream(side):
            second = first @ ordinary
        capturing.wait_stream(side)
    assert workspaces_in("graphs")
    saver.pause("graphs")
    with torch.cuda.stream(side):
        check_product(ordinary)
    saver.resume("graphs")
    graph.replay()
    torch.cuda.synchronize()
    assert bool((second == WIDTH * WIDTH).all())


def test_a_graph_that_was_captured_before_the_first_use() -> None:
    programs = [Program("early_graph.py", arguments, preload=STARTED_PRELOADED) for arguments in ((), ("later",))]
    assert [done.check().output.splitlines()[-1] for done in run_programs(programs)] == ["ok"] * 2


# ---- states of random numbers ----


def test_the_generator_s_state_for_graphs_is_not_in_a_region() -> None:
    skip_where_the_outer_pool_wins()
    graph = torch.cuda.CUDAGraph()
    with saver.region(tag="engine"):
        kept = empty(2 * MIB)
        with torch.cuda.graph(graph):
            numbers = torch.rand(1024, device="cuda")
    assert not blocks_in("engine", (8,))
    saver.pause("engine")
    if not core.preloaded:  # there the graph's pool is managed as well
        graph.replay()
        first = numbers.clone()
        graph.replay()
        assert not torch.equal(first, numbers)
    saver.resume("engine")
    graph.replay()
    torch.cuda.synchronize()
    del kept


@pytest.mark.skipif(not SIMULATED, reason="replaces PyTorch's operator by a stand-in")
def test_the_state_of_cudnn_s_dropout_is_not_in_a_region() -> None:
    def allocate(dropout: float, train: bool, seed: int, **options: Any) -> Any:
        return torch.empty(6 * MIB, dtype=torch.uint8, device=options["device"])

    with saver.region(tag="engine"):
        pass  # the first use replaces the operator that selects the device
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("_cudnn_init_dropout_state", allocate, "CUDA", allow_override=True)
        with saver.region(tag="engine"):
            inside = torch._cudnn_init_dropout_state(0.5, True, 1, dtype=torch.uint8, device="cuda")
            tensor = empty(2 * MIB)
        outside = torch._cudnn_init_dropout_state(0.5, True, 1, dtype=torch.uint8, device="cuda")
    finally:
        library._destroy()
    assert is_managed(tensor)
    assert not is_managed(inside) and not is_managed(outside)


@pytest.mark.real_gpu("cuDNN is not simulated")
def test_a_recurrent_network_with_dropout_runs_first_in_a_region() -> None:
    network = torch.nn.LSTM(16, 16, 2, dropout=0.5).cuda()
    sequence = torch.ones(4, 2, 16, device="cuda")
    torch.cuda.set_rng_state(torch.cuda.get_rng_state())  # the next use allocates the state
    with saver.region(tag="engine"):
        network(sequence)
    saver.pause("engine")
    result, _state = network(sequence)
    torch.cuda.synchronize()
    assert bool(result.isfinite().all())
