"""Bugs of regions, captured graphs, live blocks, preserve() and options, and of what is reported of them."""

from __future__ import annotations

from mutant import Mutant

__all__ = ["MUTANTS"]

_SOURCES = "torch_memory_saver/"
_TESTS = "tests/unit/python/"

_REGIONS = (
    Mutant(
        "a-region-forgets-its-host-memory",
        "torch_memory_saver/_torch/base/region_settings.py",
        "[(*options, follows)])",
        "[(*options._replace(host_policy=0), follows)])",
        (_TESTS + "engine/test_options.py::test_a_region_and_a_capture_give_the_core_every_field",),
    ),
    Mutant(
        "regions-of-different-options-share-a-pool",
        _SOURCES + "options.py",
        "    runs: bool = True\n\n    def __str__",
        "    runs: bool = True\n    __eq__ = lambda a, b: a[:3] == b[:3]\n    __hash__ = lambda a: hash(a[:3])\n\n"
        "    def __str__",
        ("torch:tests/torch/test_pools.py::test_pools_differ_by_tag_backup_place_and_runs",),
    ),
    Mutant(
        "leaving-an-outer-region-leaves-the-inner-ones",
        _SOURCES + "_torch/routing/regions.py",
        "        stack.remove(frame)\n",
        "        del stack[stack.index(frame) :]\n",
        ("torch:tests/torch/test_frames.py::test_leaving_the_outer_region_first_leaves_the_inner_one_in_force",),
    ),
    Mutant(
        "settings-of-an-outer-region-that-was-left-stay",
        "csrc/core/model/region.c",
        "    stack->depth--;\n    return later;",
        "    stack->depth--;\n    if (later) stack->entry[stack->depth] = stack->entry[at - 1];\n    return later;",
        ("tests/unit/core/model/test_region.c",),
    ),
)

_LIVE_FUNCTIONS = "csrc/python/live_functions.c"

_LIVE = (
    Mutant(
        "the-live-blocks-of-a-segment-are-one",
        _LIVE_FUNCTIONS,
        "return push(&live->ranges, address) && push(&live->ranges, address + size) &&",
        "if (live->ranges.count > 0 && live->ranges.values[live->ranges.count - 1] == address)\n"
        "        return live->ranges.values[live->ranges.count - 1] += size, true;\n"
        "    return push(&live->ranges, address) && push(&live->ranges, address + size) &&",
        (_TESTS + "torch/test_live.py::test_each_block_is_a_range_of_its_own",),
    ),
    Mutant(
        "allocations-of-other-tags-are-kept",
        _LIVE_FUNCTIONS,
        "!selection->tags ||",
        "selection->tags ||",
        (_TESTS + "torch/test_live.py::test_allocations_that_a_pause_keeps",),
    ),
    Mutant(
        "blocks-that-wait-for-a-stream-are-dropped",
        _LIVE_FUNCTIONS,
        '"state",           "inactive"}',
        '"state",           "active_pending_free"}',
        (_TESTS + "torch/test_live.py::test_used_and_pending_blocks_are_live",),
    ),
    Mutant(
        "a-segment-that-grew-is-thinned",
        _LIVE_FUNCTIONS,
        " || size > allocation->reserved_bytes)",
        ")",
        (_TESTS + "torch/test_live.py",),
    ),
    Mutant(
        "streams-of-captures-are-thinned",
        _LIVE_FUNCTIONS,
        ": number == 0;",
        ": 1;",
        (_TESTS + "torch/test_live.py::test_streams_that_a_capture_may_have_used",),
    ),
    Mutant(
        "a-capture-by-id-is-not-seen",
        _SOURCES + "_torch/routing/regions.py",
        "if torch.uses_of(pool.memory_pool) > uses]",
        "if torch.uses_of(pool.memory_pool) > uses + 1]",
        ("torch:tests/torch/test_live.py::test_a_pool_that_the_program_captures_into_by_its_id",),
    ),
)

_GRAPHS = (
    Mutant(
        "what-a-graph-allocates-elsewhere-is-managed",
        _SOURCES + "_torch/graphs/cuda_graph.py",
        "region_settings.RegionSettings(self._options.unmanaged())",
        "region_settings.RegionSettings(self._options)",
        ("preload:tests/gpu/test_graphs.py::test_allocations_of_another_stream_during_a_capture_are_ordinary",),
    ),
    Mutant(
        "a-region-is-left-on-the-wrong-thread-without-a-word",
        _SOURCES + "_engine/region.py",
        "            if frame.stack is self._store.regions.stack():\n                note_left(frame)",
        "            if True:\n                note_left(frame)",
        ("torch:tests/torch/test_frames.py::test_leaving_on_another_thread_ends_the_routing",),
    ),
    Mutant(
        "a-failed-entry-leaves-its-settings",
        _SOURCES + "_engine/region.py",
        "        region_settings.leave_region(frame.ids)\n",
        "",
        (_TESTS + "torch/test_pools.py::test_a_failed_entry_restores_everything",),
    ),
    Mutant(
        "a-capture-leaves-the-cache-full",
        _SOURCES + "_torch/graphs/cuda_graph.py",
        "        self._store.empty_cache(torch)",
        "",
        ("torch:tests/torch/test_graphs.py::test_a_capture_begins_with_an_empty_cache",),
    ),
    Mutant(
        "a-failed-capture-keeps-its-pool",
        _SOURCES + "_torch/graphs/cuda_graph.py",
        "                self._pools.release(pool, capture.user)\n",
        "",
        ("torch:tests/gpu/test_captures.py::test_a_capture_that_fails_leaves_nothing_behind",),
    ),
    Mutant(
        "a-paused-graph-pool-is-captured-into",
        _SOURCES + "_torch/graphs/cuda_graph.py",
        "if info.paused and pool.epoch != info.epoch:",
        "if info.paused and pool.epoch > info.epoch:",
        ("torch:tests/gpu/test_graph_tokens.py::test_a_paused_pool_is_not_captured_into",),
    ),
    Mutant(
        "a-pause-unmaps-workspaces",
        _SOURCES + "_torch/graphs/kept_objects.py",
        "        if not _free(torch):\n            return\n",
        "        return\n",
        ("torch:tests/gpu/test_workspaces.py::test_the_first_product_is_in_a_region",),
    ),
    Mutant(
        "a-capture-uses-a-workspace-of-a-region",
        _SOURCES + "_torch/graphs/kept_objects.py",
        "        return _free(torch)\n\n    def _make_for_capture",
        "        return False\n\n    def _make_for_capture",
        ("torch:tests/gpu/test_workspaces.py::test_a_graph_uses_the_workspace_of_a_stream_that_was_used_in_a_region",),
    ),
    Mutant(
        "freed-workspaces-of-graphs-are-handed-out",
        _SOURCES + "_torch/graphs/kept_objects.py",
        "                _core.within(self._pools.routed(torch, device), torch.torch.cuda.current_blas_handle)\n",
        "                torch.torch.cuda.current_blas_handle()\n",
        ("torch:tests/gpu/test_workspaces.py::test_a_graph_keeps_its_workspace_when_a_pause_frees_others",),
    ),
    Mutant(
        "the-generator-s-state-is-paused",
        _SOURCES + "_torch/graphs/kept_objects.py",
        "            _core.within(self._pools.routed(torch, device), graph.register_generator_state, generator)\n",
        "",
        ("torch:tests/gpu/test_workspaces.py::test_the_generator_s_state_for_graphs_is_not_in_a_region",),
    ),
    Mutant(
        "a-pool-that-is-paused-before-the-begin-is-captured-into",
        _SOURCES + "_torch/graphs/cuda_graph.py",
        "            self._pools.check_resident(torch, pool, self._options.tag)\n",
        "",
        ("torch:tests/gpu/test_captures.py::test_a_pool_that_is_paused_before_the_begin_is_not_captured_into",),
    ),
    Mutant(
        "workspaces-that-a-pause-freed-before-the-begin-are-not-made-again",
        _SOURCES + "_torch/graphs/cuda_graph.py",
        "            self._workspaces.make_again(torch, device)\n",
        "",
        ("torch:tests/gpu/test_workspaces.py::test_a_pause_frees_workspaces_while_torch_prepares_a_capture",),
    ),
    Mutant(
        "a-capture-is-announced-before-torch-synchronizes",
        _SOURCES + "_torch/graphs/cuda_graph.py",
        "        _core.within(renewed, _core.within, CaptureAnnouncement(announce), begin)",
        "        announce()\n        _core.within(renewed, begin)",
        ("torch:tests/gpu/test_captures.py::test_a_capture_is_one_from_its_begin_on",),
    ),
    Mutant(
        "a-workspace-may-lie-in-a-graph-s-pool",
        _SOURCES + "_torch/graphs/cuda_graph.py",
        "_core.within(renewed, _core.within, CaptureAnnouncement(announce), begin)",
        "_core.within(CaptureAnnouncement(announce), begin)",
        (_TESTS + "torch/test_graphs.py::test_workspaces_are_made_before_the_capture_and_in_ordinary_memory",),
    ),
    Mutant(
        "garbage-is-collected-during-captures",
        _SOURCES + "_torch/graphs/cuda_graph.py",
        "            capture.entered.enter(StoppedCollector())\n",
        "",
        ("torch:tests/gpu/test_graphs.py::test_graphs_that_are_garbage_are_not_destroyed_during_a_capture",),
    ),
)

_PRESERVING = (
    Mutant(
        "a-module-s-buffers-are-those-of-the-call",
        "torch_memory_saver/_engine/tensors/preserved.py",
        "    for each in module.modules():",
        "    for each in (module,):",
        ("torch:tests/gpu/test_preserve.py::test_of_a_module_the_buffers_of_the_pause_are_kept",),
    ),
    Mutant(
        "a-removed-handle-of-preserve-ends-a-later-registration",
        "torch_memory_saver/_engine/tensors/preserved.py",
        "            if self.storages.get(key) is reference:\n",
        "            if key in self.storages:\n",
        ("torch:tests/gpu/test_preserve.py::test_a_later_registration_replaces_the_earlier_one",),
    ),
    Mutant(
        "preserve-keeps-other-tags",
        "torch_memory_saver/_engine/tensors/preserved.py",
        "if row.tag == tag:",
        "if row.tag:",
        ("torch:tests/gpu/test_preserve.py::test_a_tag_limits_what_is_kept",),
    ),
    Mutant(
        "overlapping-preserved-ranges-stay-apart",
        "torch_memory_saver/_engine/tensors/preserved.py",
        "            begins, ends = _merge_touching(begins, ends)\n",
        "",
        ("torch:tests/gpu/test_preserve.py::test_storages_that_overlap_or_touch_are_one_range",),
    ),
    Mutant(
        "a-registration-with-a-tag-replaces-a-larger-one",
        "torch_memory_saver/_engine/tensors/preserved.py",
        "larger = map(max, map(storages.__getitem__, begins), map(merged.get, begins, repeat(0)))",
        "larger = map(max, map(storages.__getitem__, begins), repeat(0))",
        ("torch:tests/gpu/test_preserve.py::test_a_registration_with_a_tag_does_not_shrink_a_larger_one_without",),
    ),
    Mutant(
        "a-new-module-with-the-id-of-a-dead-one-is-forgotten",
        "torch_memory_saver/_engine/tensors/preserved.py",
        "            if self.modules.get(key) is module:\n",
        "            if key in self.modules:\n",
        ("torch:tests/gpu/test_preserve.py::test_a_new_module_with_the_id_of_a_dead_one_is_not_forgotten",),
    ),
    Mutant(
        "preserved-ranges-take-the-place-of-live-ones",
        "torch_memory_saver/_engine/tensors/preserved.py",
        "_sorted_ranges(_rows(*live[1:]) + _rows(kept[1]))",
        "_sorted_ranges(_rows(kept[1]))",
        ("torch:tests/gpu/test_preserve.py::test_free_blocks_are_not_kept_with_live_ones",),
    ),
)

_MISTAKES = (
    Mutant(
        "a-bound-function-runs-outside-the-region",
        _SOURCES + "_engine/region.py",
        "    in_region = Region(store, find_torch, frame.options, frame.threads)(function)\n",
        "    in_region = functools.partial(function)\n",
        ("tests/unit/python/torch/test_bind_region.py::test_a_thread_pool_allocates_in_the_caller_s_region",),
    ),
    Mutant(
        "a-progress-that-hides-a-coroutine-function-is-accepted",
        _SOURCES + "options.py",
        'refuse_unrun("progress", type(progress(done_bytes, total_bytes)))',
        "progress(done_bytes, total_bytes)",
        ("tests/unit/python/engine/test_arguments.py::test_a_progress_whose_result_shows_that_no_body_ran_ends_the_call",),
    ),
    Mutant(
        "a-task-binds-another-task-s-region",
        _SOURCES + "_torch/records/frames.py",
        "    if frame is not None:\n        return frame\n    return stack[-1] if stack else None",
        "    return stack[-1] if stack else None",
        ("tests/unit/python/torch/test_bind_region.py::test_a_task_binds_its_own_region",),
    ),
    Mutant(
        "a-warning-is-repeated",
        "torch_memory_saver/_text.py",
        "if _logged.setdefault(cause, mine) is mine:",
        "if True:",
        ("tests/unit/python/engine/test_silent_mistakes.py::test_a_cause_is_logged_once",),
    ),
    Mutant(
        "any-value-is-a-flag",
        _SOURCES + "options.py",
        "if not isinstance(value, int) or value not in (0, 1):",
        "if not isinstance(value, object):",
        ("tests/unit/python/engine/test_argument_types.py::test_a_flag_of_another_type_is_refused",),
    ),
    Mutant(
        "the-core-does-not-get-its-options",
        _SOURCES + "options.py",
        "(core if for_core else own)[name] = check(value)",
        "own[name] = check(value)",
        (_TESTS + "engine/test_options.py::test_pauses_and_resumes_give_the_core_every_field",),
    ),
    Mutant(
        "an-option-that-is-the-default-reaches-another-implementation",
        _SOURCES + "saver.py",
        "        if value is not defaults[name] and (type(value) is not type(defaults[name]) or value != defaults[name])\n",
        "",
        (_TESTS + "engine/test_resume_arguments.py::test_optional_arguments_are_handed_on_only_when_given",),
    ),
    Mutant(
        "a-range-that-a-file-holds-in-part-is-read",
        "csrc/backup/disk/operations.c",
        "if (into > extents[i].bytes || bytes > extents[i].bytes - into) continue;",
        "if (into > extents[i].bytes) continue;",
        ("tests/unit/python/backup/test_read_backup.py::test_only_what_the_pause_has_kept",),
    ),
)

_USAGE = (
    Mutant(
        "peaks-of-a-device-are-shown-for-one-of-its-tags",
        "torch_memory_saver/reports/usage.py",
        "those[0].resident_peak_bytes if those and selected is None else None",
        "those[0].resident_peak_bytes if those else None",
        ("tests/unit/python/engine/test_stats.py::test_peaks_are_of_what_has_one",),
    ),
    Mutant(
        "stats-of-a-device-lists-allocations-of-all",
        "torch_memory_saver/reports/usage.py",
        " and device in (None, row.device)]",
        "]",
        ("tests/unit/python/engine/test_stats.py::test_selections",),
    ),
)

MUTANTS = (*_REGIONS, *_LIVE, *_GRAPHS, *_PRESERVING, *_MISTAKES, *_USAGE)
