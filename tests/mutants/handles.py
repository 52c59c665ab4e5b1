"""Bugs of memory that PyTorch maps itself: its expandable segments."""

from __future__ import annotations

from mutant import Mutant

__all__ = ["MUTANTS"]

_HANDLES = "csrc/core/allocation/handles.c"
_ORPHANS = "csrc/core/allocation/orphans.c"
_HOOKS = "csrc/preload/handle_hooks.c"
_TEST = "tests/unit/core/allocation/test_handles.c"
_DURING_CALL = "tests/unit/core/allocation/test_handles_during_call.c"
_HOOK_TEST = "tests/unit/preload/test_handles.py::test_memory_that_pytorch_maps_itself"
_CUT = "torch_memory_saver/_torch/binding/expandable_segments.py"
_CUT_TEST = "tests/unit/python/torch/test_expandable.py"

MUTANTS = (
    Mutant(
        "memory-that-was-taken-over-is-freed-at-the-end",
        _HANDLES,
        "    if (!successor) return;\n",
        "    if (!successor || !successor->run) return;\n",
        (_DURING_CALL,),
    ),
    Mutant(
        "memory-that-a-resume-fills-is-taken-over",
        _HANDLES,
        "segment->state != TMS_SEGMENT_PAUSING || ",
        "",
        (_DURING_CALL,),
    ),
    Mutant(
        "another-device-s-memory-is-taken-over",
        _HANDLES,
        " && segment->device == successor->device;",
        ";",
        (_DURING_CALL,),
    ),
    Mutant(
        "memory-that-a-pause-releases-is-taken-over",
        _HANDLES,
        " || segment->run->releasing) return BUSY;",
        ") return BUSY;",
        (_DURING_CALL,),
    ),
    Mutant(
        "a-device-that-came-into-use-during-a-map-gets-no-access",
        _HANDLES,
        "    (void)tms_peers_note_skipped(saver, seen); /* the scan comes next */\n",
        "    (void)seen;\n",
        (_TEST,),
    ),
    Mutant(
        "a-map-looks-for-no-device-that-came-into-use",
        _HANDLES,
        "    if (devices->count > 1) tms_peers_refresh_after_allocation(saver);\n",
        "",
        (_TEST,),
    ),
    Mutant(
        "a-map-that-waits-keeps-the-gil",
        _HOOKS,
        "= tms_interpreter_leave();",
        "= {.state = NULL};",
        (f"{_HOOK_TEST}[preload-a_map_waits_without_the_gil]",),
    ),
    Mutant(
        "memory-that-was-taken-over-keeps-its-old-region",
        _HANDLES,
        "    run->tag = successor->tag;\n",
        "    run->tag = successor->tag = orphan->tag;\n    successor->backup.kind = orphan->backup.kind;\n",
        (_DURING_CALL,),
    ),
    Mutant(
        "memory-that-was-taken-over-stays-after-its-unmap",
        _HANDLES,
        "            orphan->successor = NULL;\n",
        "",
        (_DURING_CALL,),
    ),
    Mutant(
        "a-handle-ignores-the-margin",
        _HANDLES,
        "    tms_status_t status = tms_allocation_check_margin(saver, reserved, context, error);\n"
        "    if (status != TMS_OK) return status;\n",
        "    tms_status_t status = TMS_OK;\n",
        (_TEST,),
    ),
    Mutant(
        "no-memory-is-reclaimed-for-the-margin",
        "csrc/core/allocation/allocation.c",
        "    tms_reclaim_all(saver);\n    return compare_with_margin(",
        "    return compare_with_margin(",
        ("tests/unit/core/allocation/test_reclaim.c",),
    ),
    Mutant(
        "a-handle-reclaims-no-memory",
        _HANDLES,
        "    tms_reclaim_all(saver);\n    return tms_run_create(run, driver, devices, context, error);",
        "    return status;",
        (_TEST,),
    ),
    Mutant(
        "a-released-handle-that-is-had-again-is-unknown",
        _HANDLES,
        "if (handle->references++ == 0) tms_registry_insert(&saver->handles, &handle->node);",
        "handle->references++;",
        (_TEST,),
    ),
    Mutant(
        "any-mapping-of-a-range-is-taken-for-the-first",
        "csrc/base/registry.c",
        "        if (node->end > begin) first = node;",
        "        if (node->end > begin && (!first || first->begin >= end)) first = node;",
        ("tests/unit/base/test_registry.c", _TEST),
    ),
    Mutant(
        "a-forked-child-unmaps-memory-of-its-parent",
        _HANDLES,
        "} else if (!atomic_load(&saver->forked)) {",
        "} else {",
        (_TEST,),
    ),
    Mutant(
        "a-forked-child-releases-handles-of-its-parent",
        _HANDLES,
        "    if (atomic_load(&saver->forked)) return TMS_OK;\n",
        "",
        (_TEST,),
    ),
    Mutant(
        "memory-that-a-call-owns-is-handed-out",
        _HANDLES,
        "if (segment && !tms_segment_has_owner(segment) && segment->run && segment->run->has_handle)",
        "if (segment && segment->run && segment->run->has_handle)",
        (_DURING_CALL,),
    ),
    Mutant(
        "memory-is-taken-over-by-two-handles",
        _HANDLES,
        "|| !segment->free_requested || segment->successor) return IN_USE;",
        "|| !segment->free_requested) return IN_USE;",
        (_DURING_CALL,),
    ),
    Mutant(
        "the-handle-of-memory-that-was-taken-over-is-not-found",
        _HANDLES,
        "node ? mapped_at(node)->handle : NULL;",
        "node ? tms_segment_of(node)->handle : NULL;",
        (_DURING_CALL,),
    ),
    Mutant(
        "addresses-are-freed-under-an-orphan",
        _ORPHANS,
        "const bool keep = saver->orphans > 0;",
        "const bool keep = false;",
        (_DURING_CALL,),
    ),
    Mutant(
        "late-addresses-stay-reserved",
        _ORPHANS,
        "    if (--saver->orphans == 0) {",
        "    if (--saver->orphans == UINT64_MAX) {",
        (_DURING_CALL,),
    ),
    Mutant(
        "a-part-is-unmapped-as-if-it-were-all",
        _HANDLES,
        "node->begin != address || node->end != address + bytes) {",
        "node->begin != address) {",
        (_TEST,),
    ),
    Mutant(
        "every-library-s-memory-is-managed",
        _HOOKS,
        "properties && called_by_allocator(state, CALLER) &&",
        "properties &&",
        (f"{_HOOK_TEST}[preload-another_library_uses_the_table]",),
    ),
    Mutant(
        "pytorch-keeps-to-fabric-handles",
        _HOOKS,
        "if (asks_for_fabric(state, &region, properties)) return CUDA_ERROR_NOT_PERMITTED;",
        "(void)asks_for_fabric;",
        (f"{_HOOK_TEST}[preload-fabric_handles]",),
    ),
    Mutant(
        "a-block-in-two-pieces-is-in-the-first",
        _CUT,
        'if self._address + block["size"] > end:',
        "if False:",
        (_CUT_TEST,),
    ),
)
