"""Bugs of tags by pattern."""

from __future__ import annotations

from mutant import Mutant

__all__ = ["MUTANTS"]

_PATTERNS = "torch_memory_saver/_saver/patterns.py"
_PATTERN_TESTS = "tests/unit/python/saver/test_patterns.py"

_SELECTION = (
    Mutant(
        "a-pattern-wins-over-a-tag-of-its-name",
        _PATTERNS,
        "is_pattern = not _WILDCARDS.isdisjoint(tag) and tag not in known",
        "is_pattern = not _WILDCARDS.isdisjoint(tag)",
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
        "    if selected is None or all(_WILDCARDS.isdisjoint(tag) for tag in selected):",
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

MUTANTS = _SELECTION
