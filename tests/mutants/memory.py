"""Bugs in torch_memory_saver.observe.memory: what is recorded, and the snapshots that processes write."""

from __future__ import annotations

from mutant import Mutant

__all__ = ["MUTANTS"]

_SOURCES = "torch_memory_saver/observe/memory/"
_TESTS = "tests/unit/python/observe/memory/"
_GPU = "torch:tests/gpu/test_memory_history.py::"

MUTANTS = (
    Mutant(
        "the-history-has-no-bound",
        "torch_memory_saver/_torch/binding/history.py",
        '"max_entries": request.max_entries,\n',
        "",
        (
            _TESTS + "test_history.py::test_the_defaults_are_bounded_and_record_python_stacks",
            _GPU + "test_the_history_is_bounded",
        ),
    ),
    Mutant(
        "what-a-release-cannot-record-is-not-named",
        "torch_memory_saver/_torch/binding/history.py",
        "for name in wanted if name not in accepted)",
        "for name in wanted if name not in wanted)",
        (_TESTS + "test_history.py::test_what_a_release_lacks_is_named",),
    ),
    Mutant(
        "torch-2-0-records-one-device-only",
        "torch_memory_saver/_torch/binding/history.py",
        "for device in devices:\n                function",
        "for device in devices[:1]:\n                function",
        (_TESTS + "test_history.py::test_torch_2_0_is_called_for_each_device",),
    ),
    Mutant(
        "the-end-of-a-recording-names-host-memory",
        "torch_memory_saver/_torch/binding/history.py",
        'return Call({"enabled": False if one_device else None}, (), one_device)',
        'arguments = {"enabled": False if one_device else None, "record_pinned_host_memory": True}\n'
        "    return Call({name: arguments[name] for name in arguments if name in accepted}, (), one_device)",
        (_TESTS + "test_history.py::test_stopping",),
    ),
    Mutant(
        "an-absent-rank-is-written-as-none",
        _SOURCES + "snapshots.py",
        '**({} if rank is None else {"rank": rank}),',
        '"rank": rank,',
        (
            _TESTS + "test_sampler.py::test_the_file_is_a_pickle_of_protocol_4_without_objects",
            _GPU + "test_the_pickle_has_no_opcode_that_torchs_own_lack",
        ),
    ),
    Mutant(
        "snapshots-are-written-with-the-newest-protocol",
        "torch_memory_saver/_files.py",
        "_PICKLE_PROTOCOL = 4",
        "_PICKLE_PROTOCOL = 5",
        (_TESTS + "test_sampler.py::test_the_file_is_a_pickle_of_protocol_4_without_objects",),
    ),
    Mutant(
        "a-snapshot-is-written-in-place",
        "torch_memory_saver/_files.py",
        '    hidden = f".{target.name}.{secrets.token_hex(_RANDOM_BYTES)}.tmp"',
        "    hidden = target.name",
        (_TESTS + "test_sampler.py::test_a_file_is_replaced_only_when_the_new_one_is_whole",),
    ),
    Mutant(
        "a-removed-moment-loses-the-file-of-a-late-process",
        "torch_memory_saver/_files.py",
        "_ATTEMPTS = 5",
        "_ATTEMPTS = 1",
        (_TESTS + "test_sampler.py::test_a_moment_that_is_removed_meanwhile_is_made_again",),
    ),
    Mutant(
        "each-process-begins-a-moment-of-its-own",
        _SOURCES + "sampler.py",
        "if current == 0 or (last is not None and last >= current):",
        "if True:",
        (
            _TESTS + "test_moments.py::test_processes_that_sample_once_each_share_a_moment",
            _TESTS + "test_sampler.py::test_samplers_without_steps_share_a_counter",
        ),
    ),
    Mutant(
        "the-counter-is-not-locked",
        _SOURCES + "sampler.py",
        "fcntl.flock(descriptor, fcntl.LOCK_EX)",
        "fcntl.flock(descriptor, fcntl.LOCK_SH)",
        (_TESTS + "test_moments.py::test_a_second_process_waits_for_the_counter",),
    ),
    Mutant(
        "a-forked-child-keeps-the-lock",
        _SOURCES + "sampler.py",
        "fcntl.flock(descriptor, fcntl.LOCK_UN)",
        "pass",
        (_TESTS + "test_moments.py::test_the_lock_is_given_up_although_a_forked_child_has_the_descriptor",),
    ),
    Mutant(
        "the-newest-moments-are-removed",
        _SOURCES + "sampler.py",
        "steps[: max(0, len(steps) - keep)]",
        "steps[keep:]",
        (_TESTS + "test_moments.py::test_the_lowest_steps_are_removed",),
    ),
    Mutant(
        "a-resumed-run-loses-its-moments-to-those-of-the-run-before",
        _SOURCES + "sampler.py",
        "key=lambda step: (step not in found or step == current, step)",
        "key=lambda step: step",
        (_TESTS + "test_sampler.py::test_the_oldest_moments_are_removed",),
    ),
    Mutant(
        "a-sampler-waits-for-the-device-during-a-capture",
        _SOURCES + "sampler.py",
        'if torch.cuda.is_current_stream_capturing() or _core.counters()["visible_captures"]:',
        "if False:",
        (
            _TESTS + "test_sampler.py::test_during_a_capture_it_does_not_synchronize",
            _GPU + "test_a_snapshot_leaves_a_capture_valid_and_a_synchronized_one_refuses",
        ),
    ),
    Mutant(
        "a-timer-initialises-cuda",
        _SOURCES + "sampler.py",
        "if torch is None or not torch.cuda.is_initialized():\n            return",
        "if torch is None:\n            return",
        (
            _TESTS
            + "test_recording_from_environment.py::test_a_process_that_does_not_use_cuda_writes_nothing_and_is_not_made_to",
        ),
    ),
    Mutant(
        "a-wrong-word-of-tms-debug-drops-the-others",
        "torch_memory_saver/_engine/background.py",
        "    for word in known:\n",
        "    for word in [] if unknown else known:\n",
        ("tests/unit/python/engine/test_recordings.py",),
    ),
    Mutant(
        "a-failed-snapshot-fails-the-program",
        _SOURCES + "sampler.py",
        'keep=MIN_PAUSES, on_error="count"',
        "keep=MIN_PAUSES",
        (
            _TESTS
            + "test_recording_from_environment.py::test_a_failure_is_logged_once_with_the_folder_and_the_pause_goes_on",
        ),
    ),
)
