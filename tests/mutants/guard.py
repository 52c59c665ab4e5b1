"""Bugs of guard mode."""

from __future__ import annotations

from mutant import Mutant

__all__ = ["MUTANTS"]

_BYTES = "tests/unit/core/transition/test_guard.c"
_FAILED = "tests/unit/core/transition/test_guard_failed.c"

MUTANTS = (
    Mutant(
        "guarded-memory-can-be-written",
        "csrc/core/model/guard.c",
        "driver, devices, CU_MEM_ACCESS_FLAGS_PROT_READ,",
        "driver, devices, CU_MEM_ACCESS_FLAGS_PROT_READWRITE,",
        (_BYTES,),
    ),
    Mutant(
        "late-reads-are-not-waited-for",
        "csrc/core/transition/resume.c",
        "    tms_status_t status = t->planned.affected ? tms_steps_quiesce(t, &t->done.quiesced, error) : TMS_OK;",
        "    tms_status_t status = TMS_OK;\n    t->done.quiesced = tms_quiesced_without_users();",
        (_FAILED,),
    ),
    Mutant(
        "a-free-does-not-wait-for-late-reads",
        "csrc/core/allocation/free.c",
        "    if (!deferred) *users = tms_segment_accessible(segment);",
        "    if (!deferred) *users = segment->run ? segment->run->accessible : 0;",
        (_BYTES, _FAILED),
    ),
    Mutant(
        "the-page-is-in-the-way-of-a-resume",
        "csrc/core/transition/resume.c",
        "    free_bytes += demand->returned[device];",
        "",
        (_BYTES,),
    ),
    Mutant(
        "the-page-stays-when-nothing-is-guarded",
        "csrc/core/allocation/free.c",
        "    if (page) (void)tms_free_release_segment(saver, page, tms_quiesced_without_users());",
        "    if (page && saver->log == NULL) (void)tms_free_release_segment(saver, page, tms_quiesced_without_users());",
        (_BYTES, _FAILED),
    ),
    Mutant(
        "a-failed-resume-leaves-memory-unguarded",
        "csrc/core/transition/resume.c",
        "        if (!tms_segment_has_memory(segment)) guard_again(t, segment);",
        "",
        (_FAILED,),
    ),
    Mutant(
        "a-part-that-stays-mapped-is-not-counted",
        "csrc/core/transition/guard_mode.c",
        "    if (segment->guarded > 0) { /* also",
        "    if (status == TMS_OK) { /* also",
        (_FAILED,),
    ),
    Mutant(
        "a-page-that-the-device-may-write-to-is-unmapped",
        "csrc/core/transition/guard_mode.c",
        "    else if (idle)",
        "    else if (idle || true)",
        (_FAILED,),
    ),
    Mutant(
        "dropped-memory-is-not-filled",
        "csrc/core/transition/restore.c",
        "    return (t->requested.selection->zero || t->requested.guards) &&",
        "    return t->requested.selection->zero &&",
        (_BYTES, "torch:tests/gpu/test_guard.py"),
    ),
    Mutant(
        "memory-is-filled-where-guard-mode-is-off",
        "csrc/core/transition/restore.c",
        "    return (t->requested.selection->zero || t->requested.guards) &&",
        "    return (t->requested.selection->zero || true) &&",
        (_BYTES,),
    ),
    Mutant(
        "the-environment-does-not-switch-guard-mode-on",
        "csrc/core/model/saver.c",
        "    atomic_init(&saver->guard.on, config->guard);",
        "    atomic_init(&saver->guard.on, false);",
        ("tests/unit/python/engine/test_settings.py::test_the_environment_switches_guard_mode_on",),
    ),
)
