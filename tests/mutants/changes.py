"""Bugs of pauses that copy only what has changed."""

from __future__ import annotations

from mutant import Mutant

__all__ = ["MUTANTS"]

_FINGERPRINTS = "csrc/backup/fingerprints.c"
_PASS = "csrc/backup/pass.c"
_STORES = "csrc/backup/stores.c"
_HOST = "csrc/backup/host/operations.c"
_PAUSE = "csrc/core/transition/pause.c"
_TEST = "tests/unit/core/transition/test_changes.c"
_TEST_KERNEL = "tests/unit/tools/test_fingerprint_kernel.py"

MUTANTS = (
    Mutant(
        "a-changed-chunk-is-taken-for-equal",
        _FINGERPRINTS,
        "sizeof *fingerprints->kept) == 0) continue;",
        "sizeof *fingerprints->kept) == 0 || index % 2) continue;",
        (_TEST,),
    ),
    Mutant(
        "neighbours-are-copied-one-by-one",
        _FINGERPRINTS,
        "if (last && last->offset",
        "if (last && content->bytes == 0 && last->offset",
        (_TEST,),
    ),
    Mutant(
        "the-fingerprints-of-a-pause-are-not-kept",
        _FINGERPRINTS,
        "    fingerprints->kept = fingerprints->fresh;\n",
        "    free(fingerprints->fresh);\n    fingerprints->kept = NULL;\n",
        (_TEST,),
    ),
    Mutant(
        "another-live-set-is-compared-as-if-it-were-the-same",
        _STORES,
        "if (!tms_backup_contents_match(&backup->held, &backup->planned)) {",
        "if (!backup->saved) {",
        (_TEST,),
    ),
    Mutant(
        "what-a-program-may-have-written-to-is-compared",
        _HOST,
        "return kept && !slot->fresh && !atomic_load(&kept->handed_out) ? 1 : 0;",
        "return kept && !slot->fresh ? 1 : 0;",
        (_TEST,),
    ),
    Mutant(
        "a-copy-that-was-only-read-counts-as-handed-out",
        "csrc/core/model/inspect.c",
        "if (found && hand_out) tms_host_buffer_hand_out(found);",
        "if (found && (hand_out || bytes > 0)) tms_host_buffer_hand_out(found);",
        (_TEST,),
    ),
    Mutant(
        "a-program-that-keeps-a-view-is-forgotten",
        _HOST,
        "atomic_store(&kept->handed_out, atomic_load(&kept->references) > 1);",
        "atomic_store(&kept->handed_out, false);",
        (_TEST,),
    ),
    Mutant(
        "the-kernel-reads-memory-that-is-gone",
        _PASS,
        "        TMS_DRIVER_CALL(kernel->copier.driver, context, error, cuMemGetAccess, &access, &here, part->address);\n",
        "        TMS_OK;\n    (void)access, (void)here, (void)context, (void)error;\n",
        ("tests/unit/core/transition/test_retained.c",),
    ),
    Mutant(
        "a-call-without-retained-backups-computes-fingerprints",
        _PAUSE,
        "return backup->saved || tms_saver_host_policy(t->saver, backup->policy) == TMS_HOST_RETAIN;",
        "return backup->saved || t;",
        (_TEST,),
    ),
    Mutant(
        "a-pause-does-not-wait-for-the-kernel",
        _PASS,
        "    if (status == TMS_OK) status = tms_copier_wait(&kernel->copier, &context, error);\n",
        "",
        (_TEST,),
    ),
    Mutant(
        "the-results-of-an-earlier-pass-are-taken-for-those-of-this-one",
        _PASS,
        "    if (status == TMS_OK) memset(results_of(kernel), 0, kernel->pieces * sizeof(tms_fingerprint_t));\n",
        "",
        (_TEST,),
    ),
    Mutant(
        "the-module-of-a-context-that-was-reset-is-used",
        "csrc/device/fingerprinter.c",
        "if (loaded->context != current) *loaded",
        "if (loaded->context == 0) *loaded",
        (_TEST,),
    ),
    Mutant(
        "the-kernel-leaves-a-sum-out",
        "csrc/kernels/fingerprint.cu",
        "for (int warp = 0; warp < WARPS; warp++)",
        "for (int warp = 1; warp < WARPS; warp++)",
        (_TEST_KERNEL,),
    ),
    Mutant(
        "the-kernel-reads-the-key-of-another-place",
        "csrc/kernels/fingerprint.cu",
        "const uint4 key = keys[place + a * TMS_FINGERPRINT_THREADS + t];",
        "const uint4 key = keys[place + t];",
        (_TEST_KERNEL,),
    ),
)
