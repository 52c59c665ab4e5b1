"""Bugs of stores that plan by fingerprint: the blocks that they keep, the pass before the plan, the key, and the check of a
resume."""

from __future__ import annotations

from mutant import Mutant

__all__ = ["MUTANTS"]

_CONTENT = "csrc/backup/content.c"
_STORES = "csrc/backup/stores.c"
_FINGERPRINTER = "csrc/device/fingerprinter.c"
_INTEGRITY = "csrc/core/transition/integrity.c"
_TEST = "tests/unit/core/transition/test_by_fingerprint.c"
_TEST_CONTENT = "tests/unit/backup/test_content.c"
_TEST_KEY = "tests/unit/device/test_fingerprinter.c"
_TEST_LIVE = "tests/unit/python/torch/test_live.py"

MUTANTS = (
    Mutant(
        "a-shared-block-is-kept-with-what-was-not-requested",
        _CONTENT,
        "        if (found->live->used) block.end = found->live->used[i];\n",
        "",
        (_TEST_CONTENT,),
    ),
    Mutant(
        "an-object-ends-inside-a-vector",
        _CONTENT,
        "return bytes < TMS_MIN_OBJECT_BYTES ? bytes : bytes / VECTOR * VECTOR;",
        "return bytes;",
        (_TEST_CONTENT, _TEST),
    ),
    Mutant(
        "an-object-begins-inside-a-vector",
        _CONTENT,
        "    if (before > 0) return bytes < before ? bytes : before;\n",
        "    (void)before;\n",
        (_TEST_CONTENT,),
    ),
    Mutant(
        "a-live-block-of-torch-counts-as-requested-whole",
        "csrc/python/live_functions.c",
        "address + (requested > 0 && requested < size ? requested : size)",
        "address + size + 0 * requested",
        (_TEST_LIVE,),
    ),
    Mutant(
        "fingerprints-of-an-earlier-key-are-planned-with",
        _STORES,
        "    if (backup->fingerprints.fresh_key != stores->fingerprinter.keys) "
        "tms_fingerprints_cancel(&backup->fingerprints);\n",
        "",
        (_TEST,),
    ),
    Mutant(
        "kept-fingerprints-of-an-earlier-key-are-compared",
        _STORES,
        "backup->fingerprints.kept && keys > 0 && backup->fingerprints.kept_key == keys;",
        "backup->fingerprints.kept && keys > 0;",
        (_TEST,),
    ),
    Mutant(
        "other-stores-pay-for-the-check-of-a-resume",
        _STORES,
        "return tms_backup_held_bytes(backup) > 0 && plans_by_fingerprint(stores, backup->held.kind) &&",
        "return tms_backup_held_bytes(backup) > 0 &&",
        (_TEST,),
    ),
    Mutant(
        "private-pieces-are-checked",
        _STORES,
        "if (tms_extent_is_object(&extents[i]) &&\n                memcmp(",
        "if (memcmp(",
        (_TEST,),
    ),
    Mutant(
        "a-resume-restores-what-is-damaged",
        "csrc/core/transition/restore.c",
        "    if (status == TMS_OK) status = tms_integrity_check(t, &all->copier, wait, error);\n"
        "    if (status == TMS_FORKED) return status;\n"
        "    if (status == TMS_OK) status = tms_pending_ready(",
        "    if (status == TMS_OK) status = tms_pending_ready(",
        (_TEST,),
    ),
    Mutant(
        "memory-that-a-kernel-may-read-is-unmapped",
        _INTEGRITY,
        "    atomic_fetch_or(&t->done.busy, pass.busy);\n",
        "",
        (_TEST,),
    ),
    Mutant(
        "an-object-of-another-device-hides-one-that-is-damaged",
        _INTEGRITY,
        "        if (first == TMS_OK) first = status;\n",
        "        first = status;\n",
        (_TEST,),
    ),
    Mutant(
        "a-verified-pause-compares-what-another-process-may-have-written",
        "csrc/core/transition/verification.c",
        "    return segment->backup.partial && segment->run->releasing &&\n"
        "           tms_backup_can_compare(&t->saver->stores, segment->backup.planned.kind);\n",
        "    return segment->backup.partial && segment->run->releasing && t;\n",
        (_TEST,),
    ),
    Mutant(
        "a-module-keeps-the-key-that-it-has-drawn",
        _FINGERPRINTER,
        "!(loaded->has_key && loaded->keys == fingerprinter->keys)",
        "!loaded->has_key",
        (_TEST_KEY, _TEST),
    ),
    Mutant(
        "a-key-that-could-not-be-copied-counts-as-copied",
        _FINGERPRINTER,
        "        loaded->has_key = status == TMS_OK;\n",
        "        loaded->has_key = true;\n",
        (_TEST_KEY,),
    ),
)
