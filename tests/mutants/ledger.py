"""Bugs in the ledger: what is counted, until when, for whom, and how the lines add up."""

from __future__ import annotations

from mutant import Mutant

__all__ = ["MUTANTS"]

_TABLE = "tests/unit/base/test_ledger.c"
_CALLERS = "tests/unit/base/test_callers.c"
_PRELOAD = "tests/unit/preload/test_ledger.py::"
_PYTHON = "tests/unit/python/observe/ledger/test_ledger.py::"
_LIBRARIES = "tests/unit/python/observe/ledger/test_ledger_libraries.py::"
_LEDGER = "torch_memory_saver/observe/_ledger/sources.py"

MUTANTS = (
    Mutant(
        "a-nested-allocation-counts-twice",
        "csrc/preload/count.h",
        "count->state && !count->nested ?",
        "count->state ?",
        (_PRELOAD + "test_functions_that_the_simulated_gpu_does_not_have",),
    ),
    Mutant(
        "mapped-memory-does-not-count-once-it-is-released",
        "csrc/base/ledger.c",
        "record->taken == 0 && record->mappings == 0) discount",
        "record->taken == 0) discount",
        (_TABLE,),
    ),
    Mutant(
        "memory-does-not-count-once-it-is-unmapped",
        "csrc/base/ledger.c",
        "if (record->releases == 0 && record->taken == 0",
        "if (record->taken == 0",
        (_TABLE, _PRELOAD + "test_scenario"),
    ),
    Mutant(
        "a-failed-free-is-a-free",
        "csrc/base/ledger.c",
        "            if (gone)\n",
        "            if (gone || taken.first != TMS_NO_RECORD)\n",
        (_TABLE, _PRELOAD + "test_scenario"),
    ),
    Mutant(
        "an-unmap-ends-the-first-mapping-only",
        "csrc/base/ledger.c",
        "        address += ledger->records[number].bytes;\n",
        "        address = end;\n",
        (_TABLE,),
    ),
    Mutant(
        "a-forked-child-has-its-parents-memory",
        "csrc/base/ledger.c",
        "ledger->record_count = ledger->keyed = ledger->holder_count = 0;",
        "ledger->record_count = ledger->keyed = 0;",
        (_TABLE,),
    ),
    Mutant(
        "addresses-are-not-mixed",
        "csrc/base/ledger.c",
        "tms_hash_mix(key + (uint64_t)kind)",
        "(key + (uint64_t)kind)",
        (_TABLE,),
    ),
    Mutant(
        "a-library-keeps-the-place-from-which-it-was-unloaded",
        "csrc/base/callers.c",
        "    if (callers->unloads != unloads) return TMS_NO_CALLER;\n",
        "    (void)unloads;\n",
        (_CALLERS,),
    ),
    Mutant(
        "memory-counts-for-the-library-of-the-runtime",
        "csrc/preload/count.c",
        "tms_ledger_add(ledger, count->caller,",
        "tms_ledger_add(ledger, (const void *)(uintptr_t)tms_hook_real(count->state, hook),",
        (_PRELOAD + "test_scenario",),
    ),
    Mutant(
        "a-reset-device-keeps-its-memory",
        "csrc/preload/hooks.c",
        "if (state && result == TMS_CUDA_SUCCESS) tms_ledger_clear_device",
        "if (state && result != TMS_CUDA_SUCCESS) tms_ledger_clear_device",
        (_PRELOAD + "test_scenario",),
    ),
    Mutant(
        "managed-memory-counts-as-pytorchs-too",
        "torch_memory_saver/_torch/memory/ordinary_memory.py",
        '        if segment["address"] in managed:\n            continue\n',
        "",
        (_PYTHON + "test_every_source_tells", "torch:tests/gpu/test_ledger.py::test_managed_memory_and_ordinary_memory"),
    ),
    Mutant(
        "pytorchs-allocator-is-another-library-too",
        _LEDGER,
        "sources.torch is None or not _is_torchs_allocator(row.path)]",
        "row.path is not None]",
        (_LIBRARIES + "test_libraries_are_lines_in_preload_mode",),
    ),
    Mutant(
        "sources-that-disagree-are-hidden",
        _LEDGER,
        '"unattributed", "not attributed", rest,',
        '"unattributed", "not attributed", max(0, rest),',
        (_PYTHON + "test_sources_that_disagree_are_shown",),
    ),
    Mutant(
        "a-report-starts-a-child-process",
        _LEDGER,
        "    if not measure_context:\n",
        "    if measure_context:\n",
        (_PYTHON + "test_a_ledger_makes_no_call_that_allocates_or_waits", _PYTHON + "test_nvml_is_hidden"),
    ),
    Mutant(
        "a-ledger-makes-a-context",
        _LEDGER,
        "        if device not in listed:\n",
        "        if device < 0:\n",
        (_PYTHON + "test_devices",),
    ),
)
