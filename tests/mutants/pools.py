"""Bugs of the pools that regions route to: which are entered, kept, emptied and retired, and how idle memory goes back."""

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
        "if self.segments_at_pause[0] != epoch:",
        "if self.segments_at_pause[0] < 0:",
        (_TESTS + "torch/test_idle_pools.py::test_segments_are_listed_once_for_each_pause",),
    ),
    Mutant(
        "a-kept-backup-is-of-any-tensor",
        _SOURCES + "_engine/tensors/lookup.py",
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
        "        pools[-1].idle_at_scan = 0\n        return True",
        "        return True",
        ("torch:tests/gpu/test_empty_cache_scans.py::test_a_region_that_uses_the_idle_segment_does_not_hide_another",),
    ),
    Mutant(
        "each-call-looks-at-every-pool",
        _SOURCES + "_torch/pools/last_scan.py",
        "        return unexplained > 0",
        "        return True",
        ("torch:tests/gpu/test_empty_cache_scans.py::test_nothing_is_listed_while_no_managed_tensor_is_deleted",),
    ),
    Mutant(
        "pytorchs-function-returns-nothing-managed",
        _SOURCES + "_torch/memory/cache_wrappers.py",
        "        return store.empty_cache_with(torch, empty_all)\n",
        "        return empty_cache()\n",
        ("torch:tests/gpu/test_idle_memory.py::test_pytorchs_function_returns_idle_managed_memory",),
    ),
)

_RETIREMENT = (
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
        "a-pool-dies-while-torch-would-end-the-process",
        _SOURCES + "_torch/pools/retirement.py",
        "    if not torch.pool_objects_end_quietly:",
        "    if False:",
        (_TESTS + "torch/test_idle_pools.py",),
    ),
)

MUTANTS = (*_POOLS, *_IDLE_MEMORY, *_RETIREMENT)
