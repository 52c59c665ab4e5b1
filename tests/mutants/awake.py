"""Bugs of tags by pattern, and of check_fresh()."""

from __future__ import annotations

from mutant import Mutant

__all__ = ["MUTANTS"]

_PATTERNS = "torch_memory_saver/options.py"
_PATTERN_TESTS = "tests/unit/python/engine/test_patterns.py"

_SELECTION = (
    Mutant(
        "a-pattern-wins-over-a-tag-of-its-name",
        _PATTERNS,
        "is_pattern = not WILDCARDS.isdisjoint(tag) and tag not in known",
        "is_pattern = not WILDCARDS.isdisjoint(tag)",
        (_PATTERN_TESTS, "torch:tests/gpu/test_tag_patterns.py"),
    ),
    Mutant(
        "patterns-stand-for-tags-without-memory",
        _PATTERNS,
        "[tag for tag, is_used in known.items() if is_used]",
        "[tag for tag, is_used in known.items() if is_used or True]",
        (_PATTERN_TESTS,),
    ),
    Mutant(
        "patterns-do-not-tell-upper-from-lower-case",
        _PATTERNS,
        "fnmatchcase(name, tag)",
        "fnmatchcase(name.lower(), tag.lower())",
        (_PATTERN_TESTS,),
    ),
    Mutant(
        "tags-are-listed-for-names-as-well",
        _PATTERNS,
        "    if selected is None or all(WILDCARDS.isdisjoint(tag) for tag in selected):",
        "    if selected is None:",
        (_PATTERN_TESTS,),
    ),
    Mutant(
        "a-pattern-that-matches-nothing-is-quiet",
        _PATTERNS,
        "names.update(dict.fromkeys(matches or [tag]))",
        "names.update(dict.fromkeys(matches if is_pattern else [tag]))",
        (_PATTERN_TESTS,),
    ),
    Mutant(
        "a-tag-is-forgotten-with-its-memory",
        "csrc/base/tag.c",
        ".used = atomic_load(&tag->used)}",
        ".used = atomic_load(&tag->used) && atomic_load(&tag->paused)}",
        ("tests/unit/base/test_tag.c", _PATTERN_TESTS),
    ),
)

_FRESHNESS = "torch_memory_saver/_engine/tensors/freshness.py"
_SAMPLING = "torch_memory_saver/_engine/tensors/freshness.py"
_TENSORS = "torch_memory_saver/_engine/tensors/freshness.py"
_BLOCKS = "torch_memory_saver/_torch/memory/live_blocks.py"
_FRESH_TESTS = "tests/unit/python/engine/test_freshness.py"
_SAMPLING_TESTS = "tests/unit/python/engine/test_guard_sampling.py"
_TENSOR_TESTS = "tests/unit/python/engine/test_found_tensors.py"
_BLOCK_TESTS = "tests/unit/python/torch/test_live.py"
_ON_GPU = "torch:tests/gpu/test_check_fresh.py"
_GUARD_BYTES = "csrc/core/transition/guard_bytes.c"
_GUARD_BYTES_TESTS = "tests/unit/core/transition/test_guard_bytes.c"

_FRESH = (
    Mutant(
        "blocks-younger-than-the-resume-are-findings",
        _BLOCKS,
        "is_new = before is not None and block.place not in before",
        "is_new = False",
        (_FRESH_TESTS, _ON_GPU),
    ),
    Mutant(
        "a-resume-does-not-record-what-is-live",
        "torch_memory_saver/_engine/preparation.py",
        "        resumed_blocks.note(torch, options.tags)",
        "        pass",
        (_FRESH_TESTS, _ON_GPU),
    ),
    Mutant(
        "live-blocks-are-recorded-without-guard-mode",
        "torch_memory_saver/_engine/preparation.py",
        "    if _core.get_guard():\n        resumed_blocks",
        "    if _core.get_guard() or True:\n        resumed_blocks",
        (_FRESH_TESTS,),
    ),
    Mutant(
        "the-record-of-another-tag-is-lost",
        _BLOCKS,
        "        self._live.update(found)",
        "        self._live = found",
        (_BLOCK_TESTS, _FRESH_TESTS),
    ),
    Mutant(
        "the-record-of-freed-memory-stays",
        _BLOCKS,
        "if place not in found and place[0] not in kept:",
        "if place not in found and place[0] in waiting:",
        (_BLOCK_TESTS,),
    ),
    Mutant(
        "a-block-is-checked-beyond-what-was-requested",
        _BLOCKS,
        "min(block.requested if block.live else size,",
        "min(size,",
        (_FRESH_TESTS, _ON_GPU),
    ),
    Mutant(
        "pools-of-graphs-are-checked",
        _BLOCKS,
        "known = torch is not None and _core.knows_blocks(",
        "known = torch is not None or _core.knows_blocks(",
        ("torch:tests/torch/test_live.py::test_all_blocks_of_a_pool_that_a_capture_has_used", _FRESH_TESTS, _ON_GPU),
    ),
    Mutant(
        "what-waits-for-another-stream-is-live",
        _BLOCKS,
        '_FREED = ("inactive", "active_pending_free", "active_awaiting_free")',
        '_FREED = ("inactive",)',
        (_BLOCK_TESTS, _FRESH_TESTS),
    ),
    Mutant(
        "a-sample-has-no-end",
        _SAMPLING,
        "        starts = (*inner, begin + last)",
        "        starts = inner",
        (_SAMPLING_TESTS,),
    ),
    Mutant(
        "single-bytes-of-the-pattern-count",
        _SAMPLING,
        "            unwritten += end - begin if found == end - begin else 0",
        "            unwritten += found",
        (_SAMPLING_TESTS,),
    ),
    Mutant(
        "whole-pieces-are-sampled",
        _SAMPLING,
        "    if piece.whole:",
        "    if piece.whole and piece.bytes < PART_BYTES:",
        (_SAMPLING_TESTS, _FRESH_TESTS, _ON_GPU),
    ),
    Mutant(
        "overlapping-pieces-are-copied-twice",
        _SAMPLING,
        "        inside += depth[begin]\n        if inside:",
        "        inside += depth[begin]\n        for _ in range(inside):",
        (_SAMPLING_TESTS,),
    ),
    Mutant(
        "one-call-copies-all",
        _SAMPLING,
        "        if size + end - begin > _CALL_BYTES and size:",
        "        if size + end - begin > _CALL_BYTES and size < 0:",
        (_SAMPLING_TESTS,),
    ),
    Mutant(
        "integers-of-minus-one-are-findings",
        _FRESHNESS,
        "        return not (largest.dtype.is_floating_point or largest.dtype.is_complex)",
        "        return False",
        (_ON_GPU,),
    ),
    Mutant(
        "a-bool-is-an-integer",
        _FRESHNESS,
        "if largest is None or str(largest.dtype) == ",
        "if largest is None or largest.dtype == ",
        (_ON_GPU,),
    ),
    Mutant(
        "parts-of-a-block-are-not-told-apart",
        _FRESHNESS,
        "        if item.is_partly_unwritten and item.parts:",
        "        if item.is_unwritten and item.parts:",
        (_ON_GPU,),
    ),
    Mutant(
        "ignored-memory-has-to-be-resident",
        _FRESHNESS,
        "    return row.state == _core.STATE_ACTIVE or row.tag not in checked.ignored.tags",
        "    return row.state == _core.STATE_ACTIVE or bool(checked)",
        (_FRESH_TESTS,),
    ),
    Mutant(
        "paused-memory-is-fresh",
        _FRESHNESS,
        "    _refuse_absent(rows)",
        "    _refuse_absent([])",
        (_FRESH_TESTS,),
    ),
    Mutant(
        "a-check-needs-no-guard-mode",
        _FRESHNESS,
        "    if not _core.get_guard():",
        "    if not _core.get_guard() and not checked:",
        (_FRESH_TESTS,),
    ),
    Mutant(
        "memory-that-is-paused-meanwhile-is-fresh",
        _FRESHNESS,
        "                _refuse_absent([] if row is None else [row])",
        "                _refuse_absent([] if row is None or row else [row])",
        (_FRESH_TESTS,),
    ),
    Mutant(
        "a-name-has-no-path",
        "torch_memory_saver/_engine/tensors/lookup.py",
        "    while id(module) in parents and id(module) not in seen:",
        "    while id(module) in parents and id(module) in seen:",
        (_TENSOR_TESTS, _ON_GPU),
    ),
    Mutant(
        "frozen-modules-that-are-passed-have-no-name",
        "torch_memory_saver/_engine/tensors/lookup.py",
        "    known.update((id(module), module) for each in modules for module in each.modules())",
        "",
        (_TENSOR_TESTS, _ON_GPU),
    ),
    Mutant(
        "ranges-count-from-the-first-of-the-segment",
        _GUARD_BYTES,
        "            bytes += size;",
        "            bytes += 0 * size;",
        (_GUARD_BYTES_TESTS,),
    ),
    Mutant(
        "a-sample-does-not-wait-for-the-device",
        _GUARD_BYTES,
        "    tms_status_t status = tms_steps_quiesce(t, &quiesced, error);",
        "    t->planned.affected = 0;\n    tms_status_t status = tms_steps_quiesce(t, &quiesced, error);",
        (_GUARD_BYTES_TESTS,),
    ),
    Mutant(
        "a-sample-moves-what-it-looks-at",
        _GUARD_BYTES,
        "belong to the parent */\n    tms_completion_finish(t, false);",
        "belong to the parent */\n    tms_completion_finish(t, true);",
        (_GUARD_BYTES_TESTS,),
    ),
    Mutant(
        "a-sample-keeps-its-copies",
        _GUARD_BYTES,
        "    release_all(sample);\n    return status;",
        "    if (status == TMS_OK) release_all(sample);\n    return status;",
        (_GUARD_BYTES_TESTS,),
    ),
    Mutant(
        "a-range-beyond-its-allocation-is-read",
        _GUARD_BYTES,
        "range->end <= begin + segment->bytes;",
        "range->begin < begin + segment->bytes;",
        (_GUARD_BYTES_TESTS,),
    ),
    Mutant(
        "preserved-blocks-are-all-that-was-live",
        "csrc/core/model/segment.h",
        "    if (segment->backup.saved && !segment->only_preserved) return false;",
        "    if (segment->backup.saved) return false;",
        (_GUARD_BYTES_TESTS, _ON_GPU),
    ),
    Mutant(
        "zeroed-memory-seems-guarded",
        "csrc/core/transition/resume.c",
        "    if (t->requested.selection->zero) return TMS_CONTENTS_ZEROED;",
        "",
        (_GUARD_BYTES_TESTS, _FRESH_TESTS),
    ),
)

MUTANTS = _SELECTION + _FRESH
