"""Bugs in what sends managed memory to other processes."""

from __future__ import annotations

from mutant import Mutant

__all__ = ["MUTANTS"]

_SHARED = "torch_memory_saver/_torch/shared_memory.py"
_PYTHON = "tests/unit/python/torch/test_sharing.py"

MUTANTS = (
    Mutant(
        "a-descriptor-outlives-its-memory",
        "csrc/core/segment.c",
        "    tms_descriptor_close(&segment->exported); /* it would keep the memory */\n",
        "",
        ("tests/unit/core/test_export.c",),
    ),
    Mutant(
        "a-later-generation-is-described-as-the-first",
        "csrc/core/export.c",
        "segment->generation = ++saver->exports",
        "segment->generation = 1",
        ("tests/unit/core/test_export.c",),
    ),
    Mutant(
        "paused-memory-is-exported",
        "csrc/core/export.c",
        "segment->state != TMS_SEGMENT_ACTIVE",
        "tms_segment_has_owner(segment)",
        ("tests/unit/core/test_export.c",),
    ),
    Mutant(
        "a-descriptor-is-inherited-by-programs",
        "csrc/base/descriptors.c",
        "F_DUPFD_CLOEXEC",
        "F_DUPFD",
        ("tests/unit/base/test_descriptors.c", "tests/unit/core/test_export.c"),
    ),
    Mutant(
        "a-number-is-used-again-at-once",
        "csrc/base/descriptors.c",
        "        descriptors->next = number + 1;\n",
        "",
        ("tests/unit/base/test_descriptors.c",),
    ),
    Mutant(
        "a-sent-block-is-used-again",
        _SHARED,
        "_Sent(storage, proxy, fields.counter_file, fields.counter)",
        "_Sent(None, proxy, fields.counter_file, fields.counter)",
        (
            f"{_PYTHON}::test_a_storage_is_kept_until_its_counter_falls",
            "torch:tests/gpu/test_sharing.py::test_a_block_is_not_used_again_while_an_importer_reads_it",
        ),
    ),
    Mutant(
        "a-pause-does-not-end-what-was-sent",
        _SHARED,
        "_core.tag_info(memory.tag).epoch != memory.epoch",
        "False",
        (f"{_PYTHON}::test_a_pause_ends_what_was_sent",),
    ),
    Mutant(
        "memory-is-sent-while-a-pause-refuses-it",
        _SHARED,
        "                self._closed[call] = tags\n",
        "                pass\n",
        (
            f"{_PYTHON}::test_nothing_is_sent_between_the_look_and_the_pause",
            "torch:tests/gpu/test_sharing.py::test_another_thread_sends_nothing_between_the_look_and_the_pause",
        ),
    ),
    Mutant(
        "a-send-that-has-begun-does-not-count",
        _SHARED,
        "                self._sending[call] = row\n",
        "",
        (f"{_PYTHON}::test_a_send_that_has_begun_counts_as_shared",),
    ),
    Mutant(
        "the-offset-of-the-proxy-is-sent",
        _SHARED,
        "        offset = storage.data_ptr() - row.address\n",
        "        offset = fields.offset\n",
        (
            f"{_PYTHON}::test_a_storage_goes_with_its_memory_and_a_proxys_counter",
            "torch:tests/gpu/test_sharing.py::test_tensors_of_one_allocation_are_described_alike",
        ),
    ),
    Mutant(
        "a-counter-is-read-beside-its-place",
        "torch_memory_saver/_torch/ipc_counters.py",
        "_HEADER_BYTES = 64",
        "_HEADER_BYTES = 0",
        (f"{_PYTHON}::test_counters_are_read_where_pytorch_writes_them",),
    ),
)
