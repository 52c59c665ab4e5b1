"""Guards the list of managed modules against two calls of manage() at once.

tests/gpu/test_manage_modules.py has the rest.
"""

from __future__ import annotations

from typing import Any

import pytest

from torch_memory_saver._engine.tensors import managed_modules
from torch_memory_saver._engine.tensors.managed_modules import ManagedModules
from torch_memory_saver.options import RegionOptions


class Record:
    """What is remembered of a module. `overtake` is called while one is made."""

    overtake: Any = staticmethod(lambda: None)

    def __init__(self, torch: object, module: object, options: RegionOptions) -> None:
        self._module = module
        self.options = options
        overtake, Record.overtake = Record.overtake, staticmethod(lambda: None)
        overtake()

    def module(self) -> object:
        return self._module

    def left_bytes(self, torch: object) -> int:
        return 1


@pytest.mark.parametrize("is_same", [False, True], ids=["two modules", "one module"])
def test_two_modules_are_added_at_once(monkeypatch: pytest.MonkeyPatch, is_same: bool) -> None:
    monkeypatch.setattr(managed_modules, "_ManagedModule", Record)
    modules, options = ManagedModules(), RegionOptions.check("a")
    first = object()
    second = first if is_same else object()
    monkeypatch.setattr(Record, "overtake", staticmethod(lambda: modules.add(None, second, options)))
    modules.add(None, first, options)
    assert modules.left_bytes(None, ("a",)) == (1 if is_same else 2)
    modules.add(None, first, options)
    assert modules.left_bytes(None, ("a",)) == (1 if is_same else 2), "it replaces what was remembered"
