"""Bugs in the comparison of memory snapshots: reading, growth, drift, fragmentation, and what the page lets run."""

from __future__ import annotations

from mutant import Mutant

__all__ = ["MUTANTS"]

_SOURCES = "torch_memory_saver/observe/memory/"
_TESTS = "tests/unit/python/observe/memory/"
_COMPARISON = _TESTS + "test_comparison.py::"
_UNITS = _TESTS + "test_comparison_units.py::"
_STEPS = _TESTS + "test_steps.py::"
_READING = _TESTS + "test_snapshot_reader.py::"

MUTANTS = (
    Mutant(
        "a-snapshot-file-runs-functions",
        _SOURCES + "snapshot_reader.py",
        'raise _RefusedGlobal(f"{module}.{name}")',
        "return super().find_class(module, name)",
        (_READING + "test_a_function_is_not_called", _READING + "test_every_class_is_refused"),
    ),
    Mutant(
        "the-oldest-stack-of-a-block-of-pytorch-2-0",
        _SOURCES + "snapshot_reader.py",
        'row["history"][0]',
        'row["history"][-1]',
        (_READING + "test_a_snapshot_of_pytorch_2_0",),
    ),
    Mutant(
        "cpp-frames-make-another-stack",
        "torch_memory_saver/_stacks.py",
        "python = tuple(frame for frame in frames if not _is_native(frame))",
        "python = tuple(frames)",
        (_READING + "test_cpp_frames_are_folded", _TESTS + "test_comparison_table.py::test_cpp_frames_are_counted"),
    ),
    Mutant(
        "growth-in-one-interval-is-a-leak",
        _SOURCES + "comparison/growth.py",
        "_GROWTHS_OF_A_LEAK = 2",
        "_GROWTHS_OF_A_LEAK = 1",
        (
            _COMPARISON + "test_a_leak_never_fell_and_grew_more_than_once",
            _STEPS + "test_growth_that_stops_or_comes_once_is_a_warm_up",
        ),
    ),
    Mutant(
        "growth-that-stopped-is-a-leak",
        _SOURCES + "comparison/growth.py",
        "    return since < max(",
        "    return since >= 0 or since < max(",
        (
            _STEPS + "test_growth_that_stops_or_comes_once_is_a_warm_up",
            _TESTS + "test_recorded_snapshots.py",
            "torch:tests/gpu/test_memory_compare.py::test_only_the_leak_is_a_leak",
        ),
    ),
    Mutant(
        "a-leak-grows-in-the-last-interval",
        _SOURCES + "comparison/growth.py",
        "    return since < max(",
        "    return since == 0 and since < max(",
        (_STEPS + "test_growth_that_goes_on_is_a_leak_whatever_its_rhythm",),
    ),
    Mutant(
        "every-pause-of-a-step-is-compared",
        _SOURCES + "comparison/steps.py",
        "    if len(places) == 1 or not candidates:",
        "    if candidates is not None:",
        (
            _STEPS + "test_a_line_that_leaks_and_also_frees_is_a_leak",
            _STEPS + "test_one_point_of_a_step_is_compared_and_the_note_says_which",
        ),
    ),
    Mutant(
        "two-pauses-of-one-tag-are-one-point",
        _SOURCES + "comparison/steps.py",
        "return [place % period for place in range(len(names))]",
        "return names",
        (_STEPS + "test_a_line_that_leaks_and_also_frees_is_a_leak",),
    ),
    Mutant(
        "a-stage-of-a-program-is-compared-alone",
        _SOURCES + "comparison/steps.py",
        "and _occurs_throughout(found, length)",
        "",
        (_STEPS + "test_without_a_pattern_all_snapshots_are_compared",),
    ),
    Mutant(
        "a-recording-keeps-pauses-instead-of-steps",
        _SOURCES + "sampler.py",
        "wanted = min(max(keep, DEFAULT_KEEP * len(self._selections)), MAX_PAUSES)",
        "wanted = keep",
        (_TESTS + "test_recording_from_environment.py::test_the_latest_steps_are_kept_whatever_the_number_of_their_pauses",),
    ),
    Mutant(
        "larger-blocks-are-growth",
        _SOURCES + "comparison/growth.py",
        "classify(requested)",
        "classify(sizes)",
        (_COMPARISON + "test_a_larger_block_for_the_same_request_is_no_growth",),
    ),
    Mutant(
        "blocks-without-an-event-are-the-youngest",
        _SOURCES + "comparison/drift.py",
        "return 2, event",
        "return -1, event",
        (_COMPARISON + "test_blocks_without_an_event_are_the_oldest_and_keep_their_order",),
    ),
    Mutant(
        "blocks-that-lost-their-event-lie-by-address",
        _SOURCES + "comparison/drift.py",
        "return (1, block.address) if place is None else (0, place)",
        "return 1, block.address",
        (_COMPARISON + "test_blocks_without_an_event_are_the_oldest_and_keep_their_order",),
    ),
    Mutant(
        "a-block-drifts-that-rose-once",
        _SOURCES + "comparison/drift.py",
        "if all(before.below < after.below",
        "if all(before.below <= after.below",
        (_COMPARISON + "test_a_program_without_problems", _COMPARISON + "test_blocks_that_stay_do_not_drift"),
    ),
    Mutant(
        "cached-segments-are-held",
        _SOURCES + "comparison/fragmentation.py",
        "return 0 < self.live_bytes < HELD_SHARE",
        "return self.live_bytes < HELD_SHARE",
        (_COMPARISON + "test_reserved_memory_that_grows_alone_is_fragmentation",),
    ),
    Mutant(
        "paused-segments-are-fragmented",
        _SOURCES + "comparison/fragmentation.py",
        "if not segment.paused:",
        "if True:",
        (_COMPARISON + "test_paused_segments_hold_no_memory",),
    ),
    Mutant(
        "an-expandable-segment-is-given-back-as-a-whole",
        _SOURCES + "snapshot_reader.py",
        'if row.get("is_expandable") else 0',
        "if False else 0",
        (
            _UNITS + "test_free_pieces_of_an_expandable_segment_are_cached",
            _UNITS + "test_pieces_that_few_bytes_keep_are_held",
        ),
    ),
    Mutant(
        "a-block-counts-in-its-first-piece-only",
        _SOURCES + "comparison/fragmentation.py",
        "            if block_end > stop:  # its rest lies in the next piece\n                break\n",
        "",
        (_UNITS + "test_every_byte_of_an_expandable_segment_is_counted_once",),
    ),
    Mutant(
        "moments-in-the-order-of-their-letters",
        _SOURCES + "comparison/processes.py",
        "_files(path)), key=_natural)",
        "_files(path)))",
        (_COMPARISON + "test_folders_are_read_in_the_order_of_their_numbers",),
    ),
)
