"""Bugs in torch_memory_saver.layer_graphs: orders, timelines, and what micro-batches share."""

from __future__ import annotations

from mutant import Mutant

__all__ = ["MUTANTS"]

_SOURCES = "torch_memory_saver/layer_graphs/"
_TESTS = "tests/unit/python/layer_graphs/"

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
        "a-gradient-is-not-read-by-the-layer-before",
        _SOURCES + "buffers.py",
        "reader = backward + 1 if layer else backward",
        "reader = backward",
        (_TESTS + "test_buffers.py::test_the_time_in_which_memory_is_in_use",),
    ),
)
