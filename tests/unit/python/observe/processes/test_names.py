"""Guards names of other programs: what a terminal gets to see of them, and how wide they are there."""

from __future__ import annotations

import os
import pwd
from types import SimpleNamespace

import pytest

from torch_memory_saver.observe._processes import names
from torch_memory_saver.observe._processes.names import command_name, cut, user_of, width_of

#: Linux numbers processes up to 2^22.
NO_PROCESS = (1 << 22) + 1


def test_widths() -> None:
    assert [width_of(text) for text in ("", "ab", "模型", "e\u0301", "a模")] == [0, 2, 4, 1, 3]
    assert [cut("a模b", width) for width in range(-1, 6)] == ["", "", "a", "a", "a模", "a模b", "a模b"]
    assert cut("e\u0301x", 1) == "e\u0301", "an accent stays with its letter"


def test_the_name_and_the_user_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/proc/self/comm", encoding="utf-8") as file:
        assert command_name(os.getpid()) == file.read().strip()
    assert (command_name(NO_PROCESS), user_of(NO_PROCESS)) == ("", "")
    names._name_of_user.cache_clear()
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: SimpleNamespace(pw_name=f"user {uid}\x1b"))
    assert user_of(os.getpid()) == f"user {os.getuid()}?"
    names._name_of_user.cache_clear()

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert user_of(os.getpid()) == str(os.getuid()), "as in a container without the user's entry"
    names._name_of_user.cache_clear()
