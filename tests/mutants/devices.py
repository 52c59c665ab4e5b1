"""Bugs in the first use of PyTorch, and in what gives access to devices that are used after an allocation."""

from __future__ import annotations

from mutant import Mutant

__all__ = ["MUTANTS"]

_ALLOCATOR = "csrc/abi/torch_allocator.c"
_WATCH = "torch_memory_saver/_torch/pools/late_devices.py"
_C = "tests/unit/abi/test_late_devices.c"
_PYTHON = "tests/unit/python/torch/test_late_devices.py"
_FIRST_USE = "tests/unit/python/torch/test_first_use.py"
_TORCH = "torch:tests/gpu/test_late_device.py"
_EVERY_WAY = f"{_TORCH}::test_a_gpu_that_is_used_later_reaches_managed_memory_without_a_call"

MUTANTS = (
    Mutant(
        "a-step-of-the-first-use-that-raised-is-not-repeated",
        "torch_memory_saver/_torch/binding/first_use.py",
        "            steps[self._returned]()\n            self._returned += 1\n",
        "            self._returned += 1\n            steps[self._returned - 1]()\n",
        (f"{_FIRST_USE}::test_the_next_use_continues",),
    ),
    Mutant(
        "another-thread-uses-pytorch-before-captures-are-watched",
        "torch_memory_saver/_torch/binding/layer.py",
        "    if _first_use.is_complete:  #",
        "    if True:  #",
        (f"{_FIRST_USE}::test_another_thread_waits",),
    ),
    Mutant(
        "a-device-that-is-used-later-gets-no-access",
        _ALLOCATOR,
        "    tms_peers_refresh_after_allocation(&state->saver);\n",
        "",
        (_C, _EVERY_WAY),
    ),
    Mutant(
        "a-listener-is-called-for-every-allocation",
        "csrc/abi/late_devices.c",
        "device)) late->uncalled &= ~bit;",
        "device)) late->uncalled |= bit;",
        (_C,),
    ),
    Mutant(
        "a-watch-goes-on-after-the-first-use",
        _WATCH,
        "            torch.end_routing(pool.device, pool.id)\n",
        "",
        (f"{_PYTHON}::test_the_first_use_ends_the_watch_of_that_device_only",),
    ),
    Mutant(
        "the-current-device-is-watched",
        _WATCH,
        "_core.active_devices() | 1 << torch.current_device()",
        "_core.active_devices()",
        (f"{_PYTHON}::test_devices_that_are_neither_in_use_nor_current_are_watched",),
    ),
    Mutant(
        "a-programs-pool-beside-a-watch",
        _WATCH,
        "                self.end_all()\n            initialize(",
        "            initialize(",
        (f"{_PYTHON}::test_a_pool_of_the_program_ends_every_watch_and_one_of_this_package_none",),
    ),
    Mutant(
        "a-capture-is-no-first-use",
        _WATCH,
        "        if device in self._pools:\n            self._give_access()\n",
        "        if device in self._pools:\n",
        (f"{_PYTHON}::test_a_capture_or_an_emptying_gives_access_and_ends_the_watch_of_its_device",),
    ),
    Mutant(
        "pools-outside-regions-have-no-allocator",
        "torch_memory_saver/_torch/binding/layer.py",
        "self._new_pool(device, *self._default_arguments)",
        "self._new_pool(device)",
        (_EVERY_WAY, "torch:tests/gpu/test_region_pools.py::test_tensors_of_disable_are_given_back_one_by_one"),
    ),
    Mutant(
        "the-default-allocator-manages-everything",
        _ALLOCATOR,
        "return region.managed ? allocate_managed",
        "return true ? allocate_managed",
        ("tests/unit/abi/test_compat.c",),
    ),
)
