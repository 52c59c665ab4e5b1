"""Bugs of pauses that copy only what has changed."""

from __future__ import annotations

from mutant import Mutant

__all__ = ["MUTANTS"]

_FINGERPRINTS = "csrc/backup/fingerprints.c"
_PASS = "csrc/backup/pass.c"
_STORES = "csrc/backup/stores.c"
_HOST = "csrc/backup/host/operations.c"
_VERIFICATION = "csrc/core/transition/verification.c"
_PAUSE = "csrc/core/transition/pause.c"
_TEST = "tests/unit/core/transition/test_changed_chunks.c"
_TEST_DISK = "tests/unit/core/transition/test_changed_disk_blocks.c"
_TEST_FINGERPRINTS = "tests/unit/backup/test_fingerprints.c"
_TEST_VERIFICATION = "tests/unit/core/transition/test_verification.c"
_TEST_PASS = "tests/unit/backup/test_pass.c"
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
        "if (status == TMS_OK && !tms_backup_contents_match(&backup->held, &backup->planned))",
        "if (status == TMS_OK && !backup->saved)",
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
        "TMS_DRIVER_CALL(kernel->copier.driver, context, error, cuMemGetAccess, &access, &here, part->address);\n",
        "TMS_OK;\n    (void)access, (void)here, (void)context, (void)error;\n",
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
        "    if (status == TMS_OK) memset(results_of(kernel), 0, kernel->chunks * sizeof(tms_fingerprint_t));\n",
        "",
        (_TEST,),
    ),
    Mutant(
        "the-head-of-an-unaligned-range-is-not-hashed",
        _PASS,
        "const uint64_t begin = (part->address + chunk.offset) / vector * vector;",
        "const uint64_t begin = (part->address + chunk.offset + vector - 1) / vector * vector;",
        (_TEST,),
    ),
    Mutant(
        "a-later-device-hides-a-failed-pass",
        _PASS,
        "        if (first == TMS_OK) first = status;\n        tms_host_buffer_drop",
        "        first = status;\n        tms_host_buffer_drop",
        (_TEST_PASS,),
    ),
    Mutant(
        "only-the-first-part-is-verified",
        _STORES,
        "!*differs && done < extents[i].bytes; done += part)",
        "!*differs && done < extents[i].bytes && done < PART_BYTES; done += part)",
        (_TEST_VERIFICATION,),
    ),
    Mutant(
        "the-pieces-of-an-unaligned-range-are-miscounted",
        _FINGERPRINTS,
        "const uint64_t bytes = extents[i].offset % TMS_FINGERPRINT_VECTOR_BYTES + extents[i].bytes;",
        "const uint64_t bytes = extents[i].bytes;",
        (_TEST_FINGERPRINTS,),
    ),
    Mutant(
        "a-removed-file-still-counts-as-saved",
        "csrc/backup/disk/operations.c",
        "    if (backup->held.kind == TMS_BACKUP_DISK) backup->saved = false;\n    drop(store",
        "    drop(store",
        (_TEST_DISK,),
    ),
    Mutant(
        "an-equal-segment-hides-one-that-differs",
        _VERIFICATION,
        "        if (first == TMS_OK) first = status;\n",
        "        first = status;\n",
        (_TEST_VERIFICATION,),
    ),
    Mutant(
        "what-was-copied-whole-is-compared",
        _VERIFICATION,
        "        if (is_compared(t, segment)) status = compare(",
        "        if (segment->run->releasing) status = compare(",
        (_TEST_VERIFICATION,),
    ),
    Mutant(
        "only-the-last-failure-of-a-pass-is-described",
        _PASS,
        "first == TMS_OK ? error : NULL);\n        if (first",
        "error);\n        if (first",
        (_TEST_PASS,),
    ),
    Mutant(
        "a-stream-with-a-running-kernel-is-taken-for-idle",
        _PASS,
        "    copier->idle = false;\n",
        "",
        (_TEST_PASS,),
    ),
    Mutant(
        "a-kernel-is-launched-for-nothing",
        _PASS,
        "if (kernel && kernel->chunks > 0 &&",
        "if (kernel &&",
        (_TEST,),
    ),
    Mutant(
        "each-pass-pins-a-buffer",
        _PASS,
        "    if (status == TMS_OK) atomic_store(&kernel->buffer->policy, TMS_HOST_POOL);\n",
        "",
        (_TEST,),
    ),
    Mutant(
        "results-that-the-kernel-has-not-written-are-compared",
        _PASS,
        "    if (!are_written(results, count)) {",
        "    if (count == 0 && !are_written(results, count)) {",
        (_TEST,),
    ),
    Mutant(
        "the-kernel-s-buffer-must-be-one-pinned-block",
        "csrc/simulator/runtime/modules.c",
        "        address = host->address + host->bytes;\n",
        "        if (end > host->address + host->bytes) return false;\n        address = end;\n",
        ("tests/unit/simulator/test_fingerprint.c",),
    ),
    Mutant(
        "what-is-copied-for-the-check-counts-as-progress",
        "csrc/core/transition/save.c",
        "tms_save_copy_counted(t, device, NULL, wait, error)",
        "tms_save_copy_counted(t, device, &t->done.copied_bytes, wait, error)",
        (_TEST_VERIFICATION, _TEST_DISK),
    ),
    Mutant(
        "a-damaged-file-fails-each-verified-pause",
        _VERIFICATION,
        "if (status == TMS_BACKUP_IO) {",
        "if (status == TMS_OK && differs && !damaged) {",
        (_TEST_DISK,),
    ),
    Mutant(
        "only-the-changed-part-of-a-damaged-file-is-written-again",
        _VERIFICATION,
        "    tms_backup_copy_all(backup);\n",
        "",
        (_TEST_DISK,),
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
