"""Guards the arguments of resume(): which timeouts are refused, and what reaches another implementation."""

from __future__ import annotations

import math
from typing import Any

import pytest

from torch_memory_saver import errors, options
from torch_memory_saver import saver as saver_module
from torch_memory_saver.saver import TorchMemorySaver


@pytest.mark.parametrize("timeout", [-1, -0.5, math.nan, "1", True, [1]])
def test_bad_timeouts_are_refused(timeout: object, simulator: Any) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="timeout must"):
        TorchMemorySaver().resume(timeout=timeout)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("timeout", "seconds"), [(None, 0.0), (0, 0.0), (3, 3.0), (0.5, 0.5), (math.inf, math.inf), (10**400, math.inf)]
)
def test_timeouts(timeout: float | None, seconds: float) -> None:
    assert options.check_timeout(timeout) == seconds


def test_optional_arguments_are_handed_on_only_when_given() -> None:
    """Users install implementations of their own, which know only the first one."""
    calls: list[dict[str, Any]] = []

    class Theirs:
        def resume(self, **given: Any) -> None:
            calls.append(given)

    saver = TorchMemorySaver()
    saver._impl = Theirs()
    saver.resume("a")
    saver.resume("a", timeout=0, exclusive=True)
    saver.resume(timeout=None, exclusive=False)
    assert calls == [{"tag": "a"}, {"tag": "a", "timeout": 0, "exclusive": True}, {"tag": None}]


def test_a_program_may_wrap_the_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    """The defaults are those of the method itself, not of what stands in its place."""
    calls: list[dict[str, Any]] = []

    class Theirs:
        def pause(self, **given: Any) -> None:
            calls.append(given)

    saver = TorchMemorySaver()
    saver._impl = Theirs()
    pause = TorchMemorySaver.pause
    saver_module._defaults_of.cache_clear()
    monkeypatch.setattr(TorchMemorySaver, "pause", lambda *arguments, **keywords: pause(*arguments, **keywords))
    saver.pause("a", live_only=False)
    assert calls == [{"tag": "a", "live_only": False}]
