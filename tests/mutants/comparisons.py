"""Bugs in the comparison of memory snapshots: reading, growth, drift, fragmentation, and what the page lets run."""

from __future__ import annotations

from mutant import Mutant

__all__ = ["MUTANTS"]

_SOURCES = "torch_memory_saver/observe/memory/"
_TESTS = "tests/unit/python/observe/memory/"
_COMPARISON = _TESTS + "test_comparison.py::"
_UNITS = _TESTS + "test_comparison_units.py::"
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
        "if all(change > 0 for change in changes)",
        "if any(change > 0 for change in changes)",
        (
            _COMPARISON + "test_a_leak_grew_in_every_interval",
            _TESTS + "test_recorded_snapshots.py",
            "torch:tests/gpu/test_memory_compare.py::test_only_the_leak_is_a_leak",
        ),
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
