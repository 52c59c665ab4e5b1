"""Bugs in the Python package: pools, what a pause needs of them, live bytes, routing, regions and graphs."""

from __future__ import annotations

from mutant import Mutant

__all__ = ["MUTANTS"]

_SOURCES = "torch_memory_saver/"
_TESTS = "tests/unit/python/"

_POOLS = (
    Mutant(
        "a-second-pause-keeps-the-substitute-that-it-pauses",
        _SOURCES + "_torch/memory/default_pool.py",
        'pool_of(segment) == self._substitutes.target(segment["device"])',
        "pool_of(segment) == DEFAULT_POOL",
        ("torch:tests/gpu/test_paused_default_pool.py::test_scenario[cycles]",),
    ),
    Mutant(
        "a-substitute-takes-precedence-over-a-region",
        _SOURCES + "_torch/memory/default_pool.py",
        "            with self._regions.routing_suspended(torch):\n",
        "            with contextlib.nullcontext():\n",
        ("torch:tests/gpu/test_paused_default_pool.py::test_scenario[regions]",),
    ),
    Mutant(
        "a-cache-is-emptied-while-other-threads-get-paused-blocks",
        _SOURCES + "_torch/memory/default_pool.py",
        "                torch.set_caching(False)\n",
        "",
        (_TESTS + "torch/test_default_pool.py",),
    ),
    Mutant(
        "a-dropped-pool-ends-the-process",
        _SOURCES + "_torch/memory/default_pool.py",
        "            if self._pools and torch.uses_of(memory_pool) == 1:",
        "            if not self._pools and torch.uses_of(memory_pool) == 1:",
        ("torch:tests/gpu/test_paused_default_pool.py::test_scenario[dropped_pools]",),
    ),
    Mutant(
        "a-pool-that-was-entered-since-the-pause-has-old-tensors-only",
        _SOURCES + "_torch/pools/idle.py",
        "and pool.epoch < epoch and torch.uses_of",
        "and pool.epoch <= epoch and torch.uses_of",
        (_TESTS + "torch/test_idle_pools.py::test_tensors_are_old_until_a_region_enters_their_pool",),
    ),
    Mutant(
        "a-pool-that-a-graph-uses-has-old-tensors-only",
        _SOURCES + "_torch/pools/idle.py",
        "pool.epoch < epoch and torch.uses_of(pool.memory_pool) <= OBJECT_USES\n",
        "pool.epoch < epoch\n",
        (_TESTS + "torch/test_idle_pools.py::test_tensors_of_a_pool_that_a_graph_uses_are_unknown",),
    ),
    Mutant(
        "segments-are-not-listed-again-after-a-pause",
        _SOURCES + "_torch/records/pool.py",
        "if self.listed[0] != epoch:",
        "if self.listed[0] < 0:",
        (_TESTS + "torch/test_idle_pools.py::test_segments_are_listed_once_for_each_pause",),
    ),
    Mutant(
        "a-kept-backup-is-of-any-tensor",
        _SOURCES + "_engine/tensors.py",
        "row.backup_bytes > 0 and holds_old(row)",
        "row.backup_bytes > 0",
        ("torch:tests/gpu/test_backup_owners.py::test_a_tensor_at_the_place_of_a_deleted_one",),
    ),
    Mutant(
        "a-pool-with-paused-memory-is-entered",
        _SOURCES + "_torch/pools/idle.py",
        "[pool for pool in idle if pool.epoch == info.epoch]",
        "[pool for pool in idle if pool.epoch <= info.epoch]",
        ("torch:tests/torch/test_pausing.py::test_the_pools_of_regions_while_their_tag_is_paused",),
    ),
    Mutant(
        "a-pause-beside-another-threads-region",
        _SOURCES + "_torch/routing/admission.py",
        "if frame.managed and frame.stack is not pause.stack and selects(pause.tags, frame.tag)",
        "if False",
        ("torch:tests/torch/test_pausing.py::test_another_thread_in_the_region_is_an_error",),
    ),
    Mutant(
        "a-region-of-another-tag-holds-up-a-pause",
        _SOURCES + "_torch/routing/admission.py",
        "frame.stack is not pause.stack and selects(pause.tags, frame.tag)",
        "frame.stack is not pause.stack",
        ("torch:tests/torch/test_pausing.py::test_another_thread_in_the_region_is_an_error",),
    ),
    Mutant(
        "a-signal-during-a-leave-goes-on-at-once",
        "csrc/python/scope.c",
        "enum { MAX_ATTEMPTS = 100 };",
        "enum { MAX_ATTEMPTS = 1 };",
        (_TESTS + "torch/test_interrupted_regions.py::test_a_region",),
    ),
    Mutant(
        "an-interrupted-leave-forgets-a-pool",
        _SOURCES + "_torch/pools/idle.py",
        "                _core.move(pools, self._idle.setdefault(key, []), 0)",
        "                pool = pools.pop(0)\n                self._idle.setdefault(key, []).append(pool)",
        (_TESTS + "torch/test_interrupted_regions.py::test_a_region",),
    ),
    Mutant(
        "a-pause-does-not-wait-for-regions",
        _SOURCES + "_torch/routing/regions.py",
        "lambda: self.close_ended() and self._end_following(pause), deadline)",
        "lambda: True, deadline)",
        (_TESTS + "torch/test_waiting_pauses.py::test_the_error_names_thread_and_tag",),
    ),
    Mutant(
        "a-thread-that-a-pause-waits-for-waits-for-the-pause",
        _SOURCES + "_torch/routing/admission.py",
        "            if not [each for each in own if selects(pause.tags, each.tag)]:",
        "            if True:",
        (_TESTS + "torch/test_waiting_pauses.py::test_a_thread_inside_may_enter_further_regions",),
    ),
    Mutant(
        "a-forked-child-never-collects",
        _SOURCES + "_torch/base/collector.py",
        "os.register_at_fork(after_in_child=_collector.after_fork_in_child)",
        "",
        (_TESTS + "torch/test_collector.py::test_a_child_that_is_forked_meanwhile_by_another_thread",),
    ),
    Mutant(
        "what-another-thread-kept-is-never-emptied",
        _SOURCES + "_torch/memory/store.py",
        "        due = self.idle_pools.pending - self._devices_that_keep_cache(torch)",
        "        due = self.idle_pools.pending & self._devices_that_keep_cache(torch)",
        ("torch:tests/torch/test_pools.py::test_pytorchs_cache_goes_when_the_last_thread_leaves_its_region",),
    ),
    Mutant(
        "a-replaced-pool-is-forgotten",
        _SOURCES + "_torch/memory/store.py",
        "self.idle_pools.check_out(torch, pool.key)\n                self.idle_pools.retire(torch, pool)",
        "self.idle_pools.check_out(torch, pool.key)",
        ("torch:tests/torch/test_pools.py::test_empty_cache_inside_regions",),
    ),
    Mutant(
        "an-idle-pool-that-is-kept-is-forgotten",
        _SOURCES + "_torch/pools/idle.py",
        "        while self.pools:\n            _core.within(",
        "        while False:\n            _core.within(",
        ("torch:tests/gpu/test_region_pools.py::test_emptying_keeps_the_pool_of_a_tag_without_idle_memory",),
    ),
    Mutant(
        "a-suspended-region-stays-so",
        _SOURCES + "_torch/routing/suspension.py",
        "        for frame in self._routed:\n            self._router.begin(self._torch, frame)",
        "        for frame in self._routed[:1]:\n            self._router.begin(self._torch, frame)",
        ("torch:tests/torch/test_pools.py::test_empty_cache_inside_regions",),
    ),
    Mutant(
        "a-paused-pool-is-forgotten",
        _SOURCES + "_torch/memory/pause_preparation.py",
        "            for pool in paused:\n                store.idle_pools.check_in(pool)",
        "            pass",
        ("torch:tests/torch/test_pausing.py::test_a_second_pause_inside_the_region_and_its_pools_afterwards",),
    ),
    Mutant(
        "memory-is-emptied-during-a-capture-elsewhere",
        _SOURCES + "_torch/pools/retirement.py",
        'torch.is_capturing() or bool(_core.counters()["visible_captures"])',
        "torch.is_capturing()",
        (_TESTS + "torch/test_pausing.py",),
    ),
    Mutant(
        "idle-memory-of-retired-pools-is-paused",
        _SOURCES + "_torch/memory/pause_preparation.py",
        "    if retired or _has_idle_segment(torch, store.idle_pools.retired_pools(), tags):",
        "    if retired:",
        ("torch:tests/torch/test_pools.py::test_idle_memory_of_a_retired_pool_is_released_by_a_pause",),
    ),
)

_IDLE_MEMORY = (
    Mutant(
        "a-retirement-strands-more-than-it-returns",
        _SOURCES + "_torch/pools/fill.py",
        "    return fill.idle > loss and (",
        "    return (",
        (_TESTS + "torch/test_idle_pools.py::test_the_rule",),
    ),
    Mutant(
        "what-is-stranded-already-does-not-count",
        _SOURCES + "_torch/pools/fill.py",
        "    loss = fill.free + stranded\n",
        "    loss = fill.free\n",
        (
            _TESTS + "torch/test_idle_pools.py::test_the_rule",
            "torch:tests/gpu/test_idle_memory.py::test_temporaries_do_not_strand_what_is_kept",
        ),
    ),
    Mutant(
        "pytorchs-cache-goes-with-retired-pools",
        _SOURCES + "_torch/routing/regions.py",
        "        self._admission.frames[id(frame)] = frame\n        self.router.begin(torch, frame)\n",
        "        self._admission.frames[id(frame)] = frame\n",
        ("torch:tests/torch/test_entry_room.py::test_many_entries_with_temporaries_return_it_once",),
    ),
    Mutant(
        "a-first-region-finds-the-cache-full",
        _SOURCES + "_torch/routing/entry_room.py",
        "            return torch.releasable_bytes(device) > _LARGE_PART * total\n",
        "            return False\n",
        ("torch:tests/torch/test_entry_room.py::test_later_regions_leave_it",),
    ),
    Mutant(
        "a-return-in-vain-is-repeated",
        _SOURCES + "_torch/routing/entry_room.py",
        "record.needless, record.free = _held_bytes(*key), free",
        "record.free = free",
        ("torch:tests/torch/test_entry_room.py::test_many_entries_return_it_once",),
    ),
    Mutant(
        "what-died-while-paused-is-resumed",
        _SOURCES + "_torch/memory/resume_preparation.py",
        "        has_retired = store.idle_pools.retire_idle(torch, store.idle_pools.select(tags))\n",
        "        has_retired = False\n",
        (_TESTS + "torch/test_pausing.py::test_a_resume_reads_no_blocks_if_nothing_was_freed",),
    ),
    Mutant(
        "an-idle-segment-that-a-region-has-used-is-still-expected",
        _SOURCES + "_torch/pools/idle.py",
        "        pools[-1].kept = 0\n        return True",
        "        return True",
        ("torch:tests/gpu/test_empty_cache_looks.py::test_a_region_that_uses_the_idle_segment_does_not_hide_another",),
    ),
    Mutant(
        "each-call-looks-at-every-pool",
        _SOURCES + "_torch/pools/last_look.py",
        "        return unexplained > 0",
        "        return True",
        ("torch:tests/gpu/test_empty_cache_looks.py::test_nothing_is_listed_while_no_managed_tensor_is_deleted",),
    ),
    Mutant(
        "pytorchs-function-returns-nothing-managed",
        _SOURCES + "_torch/memory/cache_wrappers.py",
        "        return store.empty_cache_with(torch, empty_all)\n",
        "        return empty_cache()\n",
        ("torch:tests/gpu/test_idle_memory.py::test_pytorchs_function_returns_idle_managed_memory",),
    ),
)

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

_TORCH_LAYER = (
    Mutant(
        "a-retired-pool-keeps-its-use",
        _SOURCES + "_torch/pools/retirement.py",
        "        *_steps_of_destruction(pool),\n        release,\n",
        "        *_steps_of_destruction(pool),\n",
        ("torch:tests/torch/test_pools.py::test_memory_goes_with_the_last_tensor_of_a_retired_pool",),
    ),
    Mutant(
        "a-pool-object-ends-during-a-capture",
        _SOURCES + "_torch/pools/retirement.py",
        "    if must_not_free(torch):\n        return _steps_of_retirement(torch, pool)\n    return [*(functools",
        "    return [*(functools",
        (
            _TESTS + "torch/test_idle_pools.py::"
            "test_the_end_of_the_object_is_its_pools_last_use_unless_a_capture_is_active[True]",
        ),
    ),
    Mutant(
        "what-torch-caches-is-not-seen",
        _SOURCES + "_torch/binding/layer.py",
        "return int(reserved - active - split)",
        "return int(split)",
        ("torch:tests/gpu/test_out_of_memory.py::test_a_region_finds_memory_that_torch_only_caches",),
    ),
    Mutant(
        "segments-of-every-pool-count-as-one-pools",
        _SOURCES + "_torch/binding/layer.py",
        'self._snapshot(pool)["segments"]',
        'self._snapshot(_DEFAULT_POOL)["segments"]',
        ("torch:tests/gpu/test_region_pools.py::test_emptying_keeps_the_pool_of_a_tag_without_idle_memory",),
    ),
    Mutant(
        "what-a-graph-allocates-elsewhere-is-managed",
        _SOURCES + "_torch/graphs/cuda_graph.py",
        "region_settings.RegionSettings(self._options.unmanaged())",
        "region_settings.RegionSettings(self._options)",
        ("preload:tests/gpu/test_graphs.py::test_allocations_of_another_stream_during_a_capture_are_ordinary",),
    ),
    Mutant(
        "a-pool-dies-while-torch-would-end-the-process",
        _SOURCES + "_torch/pools/retirement.py",
        "    if not torch.pool_objects_end_quietly:",
        "    if False:",
        (_TESTS + "torch/test_idle_pools.py",),
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
        "        _core.within(renewed, functools.partial(_core.within, announcing(announce), begin))",
        "        announce()\n        _core.within(renewed, begin)",
        ("torch:tests/gpu/test_captures.py::test_a_capture_is_one_from_its_begin_on",),
    ),
    Mutant(
        "a-workspace-may-lie-in-a-graph-s-pool",
        _SOURCES + "_torch/graphs/cuda_graph.py",
        "_core.within(renewed, functools.partial(_core.within, announcing(announce), begin))",
        "_core.within(announcing(announce), begin)",
        (_TESTS + "torch/test_graphs.py::test_workspaces_are_made_before_the_capture_and_in_ordinary_memory",),
    ),
    Mutant(
        "garbage-is-collected-during-captures",
        _SOURCES + "_torch/graphs/cuda_graph.py",
        "            capture.entered.enter(collector_stopped())\n",
        "",
        ("torch:tests/gpu/test_graphs.py::test_graphs_that_are_garbage_are_not_destroyed_during_a_capture",),
    ),
)

_PRESERVING = (
    Mutant(
        "a-module-s-buffers-are-those-of-the-call",
        "torch_memory_saver/_engine/preserved.py",
        "    for each in module.modules():",
        "    for each in (module,):",
        ("torch:tests/gpu/test_preserve.py::test_of_a_module_the_buffers_of_the_pause_are_kept",),
    ),
    Mutant(
        "a-removed-handle-of-preserve-ends-a-later-registration",
        "torch_memory_saver/_engine/preserved.py",
        "            if self.storages.get(key) is reference:\n",
        "            if key in self.storages:\n",
        ("torch:tests/gpu/test_preserve.py::test_a_later_registration_replaces_the_earlier_one",),
    ),
    Mutant(
        "preserve-keeps-other-tags",
        "torch_memory_saver/_engine/preserved.py",
        "if row.tag == tag:",
        "if row.tag:",
        ("torch:tests/gpu/test_preserve.py::test_a_tag_limits_what_is_kept",),
    ),
    Mutant(
        "overlapping-preserved-ranges-stay-apart",
        "torch_memory_saver/_engine/preserved.py",
        "            begins, ends = _joined(begins, ends)\n",
        "",
        ("torch:tests/gpu/test_preserve.py::test_storages_that_overlap_or_touch_are_one_range",),
    ),
    Mutant(
        "a-registration-with-a-tag-replaces-a-larger-one",
        "torch_memory_saver/_engine/preserved.py",
        "larger = map(max, map(storages.__getitem__, begins), map(merged.get, begins, repeat(0)))",
        "larger = map(max, map(storages.__getitem__, begins), repeat(0))",
        ("torch:tests/gpu/test_preserve.py::test_a_registration_with_a_tag_does_not_shrink_a_larger_one_without",),
    ),
    Mutant(
        "a-new-module-with-the-id-of-a-dead-one-is-forgotten",
        "torch_memory_saver/_engine/preserved.py",
        "            if self.modules.get(key) is module:\n",
        "            if key in self.modules:\n",
        ("torch:tests/gpu/test_preserve.py::test_a_new_module_with_the_id_of_a_dead_one_is_not_forgotten",),
    ),
    Mutant(
        "preserved-ranges-take-the-place-of-live-ones",
        "torch_memory_saver/_engine/preserved.py",
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

MUTANTS = (*_POOLS, *_IDLE_MEMORY, *_REGIONS, *_LIVE, *_TORCH_LAYER, *_PRESERVING, *_MISTAKES, *_USAGE)
