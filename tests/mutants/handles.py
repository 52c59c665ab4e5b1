"""Bugs of memory that PyTorch maps itself: its expandable segments."""

from __future__ import annotations

from mutant import Mutant

__all__ = ["MUTANTS"]

_HANDLES = "csrc/core/allocation/handles.c"
_ORPHANS = "csrc/core/allocation/orphans.c"
_HOOKS = "csrc/preload/handle_hooks.c"
_TEST = "tests/unit/core/allocation/test_handles.c"
_HOOK_TEST = "tests/unit/preload/test_handles.py::test_memory_that_pytorch_maps_itself"
_CUT = "torch_memory_saver/_torch/expandable.py"
_CUT_TEST = "tests/unit/python/torch/test_expandable.py"

MUTANTS = (
    Mutant(
        "memory-that-was-taken-over-is-freed-at-the-end",
        _HANDLES,
        "    if (!successor) return;\n",
        "    if (!successor || !successor->run) return;\n",
        (_TEST,),
    ),
    Mutant(
        "memory-that-a-resume-fills-is-taken-over",
        _HANDLES,
        "segment->state != TMS_SEGMENT_PAUSING || ",
        "",
        (_TEST,),
    ),
    Mutant(
        "another-device-s-memory-is-taken-over",
        _HANDLES,
        " && segment->device == successor->device;",
        ";",
        (_TEST,),
    ),
    Mutant(
        "memory-that-a-pause-releases-is-taken-over",
        _HANDLES,
        " || segment->run->leaving) return BUSY;",
        ") return BUSY;",
        (_TEST,),
    ),
    Mutant(
        "a-device-that-came-into-use-during-a-map-gets-no-access",
        _HANDLES,
        "    (void)tms_peers_note_skipped(saver, seen); /* the look comes next */\n",
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
        (_TEST,),
    ),
    Mutant(
        "memory-that-was-taken-over-stays-after-its-unmap",
        _HANDLES,
        "            orphan->successor = NULL;\n",
        "",
        (_TEST,),
    ),
    Mutant(
        "addresses-are-freed-under-an-orphan",
        _ORPHANS,
        "const bool keep = saver->orphans > 0;",
        "const bool keep = false;",
        (_TEST,),
    ),
    Mutant(
        "late-addresses-stay-reserved",
        _ORPHANS,
        "    if (--saver->orphans == 0) {",
        "    if (--saver->orphans == UINT64_MAX) {",
        (_TEST,),
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
