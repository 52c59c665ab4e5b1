"""Guards the table of what is added to the saver: each row names a function, and a missing folder adds nothing."""

from __future__ import annotations

from importlib import import_module

import pytest

from torch_memory_saver import _additions
from torch_memory_saver.errors import InvalidStateError
from torch_memory_saver.saver import TorchMemorySaver


@pytest.mark.parametrize("event", _additions.ADDITIONS)
def test_each_row_names_a_function(event: str) -> None:
    for place in _additions.ADDITIONS[event].values():
        module, _, name = place.partition(":")
        assert name in import_module(module).__all__
        assert callable(getattr(import_module(module), name))
    assert list(_additions.added(event)) == list(_additions.ADDITIONS[event]), "all folders are here"


def test_a_function_gets_the_arguments_of_the_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_additions.ADDITIONS, "recording", {"here": "torch_memory_saver._additions:_is_installed"})
    assert _additions.added("recording")["here"]("torch_memory_saver.absent.module:function") is False


def test_what_is_not_installed_is_not_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_additions.ADDITIONS, "ledger", {"ledger": "torch_memory_saver.absent.module:function"})
    assert _additions.added("ledger") == {}
    with pytest.raises(InvalidStateError, match="has no ledger"):
        TorchMemorySaver().ledger()
