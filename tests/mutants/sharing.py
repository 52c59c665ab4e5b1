"""Bugs in what sends managed memory to other processes."""

from __future__ import annotations

from mutant import Mutant

__all__ = ["MUTANTS"]

_SHARED = "torch_memory_saver/_torch/sharing/sent_memory.py"
_PYTHON = "tests/unit/python/torch/test_sharing.py"
_IPC = "torch_memory_saver/_torch/sharing/ipc.py"
_IPC_TESTS = "tests/unit/python/torch/test_ipc.py"

MUTANTS = (
    Mutant(
        "the-first-send-of-an-unaware-process-comes-too-early",
        "csrc/preload/interpreter.c",
        "    (void)python.Py_AddPendingCall(run_pending, (void *)(intptr_t)getpid());\n",
        "    (void)run_pending;\n",
        ("tests/unit/preload/test_interpreter.py::test_the_first_managed_allocation",),
    ),
    Mutant(
        "a-forked-child-makes-a-pending-call-of-its-parent",
        "csrc/preload/interpreter.c",
        "(pid_t)(intptr_t)process != getpid() || ",
        "!process || ",
        ("tests/unit/preload/test_interpreter.py::test_a_forked_child_makes_no_call_of_its_parent",),
    ),
    Mutant(
        "one-of-two-first-sends-is-forgotten",
        _SHARED,
        "if earlier is None or earlier.exported != memory.exported:",
        "if True:",
        (f"{_PYTHON}::test_two_first_sends_of_the_same_memory_at_once_are_both_kept",),
    ),
    Mutant(
        "a-descriptor-outlives-its-memory",
        "csrc/core/model/run.c",
        "    tms_descriptor_close(&run->exported); /* it would keep the memory */\n",
        "",
        ("tests/unit/core/model/test_export.c",),
    ),
    Mutant(
        "a-later-generation-is-described-as-the-first",
        "csrc/core/model/export.c",
        "run->generation = ++saver->exports",
        "run->generation = 1",
        ("tests/unit/core/model/test_export.c",),
    ),
    Mutant(
        "damaged-memory-is-exported",
        "csrc/core/model/export.c",
        "segment->state != TMS_SEGMENT_ACTIVE",
        "segment->state != TMS_SEGMENT_ACTIVE && segment->state != TMS_SEGMENT_DAMAGED",
        ("tests/unit/core/model/test_export.c",),
    ),
    Mutant(
        "a-descriptor-is-inherited-by-programs",
        "csrc/base/descriptors.c",
        "F_DUPFD_CLOEXEC",
        "F_DUPFD",
        ("tests/unit/base/test_descriptors.c", "tests/unit/core/model/test_export.c"),
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
        "_Sent(storage, *counter, event)",
        "_Sent(None, *counter, event)",
        (
            f"{_PYTHON}::test_a_storage_is_kept_until_its_counter_falls",
            "torch:tests/gpu/test_sharing_lifetimes.py::test_a_block_is_not_used_again_while_an_importer_reads_it",
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
        "            self._closed[call] = tags\n",
        "            pass\n",
        (
            f"{_PYTHON}::test_nothing_is_sent_between_the_look_and_the_pause",
            "torch:tests/gpu/test_sharing_pauses.py::test_another_thread_sends_nothing_between_the_look_and_the_pause",
        ),
    ),
    Mutant(
        "a-send-that-has-begun-does-not-count",
        _SHARED,
        "        self._sending[call] = row\n",
        "",
        (f"{_PYTHON}::test_a_send_that_has_begun_counts_as_shared",),
    ),
    Mutant(
        "the-offset-in-the-allocation-is-not-sent",
        _SHARED,
        "offset = storage.data_ptr() - exported[0].address",
        "offset = 0",
        (
            f"{_PYTHON}::test_a_storage_goes_with_its_memory_a_counter_and_an_event",
            "torch:tests/gpu/test_sharing.py::test_tensors_of_one_allocation_are_described_alike",
        ),
    ),
    Mutant(
        "a-counter-is-read-beside-its-place",
        _IPC,
        "_HEADER_BYTES = 64",
        "_HEADER_BYTES = 0",
        (
            f"{_IPC_TESTS}::test_counters_are_laid_out_as_importers_expect",
            "torch:tests/gpu/test_sharing_pauses.py::test_a_pause_may_refuse_or_wait_for_importers",
        ),
    ),
    Mutant(
        "a-counter-is-used-for-two-tensors",
        _IPC,
        "        self._taken += 1\n",
        "        self._taken = 1\n",
        (f"{_IPC_TESTS}::test_a_counter_is_used_once_and_full_files_go_with_their_last_counter",),
    ),
    Mutant(
        "a-file-of-counters-stays",
        _IPC,
        "        os.unlink(path)\n",
        "        pass\n",
        (_IPC_TESTS,),
    ),
    Mutant(
        "an-importer-does-not-wait-for-the-senders-stream",
        _IPC,
        "            known.recorded.event.record(known.stream)\n",
        "",
        (
            f"{_IPC_TESTS}::test_a_stream_has_one_event_which_is_recorded_at_each_send",
            "torch:tests/gpu/test_sharing.py::test_an_importer_waits_for_the_senders_stream",
        ),
    ),
    Mutant(
        "streams-of-other-libraries-keep-their-event",
        _IPC,
        "stream_id != 0 and stream_id % 2 == 0",
        "False",
        (f"{_IPC_TESTS}::test_a_stream_of_another_library_gets_an_event_each_time",),
    ),
)
