"""Guards the table of what is added to the saver: each row names a function, and a missing folder adds nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from users import USER, as_user

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


def unprivileged(function: Callable[[], Any]) -> Any:
    """Call a function without the rights of root, which may look at every folder."""
    return as_user(USER, function) if os.geteuid() == 0 else function()


def test_a_folder_that_may_not_be_looked_at_is_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a process that gave up its rights after it had imported what it needs."""
    folder = tmp_path / "observe" / "_processes"
    folder.mkdir(parents=True)
    monkeypatch.setattr(_additions, "_ROOT", str(tmp_path))
    tmp_path.chmod(0)
    try:
        assert unprivileged(lambda: list(_additions.added("first use"))) == ["requests"]
    finally:
        tmp_path.chmod(0o700)
