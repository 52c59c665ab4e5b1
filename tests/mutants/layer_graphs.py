"""Bugs in torch_memory_saver.layer_graphs: orders, timelines, and what micro-batches share."""

from __future__ import annotations

from mutant import Mutant

__all__ = ["MUTANTS"]

_SOURCES = "torch_memory_saver/layer_graphs/"
_TESTS = "tests/unit/python/layer_graphs/"
_GPU = "torch:tests/gpu/"

MUTANTS = (
    Mutant(
        "a-warm-up-of-one-forward-a-later-rank",
        _SOURCES + "schedule.py",
        "after * 2 + (vpp - 1) * group",
        "after + (vpp - 1) * group",
        (_TESTS + "test_schedule.py::test_the_number_of_warm_up_forwards",),
    ),
    Mutant(
        "backwards-begin-with-the-first-chunk",
        _SOURCES + "schedule.py",
        "backwards = [chunk - chunks for",
        "backwards = [-chunk - 1 for",
        (_TESTS + "test_schedule.py::test_a_last_group_that_is_smaller",),
    ),
    Mutant(
        "a-small-last-group-costs-nothing",
        _SOURCES + "schedule.py",
        "(last == 0 or last >= pp)",
        "(last == 0 or last < pp)",
        (_TESTS + "test_schedule.py::test_the_bubble_of_a_last_group",),
    ),
    Mutant(
        "work-begins-before-what-it-needs",
        _SOURCES + "timeline.py",
        "max(self.now, ends[needed])",
        "self.now",
        (_TESTS + "test_schedule.py::test_every_order_is_whole_and_can_run",),
    ),
    Mutant(
        "a-static-input-is-never-freed",
        _SOURCES + "buffers.py",
        "            for number in taken[key]:\n                stock.give_back(number)",
        "            continue",
        (_TESTS + "test_buffers.py::test_a_backward_frees_the_input_of_its_forward",),
    ),
    Mutant(
        "a-static-input-of-another-shape-is-taken",
        _SOURCES + "buffers.py",
        "kinds = [(shape, (key[0], layer)",
        "kinds = [(None, (key[0], layer)",
        (_TESTS + "test_buffers.py::test_inputs_of_other_shapes_are_not_taken",),
    ),
    Mutant(
        "chunks-share-the-static-inputs-of-shared-graphs",
        _SOURCES + "buffers.py",
        '(key[0], layer) if graphs == "shared" else None',
        "None",
        (_TESTS + "test_buffers.py::test_static_inputs_are_never_in_use_twice",),
    ),
    Mutant(
        "memory-is-free-before-its-last-step",
        _SOURCES + "buffers.py",
        "range(use.first, use.last + 1)",
        "range(use.first, use.last)",
        (_TESTS + "test_buffers.py::test_uses_that_touch_overlap",),
    ),
    Mutant(
        "uses-that-touch-are-taken-for-apart",
        _SOURCES + "buffers.py",
        "use.first <= before.last",
        "use.first < before.last",
        (_TESTS + "test_buffers.py::test_uses_that_touch_overlap",),
    ),
    Mutant(
        "a-gradient-is-kept-for-one-layer-only",
        _SOURCES + "buffers.py",
        "end = begins[item.backward] + last_layer",
        "end = min(backward + 1, begins[item.backward] + last_layer)",
        (_TESTS + "test_buffers.py::test_gradients_are_kept_until_the_chunks_backward_ends",),
    ),
    Mutant(
        "runs-out-of-turn-are-not-refused",
        _SOURCES + "captured/progress.py",
        "if (backward, chunk, layer) != (graph.backward, graph.chunk, graph.layer):",
        "if False:",
        (_TESTS + "test_progress.py::test_runs_out_of_turn_are_refused",),
    ),
    Mutant(
        "memory-in-flight-is-not-waited-for",
        _SOURCES + "captured/progress.py",
        "            if last < self._runs:\n                work.wait()",
        "            if last < self._runs:\n                pass",
        (_TESTS + "test_progress.py::test_what_is_in_flight_is_waited_for_once_and_not_too_early",),
    ),
    Mutant(
        "gradients-of-parameters-lie-in-the-pool",
        _SOURCES + "captured/passes.py",
        "[None if each is None else each.clone() for each in self._parameter_gradients]",
        "[None if each is None else each.detach() for each in self._parameter_gradients]",
        (
            _GPU + "test_layer_graphs.py::test_gradients_of_parameters_do_not_lie_in_the_pool",
            _GPU + "test_layer_graphs.py::test_a_step_computes_what_eager_layers_do",
        ),
    ),
    Mutant(
        "results-are-released-before-their-backward",
        _SOURCES + "captured/capture.py",
        "releases.setdefault(use.last, [])",
        "releases.setdefault(use.first, [])",
        (_GPU + "test_layer_graphs.py::test_a_step_computes_what_eager_layers_do",),
    ),
    Mutant(
        "results-are-never-released",
        _SOURCES + "captured/capture.py",
        "if captured is not None and self._capturing.reuse:",
        "if captured is not None and False:",
        (_GPU + "test_layer_graphs.py::test_the_pool_does_not_grow_with_the_microbatches",),
    ),
    Mutant(
        "outputs-of-one-shape-share-a-gradient",
        _SOURCES + "captured/passes.py",
        "kinds[:number].count(kind)",
        "0",
        (_GPU + "test_layer_graphs_calls.py::test_an_output_that_no_loss_uses_has_the_gradient_zero",),
    ),
    Mutant(
        "a-gradient-that-is-passed-on-stays-the-static-one",
        _SOURCES + "captured/passes.py",
        "each.clone() if each is not None and each.untyped_storage().data_ptr() in static else each",
        "each",
        (_GPU + "test_layer_graphs_calls.py::test_a_gradient_that_a_layer_passes_on_is_not_the_static_one",),
    ),
    Mutant(
        "a-warm-up-changes-buffers",
        _SOURCES + "captured/warm_up.py",
        "                buffer.copy_(before)",
        "                pass",
        (_GPU + "test_layer_graphs_calls.py::test_buffers_count_calls_and_not_captures",),
    ),
    Mutant(
        "a-failed-capture-leaves-its-routing",
        "torch_memory_saver/_torch/graphs.py",
        "                clean_up(self._torch, self._device, self._pool.id, self._outer_stream)\n",
        "",
        ("torch:tests/gpu/test_captures.py::test_a_capture_that_fails_leaves_nothing_behind",),
    ),
)
