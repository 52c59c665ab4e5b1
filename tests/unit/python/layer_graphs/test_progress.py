"""Guards the position in a captured order: what comes next, what is refused, and what is waited for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from torch_memory_saver import layer_graphs
from torch_memory_saver.errors import InvalidArgumentError, InvalidStateError
from torch_memory_saver.layer_graphs.captured.progress import Progress
from torch_memory_saver.layer_graphs.plan.buffers import graph_uses

FORWARD, BACKWARD = False, True


class Send:
    """Counts how often it was waited for."""

    def __init__(self) -> None:
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1


def run(progress: Progress, *runs: tuple[bool, int, int], address: int = 0, discards: int = 0) -> list[int]:
    """Does runs, each with a result at the address, and returns their micro-batches."""
    found = []
    for backward, chunk, layer in runs:
        use = progress.begin(backward, chunk, layer, "graphs", discards)
        progress.end(use, [address])
        found.append(use.microbatch)
    return found


def test_the_order_gives_the_microbatches_and_begins_again() -> None:
    progress = Progress(graph_uses((1, 1, -1, -1), 1))
    step = [(FORWARD, 0, 0), (FORWARD, 0, 0), (BACKWARD, 0, 0), (BACKWARD, 0, 0)]
    for _ in range(2):
        assert run(progress, *step) == [0, 1, 0, 1]


def test_runs_out_of_turn_are_refused() -> None:
    progress = Progress(graph_uses((1, 2, -2, -1), 2))
    run(progress, (FORWARD, 0, 0))
    for wrong in ((FORWARD, 0, 0), (FORWARD, 1, 1), (BACKWARD, 0, 1)):
        with pytest.raises(InvalidStateError, match="but the forward of chunk 0, layer 1, for micro-batch 0 comes next"):
            progress.begin(*wrong, "graphs", 0)
    assert run(progress, (FORWARD, 0, 1), (FORWARD, 1, 0), (FORWARD, 1, 1), (BACKWARD, 1, 1)) == [0] * 4


def test_layers_without_a_backward_are_left_out() -> None:
    progress = Progress(graph_uses((1, -1), 2))
    progress.skip_backwards({(0, 0)})
    for _ in range(2):
        assert run(progress, (FORWARD, 0, 0), (FORWARD, 0, 1), (BACKWARD, 0, 1)) == [0] * 3


def test_what_is_in_flight_is_waited_for_once_and_not_too_early() -> None:
    progress = Progress(graph_uses((1, 1, -1, -1), 1))
    output, gradient = Send(), Send()
    run(progress, (FORWARD, 0, 0), address=1)
    progress.keep_for(1, output)
    run(progress, (FORWARD, 0, 0), (BACKWARD, 0, 0), address=2)
    progress.keep_for(2, gradient)
    assert output.waits == gradient.waits == 0, "the output is in use until its backward has run"
    run(progress, (BACKWARD, 0, 0))
    assert output.waits == gradient.waits == 1
    run(progress, (FORWARD, 0, 0))
    assert output.waits == gradient.waits == 1


@pytest.mark.parametrize("done", range(1, 8))
def test_discarded_results_are_refused_while_a_run_reads_them(done: int) -> None:
    """Two micro-batches one after the other: only between them nothing is in flight."""
    progress = Progress(graph_uses((1, -1, 1, -1), 2))
    step = [(FORWARD, 0, 0), (FORWARD, 0, 1), (BACKWARD, 0, 1), (BACKWARD, 0, 0)] * 2
    run(progress, *step[:done], discards=1)
    if done == 4:
        run(progress, *step[done:], discards=2)
        return
    with pytest.raises(InvalidStateError, match="a pause of tag 'graphs' has discarded results") as failure:
        run(progress, step[done], discards=2)
    assert failure.value.tag == "graphs"
    run(progress, *step[done:], discards=1)
    run(progress, *step, discards=3)


def test_discarded_results_of_micro_batches_in_flight() -> None:
    progress = Progress(graph_uses((1, 1, -1, -1), 1))
    run(progress, (FORWARD, 0, 0), (FORWARD, 0, 0), (BACKWARD, 0, 0))
    with pytest.raises(InvalidStateError, match="the backward of chunk 0, layer 0, for micro-batch 1"):
        run(progress, (BACKWARD, 0, 0), discards=1)
    progress.restart()
    assert run(progress, (FORWARD, 0, 0), discards=1) == [0]


def test_a_forward_without_a_backward_has_results_that_are_read() -> None:
    progress = Progress(graph_uses((1, -1), 2))
    progress.skip_backwards({(0, 0)})
    run(progress, (FORWARD, 0, 0))
    with pytest.raises(InvalidStateError, match="the forward of chunk 0, layer 1"):
        run(progress, (FORWARD, 0, 1), discards=1)
    run(progress, (FORWARD, 0, 1), (BACKWARD, 0, 1))
    run(progress, (FORWARD, 0, 0), discards=1)


def test_a_restart_waits_and_forgets() -> None:
    progress = Progress(graph_uses((1, -1), 1))
    send = Send()
    run(progress, (FORWARD, 0, 0), address=1)
    progress.keep_for(1, send)
    progress.restart()
    assert send.waits == 1 and progress.next().first == 0
    with pytest.raises(InvalidArgumentError, match="no output of a captured layer"):
        progress.keep_for(1, send)


def test_the_plans_need_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; from torch_memory_saver.layer_graphs.plan import pipeline_order"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert {"capture_layers", "LayerGraphs"} <= set(layer_graphs.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'capture_layer'"):
        layer_graphs.capture_layer  # noqa: B018
