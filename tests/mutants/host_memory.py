"""Bugs of the host store: where buffers are placed, and what planning a pause costs."""

from __future__ import annotations

from mutant import Mutant

__all__ = ["MUTANTS"]

_GAPS = "csrc/backup/host/gaps.c"
_POOL = "csrc/backup/host/pool.c"
_BATCH = "csrc/backup/host/batch.c"
_TEST_GAPS = "tests/unit/backup/host/test_gaps.c"
_TEST_POOL = "tests/unit/backup/host/test_pool.c"

MUTANTS = (
    Mutant(
        "a-search-compares-every-gap",
        _GAPS,
        "enum { MAX_COMPARED = 64, ",
        "enum { MAX_COMPARED = 1 << 20, ",
        (_TEST_GAPS,),
    ),
    Mutant(
        "a-buffer-gets-the-first-gap-that-fits",
        _GAPS,
        "&& (!best || bytes_of(gap) < bytes_of(best))) best = gap;",
        "&& !best) best = gap;",
        (_TEST_GAPS,),
    ),
    Mutant(
        "gaps-side-by-side-stay-apart",
        _GAPS,
        "*after = find_at(block, until);",
        "*after = NULL;",
        (_TEST_GAPS,),
    ),
    Mutant(
        "the-pool-of-another-device-is-not-used",
        _GAPS,
        "        if (other != device) gap = find_on(store, other, bytes);\n",
        "",
        (_TEST_POOL,),
    ),
    Mutant(
        "memory-that-leaves-the-pool-stays-a-gap",
        "csrc/backup/host/release.c",
        "    if (chunk->open) tms_host_gaps_remove(chunk->block, chunk->offset, chunk->offset + chunk->bytes);\n",
        "",
        (_TEST_GAPS,),
    ),
    Mutant(
        "a-buffer-in-the-pool-leaves-no-gap",
        _POOL,
        "        leave_gap(chunk, buffer);\n",
        "        (void)leave_gap;\n",
        (_TEST_GAPS, _TEST_POOL),
    ),
    Mutant(
        "groups-share-a-slot",
        _BATCH,
        "tms_hash_number(tms_hash_mix((uintptr_t)group), (uint64_t)device);",
        "tms_hash_number(0, (uint64_t)device);",
        (_TEST_GAPS,),
    ),
    Mutant(
        "help-begins-at-the-first-chunk-each-time",
        _BATCH,
        "        if (i == *first && !needs_help) ++*first;\n",
        "        (void)first;\n",
        (_TEST_GAPS,),
    ),
)
