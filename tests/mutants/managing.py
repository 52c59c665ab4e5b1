"""Bugs of manage(): what it moves, what it refuses, and what the device holds meanwhile."""

from __future__ import annotations

from mutant import Mutant

__all__ = ["MUTANTS"]

_MANAGING = "torch_memory_saver/_engine/tensors/managed_tensors.py"
_MOVABLE = "torch_memory_saver/_engine/tensors/movable.py"
_WRAPPED = "torch_memory_saver/_engine/tensors/optimizers.py"
_MODULES = "torch_memory_saver/_engine/tensors/managed_modules.py"
_SAVED = "torch_memory_saver/_engine/tensors/saved_tensors.py"
_MOVES = "torch:tests/gpu/test_manage.py::"
_OPTIMIZERS = "torch:tests/gpu/test_manage_optimizers.py::"
_WRAPPERS = "torch:tests/gpu/test_manage_wrappers.py::"
_LEAVING = "torch:tests/gpu/test_manage_modules.py::"
_REFUSALS = "torch:tests/gpu/test_manage_refusals.py::"

MUTANTS = (
    Mutant(
        "old-memory-is-used-again-during-the-copy",
        _MANAGING,
        "    alias.record_stream(torch.torch.cuda.current_stream(movable.device))\n",
        "",
        (_MOVES + "test_another_thread_does_not_get_memory_that_is_being_copied",),
    ),
    Mutant(
        "moved-memory-stays-in-the-cache",
        _MANAGING,
        "        if cached and cached + each.bytes > most:",
        "        if False:",
        (_MOVES + "test_the_peak_is_the_largest_storage",),
    ),
    Mutant(
        "the-cache-is-emptied-for-each-storage",
        _MANAGING,
        "        if cached and cached + each.bytes > most:",
        "        if True:",
        (_MOVES + "test_small_tensors_empty_the_cache_seldom",),
    ),
    Mutant(
        "storages-move-in-any-order",
        _MOVABLE,
        "    return sorted(found.values(), key=lambda movable: (movable.device, movable.address))",
        "    return list(found.values())",
        (_MOVES + "test_the_peak_is_the_largest_storage",),
    ),
    Mutant(
        "cached-memory-counts-as-a-lack",
        _MANAGING,
        "        store.empty_cache(torch)  # PyTorch does not do this itself while a pool is routed\n",
        "        raise\n",
        (_MOVES + "test_cached_memory_is_released_if_memory_is_short",),
    ),
    Mutant(
        "another-backup-counts-as-in-place",
        _MOVABLE,
        "(row.tag, row.backup) != (options.tag, options.backup)",
        "row.tag != options.tag",
        (_MOVES + "test_another_tag_or_backup_moves_managed_memory",),
    ),
    Mutant(
        "another-tag-counts-as-in-place",
        _MOVABLE,
        "(row.tag, row.backup) != (options.tag, options.backup)",
        "row.backup != options.backup",
        (_MOVES + "test_another_tag_or_backup_moves_managed_memory",),
    ),
    Mutant(
        "each-step-looks-at-pytorchs-memory",
        _MANAGING,
        " or _addresses_of(torch.torch, optimizer) == self._addresses or ",
        " or ",
        (_OPTIMIZERS + "test_a_step_that_adds_nothing_costs_no_look_at_pytorchs_memory",),
    ),
    Mutant(
        "state-lies-in-segments-of-activations",
        _MANAGING,
        "                    self._store.empty_cache(torch)\n",
        "                    pass\n",
        (_OPTIMIZERS + "test_the_state_does_not_lie_in_segments_of_activations",),
    ),
    Mutant(
        "each-step-without-state-empties-the-cache",
        _MANAGING,
        "                    self._is_prepared = True\n",
        "",
        (_OPTIMIZERS + "test_a_step_of_an_optimizer_without_state_empties_the_cache_once",),
    ),
    Mutant(
        "loaded-state-stays-outside",
        _MANAGING,
        "            (optimizer.register_load_state_dict_post_hook, self._was_loaded),\n",
        "",
        (_OPTIMIZERS + "test_state_that_is_loaded_moves_at_once",),
    ),
    Mutant(
        "an-earlier-registration-goes-on",
        _MANAGING,
        "            _followers[optimizer].remove()\n",
        "            pass\n",
        (_OPTIMIZERS + "test_a_later_call_replaces_the_earlier_one",),
    ),
    Mutant(
        "memory-that-a-library-keeps-counts-as-gone",
        _MODULES,
        "        gone = [address for address, had in missing.items() if had.expired()]\n",
        "        gone = list(missing)\n",
        (
            _LEAVING + "test_views_of_memory_that_is_gathered_while_the_managed_shard_lives",
            _LEAVING + "test_memory_that_was_kept_and_is_dropped_later",
        ),
    ),
    Mutant(
        "memory-that-is-dropped-later-is-never-noticed",
        _MODULES,
        " or any(each.expired() for each in self._kept):",
        ":",
        (_LEAVING + "test_memory_that_was_kept_and_is_dropped_later",),
    ),
    Mutant(
        "divided-parameters-count-as-left",
        _MODULES,
        "                del self._had[address]\n",
        "                pass\n",
        (_LEAVING + "test_parameters_that_are_empty_while_nobody_uses_them",),
    ),
    Mutant(
        "each-pause-looks-at-each-tensor",
        _MODULES,
        "        if addresses != self._addresses or ",
        "        if True or ",
        (_LEAVING + "test_no_tensor_is_looked_up_if_no_address_has_changed",),
    ),
    Mutant(
        "a-pause-of-another-tag-looks-at-the-module",
        _MODULES,
        " if selects(tags, each.options.tag))",
        ")",
        (_LEAVING + "test_one_warning_after_parameters_have_left",),
    ),
    Mutant(
        "each-pause-warns-of-modules",
        _MODULES,
        "                self._is_logged = True\n",
        "",
        (_LEAVING + "test_later_changes_are_counted_without_another_warning",),
    ),
    Mutant(
        "state-that-a-step-moves-back-moves",
        _MANAGING,
        "    _refuse_followed(torch.torch, found, options, optimizers)\n",
        "",
        (_REFUSALS + "test_state_of_an_optimizer_that_is_followed_with_another_tag",),
    ),
    Mutant(
        "only-the-wrapper-is-followed",
        _WRAPPED,
        "    return [outer, *inner]\n",
        "    return [outer]\n",
        (_WRAPPERS + "test_the_optimizers_inside_are_followed",),
    ),
    Mutant(
        "lists-of-optimizers-are-not-searched",
        _WRAPPED,
        "    return [*(getattr(value, name, None) for name in _NAMES), *containers]\n",
        "    return [getattr(value, name, None) for name in _NAMES]\n",
        (_WRAPPERS + "test_the_optimizers_inside_are_followed",),
    ),
    Mutant(
        "a-hidden-optimizer-is-left-out-silently",
        _WRAPPED,
        "    if hidden:\n",
        "    if False:\n",
        (_WRAPPERS + "test_an_unknown_wrapper_is_refused_before_anything_moves",),
    ),
    Mutant(
        "a-failed-call-leaves-its-hooks",
        _MANAGING,
        "        handle.remove()\n        raise\n",
        "        raise\n",
        (
            _WRAPPERS + "test_a_failed_call_removes_its_followers_and_keeps_the_earlier_ones",
            _WRAPPERS + "test_a_call_that_fails_during_the_move_removes_its_followers",
        ),
    ),
    Mutant(
        "state-that-a-wrapper-loads-stays-outside",
        _MANAGING,
        "                follower._look_at(inner)\n",
        "                pass\n",
        (_WRAPPERS + "test_state_that_a_wrapper_loads_into_the_inner_one_moves_at_once",),
    ),
    Mutant(
        "a-first-step-without-state-is-silent",
        _MANAGING,
        "            self._warn_of_no_state(optimizer)\n",
        "            pass\n",
        (_WRAPPERS + "test_one_warning_after_a_first_step_that_made_no_state",),
    ),
    Mutant(
        "state-in-lists-stays-outside",
        _MOVABLE,
        "            elif isinstance(value, (list, tuple)):\n                nested.extend(value)\n",
        "",
        (_OPTIMIZERS + "test_state_that_a_step_replaces_moves_again",),
    ),
    Mutant(
        "memory-of-graphs-moves",
        _MOVABLE,
        "        if pool is not None and pool not in known:",
        "        if False:",
        (
            _REFUSALS + "test_memory_of_a_captured_graph",
            _OPTIMIZERS + "test_state_that_a_capture_has_made_is_refused_by_name",
        ),
    ),
    Mutant(
        "memory-of-disable-is-refused",
        _MOVABLE,
        " | torch.ordinary_pools",
        "",
        (_REFUSALS + "test_ordinary_memory_of_disable_and_of_other_tags_may_move",),
    ),
    Mutant(
        "saved-tensors-move",
        _MANAGING,
        "            refuse_saved(torch.torch, found, objects)\n",
        "",
        (_REFUSALS + "test_a_tensor_that_is_saved_for_a_backward",),
    ),
    Mutant(
        "only-the-last-node-of-a-graph-is-looked-at",
        _SAVED,
        "                waiting.append(following)\n",
        "                pass\n",
        (_REFUSALS + "test_a_tensor_that_is_saved_for_a_backward",),
    ),
    Mutant(
        "work-of-other-streams-is-not-waited-for-before-a-copy",
        _MANAGING,
        "        for device in devices:\n            torch.synchronize(device)\n"
        "        store.empty_cache(torch)\n        _move_each(",
        "        store.empty_cache(torch)\n        _move_each(",
        (_MOVES + "test_work_of_other_streams_is_waited_for_before_the_copy",),
    ),
    Mutant(
        "a-registration-that-has-ended-refuses-its-state",
        _MANAGING,
        "        if not follower.is_active or any(",
        "        if any(",
        (_REFUSALS + "test_state_of_an_optimizer_that_is_followed_with_another_tag",),
    ),
    Mutant(
        "a-module-without-tensors-is-refused",
        _MOVABLE,
        "    if every and not on_device:\n        where = every[0].tensor.device\n",
        '    if not on_device:\n        where = every[0].tensor.device if every else "cpu"\n',
        (_MOVES + "test_storages_without_memory_and_modules_without_tensors_are_skipped",),
    ),
    Mutant(
        "captures-begin-during-a-move",
        _MANAGING,
        "    with Region(store, lambda: torch, options), capture_gate.held():",
        "    with Region(store, lambda: torch, options):",
        (_MOVES + "test_no_capture_begins_during_a_move",),
    ),
)
