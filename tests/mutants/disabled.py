"""Bugs in TMS_DISABLE and in the record of what is replaced in other packages."""

from __future__ import annotations

from mutant import Mutant

__all__ = ["MUTANTS"]

_DISABLED = "tests/unit/python/engine/test_disabled.py::"
_PATCHES = "tests/unit/python/test_patches.py::"
_TABLE = "torch_memory_saver/_patches.py"

MUTANTS = (
    Mutant(
        "a-disabled-process-counts-and-announces",
        "csrc/preload/resolve.c",
        "return state && !state->config.disable ? state : NULL;",
        "return state;",
        (_DISABLED + "test_the_preload_library_passes_everything_on",),
    ),
    Mutant(
        "a-disabled-process-has-managed-settings",
        "csrc/core/model/region.c",
        ".managed = settings->managed != 0 && !defaults->disabled};",
        ".managed = settings->managed != 0};",
        ("tests/unit/core/model/test_region.c", _DISABLED + "test_the_preload_library_passes_everything_on"),
    ),
    Mutant(
        "a-disabled-process-manages-pools",
        "csrc/abi/torch_allocator.c",
        "    if (state->config.disable) return tms_torch_ordinary_malloc(size, device, stream);\n",
        "",
        (_DISABLED + "test_torchs_allocator_gives_ordinary_memory",),
    ),
    Mutant(
        "a-disabled-process-starts-recordings",
        "torch_memory_saver/_engine/background.py",
        "if not _core.main_interpreter or _core.get_disabled():",
        "if not _core.main_interpreter:",
        ("tests/unit/python/cli/test_run.py::test_a_disabled_program_is_not_recorded",),
    ),
    Mutant(
        "the-plugin-of-vllm-registers-although-disabled",
        "torch_memory_saver/vllm/plugin.py",
        "    if _core.get_disabled():\n        _register_loader()\n        return\n",
        "",
        (_DISABLED + "test_the_plugin_of_vllm_does_not_offer_itself",),
    ),
    Mutant(
        "the-second-original-is-remembered",
        _TABLE,
        "_value(owner, key) if outer is None else outer.original",
        "_value(owner, key)",
        (_PATCHES + "test_a_second_replacement_remembers_the_first_original",),
    ),
    Mutant(
        "a-replacement-stays-in-force-after-its-end",
        _TABLE,
        "return place is not None and _value(owner, key) is not place.original",
        "return place is not None",
        (_PATCHES + "test_a_replacement_is_in_force_until_the_original_is_back",),
    ),
)
